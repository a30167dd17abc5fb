"""Stage 3: parameters are sharded too. It is stage 2 with weights that are whole only while a module uses them.

Large parameters form units (`param_unit.py`), one per module and optimizer group (`granularity.py`): gathered before
use and released after (`param_gathering.py`), reduce-scattered as one bucket, updated where their shard is. Small ones
(`stage3_param_persistence_threshold`) stay whole and are treated as in stage 2. 16/W bytes per parameter in fp32 and in
low precision, and the largest working set (ZeRO, arXiv 1910.02054, section 5.3: P_os+g+p).
"""

from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.errors import ConfigError
from deepspeed.zero import quantized
from deepspeed.zero.agreement import check_same
from deepspeed.zero.backward import abandons_on_error
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.gradient_norm import Scalar
from deepspeed.zero.holding import ShardingOptions
from deepspeed.zero.managed import manager_of
from deepspeed.zero.module_units import ModuleUnits, Stage3Options
from deepspeed.zero.param_gathering import ParamGathering
from deepspeed.zero.param_unit import ParamUnit, freed_memory_returned, unit_of
from deepspeed.zero.stage2 import Stage2
from deepspeed.zero.strategy import Sharding
from deepspeed.zero.whole_state_dict import unwatch, watch


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
        self._divide(Module())  # nothing yet
        self.gathering = ParamGathering(Module(), self.module_units, self.partitioning, self.reduction)

    # ---- building -----------------------------------------------------------------------------------------------

    def attach(self, *args: Any, **kwargs: Any) -> None:
        with freed_memory_returned():
            super().attach(*args, **kwargs)

    def _prepare(self, module: Module, optimizer: Optimizer | None) -> None:
        if self._is_whole:
            raise ConfigError(
                f"zero_optimization.stage 3: the update of {type(optimizer).__name__} looks at whole parameters, and "
                "this stage holds shards of them; use stage 1 or 2, or give the optimizer is_elementwise = True if "
                "the update of each element depends on that element alone"
            )
        groups = optimizer.param_groups if optimizer is not None else []
        self._divide(module, [param for group in groups for param in group["params"]])

    def _divide(self, module: Module, trained: Sequence[Parameter] = ()) -> None:
        device, dtype = self.options.device, self.options.model_dtype
        units = ModuleUnits(module, self.unit_groups, self.partitioning, trained, device=device, dtype=dtype)
        self.module_units = units

    def agree(self, optimizer: Optimizer | None, param_groups: Sequence[Sequence[Parameter]]) -> None:
        super().agree(optimizer, param_groups)
        check_same(self.partitioning.facts(), self.group)

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
        self.gathering.remove_hooks()
        self.gathering = ParamGathering(self._module, self.module_units, self.partitioning, self.reduction)
        watch(self._module)

    def before_compile(self) -> None:
        self.gathering.hooks.leave_out_of_graphs()

    # ---- one step -----------------------------------------------------------------------------------------------

    def _begin_backward(self, by_user: bool) -> None:
        super()._begin_backward(by_user)
        self.gathering.begin_backward(group.unit for group in self.groups if group.unit is not None)

    def _after_arrival(self, unit: ParamUnit) -> None:
        self.gathering.gradient_arrived(unit)

    def _end_backward(self) -> None:
        super()._end_backward()
        self.gathering.end_backward()

    @abandons_on_error
    def _finish_collectives(self) -> Scalar:
        self.gathering.refuse_left_whole()  # where peers still wait for this rank, and no weight has changed
        return super()._finish_collectives()

    def _reduce(self, bucket: Bucket, wire_N: Tensor) -> Work:
        group = self.groups[bucket.index]
        if group.unit is None or not self.partitioning.quantizes_gradients:
            return super()._reduce(bucket, wire_N)
        return quantized.reduce_scatter(group.ranks.shards, group.shard_of(wire_N), wire_N, tag=bucket.index)

    def _all_gather_weights(self, index: int) -> Work | None:
        return super()._all_gather_weights(index) if self.groups[index].unit is None else None

    def _abandon(self, *works: tuple[GroupBackend, Work]) -> None:
        super()._abandon(*works, *self._abandon_gathers())
        self.gathering.shards_changed()  # may fail, as a disk does: after the peers know of this rank

    def _abandon_gathers(self) -> Sequence[tuple[GroupBackend, Work]]:
        return self.gathering.abandon()

    def _finish_in_flight(self) -> None:
        super()._finish_in_flight()
        self.gathering.finish()

    # ---- states -------------------------------------------------------------------------------------------------

    def sharded_units(self) -> Sequence[ParamUnit]:
        return self.module_units.all

    def release_gathered(self) -> None:
        self.gathering.release()

    def weights_changed(self, params: Set[Tensor]) -> None:
        self.wait_for_copy()
        for group in self.groups:
            if not params.isdisjoint(group.params):
                group.take_changes()

    def borrowed_names(self) -> list[str]:
        return list(self._find_borrowed())

    def _find_borrowed(self) -> dict[str, Parameter]:
        borrowed = self.module_units.borrowed

        def is_of_another(param: Parameter) -> bool:
            if unit_of(param) is not None:
                return param in borrowed
            # whole, and without an optimizer in no shard of this engine, which a save would write
            return self.optimizer is None and manager_of(param) not in (None, self)

        return {name: param for name, param in self.named_parameters if is_of_another(param)}

    def _find_lenders(self) -> list[Sharding]:
        """Of the engines that train what this one borrows."""
        managers = dict.fromkeys(manager_of(param) for param in self._find_borrowed().values())
        return [manager for manager in managers if manager is not None]

    def release_borrowed(self) -> None:
        for lender in self._find_lenders():
            lender.require_unmoved("load_checkpoint")
            lender.wait_for_copy()
        self.gathering.release_borrowed()

    def load_frozen(self, parts: dict[str, Tensor]) -> None:
        self.gathering.load_parts(parts, self.backend)
        params = set(self._find_borrowed().values())
        for lender in self._find_lenders():
            lender.weights_changed(params)

    def retire(self) -> None:
        """Leave the parameters, sharded as they are, to another engine, which trains them."""
        self.module_units.leave()
        self.destroy()

    def destroy(self) -> None:
        module = self._module
        self.gathering.remove_hooks()
        super().destroy()
        self.module_units.destroy()
        unwatch(module)
