"""`Holding`: what a stage keeps of the model and where: flat groups, buckets, gradient memory, batches of the update.

Made by `Sharding.attach`, which adds what happens to it in a backward and a step (`strategy.py`). What a stage decides
of the layout stands first; `stage1.py` and `stage2.py` answer differently.

Legend: N padded numel of a flat group, S numel of this rank's partition, W ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim import Optimizer

from deepspeed.comm.backend import Backend, Piece
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once
from deepspeed.ops.kernel_optimizer import KernelOptimizer
from deepspeed.zero import state_dict as states
from deepspeed.zero.agreement import check_same, described, named_ranks
from deepspeed.zero.bucket import Bucket, Slot
from deepspeed.zero.flat_group import FlatGroup, ParamShard
from deepspeed.zero.layout import BucketSpec, Fragment, GroupLayout, cut_buckets, update_batches
from deepspeed.zero.param_unit import shape_of
from deepspeed.zero.placement import Placement
from deepspeed.zero.update import Batch, takes_one_pass

#: elements whose gradients are widened to fp32 at once: 2 MiB, which a core's cache holds. Measured for Adam on 25 M
#: bf16 parameters, one thread: 20.7 ms at 2**19, 27 at 2**20, 32 from 2**21
WIDENED_NUMEL = 2**19


#: small models get buckets of a third of their size, so that something overlaps the backward, but none below this
MIN_BUCKET_NUMEL = 2**18


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What a stage needs of the configuration, as values."""

    model_dtype: torch.dtype | None = None  # dtype that parameters get; None leaves them
    accumulation_dtype: torch.dtype | None = None  # of gradients between backwards; None is the parameter's own
    wire_dtype: torch.dtype | None = None  # of gradients on the way; None is the accumulation dtype
    bucket_numel: int = 500_000_000  # upper bound; the backend's own wish may be smaller
    update_numel: int = 4 * 2**20  # fp32 elements updated and published in one go
    overlap: bool = True  # launch a bucket when it is full, not when the backward is over
    allows_unused: bool = True  # a parameter without gradient is skipped; False: it is an error that names it
    predivide_factor: float | None = None  # gradients are divided by this before the sum and by W / this after it
    device: torch.device | None = None  # that the parameters get (stage 3 moves them shard by shard)
    placement: Placement = field(default_factory=Placement)  # where masters, states and reduced gradients live


class Holding:
    """What one rank holds. The base class is stage 0: everything."""

    #: whether a bucket is summed into its owner only
    _sums_to_owners = False

    def __init__(self, options: ShardingOptions, backend: Backend, group: ProcessGroup | None = None) -> None:
        self.options = options
        self.backend = backend
        self.group = group
        self.placement = options.placement
        self.world_size = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)
        backend.connect(group)  # here all ranks are at the same place; in a backward they need not be
        self.optimizer: Optimizer | None = None
        self.groups: list[FlatGroup] = []
        self.params: list[Parameter] = []
        self.buckets: list[Bucket] = []
        self._given_params: list[list[Parameter]] = []  # by group of the optimizer, before it held masters
        self._is_whole = False  # the optimizer looks at whole matrices: fragments are whole parameters
        self._widens = False  # gradients are copied to fp32 before the update, piece by piece
        self._bucket_bytes = 0  # that the backend prefers
        self._positions: dict[int, int] = {}  # id of a parameter -> its place in the model
        self._slots: list[list[Slot]] = []  # by parameter
        self._gradients: list[Tensor] = []  # by group: what buckets live in
        self._reduced: list[Tensor] = []  # by group: where the optimizer finds this rank's sums, padding zero

    # ---- what a stage decides -----------------------------------------------------------------------------------

    @property
    def _owner_rank(self) -> int:
        """This rank as an owner of fragments; in stage 0 one owner has everything, and that is every rank."""
        return 0

    def _cuts(self, numels: Sequence[int]) -> tuple[int, ...]:
        """Where a flat group of these parameters is divided; see `GroupLayout`."""
        return (0, sum(numels))

    def _is_flat(self) -> bool:
        """Whether parameters become views of one buffer."""
        return False

    def _create_gradients(self, group: FlatGroup, dtype: torch.dtype) -> Tensor:
        """The gradient memory of one group that lives from step to step: all N elements."""
        return self.placement.pinned(self.backend.allocate(group.layout.padded_numel, dtype, group.params[0].device))

    def _bucket_memory(self, spec: BucketSpec) -> Tensor:
        return self._gradients[spec.group][spec.start : spec.stop]

    def _create_bucket(self, spec: BucketSpec) -> Bucket:
        return Bucket(
            spec,
            is_holder=self._is_holder(spec),
            take=self._bucket_memory,
            give=None,
            wire_dtype=self.options.wire_dtype,
            keep=self.placement.keeper(adds=False) if spec.owner == self._owner_rank else None,
        )

    def _is_holder(self, spec: BucketSpec) -> bool:
        """Whether this rank goes on adding to what a bucket holds after its reduction; one rank does."""
        return self.rank == 0

    def _owned_gradients(self) -> list[Tensor]:
        """This rank's part of what buckets live in, one 1-D tensor per group."""
        return self._gradients

    # ---- building -----------------------------------------------------------------------------------------------

    def agree(self, optimizer: Optimizer | None, param_groups: Sequence[Sequence[Parameter]]) -> None:
        """Compare with the other ranks what the layout follows from, and settle what each would choose by itself.

        Raises:
            ConfigError: on every rank; it names those that differ.
        """
        options = self.options
        dtypes = (options.model_dtype, options.accumulation_dtype, options.wire_dtype)
        facts = {
            "zero_optimization.stage": f"{type(self).__name__}, offloaded: {self.placement.is_apart}",
            "the optimizer": f"{type(optimizer).__name__}, whole parameters: {self._is_whole}",
            "the optimizer's parameters": "; ".join(map(self._described, param_groups)),
            "the dtypes of parameters, gradient accumulation and communication": str(dtypes),
            "reduce_bucket_size": str(options.bucket_numel),
            "gradient_predivide_factor": str(options.predivide_factor),
        }
        check_same(facts, self.group)
        if isinstance(optimizer, KernelOptimizer):
            optimizer.uses_kernel = True  # whatever it was in an engine before this one
        has_kernel = not isinstance(optimizer, KernelOptimizer) or optimizer.has_kernel
        # of the weights as they are now: offloaded ones are not the host kernel's yet, and are widened in short pieces
        widens = options.model_dtype is not None and not takes_one_pass(optimizer)
        preferred = self.backend.preferred_bucket_bytes(self.world_size, to_owners=self._sums_to_owners)
        by_rank = all_gather_values([has_kernel, widens, preferred], self.group)
        self._widens = any(numbers[1] for numbers in by_rank)
        self._bucket_bytes = min(numbers[2] for numbers in by_rank)
        lacking = [rank for rank, numbers in enumerate(by_rank) if not numbers[0]]
        if isinstance(optimizer, KernelOptimizer) and 0 < len(lacking) < self.world_size:
            self._use_reference(optimizer, lacking)

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
        """Split one optimizer group by dtype and lay out each part."""
        self._refuse_attached(index, params)
        by_dtype: dict[torch.dtype, list[Parameter]] = {}
        for param in params:
            if param.requires_grad and shape_of(param).numel() > 0:
                by_dtype.setdefault(param.dtype, []).append(param)
        shards: list[ParamShard] = []
        for same_dtype in by_dtype.values():
            group = FlatGroup(
                same_dtype,
                first_index=len(self.params),
                param_group=index,
                layout=self._layout([param.numel() for param in same_dtype]),
                rank=self._owner_rank,
                model_dtype=self.options.model_dtype,
                is_flat=self._is_flat(),
                is_whole=self._is_whole,
                has_optimizer=self.optimizer is not None,
                placement=self.placement,
                allocate=self.backend.allocate,
            )
            self.groups.append(group)
            self.params.extend(same_dtype)
            shards.extend(group.shards)
            if self.optimizer is not None:
                states.adopt(self.optimizer, group)
        self._given_params.append(list(params))
        if self.optimizer is not None:
            self.optimizer.param_groups[index]["params"] = [shard.master for shard in shards]

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
        for param in params:
            if id(param) in attached:
                raise ConfigError(
                    f"optimizer.param_groups[{index}]: a parameter of shape {tuple(param.shape)} is in two groups; put "
                    "it in one"
                )

    def _layout(self, numels: Sequence[int]) -> GroupLayout:
        """Fragments as long as possible, but where gradients are widened, or weights sent, piece by piece."""
        is_divided = (self._widens or self.placement.is_apart) and not self._is_whole
        return GroupLayout(numels, self._cuts(numels), self._batch_numel() if is_divided else None)

    def _batch_numel(self) -> int:
        return WIDENED_NUMEL if self._widens else self.options.update_numel

    def _accumulation_dtype(self, group: FlatGroup) -> torch.dtype:
        wanted = self.options.accumulation_dtype
        return wanted if wanted is not None and group.dtype.is_floating_point else group.dtype

    def _allocate_gradients(self) -> None:
        """Make the gradient memory of groups that have none yet: at the first backward, which an engine that only
        evaluates never sees."""
        first = len(self._gradients)
        for group in self.groups[first:]:
            self._gradients.append(self._create_gradients(group, self._accumulation_dtype(group)))
        for group, owned_S in zip(self.groups[first:], self._owned_gradients()[first:], strict=True):
            self._reduced.append(self.placement.home_of_gradients(group, owned_S))
            group.clear_padding(self._reduced[-1])
        self._connect_shards()

    def cut_buckets(self) -> None:
        """Cut all groups into buckets, in the order in which a backward fills them; again after a group was added."""
        itemsize = max((self._accumulation_dtype(group).itemsize for group in self.groups), default=4)
        third = sum(group.layout.numel for group in self.groups) // 3
        wish = min(self._bucket_bytes // itemsize, max(MIN_BUCKET_NUMEL, third))
        self.buckets = [self._create_bucket(spec) for spec in self._specs(min(self.options.bucket_numel, wish))]
        self._slots = [[] for _ in self.params]
        for bucket in self.buckets:
            first = self.groups[bucket.spec.group].first_index
            for slot in bucket.slots:
                self._slots[first + slot.fragment.param].append(slot)

    def _specs(self, max_numel: int) -> list[BucketSpec]:
        """Which elements each bucket has, in the order of reduction."""
        positions = [[self._positions.get(id(param), 0) for param in group.params] for group in self.groups]
        return cut_buckets([group.layout for group in self.groups], positions, max_numel)

    def _batches(self) -> Iterator[Batch]:
        if not self._is_flat() and not self._widens:  # nothing to publish
            yield Batch(None, [shard for group in self.groups for shard in group.shards], [])
            return
        for index, group in enumerate(self.groups):
            shard_of = {shard.fragment: shard for shard in group.shards}
            for per_rank in update_batches(group.layout, self._batch_numel()):
                mine = [shard_of[fragment] for fragment in per_rank[self._owner_rank]]
                yield Batch(index, mine, [_span(fragments) for fragments in per_rank if fragments])

    def _connect_shards(self) -> None:
        """Tell each shard where its reduced gradient is."""
        for group, reduced_S in zip(self.groups, self._reduced, strict=True):
            for shard in group.shards:
                start = shard.fragment.start - group.partition_start
                grad = reduced_S.narrow(0, start, shard.fragment.numel)
                shard.grad = grad.view(shard.master.shape)

    @property
    def exchange_bytes(self) -> int:
        """Bytes that stay allocated between steps for exchanges: no states, but held."""
        return self.backend.held_bytes + self.placement.held_bytes

    def find(self, param: Parameter) -> tuple[FlatGroup, int]:
        """The group of a parameter and its index in it.

        Raises:
            KeyError: if the parameter is not attached.
        """
        for group in self.groups:
            for index, candidate in enumerate(group.params):
                if candidate is param:
                    return group, index
        raise KeyError(f"parameter of shape {tuple(param.shape)} is not managed by this engine")


def _span(fragments: Sequence[Fragment]) -> Piece:
    return Piece(fragments[0].start, fragments[-1].stop, fragments[0].owner)
