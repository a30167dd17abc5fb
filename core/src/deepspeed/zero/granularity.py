"""Which parameters stage 3 gathers together: the modules of its units.

Called once, when an engine is built. A module that is small enough is one unit with all below it, so that one
all-gather serves it: a transformer block, say. A larger one is divided: what it owns itself is a unit, and its children
are looked at in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch.nn import Module, Parameter

from deepspeed.zero.leaf_modules import z3_leaf_module
from deepspeed.zero.param_unit import shape_of


@dataclass(frozen=True, slots=True)
class UnitModule:
    """A module and those of its parameters that are gathered with it, by name."""

    name: str
    module: Module
    params: tuple[tuple[str, Parameter], ...]


def divide(
    root: Module, wanted: Callable[[Parameter], bool], *, max_numel: int, min_granularity: int = 0
) -> list[UnitModule]:
    """Every wanted parameter below `root` in exactly one unit module, in the order of the module tree.

    Args:
        wanted: which parameters are sharded.
        max_numel: a module with more elements is divided, unless it is a leaf module (`set_z3_leaf_modules`).
        min_granularity: a module with fewer elements per module below it is not divided
            (`stage3_module_granularity_threshold`).
    """
    found: list[UnitModule] = []
    seen: set[Parameter] = set()

    def take(name: str, module: Module, *, recurse: bool) -> tuple[tuple[str, Parameter], ...]:
        prefix = f"{name}." if name else ""
        named = module.named_parameters(prefix=prefix[:-1], recurse=recurse)
        return tuple((each, param) for each, param in named if param not in seen and wanted(param))

    def add(name: str, module: Module, params: tuple[tuple[str, Parameter], ...]) -> None:
        if params:
            found.append(UnitModule(name, module, params))
            seen.update(param for _, param in params)

    def visit(name: str, module: Module) -> None:
        below = take(name, module, recurse=True)
        if not below:
            return
        numel = sum(shape_of(param).numel() for _, param in below)
        is_one = module is not root and _is_called(module)
        is_one = is_one and (numel <= max_numel or numel < min_granularity * sum(1 for _ in module.modules()))
        if z3_leaf_module(module) or is_one:
            add(name, module, below)
            return
        add(name, module, take(name, module, recurse=False))
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", root)
    return found


def _is_called(module: Module) -> bool:
    """Whether the module has a forward: a ModuleList has none, so no hook on it would run."""
    return type(module).forward is not Module.forward
