"""`Holding`: what a stage keeps of the model and where: units, buckets, gradient memory, batches of the update.

Made by `Sharding.attach`. What happens to it in a backward and in a step is in `backward.py` and `strategy.py`. What a
stage decides of the layout stands first; the stages answer differently.

Legend: N padded numel of a unit, S numel of a shard, W ranks.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.values import all_gather_values, check_same, named_ranks
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once
from deepspeed.ops.optimizer import KernelOptimizer
from deepspeed.zero.bucket import Bucket, BucketPool
from deepspeed.zero.flat_group import FlatGroup, SubGroup, adopt_state, divide
from deepspeed.zero.layout import UnitLayout, divide_into_units
from deepspeed.zero.param_unit import ParamUnit, shape_of
from deepspeed.zero.placement import Keep, Placement
from deepspeed.zero.synchronize import described, settings_of
from deepspeed.zero.unit_groups import UnitGroups, UnitRanks
from deepspeed.zero.update import UpdateBatch, takes_one_pass, takes_one_pass_of

#: elements whose gradients are widened to fp32 at once: 2 MiB, which a core's cache holds. Measured for Adam on 25 M
#: bf16 parameters, one thread: 20.7 ms at 2**19, 27 at 2**20, 32 from 2**21
WIDENED_NUMEL = 2**19
#: the same in a device's memory, where it is a buffer of 64 MiB: a call of the optimizer costs the host more than the
#: device needs for a short part
DEVICE_WIDENED_NUMEL = 2**24
#: elements updated in one call in a device's memory, about half a millisecond of its bandwidth; what is gathered begins
#: after it
DEVICE_UPDATE_NUMEL = 2**26

#: small models get buckets of a third of their size, so that something overlaps the backward, but none below this
MIN_BUCKET_NUMEL = 2**18


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """`ShardingOptions` carries, as plain values, what a stage needs of the configuration."""

    model_dtype: torch.dtype | None = None  # dtype that parameters get; None leaves them
    accumulation_dtype: torch.dtype | None = None  # of gradients between backwards; None is the parameter's own
    wire_dtype: torch.dtype | None = None  # of gradients on the way; None is the accumulation dtype
    bucket_numel: int = 500_000_000  # upper bound; the backend's own wish may be smaller
    update_numel: int = 4 * 2**20  # fp32 elements updated, and then gathered, in one go
    sub_group_numel: int = sys.maxsize  # the user's bound for the same
    overlap: bool = True  # launch a bucket when it is full, not when the backward is over
    allows_unused: bool = True  # a parameter without gradient is skipped; False: it is an error that names it
    predivide_factor: float | None = None  # gradients are divided by this before the sum and by W / this after it
    groups: UnitGroups | None = None  # of the units; None: all are those of the whole data-parallel group
    model_ranks: tuple[GroupBackend, ...] = ()  # one per axis (tp, pp) along which the caller divided the model
    counts_replicated: bool = True  # this rank adds parameters to the norm that its tensor-parallel peers have, too
    device: torch.device | None = None  # that the parameters get (stage 3 moves them shard by shard)
    placement: Placement = field(default_factory=Placement)  # where master weights, states and reduced gradients live


class Holding:
    """`Holding` keeps what one rank has of the model. The base class is stage 0, where every rank has everything."""

    stage = 0

    def __init__(self, options: ShardingOptions, backend: GroupBackend, group: ProcessGroup | None = None) -> None:
        self.options = options
        self.backend = backend
        self.group = group
        self.placement = options.placement
        self.world_size = backend.world_size
        self.rank = backend.rank
        self.unit_groups = options.groups or UnitGroups(UnitRanks.over(backend))
        self.backends = self.unit_groups.backends()
        for ranks in self.backends:
            ranks.connect()  # here all ranks are at the same place; in a backward they need not be
        self.optimizer: Optimizer | None = None
        self.groups: list[FlatGroup] = []  # one for each unit
        self.params: list[Parameter] = []
        self.named_parameters: list[tuple[str, Parameter]] = []  # of the module, also those that are not attached
        self.buckets: list[Bucket] = []  # one for each unit, in the order in which a backward fills them
        self.saved_groups: list[list[int]] = []  # attached parameters as a checkpoint has them
        self._given_params: list[list[Parameter]] = []  # by group of the optimizer, before it held master weights
        self._is_whole = False  # the optimizer is not known to be elementwise: fragments are whole parameters
        self._widens = False  # gradients are copied to fp32 before the update, part by part
        self._bucket_bytes = 0  # that the backend prefers
        self._total_numel = 0  # elements that train
        self._positions: dict[int, int] = {}  # id of a parameter -> its place in the model
        self._gradients: list[Tensor] = []  # by group: what lives from step to step
        self._reduced: list[Tensor] = []  # by group: where the optimizer finds this rank's sums, padding zero

    # ---- what a stage decides -----------------------------------------------------------------------------------

    def _layout(self, numels: Sequence[int], world_size: int) -> UnitLayout:
        """Return how a unit of these parameters is divided over its ranks; in stage 0 every rank owns everything."""
        return UnitLayout.single(numels, self._max_fragment_numel())

    def _is_flat(self) -> bool:
        """Whether parameters become views of one buffer."""
        return False

    def _create_gradients(self, index: int, dtype: torch.dtype) -> Tensor:
        """The gradient memory of the unit `index` that lives from step to step: all N elements."""
        group = self.groups[index]
        return group.placement.pinned(group.ranks.shards.allocate(group.layout.padded_numel, dtype, group.device))

    def _create_bucket(self, index: int) -> Bucket:
        """The bucket of the unit `index`."""
        group = self.groups[index]
        everything = (0, group.layout.padded_numel)
        return self._bucket(index, everything, kept=everything if group.ranks.rank == 0 else (0, 0))

    def _owned_gradients(self, index: int) -> Tensor:
        """This rank's part of the gradient memory of a unit, 1-D."""
        return self._gradients[index]

    def _bucket(
        self, index: int, result: tuple[int, int], kept: tuple[int, int], pool: BucketPool | None = None
    ) -> Bucket:
        """Create the bucket of the unit `index`; without a pool, the bucket fills the gradient memory of the unit."""
        group = self.groups[index]
        return Bucket(
            index,
            group.layout,
            shapes=group.shapes,
            memory=(lambda: self._gradients[index]) if pool is None else None,
            pool=pool,
            result=result,
            kept=kept,
            wire_dtype=self.options.wire_dtype,
            keep=self._keeper(index, pooled=pool is not None),
        )

    def _keeper(self, index: int, *, pooled: bool) -> Keep | None:
        """Return the function that takes this rank's sums out of the bucket of the unit; None if they stay there."""
        return self.groups[index].placement.keeper(adds=pooled)

    # ---- building -----------------------------------------------------------------------------------------------

    def agree(self, optimizer: Optimizer | None, param_groups: Sequence[Sequence[Parameter]]) -> None:
        """Compare with the other ranks what the layout follows from, and settle what each would choose by itself.

        Raises:
            ConfigError: on every rank; it names those that differ.
        """
        options = self.options
        dtypes = (options.model_dtype, options.accumulation_dtype, options.wire_dtype)
        facts = {
            "zero_optimization.stage": f"{type(self).__name__}, offloaded: {self.placement.is_offloaded}",
            "the optimizer": f"{type(optimizer).__name__}, whole parameters: {self._is_whole}",
            "the optimizer's parameters": "; ".join(map(self._described, param_groups)),
            "the optimizer's settings": "; ".join(map(settings_of, optimizer.param_groups if optimizer else ())),
            "the dtypes of parameters, gradient accumulation and communication": str(dtypes),
            "reduce_bucket_size": str(options.bucket_numel),
            "gradient_predivide_factor": str(options.predivide_factor),
        }
        check_same(facts, self.group)
        if isinstance(optimizer, KernelOptimizer):
            optimizer.uses_kernel = True  # whatever it was in an engine before this one
        has_kernel = not isinstance(optimizer, KernelOptimizer) or optimizer.has_kernel
        widens = options.model_dtype is not None and not self._will_take_one_pass(optimizer)
        can = self.backend.capabilities
        preferred = can.preferred_bucket_bytes if self.stage > 0 else can.preferred_all_reduce_bytes
        by_rank = all_gather_values([has_kernel, widens, preferred], self.group)
        self._widens = any(numbers[1] for numbers in by_rank)
        self._bucket_bytes = min(numbers[2] for numbers in by_rank)
        trained = (param for params in param_groups for param in params if param.requires_grad)
        self._total_numel = sum(shape_of(param).numel() for param in trained)
        lacking = [rank for rank, numbers in enumerate(by_rank) if not numbers[0]]
        if isinstance(optimizer, KernelOptimizer) and 0 < len(lacking) < self.world_size:
            self._use_reference(optimizer, lacking)

    def _will_take_one_pass(self, optimizer: Optimizer | None) -> bool:
        """Whether one pass updates the master weights, which do not exist yet and may be elsewhere than the weights are
        now: stage 3 takes them from a model on the host. Where they are offloaded, it says whether the host's kernel
        takes the weights themselves; if not, they are widened in short parts."""
        device = self.options.device
        if optimizer is None or device is None or self.placement.is_offloaded:
            return takes_one_pass(optimizer)
        return takes_one_pass_of(optimizer, [[torch.empty(0, device=device)] for _ in optimizer.param_groups])

    def _use_reference(self, optimizer: KernelOptimizer, lacking: list[int]) -> None:
        """Replicas that step with a kernel here and its reference there drift apart by roundings."""
        optimizer.uses_kernel = False
        warn_once(
            f"optimizer: {named_ranks(lacking)} of {self.world_size} cannot load the kernel of "
            f"{type(optimizer).__name__}, so all ranks step with its torch reference, which is slower; ds_report there "
            "says why"
        )

    def _described(self, params: Sequence[Parameter]) -> str:
        """The parameters that train, by their places in the module."""
        return described((str(self._positions.get(id(param))), param) for param in params if param.requires_grad)

    def hold_group(self, index: int, params: Sequence[Parameter]) -> None:
        """Split one optimizer group by dtype and by who shares the parameters, and lay out each part in units."""
        self._refuse_attached(index, params)
        parts: dict[tuple[torch.dtype, UnitRanks], list[Parameter]] = {}
        for param in params:
            if param.requires_grad and shape_of(param).numel() > 0:
                parts.setdefault((param.dtype, self.unit_groups.of(param)), []).append(param)
        first = len(self.groups)
        for alike in parts.values():
            self._hold_units(index, alike)
            place = {id(param): position for position, param in enumerate(self.params)}
            self.saved_groups.append([place[id(param)] for param in alike])
        self._given_params.append(list(params))
        if self.optimizer is not None:
            masters = [shard.master for group in self.groups[first:] for shard in group.shards]
            self.optimizer.param_groups[index]["params"] = masters

    def _hold_units(self, index: int, params: Sequence[Parameter]) -> None:
        """Lay out parameters of one dtype that the same ranks share."""
        if self.unit_groups.of(params[0]).is_tied:  # other stages hold other parameters beside them
            for param in params:
                self._hold([param], index)
            return
        numels = [param.numel() for param in params]
        positions = [self._positions.get(id(param), 0) for param in params]
        for run in divide_into_units(numels, positions, self._unit_numel(params)):
            self._hold([params[place] for place in run], index)

    def _hold(self, params: Sequence[Parameter], index: int, unit: ParamUnit | None = None) -> None:
        """Make one unit of parameters; `unit`: it shards the weights themselves."""
        ranks = self.unit_groups.of(params[0])
        numels = [shape_of(param).numel() for param in params]
        group = FlatGroup(
            params,
            first_index=len(self.params),
            param_group=index,
            layout=self._layout(numels, ranks.world_size),
            ranks=ranks,
            model_dtype=self.options.model_dtype,
            is_flat=unit is None and self._is_flat(),
            is_whole=self._is_whole,
            has_optimizer=self.optimizer is not None,
            placement=self.placement.of_unit(sum(numels)),
            unit=unit,
        )
        self.groups.append(group)
        self.params.extend(params)
        if self.optimizer is not None:
            adopt_state(self.optimizer, group)
            gradient_dtype = self._accumulation_dtype(group.dtype)
            group.placement.put_away(self.optimizer, self._sub_groups(group), gradient_dtype)
            group.forget_masters()

    def _unit_numel(self, params: Sequence[Parameter]) -> int:
        """Elements of a unit of such parameters, at most."""
        wish = min(self._bucket_bytes // self._accumulation_dtype(params[0].dtype).itemsize, self._third())
        numel = min(self.options.bucket_numel, wish)
        largest = max(param.numel() for param in params)
        world_size = self.unit_groups.of(params[0]).world_size
        return max(numel, largest * world_size) if self._is_whole and self.stage > 0 else numel

    def _third(self) -> int:
        return max(MIN_BUCKET_NUMEL, self._total_numel // 3)

    def _give_back(self, optimizer: Optimizer) -> None:
        """Let the optimizer hold the parameters that it was given, without the states of what it held instead."""
        given = {id(param) for params in self._given_params for param in params}
        for shard in (shard for group in self.groups for shard in group.shards):
            if id(shard.master) not in given:
                optimizer.state.pop(shard.master, None)
        for param_group, params in zip(optimizer.param_groups, self._given_params, strict=False):
            param_group["params"] = params
        self._given_params = []

    def _refuse_attached(self, index: int, params: Sequence[Parameter]) -> None:
        attached = {id(param) for param in self.params}
        own: set[int] = set()
        for param in params:
            if id(param) in own:
                raise ConfigError(
                    f"optimizer.param_groups[{index}]: a parameter of shape {tuple(shape_of(param))} is in it twice; "
                    "give each parameter once"
                )
            own.add(id(param))
            if id(param) in attached:
                raise ConfigError(
                    f"optimizer.param_groups[{index}]: a parameter of shape {tuple(param.shape)} is in two groups; put "
                    "it in one"
                )

    def _max_fragment_numel(self) -> int | None:
        """Fragments are as long as possible, but where gradients are widened, or weights sent, part by part."""
        is_divided = (self._widens or self.placement.is_offloaded) and not self._is_whole
        return self._batch_numel() if is_divided else None

    def _batch_numel(self) -> int:
        device = self.options.device
        on_device = device is not None and device.type != "cpu" and not self.placement.is_offloaded
        update, widened = self.options.update_numel, WIDENED_NUMEL
        if on_device:
            update, widened = max(update, DEVICE_UPDATE_NUMEL), DEVICE_WIDENED_NUMEL
        numel = min(update, self.options.sub_group_numel)
        return min(widened, numel) if self._widens and not self.placement.fetches else numel

    def _sub_groups(self, group: FlatGroup) -> list[SubGroup]:
        return divide(group.shards, self._batch_numel())

    def _accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of `dtype` add up, whether the model's dtype was applied to
        the parameters already or not."""
        wanted = self.options.accumulation_dtype
        if not dtype.is_floating_point:
            return dtype
        return wanted or self.options.model_dtype or dtype

    def _allocate_gradients(self) -> None:
        """Make the gradient memory of units that have none yet: at the first backward, which an engine that only
        evaluates never sees."""
        first = len(self._gradients)
        for index, group in enumerate(self.groups[first:], first):
            self._gradients.append(self._create_gradients(index, self._accumulation_dtype(group.dtype)))
            reduced_S = group.placement.home_of_gradients(index, group, self._owned_gradients(index))
            reduced_S[reduced_S.numel() - group.layout.padding(group.rank) :].zero_()
            self._reduced.append(reduced_S)
        self._connect_shards()

    def cut_buckets(self) -> None:
        """A bucket for each unit, in the order in which a backward fills them; again after a group was added."""
        buckets = [self._create_bucket(index) for index in range(len(self.groups))]
        first = [min(self._positions.get(id(param), 0) for param in group.params) for group in self.groups]
        self.buckets = sorted(buckets, key=lambda bucket: -first[bucket.index])

    def _batches(self) -> Iterator[UpdateBatch]:
        is_one = not self._is_flat() and not self._widens  # nothing to gather
        room = self._batch_numel()
        batch = UpdateBatch([], [])
        numel = 0
        for index, group in enumerate(self.groups):
            if group.placement is not batch.placement or group.placement.fetches:  # a sub-group is of one unit
                if batch.finished:
                    yield batch
                batch, numel = UpdateBatch([], [], group.placement), 0
            is_started = False
            for shard in group.shards:
                if batch.shards and numel + shard.fragment.numel > room and not is_one:
                    yield batch
                    batch, numel = UpdateBatch([], [], group.placement), 0
                if not is_started:
                    batch.started.append(index)
                    is_started = True
                batch.shards.append(shard)
                numel += shard.fragment.numel
            if not is_started:  # this rank has nothing of it
                batch.started.append(index)
            batch.finished.append(index)
        yield batch

    def _connect_shards(self) -> None:
        """Point each shard at its reduced gradient: at the tensor through which its bucket writes it, where that is the
        same memory. A model of many small parameters is slowed down by every tensor object that a step touches."""
        for bucket in self.buckets:
            if self.groups[bucket.index].placement.fetches:  # which does it for each batch
                continue
            group, reduced_S = self.groups[bucket.index], self._reduced[bucket.index]
            views = bucket.lasting()[1] if bucket.is_lasting else ()
            for shard in group.shards:
                start = shard.fragment.start - group.shard_start
                shard.grad = reduced_S.narrow(0, start, shard.fragment.numel).view(shard.master.shape)
                if views and _is_same_memory(view := views[shard.fragment.param], shard.grad):
                    shard.grad = view

    @property
    def gradient_memory(self) -> Sequence[Tensor]:
        """The tensors of gradients that live from step to step, by unit; they may be without memory."""
        return self._gradients

    @property
    def held_bytes(self) -> int:
        """Bytes that stay allocated between steps for collectives and copies; no states."""
        return sum(ranks.held_bytes for ranks in self.backends) + self.placement.held_bytes

    def _reduced_units(self) -> Iterator[tuple[FlatGroup, Tensor]]:
        """The units, with this rank's reduced gradients of each."""
        return zip(self.groups, self._reduced, strict=True)

    def _name_of(self, param: Tensor) -> str:
        return next((name for name, other in self.named_parameters if other is param), "?")

    def find(self, param: Parameter) -> tuple[FlatGroup, int]:
        """The unit of a parameter and its index in it.

        Raises:
            KeyError: if the parameter is not attached.
        """
        for group in self.groups:
            for index, candidate in enumerate(group.params):
                if candidate is param:
                    return group, index
        raise KeyError(f"parameter of shape {tuple(shape_of(param))} is not managed by this engine")


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors are the same elements in the same shape."""
    return (one.data_ptr(), one.dtype, one.shape) == (other.data_ptr(), other.dtype, other.shape)
