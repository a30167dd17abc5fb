"""Stage 3: parameters are sharded too. It is stage 2 with weights that are whole only while a module uses them.

Large parameters form units (`param_unit.py`), one per module and optimizer group (`granularity.py`): gathered before
use and released after (`module_hooks.py`, `fetcher.py`), reduce-scattered as one bucket, updated where their shard is.
Small ones (`stage3_param_persistence_threshold`) stay whole and are treated as in stage 2. 16/W bytes per parameter in
fp32 and in low precision, and the largest working set (ZeRO, arXiv 1910.02054, section 5.3: P_os+g+p).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.errors import ConfigError
from deepspeed.zero import state_dict as states
from deepspeed.zero.fetcher import ParamFetcher
from deepspeed.zero.granularity import UnitModule, divide
from deepspeed.zero.holding import ShardingOptions
from deepspeed.zero.layout import UnitLayout
from deepspeed.zero.leaf_modules import z3_leaf_module
from deepspeed.zero.managed import manager_of
from deepspeed.zero.module_hooks import ModuleHooks
from deepspeed.zero.param_marks import mark_whole, unmark
from deepspeed.zero.param_unit import ParamUnit, shape_of, unit_of
from deepspeed.zero.stage2 import Stage2
from deepspeed.zero.strategy import BackwardPlan


@dataclass(frozen=True, kw_only=True)
class Stage3Options:
    """What stage 3 needs of the configuration besides `ShardingOptions`. Sizes are numbers of elements."""

    prefetch_numel: int = 50_000_000
    max_live_numel: int = 1_000_000_000
    max_reuse_numel: int = 1_000_000_000
    persistence_numel: int = 100_000  # smaller parameters stay whole
    model_persistence_numel: int = 2**63 - 1  # of all that stay whole, at most
    min_granularity: int = 0


class Stage3(Stage2):
    """Optimizer states, gradients and parameters are sharded."""

    stage = 3

    def __init__(
        self,
        options: ShardingOptions,
        backend: GroupBackend,
        group: ProcessGroup | None = None,
        partitioning: Stage3Options | None = None,
    ) -> None:
        super().__init__(options, backend, group)
        self.partitioning = partitioning or Stage3Options()
        self.units: list[ParamUnit] = []
        self.hooks: ModuleHooks | None = None
        self._borrowed: dict[Parameter, ModuleHooks] = {}  # parameters that another engine shards and trains
        self._marked: list[Parameter] = []  # those that stay whole
        self._unit_modules: list[UnitModule] = []
        self._units_of_module: dict[Module, list[ParamUnit]] = {}
        self._unit_of_param: list[ParamUnit | None] = []  # by attached parameter

    # ---- building -----------------------------------------------------------------------------------------------

    def attach(
        self,
        module: Module,
        optimizer: Optimizer | None,
        plan: Callable[[bool], BackwardPlan],
        *,
        is_elementwise: bool = True,
    ) -> None:
        if not is_elementwise:
            raise ConfigError(
                f"zero_optimization.stage 3: the update of {type(optimizer).__name__} looks at whole parameters, and "
                "this stage holds shards of them; use stage 1 or 2"
            )
        self._borrowed = _find_borrowed(module)
        is_sharded = self._choose_sharded(module)
        for param in module.parameters():
            if param in self._borrowed:
                continue
            unit = unit_of(param)
            if unit is not None and not is_sharded(param):  # a small one, sharded by zero.Init
                unit.restore_plain()
            if not is_sharded(param) and self.options.device is not None:
                param.data = param.data.to(self.options.device)
        self._unit_modules = divide(
            module,
            is_sharded,
            max_numel=self._module_numel(),
            min_granularity=self.partitioning.min_granularity,
        )
        self._module = module
        super().attach(module, optimizer, plan, is_elementwise=is_elementwise)

    def _choose_sharded(self, module: Module) -> Callable[[Parameter], bool]:
        """All parameters but the smallest; smaller ones first, up to the limit for the model."""
        room = self.partitioning.model_persistence_numel
        small = set()
        for param in sorted(module.parameters(), key=lambda each: shape_of(each).numel()):
            numel = shape_of(param).numel()
            room -= numel
            if numel >= self.partitioning.persistence_numel or room < 0:
                break
            small.add(param)
        return lambda param: param not in small and param not in self._borrowed and shape_of(param).numel() > 0

    def _module_numel(self) -> int:
        """Elements that one all-gather serves well."""
        preferred = self.backend.capabilities.preferred_bucket_bytes // 4
        return min(self.partitioning.prefetch_numel, preferred)

    def hold_group(self, index: int, params: Sequence[Parameter]) -> None:
        for unit in dict.fromkeys(map(unit_of, params)):
            if unit in self.units:  # of a group that is added later
                self._drop_unit(unit)
        super().hold_group(index, params)

    def _hold_units(self, index: int, params: Sequence[Parameter]) -> None:
        """One unit per module for large parameters, units as in stage 2 for small ones."""
        left = dict.fromkeys(params)
        for unit_module in self._unit_modules:
            named = [(name, param) for name, param in unit_module.params if param in left]
            if named:
                unit = self._create_unit(unit_module, named)
                self._hold(unit.params, index, unit)
                unit.source_S = None
                for param in unit.params:
                    del left[param]
        if left:
            super()._hold_units(index, list(left))

    def _layout(self, numels: Sequence[int]) -> UnitLayout:
        return UnitLayout.even(numels, self.world_size, self._max_fragment_numel())

    def _create_unit(self, unit_module: UnitModule, named: list[tuple[str, Parameter]]) -> ParamUnit:
        param = named[0][1]
        unit = ParamUnit(
            [param for _, param in named],
            [name for name, _ in named],
            self.backend,
            device=self.options.device or param.device,
            dtype=self.options.model_dtype if param.is_floating_point() else None,
        )
        self.units.append(unit)
        if z3_leaf_module(unit_module.module):
            for param in unit.params:
                param.ds_z3_leaf_module = unit_module.module  # type: ignore[attr-defined]
        self._units_of_module.setdefault(unit_module.module, []).append(unit)
        return unit

    def _shard_others(self) -> None:
        """Units for parameters that do not train, or that the optimizer does not have."""
        attached = set(self.params)
        for unit_module in self._unit_modules:
            rest: dict[tuple[torch.dtype, bool], list[tuple[str, Parameter]]] = {}
            for name, param in unit_module.params:
                if param not in attached and unit_of(param) not in self.units:
                    rest.setdefault((param.dtype, param.requires_grad), []).append((name, param))
            for named in rest.values():
                self._create_unit(unit_module, named).source_S = None

    def _drop_unit(self, unit: ParamUnit) -> None:
        self.units.remove(unit)
        for units in self._units_of_module.values():
            if unit in units:
                units.remove(unit)
        unit.restore_plain()

    def _finish_groups(self) -> None:
        super()._finish_groups()
        self._unit_of_param = [unit_of(param) for param in self.params]
        self._shard_others()
        self._mark_whole()
        if self.hooks is not None:
            self.hooks.remove()
        self.fetcher = ParamFetcher(
            self.units,
            prefetch_numel=self.partitioning.prefetch_numel,
            max_live_numel=self.partitioning.max_live_numel,
            max_reuse_numel=self.partitioning.max_reuse_numel,
        )
        if self._borrowed and not self.units:
            self.hooks = next(iter(self._borrowed.values()))
        else:
            self.hooks = ModuleHooks(self._module, self.fetcher, self._units_of_module)

    def _mark_whole(self) -> None:
        for param in self._module.parameters():
            if unit_of(param) is None and not hasattr(param, "ds_persist"):
                mark_whole(param, self.backend)
                self._marked.append(param)

    # ---- one step -----------------------------------------------------------------------------------------------

    def _begin_backward(self, by_user: bool) -> None:
        super()._begin_backward(by_user)
        for each in self.units:
            each.num_missing = 0
        for unit in self._unit_of_param:
            if unit is not None:
                unit.num_missing += 1

    def _take_gradient(self, index: int, param: Tensor) -> None:
        super()._take_gradient(index, param)
        unit = self._unit_of_param[index]
        if unit is not None:
            unit.num_missing -= 1
            if unit.num_missing <= 0 and unit.num_users == 0:
                self.fetcher.drop(unit)

    def _end_backward(self) -> None:
        super()._end_backward()
        for unit in self.units:
            if unit.num_users == 0:
                self.fetcher.drop(unit)

    def _all_gather_weights(self, index: int) -> Work | None:
        return super()._all_gather_weights(index) if self.groups[index].unit is None else None

    def _abandon(self, *works: Work, failed: bool) -> None:
        super()._abandon(*works, *self.fetcher.abandon(), failed=failed)

    def update(self, scale: float = 1.0) -> None:
        self.fetcher.release_all()
        super().update(scale)

    def weights_from_masters(self) -> None:
        self.fetcher.release_all()
        super().weights_from_masters()

    def weights_changed(self, params: Sequence[Tensor]) -> None:
        changed = set(params)
        for group in self.groups:
            if not changed.isdisjoint(group.params):
                group.take_changes()

    # ---- states -------------------------------------------------------------------------------------------------

    def release_gathered(self) -> None:
        self.fetcher.release_all()

    def load_frozen(self, parts: dict[str, Tensor]) -> None:
        for unit in self.units:
            if all(name in parts for name in unit.names):
                states.load_parts(unit, [parts[name] for name in unit.names])

    def retire(self) -> None:
        """Leave the parameters, sharded as they are, to another engine, which trains them."""
        self.units = []
        self.destroy()

    def destroy(self) -> None:
        lenders = set(self._borrowed.values())
        if self.hooks is not None and self.hooks not in lenders:
            self.hooks.remove()
            for each in lenders:
                each.install_again()
        super().destroy()
        for param in self._marked:
            unmark(param)
        for unit in self.units:
            unit.restore_plain()
        self._borrowed, self._marked = {}, []
        self.units, self._units_of_module, self._unit_of_param, self._unit_modules = [], {}, [], []


def _find_borrowed(module: Module) -> dict[Parameter, ModuleHooks]:
    """Sharded parameters of an engine that trains them, or parts of the same model, with that engine's hooks.

    An engine that evaluates leaves such parameters in the units where they are. Hooks that a dropped engine left
    behind are removed.
    """
    by_param = {param: unit.hooks for param in module.parameters() if (unit := unit_of(param)) is not None}
    hooks = {each for each in by_param.values() if each is not None}
    live = {each for each in hooks if any(map(manager_of, each.params()))}
    for each in hooks - live:
        each.remove()
    for each in live:
        each.install_again()
    return {param: each for param, each in by_param.items() if each in live}
