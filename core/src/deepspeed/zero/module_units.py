"""`ModuleUnits` decides which parameters of a model stage 3 shards, and which units they form.

Large parameters form one unit per module, optimizer group, dtype, shard group and `requires_grad`. Small parameters
stay whole. Parameters that another engine shards and trains stay in that engine's units.

A module that is small enough forms one unit with all its submodules (a transformer block, for example), so that one
all-gather serves it. A larger module is divided: its own parameters form a unit, and its children are visited in turn.
A *leaf module* is one unit whatever its size. It is for modules that use different children in every forward, such as
experts. Users and Accelerate (`transformer_moe_cls_names`) mark leaf modules before `initialize`; `initialize` marks
those of `zero_optimization.leaf_module`. Stages 0, 1 and 2 hold whole parameters and ignore the marks.

`Int8Unit` holds frozen parameters whose shards are stored in int8 (`zero_quantized_nontrainable_weights`), rounded when
they are set. Modules and checkpoints get these rounded values from an all-gather: see [Note: rounded once] in
`quantized.py`."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from deepspeed.comm.backend import Work
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.give_up import arrive_in, begin_use, give_up
from deepspeed.comm.parted import RanksParted
from deepspeed.comm.values import all_gather_values, named_ranks
from deepspeed.config.zero import LEAF_CLASSES
from deepspeed.errors import CommError, StateError
from deepspeed.log import logger
from deepspeed.ops.operators import FLOATS
from deepspeed.zero import quantized
from deepspeed.zero.managed import manager_of
from deepspeed.zero.param_marks import mark_whole, unmark
from deepspeed.zero.param_unit import ParamUnit, set_data, shape_of, unit_of
from deepspeed.zero.placement import ShardHome
from deepspeed.zero.unit_groups import UnitGroups, UnitRanks


class Int8Unit(ParamUnit):
    """`Int8Unit` is a `ParamUnit` whose shard takes one byte per element plus 4 per block; `shard_S` is the codes.

    Args:
        params: frozen parameters, in fp32, bf16 or fp16 as weights.
        names, ranks, keys: as for `ParamUnit`; `ranks` has at least two ranks.
    """

    def __init__(self, params: list[Parameter], names: list[str], ranks: UnitRanks, **keys: Any) -> None:
        super().__init__(params, names, ranks, **keys)
        assert self.is_sharded
        self._packing = quantized.ShardPacking(self.shard_S.numel(), quantized.WEIGHT_BITS)
        self._packed_B = self.shard_S.new_empty(self._packing.num_bytes, dtype=torch.int8)
        self.set_shard(self.shard_S)
        self.shard_S = self._packing.codes(self._packed_B)
        self.source_S = None
        for index, param in enumerate(self.params):
            param.ds_tensor = self.shard_of(index)  # type: ignore[attr-defined]

    def set_shard(self, values_S: Tensor) -> None:
        self._packing.pack(self._packing.lasting(values_S), self._packed_B)

    @property
    def kept_bytes(self) -> int:
        return super().kept_bytes - self.shard_S.nbytes + self._packed_B.nbytes  # codes and scales

    def _is_as_sharded(self, index: int) -> bool:
        return False  # codes cannot be compared with weights

    def _is_all_as_sharded(self) -> bool:
        return True

    def _all_gather(self, full_N: Tensor, quantizes: bool) -> Work:
        return quantized.all_gather_packed(self.ranks, full_N, self._packed_B, self._packing, tag=self.names[0])


_MARK = "_z3_leaf"


def set_z3_leaf_modules(
    model: Module, leaf_module_classes: Sequence[type[Module] | str], raise_if_not_found: bool = True
) -> list[Module]:
    """Mark every module of the given classes and return them.

    Args:
        leaf_module_classes: classes, or their names, short or with the module ("pkg.mod.Class").
        raise_if_not_found: whether to raise if a class has no module.

    Raises:
        ValueError: if no module has one of the classes.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: Module, leaf_module_classes: Sequence[type[Module] | str], raise_if_not_found: bool = True
) -> list[Module]:
    """Undo `set_z3_leaf_modules`; return the modules of the given classes."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[Module]:
    """Mark the modules of these names, or with `flag=False` remove the marks; return the modules.

    Raises:
        ValueError: if there is no module of a name, unless `raise_if_not_found` is False.
    """
    return _mark_named(model, module_names, lambda name, wanted: name == wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[Module]:
    """Mark the modules whose names end with these suffixes, or with `flag=False` remove the marks; return the modules.

    Raises:
        ValueError: if no module's name ends with a suffix, unless `raise_if_not_found` is False.
    """
    return _mark_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def set_z3_leaf_module(model: Module, flag: bool) -> None:
    """Mark one module, or with `flag=False` remove its mark."""
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: Module) -> list[Module]:
    """Return every marked module of `model`, in the order of `model.modules()`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: Module) -> bool:
    """Return whether this module is marked."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model: Parameter) -> bool:
    """Return whether stage 3 gathers this parameter with a leaf module. The argument's name is DeepSpeed's."""
    return getattr(model, "ds_z3_leaf_module", None) is not None


def mark_configured(model: Module, classes: Sequence[str], names: Sequence[str], suffixes: Sequence[str]) -> None:
    """Mark the modules that `zero_optimization.leaf_module` lists: by class, by path, by the end of the path.

    Entries without a module are logged and not refused, since one configuration may serve several models.
    """
    for kind, wanted, is_one in (
        ("classes", classes, lambda name, module, each: _is_of(module, each)),
        ("names", names, lambda name, module, each: name == each),
        ("name_suffixes", suffixes, lambda name, module, each: name.endswith(each)),
    ):
        for each in wanted:
            found = [module for name, module in model.named_modules() if is_one(name, module, each)]
            for module in found:
                set_z3_leaf_module(module, True)
            if not found and each not in LEAF_CLASSES:
                logger.warning(
                    f"zero_optimization.leaf_module.{kind}: found no module {each!r} in {type(model).__name__}"
                )


def _mark_named(
    model: Module, names: Sequence[str], fits: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> list[Module]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"module names: found {type(names).__name__}, wanted a list of names")
    by_name = {each: [module for name, module in model.named_modules() if fits(name, each)] for each in names}
    if raise_if_not_found and (missing := [each for each, found in by_name.items() if not found]):
        raise ValueError(f"module names: found no module {', '.join(missing)} in {type(model).__name__}")
    found = list(dict.fromkeys(module for modules in by_name.values() for module in modules))
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _mark(model: Module, classes: Sequence[type[Module] | str], flag: bool, raise_if_not_found: bool) -> list[Module]:
    if isinstance(classes, str) or not isinstance(classes, Sequence):
        raise TypeError(f"leaf_module_classes: found {type(classes).__name__}, wanted a list of classes or names")
    if (other := next((each for each in classes if not isinstance(each, type | str)), None)) is not None:
        raise TypeError(f"leaf_module_classes: found {other!r} in it, wanted classes or their names")
    found = [module for module in model.modules() if any(_is_of(module, each) for each in classes)]
    missing = [each for each in classes if not any(_is_of(module, each) for module in found)]
    if raise_if_not_found and missing:
        names = ", ".join(each if isinstance(each, str) else each.__qualname__ for each in missing)
        raise ValueError(f"leaf_module_classes: found no module of class {names} in {type(model).__name__}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: Module, wanted: type[Module] | str) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    cls = type(module)
    return wanted in (cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}")


@dataclass(frozen=True, slots=True)
class UnitModule:
    """`UnitModule` is a module with those of its parameters that are gathered with it, by name."""

    name: str
    module: Module
    params: tuple[tuple[str, Parameter], ...]


def divide(
    root: Module, wanted: Callable[[Parameter], bool], *, max_numel: int, min_granularity: int = 0
) -> list[UnitModule]:
    """Assign every wanted parameter of `root` to exactly one unit module, in the order of the module tree.

    Args:
        wanted: whether a parameter is sharded.
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
    """Return whether the module has a forward. A ModuleList has none, so a hook on it would not run."""
    return type(module).forward is not Module.forward


_MAX_PARTED = 3  # times that a peer may be elsewhere during the final gathers


@dataclass(frozen=True, kw_only=True)
class Stage3Options:
    """`Stage3Options` holds the options of stage 3 besides `ShardingOptions`. Sizes are numbers of elements."""

    prefetch_numel: int = 50_000_000
    max_live_numel: int = 1_000_000_000
    max_reuse_numel: int = 1_000_000_000
    persistence_numel: int = 100_000  # smaller parameters stay whole
    model_persistence_numel: int = 2**63 - 1  # maximum of all parameters that stay whole
    min_granularity: int = 0
    quantizes_weights: bool = False  # weights are rounded to int8 for modules; see quantized.py
    keeps_frozen_in_int8: bool = False  # shards of frozen parameters are int8; see module_units.py
    checks_values: bool = False  # compare values after a read-only `GatheredParameters` (`enable_sanity_checks`)
    home: ShardHome | None = None  # where shards are kept; None: on the device

    def facts(self) -> dict[str, str]:
        """Return the options in which all ranks must agree, as text by configuration key."""
        values = {
            "stage3_prefetch_bucket_size": self.prefetch_numel,
            "stage3_max_live_parameters": self.max_live_numel,
            "stage3_max_reuse_distance": self.max_reuse_numel,
            "stage3_param_persistence_threshold": self.persistence_numel,
            "stage3_model_persistence_threshold": self.model_persistence_numel,
            "stage3_module_granularity_threshold": self.min_granularity,
            "zero_quantized_weights": self.quantizes_weights,
            "zero_quantized_nontrainable_weights": self.keeps_frozen_in_int8,
            "enable_sanity_checks": self.checks_values,
            "offload_param.device": "none" if self.home is None else self.home.name,
        }
        return {key: str(value) for key, value in values.items()}


class ModuleUnits:
    """`ModuleUnits` holds the units of one engine (`all`) and the units by module (`of_module`).

    Args:
        module: the model.
        groups: the process groups over which parameters are sharded.
        trained: parameters of the engine's optimizer.
        device: target device of the parameters; None leaves them where they are.
        dtype: target dtype of floating parameters of a unit; None leaves it.
    """

    def __init__(
        self,
        module: Module,
        groups: UnitGroups,
        options: Stage3Options,
        trained: Iterable[Parameter] = (),
        *,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.all: list[ParamUnit] = []
        self.of_module: dict[Module, list[ParamUnit]] = {}
        #: parameters that another engine shards and trains
        self.borrowed = _find_borrowed(module, set(trained))
        self._module = module
        self._groups, self._device, self._dtype = groups, device, dtype
        self._keeps_int8 = options.keeps_frozen_in_int8
        self._home = options.home
        self._checks_values = options.checks_values
        self._marked: list[Parameter] = []  # parameters that stay whole
        is_sharded = self._choose_sharded(options)
        for param in module.parameters():
            if param not in self.borrowed and not is_sharded(param):
                self._keep_whole(param)
        # numel at which one all-gather is efficient
        max_numel = min(options.prefetch_numel, groups.dense.shard_group.capabilities.preferred_bucket_bytes // 4)
        self._divided: list[UnitModule] = divide(
            module, is_sharded, max_numel=max_numel, min_granularity=options.min_granularity
        )

    def _choose_sharded(self, options: Stage3Options) -> Callable[[Parameter], bool]:
        """Return which parameters are sharded: all except the smallest, whose total is limited for the model."""
        room = options.model_persistence_numel
        small = set()
        for param in sorted(self._module.parameters(), key=lambda each: shape_of(each).numel()):
            numel = shape_of(param).numel()
            room -= numel
            if numel >= options.persistence_numel or room < 0:
                break
            small.add(param)
        return lambda param: param not in small and param not in self.borrowed and shape_of(param).numel() > 0

    def _keep_whole(self, param: Parameter) -> None:
        if (unit := unit_of(param)) is not None:  # sharded by zero.Init
            unit.restore_plain()
        if self._device is not None:
            set_data(param, param.data.to(self._device))

    def create_for(self, params: Sequence[Parameter]) -> Iterator[ParamUnit]:
        """Yield new units for the sharded ones of `params`, which share one dtype and the same ranks."""
        wanted = set(params)
        for unit_module in self._divided:
            named = [(name, param) for name, param in unit_module.params if param in wanted]
            if named:
                yield self._create(unit_module, named)

    def create_rest(self, attached: Sequence[Parameter]) -> None:
        """Create units for parameters that do not train or are not in the optimizer; mark all others as whole."""
        trained = set(attached)
        for unit_module in self._divided:
            rest: dict[tuple[torch.dtype, bool, UnitRanks], list[tuple[str, Parameter]]] = {}
            for name, param in unit_module.params:
                if param not in trained and unit_of(param) not in self.all:
                    kind = (param.dtype, param.requires_grad, self._groups.of(param))
                    rest.setdefault(kind, []).append((name, param))
            for named in rest.values():
                self._create(unit_module, named).source_S = None
        for name, param in self._module.named_parameters():
            if unit_of(param) is None and not hasattr(param, "ds_persist"):
                mark_whole(param, self._groups.of(param).reduce_group, name, checks_values=self._checks_values)
                self._marked.append(param)

    def _create(self, unit_module: UnitModule, named: list[tuple[str, Parameter]]) -> ParamUnit:
        param = named[0][1]
        dtype = self._dtype if param.is_floating_point() else None
        ranks = self._groups.of(param)
        is_int8 = self._keeps_int8 and not param.requires_grad and ranks.world_size > 1
        kind = Int8Unit if is_int8 and (dtype or param.dtype) in FLOATS else ParamUnit
        unit = kind(
            [param for _, param in named],
            [name for name, _ in named],
            ranks,
            device=self._device or param.device,
            dtype=dtype,
            home=self._home,
        )
        unit.checks_values = self._checks_values
        self.all.append(unit)
        if z3_leaf_module(unit_module.module):
            for param in unit.params:
                param.ds_z3_leaf_module = weakref.proxy(unit_module.module)  # type: ignore[attr-defined]
        self.of_module.setdefault(unit_module.module, []).append(unit)
        return unit

    def drop(self, params: Sequence[Parameter]) -> None:
        """Make `params` plain again, because they are in a group that is added to the optimizer."""
        for unit in dict.fromkeys(map(unit_of, params)):
            if unit is not None and unit in self.all:
                self.forget(unit)
                unit.restore_plain()

    def forget(self, unit: ParamUnit) -> None:
        """Stop managing `unit` and leave it in its current state."""
        self.all.remove(unit)
        for units in self.of_module.values():
            if unit in units:
                units.remove(unit)

    def leave(self) -> None:
        """Leave the parameters in their current state to another engine."""
        self.all, self._home = [], None

    def destroy(self) -> None:
        """Make all parameters plain and whole. A collective.

        Raises:
            OSError: if this rank's offloaded shards cannot be read.
            CommError: if a peer's offloaded shards cannot be read, or a peer has failed. The parameters then have no
                values, and everything else is done.
        """
        for param in self._marked:
            if manager_of(param) is None:  # else another engine trains it now
                unmark(param)
        units, home, self._home = self.all, self._home, None
        self.all, self.of_module, self.borrowed, self._marked, self._divided = [], {}, {}, [], []
        try:
            # `arrive_in` raises if a peer is in a step, where it would take part in the gathers
            if units and self._groups.dense.shard_group.world_size > 1:
                _meet_again(partial(arrive_in, self._groups.dense.reduce_group.group, "engine.destroy"), units)
            if home is not None:
                _meet_again(partial(self._require_readable, home), units)
            for unit in units:
                _release_unchanged(unit)
            for unit in units:
                _meet_again(unit.restore_plain, units)
        finally:
            for unit in units:  # those that were not restored
                unit.let_go()
            if home is not None:
                home.release()

    def _require_readable(self, home: ShardHome) -> None:
        """Raise on every rank if one rank cannot read its shards; otherwise gathering ranks would wait for it."""
        problem: OSError | None = None
        try:
            home.check()
        except OSError as error:
            problem = error
        by_rank = all_gather_values(problem and str(problem), backend=self._groups.dense.reduce_group)
        if problem is not None:
            raise problem
        if lost := [rank for rank, text in enumerate(by_rank) if text]:
            raise CommError(f"the weights that {named_ranks(lost)} offloaded are lost: {by_rank[lost[0]]}")


def _find_borrowed(module: Module, trained: Set[Parameter]) -> dict[Parameter, ParamUnit]:
    """Return the sharded parameters that another live engine holds, with that engine's units.

    Hooks of live engines that a library removed are registered again; hooks of dropped engines are removed. Units with
    a parameter in `trained` (hence frozen in the other engine) are not borrowed: the new engine divides them.
    """
    units = {param: unit for param in module.parameters() if (unit := unit_of(param)) is not None}
    hooks = {each for unit in units.values() if (each := unit.hooks) is not None}
    live = {each for each in hooks if any(map(manager_of, each.params()))}
    for each in hooks - live:
        each.remove()
    for unit in {unit for param, unit in units.items() if param in trained and unit.hooks in live}:
        unit.hooks.give_up(unit)
    for each in live:
        each.install_again()
    return {param: unit for param, unit in units.items() if unit.hooks in live}


def _release_unchanged(unit: ParamUnit) -> None:
    """Release gathered parameters, since a peer that failed lacks them: all ranks gather them. Changes are kept."""
    try:
        unit.refuse_changes()
    except StateError:
        return
    unit.release()


def _meet_again(collective: Callable[[], None], units: Sequence[ParamUnit]) -> None:
    """Run a collective in which all ranks take part, and repeat it after a failure. A peer may have failed more often
    than this rank knows; it may be in this call now, or enter it when it learns of a failure of this rank."""
    num_parted = 0
    while True:
        try:
            return collective()
        except (PeerFailed, RanksParted) as error:
            # PeerFailed does not count: each failure that this rank learns of leaves one fewer to come
            num_parted += isinstance(error, RanksParted)
            if num_parted > _MAX_PARTED:
                raise
            begin_use()  # a new failure, not the one that the user may be handling
            give_up([left for each in units if (left := each.abandon()) is not None])
