"""Stage 3: parameters are sharded too. It is stage 2 with weights that are whole only while a module uses them.

Large parameters form units (`param_unit.py`), one per module and optimizer group (`granularity.py`): gathered before
use and released after (`module_hooks.py`, `fetcher.py`), reduce-scattered as one bucket, updated where their shard is.
Small ones (`stage3_param_persistence_threshold`) stay whole and are treated as in stage 2. 16/W bytes per parameter in
fp32 and in low precision, and the largest working set (ZeRO, arXiv 1910.02054, section 5.3: P_os+g+p).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from deepspeed.comm import group_backend
from deepspeed.comm.backend import Backend, Work
from deepspeed.comm.work import DONE
from deepspeed.errors import ConfigError
from deepspeed.zero import sharded_state
from deepspeed.zero import state_dict as states
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.fetcher import ParamFetcher
from deepspeed.zero.flat_group import FlatGroup
from deepspeed.zero.granularity import UnitModule, divide
from deepspeed.zero.holding import ShardingOptions
from deepspeed.zero.layout import BucketSpec, Fragment
from deepspeed.zero.module_hooks import ModuleHooks
from deepspeed.zero.param_unit import ParamUnit, shape_of, unit_of
from deepspeed.zero.stage2 import Stage2
from deepspeed.zero.strategy import BackwardPlan
from deepspeed.zero.update import Batch

#: owner of a bucket that every rank owns a shard of
EVERY_RANK = -1


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
        backend: Backend,
        group: ProcessGroup | None = None,
        partitioning: Stage3Options | None = None,
    ) -> None:
        super().__init__(options, backend, group)
        self.partitioning = partitioning or Stage3Options()
        self.units: list[ParamUnit] = []
        self.hooks: ModuleHooks | None = None
        self._unit_modules: list[UnitModule] = []
        self._units_of_module: dict[Module, list[ParamUnit]] = {}
        self._kept: set[int] = set()  # groups that hold a sum of this step
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
        self._ranks = group_backend(self.group)
        self._ranks.connect()
        is_sharded = self._choose_sharded(module)
        for param in module.parameters():
            unit = unit_of(param)
            if unit is not None and not is_sharded(param):  # a small one, sharded by zero.Init
                unit.restore_plain()
            if not is_sharded(param) and self.options.device is not None:
                param.data = param.data.to(self.options.device)
        self._unit_modules = divide(
            module,
            is_sharded,
            max_numel=self._unit_numel(),
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
        return lambda param: param not in small and shape_of(param).numel() > 0

    def _unit_numel(self) -> int:
        """Elements that one all-gather serves well."""
        preferred = self.backend.preferred_bucket_bytes(self.world_size, to_owners=True) // 4
        return min(self.partitioning.prefetch_numel, preferred)

    def hold_group(self, index: int, params: Sequence[Parameter]) -> None:
        """Units for large parameters, flat groups as in stage 2 for small ones."""
        self._refuse_attached(index, params)
        for unit in dict.fromkeys(map(unit_of, params)):
            if unit in self.units:  # of a group that is added later
                self._drop_unit(unit)
        wanted = {param for param in params if param.requires_grad}
        sharded: set[Parameter] = set()
        for unit_module in self._unit_modules:
            by_dtype: dict[torch.dtype, list[tuple[str, Parameter]]] = {}
            for name, param in unit_module.params:
                if param in wanted:
                    by_dtype.setdefault(param.dtype, []).append((name, param))
            for named in by_dtype.values():
                sharded.update(param for _, param in named)
                self._hold_unit(index, unit_module, named)
        super().hold_group(index, [param for param in params if param not in sharded])
        self._given_params[-1] = list(params)
        if self.optimizer is not None:
            groups = [group for group in self.groups if group.param_group == index]
            masters = [shard.master for group in groups for shard in group.shards]
            self.optimizer.param_groups[index]["params"] = masters

    def _hold_unit(self, index: int, unit_module: UnitModule, named: list[tuple[str, Parameter]]) -> None:
        params = [param for _, param in named]
        unit = self._create_unit(unit_module, named)
        group = FlatGroup(
            params,
            first_index=len(self.params),
            param_group=index,
            layout=unit.layout,
            rank=self.rank,
            model_dtype=self.options.model_dtype,
            is_flat=False,
            is_whole=False,
            has_optimizer=self.optimizer is not None,
            placement=self.placement,
            allocate=self.backend.allocate,
            unit=unit,
        )
        unit.source_S = None
        self.groups.append(group)
        self.params.extend(params)
        if self.optimizer is not None:
            states.adopt(self.optimizer, group)

    def _create_unit(self, unit_module: UnitModule, named: list[tuple[str, Parameter]]) -> ParamUnit:
        param = named[0][1]
        dtype = self.options.model_dtype if param.is_floating_point() else None
        unit = ParamUnit(
            [param for _, param in named],
            [name for name, _ in named],
            self._ranks,
            device=self.options.device or param.device,
            dtype=dtype,
        )
        self.units.append(unit)
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
        if self.hooks is not None:
            self.hooks.remove()
        self.fetcher = ParamFetcher(
            self.units,
            prefetch_numel=self.partitioning.prefetch_numel,
            max_live_numel=self.partitioning.max_live_numel,
            max_reuse_numel=self.partitioning.max_reuse_numel,
        )
        self.hooks = ModuleHooks(self._module, self.fetcher, self._units_of_module)

    def _specs(self, max_numel: int) -> list[BucketSpec]:
        flat = {index: group for index, group in enumerate(self.groups) if group.unit is None}
        positions = [[self._positions.get(id(param), 0) for param in group.params] for group in self.groups]
        keyed = []
        for index, group in enumerate(self.groups):
            if index not in flat:
                fragments = tuple(
                    Fragment(place, 0, start, start + numel, EVERY_RANK)
                    for place, (start, numel) in enumerate(zip(group.layout.offsets, group.layout.numels, strict=False))
                )
                spec = BucketSpec(index, 0, group.layout.padded_numel, EVERY_RANK, fragments)
                keyed.append((min(positions[index]), spec))
        for spec in super()._specs(max_numel):
            if spec.group in flat:
                keyed.append((min(positions[spec.group][fragment.param] for fragment in spec.fragments), spec))
        keyed.sort(key=lambda item: -item[0])
        return [spec for _, spec in keyed]

    def _create_gradients(self, group: FlatGroup, dtype: torch.dtype) -> Tensor:
        device = self.options.device or group.params[0].device
        start, stop = (0, 0) if self.placement.is_apart else group.layout.partition(self.rank)
        return self.placement.pinned(self.backend.allocate(stop - start, dtype, device))

    def _create_bucket(self, spec: BucketSpec) -> Bucket:
        group = self.groups[spec.group]
        if group.unit is None:
            return super()._create_bucket(spec)
        pool = self._pool(self._accumulation_dtype(group), group.unit.shard_S.device)
        keep = self._keep if not self.placement.is_apart else self._keep_apart
        return Bucket(
            spec, is_holder=False, take=pool.take, give=pool.give, wire_dtype=self.options.wire_dtype, keep=keep
        )

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

    def _exchange(self, bucket: Bucket, wire_N: Tensor) -> Work:
        if bucket.spec.owner != EVERY_RANK:
            return super()._exchange(bucket, wire_N)
        group = self.groups[bucket.spec.group]
        assert group.unit is not None
        wire_N[group.layout.numel :].zero_()
        return self._ranks.reduce_scatter(group.partition_of(wire_N), wire_N, tag=group.unit.names[0])

    def _keep(self, spec: BucketSpec, work: Work, wire_N: Tensor) -> Work:
        """Add this rank's shard of a reduced bucket to the sum of the step."""
        work.wait()
        group = self.groups[spec.group]
        mine_S = group.partition_of(wire_N)
        if spec.group in self._kept:
            self._gradients[spec.group].add_(mine_S)
        else:
            self._gradients[spec.group].copy_(mine_S)
            self._kept.add(spec.group)
        return DONE

    def _keep_apart(self, spec: BucketSpec, work: Work, wire_N: Tensor) -> Work:
        """Give this rank's shard of a reduced bucket to where the optimizer's side lives."""
        group = self.groups[spec.group]
        start, stop = group.layout.partition(self.rank)
        keep = self.placement.keeper(adds=True)
        assert keep is not None
        return keep(BucketSpec(spec.group, start, stop, self.rank, ()), work, group.partition_of(wire_N))

    def _publish(self, batch: Batch) -> Work | None:
        assert batch.group is not None
        return None if self.groups[batch.group].unit is not None else super()._publish(batch)

    def update(self, scale: float = 1.0) -> None:
        self.fetcher.release_all()
        super().update(scale)

    def publish_all(self) -> None:
        self.fetcher.release_all()
        super().publish_all()

    def weights_changed(self, params: Sequence[Parameter], source: int) -> None:
        for param in params:
            if unit_of(param) is None and self.world_size > 1:  # a small one, whole on every rank
                value = param.data.contiguous().view(-1)
                self._ranks.broadcast(value, torch.distributed.get_group_rank(self._ranks.group, source)).wait()
                param.data.view(-1).copy_(value)
        self.masters_from_weights()

    def zero_grad(self) -> None:
        super().zero_grad()
        self._kept.clear()

    # ---- states -------------------------------------------------------------------------------------------------

    def saved_order(self, index: int) -> list[int]:
        """Attached parameters of one group of the optimizer, in the order in which the user gave them."""
        wanted = {param for group in self.groups if group.param_group == index for param in group.params}
        place = {param: position for position, param in enumerate(self.params)}
        return [place[param] for param in self._given_params[index] if param in wanted]

    def saved_parameters(self) -> list[list[Parameter]]:
        return [[self.params[place] for place in self.saved_order(index)] for index in range(len(self._given_params))]

    def before_load(self) -> None:
        self.fetcher.release_all()

    def load_frozen(self, parts: dict[str, Tensor]) -> None:
        for unit in self.units:
            if all(name in parts for name in unit.names):
                sharded_state.load_parts(unit, [parts[name] for name in unit.names])

    def numel_of(self, param: int) -> int:
        """Elements of an attached parameter."""
        return shape_of(self.params[param]).numel()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of masters and optimizer state, as in DeepSpeed's stage 3 files. A collective."""
        return sharded_state.collect(self)

    def check_state(self, saved: dict[str, Any]) -> None:
        sharded_state.check(self, saved)

    def restore_state(self, saved: dict[str, Any], *, load_optimizer_states: bool) -> None:
        sharded_state.restore(self, saved, load_optimizer_states=load_optimizer_states)

    def destroy(self) -> None:
        if self.hooks is not None:
            self.hooks.remove()
        super().destroy()
        for unit in self.units:
            unit.restore_plain()
        self.units, self._units_of_module, self._unit_of_param, self._unit_modules = [], {}, [], []
