"""The stages 0 to 3 of ZeRO: what each has in its own way of what `Sharding` does in all of them.

How a step goes is in `strategy.py`, what is held in `holding.py`. Each stage is the one before it and one thing more:
shards of the optimizer states, of the gradients, of the parameters. Figures are bytes per parameter on a rank with
Adam (ZeRO, arXiv 1910.02054, section 5).
"""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.comm.values import check_same
from deepspeed.errors import ConfigError
from deepspeed.optim import looks_at_whole
from deepspeed.zero import quantized
from deepspeed.zero.backward import abandons_on_error
from deepspeed.zero.bucket import Bucket, BucketPool, GradientShards
from deepspeed.zero.flat_group import FlatGroup
from deepspeed.zero.holding import ShardingOptions
from deepspeed.zero.layout import UnitLayout
from deepspeed.zero.managed import manager_of
from deepspeed.zero.module_hooks import ParamGathering
from deepspeed.zero.module_units import ModuleUnits, Stage3Options
from deepspeed.zero.param_unit import ParamUnit, freed_memory_returned, unit_of
from deepspeed.zero.placement import Keep
from deepspeed.zero.step_facts import Scalar
from deepspeed.zero.strategy import Sharding
from deepspeed.zero.whole_state_dict import unwatch, watch


class Stage0(Sharding):
    """Stage 0, plain data parallelism: every rank holds parameters, gradients and optimizer states whole.

    A bucket is all-reduced (`Reducing._reduce`); averaged gradients are shown as `param.grad`. 16 bytes in fp32.
    """

    shows_gradients = True

    def _norm_part(self) -> list[Tensor]:
        units = self._reduced_units()
        own = ((group, grads.tensor_split(group.ranks.world_size)[group.ranks.rank]) for group, grads in units)
        return [group.ranks.counted(grads) for group, grads in own]

    def _counts(self, group: FlatGroup) -> bool:
        return group.ranks.rank == 0 and super()._counts(group)

    def _after_launch(self) -> None:
        """Wait, so that `param.grad` can be read, and clipped, when the backward is over."""
        self.reduce()

    def _after_reduce(self) -> None:
        if self.average_factor == 1.0:
            try:
                self._shown.show(self.groups, self.buckets, self._used_anywhere)
            except RuntimeError:  # torch: a gradient of another dtype than the parameter's
                self.refuse_converted()
                raise


class Stage1(Sharding):
    """Stage 1: each rank updates, and keeps the optimizer states of, its own shard of the parameters.

    The parameters of a unit are views of one flat buffer, cut in W equal shards; a full bucket is reduce-scattered
    instead of all-reduced; after the update the shards are all-gathered. 8 + 8/W bytes in fp32, 4 + 12/W in low
    precision (P_os).
    """

    stage = 1

    def _layout(self, numels: Sequence[int], world_size: int) -> UnitLayout:
        if self._is_whole:
            return UnitLayout.whole(numels, world_size)
        return UnitLayout.even(numels, world_size, self._max_fragment_numel())

    def _is_flat(self) -> bool:
        return True

    def _create_bucket(self, index: int) -> Bucket:
        shard = self.groups[index].layout.shard(self.groups[index].rank)
        return self._bucket(index, shard, kept=shard)

    def _reduce(self, bucket: Bucket, wire_N: Tensor) -> Work:
        group = self.groups[bucket.index]
        return group.ranks.shards.reduce_scatter(group.shard_of(wire_N), wire_N, tag=bucket.index)

    def _all_gather_weights(self, index: int) -> Work | None:
        group = self.groups[index]
        assert group.flat_N is not None
        return group.ranks.shards.all_gather(group.flat_N, group.shard_of(group.flat_N), tag=index)

    def _owned_gradients(self, index: int) -> Tensor:
        return self.groups[index].shard_of(self._gradients[index])


#: buckets in flight at the same time, and buffers that wait for reuse. A bound for what this rank starts: a hook waits
#: for no peer, so it is exceeded where peers are late
MAX_IN_FLIGHT = 2


class Stage2(Stage1):
    """Stage 2: gradients are sharded too. It is stage 1 with another place for gradients to be.

    A bucket's buffer is borrowed from a small pool, from its first gradient until its sum was added to this rank's
    shard (`GradientShards`). So gradients are reduced after every backward, also between two steps. 4 + 12/W bytes in
    fp32, 2 + 14/W in low precision (P_os+g).
    """

    stage = 2
    reduces_always = True

    def __init__(self, options: ShardingOptions, backend: GroupBackend, group: ProcessGroup | None = None) -> None:
        super().__init__(options, backend, group)
        self._gradient_shards = GradientShards()
        self._pools: dict[tuple[torch.dtype, torch.device], BucketPool] = {}

    def _max_in_flight(self) -> int | None:
        return MAX_IN_FLIGHT

    def _is_alone(self, group: FlatGroup) -> bool:
        """One rank that keeps its gradients beside its weights: its shard is the whole buffer, so none is borrowed."""
        return group.ranks.world_size == 1 and not group.placement.is_offloaded

    def _create_gradients(self, index: int, dtype: torch.dtype) -> Tensor:
        group = self.groups[index]
        if self._is_alone(group):
            return super()._create_gradients(index, dtype)
        numel = 0 if group.placement.is_offloaded else group.layout.shard_numel
        return self._gradient_shards.create(index, numel, dtype, group.device)

    def _owned_gradients(self, index: int) -> Tensor:
        return self._gradients[index]

    def _create_bucket(self, index: int) -> Bucket:
        group = self.groups[index]
        shard = group.layout.shard(group.rank)
        return self._bucket(index, shard, kept=shard, pool=None if self._is_alone(group) else self._pool(group))

    def _pool(self, group: FlatGroup) -> BucketPool:
        dtype, device = self._accumulation_dtype(group.dtype), group.device
        new = BucketPool(MAX_IN_FLIGHT, lambda numel: self.backend.allocate(numel, dtype, device))
        return self._pools.setdefault((dtype, device), new)

    def _keeper(self, index: int, *, pooled: bool) -> Keep | None:
        return super()._keeper(index, pooled=pooled) or (self._gradient_shards.add_up if pooled else None)

    def _connect_shards(self) -> None:
        self._gradient_shards.allocate()
        super()._connect_shards()
        self._gradient_shards.free()

    def _local_norms(self) -> list[Tensor]:
        self._gradient_shards.zero_without_sum()
        return super()._local_norms()

    def zero_grad(self) -> None:
        super().zero_grad()
        self._gradient_shards.forget()

    def _drop_gradient_memory(self) -> None:
        super()._drop_gradient_memory()
        self._gradient_shards.leave()

    def drop_free_buffers(self) -> None:
        for pool in self._pools.values():
            pool.drop_free()

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + sum(pool.free_bytes for pool in self._pools.values())

    def destroy(self) -> None:
        super().destroy()
        self._gradient_shards = GradientShards()
        self._pools.clear()


class Stage3(Stage2):
    """Stage 3: parameters are sharded too. It is stage 2 with weights that are whole only while a module uses them.

    Large parameters form units (`module_units.py`, `param_unit.py`): gathered before use and released after
    (`module_hooks.py`), reduce-scattered as one bucket, updated where their shard is. Small ones
    (`stage3_param_persistence_threshold`) stay whole and are treated as in stage 2. 16/W bytes in fp32 and in low
    precision, and the largest working set (P_os+g+p).
    """

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
            name = type(optimizer).__name__
            if looks_at_whole(optimizer):
                raise ConfigError(
                    f"zero_optimization.stage 3: the update of {name} looks at whole parameters, and this stage holds "
                    "shards of them; use stage 1 or 2"
                )
            raise ConfigError(
                f"zero_optimization.stage 3: the update of {name} is not known to be elementwise, and this stage holds "
                "shards of parameters. If the update of each element depends on that element alone, give the class "
                f"{name} is_elementwise = True; else use stage 1 or 2"
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

    def accept_load(self) -> None:
        self.gathering.accept_load()

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
        """Return the shardings of the engines that train what this one borrows."""
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
        """Leave the parameters sharded as they are."""
        self.module_units.leave()
        self.destroy()

    def destroy(self) -> None:
        module = self._module
        self.gathering.remove_hooks()
        super().destroy()
        self.module_units.destroy()
        unwatch(module)
