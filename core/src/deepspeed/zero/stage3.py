"""Stage 3: parameters are sharded too. It is stage 2 with weights that are whole only while a module uses them.

Large parameters form units (`param_unit.py`), one per module and optimizer group (`granularity.py`): gathered before
use and released after (`module_hooks.py`, `fetcher.py`), reduce-scattered as one bucket, updated where their shard is.
Small ones (`stage3_param_persistence_threshold`) stay whole and are treated as in stage 2. 16/W bytes per parameter in
fp32 and in low precision, and the largest working set (ZeRO, arXiv 1910.02054, section 5.3: P_os+g+p).
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.errors import ConfigError
from deepspeed.zero import quantized
from deepspeed.zero import state_dict as states
from deepspeed.zero.agreement import check_same
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.fetcher import ParamFetcher
from deepspeed.zero.holding import ShardingOptions
from deepspeed.zero.module_hooks import ModuleHooks
from deepspeed.zero.module_units import ModuleUnits, Stage3Options
from deepspeed.zero.param_unit import ParamUnit, unit_of
from deepspeed.zero.stage2 import Stage2
from deepspeed.zero.strategy import BackwardPlan


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
        self.hooks: ModuleHooks | None = None
        self.module_units = ModuleUnits(
            Module(), self.unit_groups, self.partitioning, device=None, dtype=None
        )  # none yet

    @property
    def units(self) -> list[ParamUnit]:
        """The units of sharded parameters."""
        return self.module_units.all

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
                "this stage holds shards of them; use stage 1 or 2, or give the optimizer is_elementwise = True if "
                "the update of each element depends on that element alone"
            )
        self._module = module
        self.module_units = self._divide(module)
        super().attach(module, optimizer, plan, is_elementwise=is_elementwise)

    def agree(self, optimizer: Optimizer | None, param_groups: Sequence[Sequence[Parameter]]) -> None:
        super().agree(optimizer, param_groups)
        facts = {
            "zero_quantized_weights": str(self.partitioning.quantizes_weights),
            "zero_quantized_gradients": str(self.partitioning.quantizes_gradients),
            "zero_quantized_nontrainable_weights": str(self.partitioning.keeps_frozen_in_int8),
        }
        check_same(facts, self.group)

    def _divide(self, module: Module) -> ModuleUnits:
        device, dtype = self.options.device, self.options.model_dtype
        return ModuleUnits(module, self.unit_groups, self.partitioning, device=device, dtype=dtype)

    def hold_group(self, index: int, params: Sequence[Parameter]) -> None:
        self.module_units.drop(params)
        super().hold_group(index, params)

    def _hold_units(self, index: int, params: Sequence[Parameter]) -> None:
        """One unit per module for large parameters, units as in stage 2 for small ones."""
        for unit in self.module_units.create_for(params):
            self._hold(unit.params, index, unit)
            unit.source_S = None
        if small := [param for param in params if unit_of(param) is None]:
            super()._hold_units(index, small)

    def _finish_groups(self) -> None:
        super()._finish_groups()
        self.module_units.create_rest(self.params)
        if self.hooks is not None:
            self.hooks.remove()
        self.fetcher = ParamFetcher(
            self.units,
            prefetch_numel=self.partitioning.prefetch_numel,
            max_live_numel=self.partitioning.max_live_numel,
            max_reuse_numel=self.partitioning.max_reuse_numel,
            quantizes=self.partitioning.quantizes_weights,
        )
        if self.module_units.borrowed and not self.units:
            self.hooks = next(iter(self.module_units.borrowed.values()))
        else:
            self.hooks = ModuleHooks(self._module, self.fetcher, self.module_units.of_module)

    def before_compile(self) -> None:
        assert self.hooks is not None
        self.hooks.leave_out_of_graphs()

    # ---- one step -----------------------------------------------------------------------------------------------

    def _begin_backward(self, by_user: bool) -> None:
        super()._begin_backward(by_user)
        for group in self.groups:
            if group.unit is not None:
                group.unit.num_missing = len(group.params)

    def _after_arrival(self, index: int) -> None:
        """After its last gradient the unit is dropped."""
        unit = self.groups[index].unit
        assert unit is not None
        unit.num_missing -= 1
        if unit.num_missing <= 0 and unit.num_users == 0:
            self.fetcher.drop(unit)

    def _end_backward(self) -> None:
        super()._end_backward()
        for unit in self.units:
            if unit.num_users == 0:
                self.fetcher.drop(unit)

    def _reduce(self, bucket: Bucket, wire_N: Tensor) -> Work:
        group = self.groups[bucket.index]
        if group.unit is None or not self.partitioning.quantizes_gradients:
            return super()._reduce(bucket, wire_N)
        return quantized.reduce_scatter(group.ranks.shards, group.shard_of(wire_N), wire_N, tag=bucket.index)

    def _all_gather_weights(self, index: int) -> Work | None:
        return super()._all_gather_weights(index) if self.groups[index].unit is None else None

    def _abandon(self, *works: tuple[GroupBackend, Work], failed: bool) -> None:
        super()._abandon(*works, *self.fetcher.abandon(), failed=failed)
        for unit in self.units:
            unit.shards_changed()

    def _finish_in_flight(self) -> None:
        super()._finish_in_flight()
        self.fetcher.finish_all()

    def update(self, scale: float = 1.0) -> None:
        self.release_gathered()
        super().update(scale)

    def weights_from_masters(self) -> None:
        self.release_gathered()
        super().weights_from_masters()

    def weights_changed(self, params: Sequence[Tensor]) -> None:
        changed = set(params)
        for group in self.groups:
            if not changed.isdisjoint(group.params):
                group.take_changes()

    # ---- states -------------------------------------------------------------------------------------------------

    def release_gathered(self) -> None:
        self.fetcher.release_all()
        for unit in self.units:
            unit.shards_changed()

    def load_frozen(self, parts: dict[str, Tensor]) -> None:
        for unit in self.units:
            if all(name in parts for name in unit.names):
                states.load_parts(unit, [parts[name] for name in unit.names])
        for name, param in self._module.named_parameters():
            if name in parts and unit_of(param) is None:  # sharded where it was saved
                param.data.copy_(states.whole_of_parts(parts[name], param.shape, self.backend))
        for unit in self.units:  # `load_state_dict` has copied empty tensors into the released parameters
            unit.accept_changes()

    def retire(self) -> None:
        """Leave the parameters, sharded as they are, to another engine, which trains them."""
        self.module_units.leave()
        self.destroy()

    def destroy(self) -> None:
        lenders = set(self.module_units.borrowed.values())
        if self.hooks is not None and self.hooks not in lenders:
            self.hooks.remove()
            for each in lenders:
                each.install_again()
        super().destroy()
        self.module_units.destroy()
