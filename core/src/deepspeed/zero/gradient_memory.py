"""`GradientMemory` holds the memory in which gradients of a step are summed and reduced: a bucket for each unit.

With whole gradients (stages 0 and 1) a bucket fills memory that lives from step to step. With sharded gradients (stages
2 and 3) a bucket borrows a buffer from a pool for one reduction; the reduced sum is added to this rank's shard, which
has memory until the step is over.

`ExposedGrads` has the averaged gradients that a user finds in `param.grad` between backward and step. `Gradients`
creates it where all ranks have whole gradients (stage 0). `param.grad` is the view through which the bucket writes its
memory, so the step uses what the user changes in place, such as clipped gradients. If the user assigns other `.data` to
a view, the view gets its memory back before a bucket writes through it again.

At stages 1 to 3 `param.grad` is None between backward and step, so `torch.nn.utils.clip_grad_norm_` and
`clip_grad_value_` silently clip nothing. `hint_at_clipping` adds a warning. Scripts import these functions before an
engine exists, so replacing the names would be too late. Each function is a no-grad wrapper around a function in a cell
of its closure, and the warning is added in that cell.

Legend: N padded numel of a unit, S numel of a shard.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad

from deepspeed.comm.backend import DONE, GroupBackend, Work
from deepspeed.log import warn_once
from deepspeed.zero.bucket import Bucket, BucketPool
from deepspeed.zero.managed import manager_of
from deepspeed.zero.stages import MAX_IN_FLIGHT, ZeroStage
from deepspeed.zero.unit import Unit
from deepspeed.zero.units import ShardingOptions, Units


class GradientMemory:
    """The gradient memory of the units of one engine.

    Attributes:
        buckets: one for each unit, in the order in which a backward fills them.
        by_unit: by unit, the tensor that lives from step to step; its storage may be empty.
        reduced: by unit, the tensor in which the optimizer finds this rank's sums; padding is zero.
    """

    def __init__(self, units: Units, options: ShardingOptions, backend: GroupBackend) -> None:
        self.buckets: list[Bucket] = []
        self.by_unit: list[Tensor] = []
        self.reduced: list[Tensor] = []
        self._units, self._options, self._backend = units, options, backend
        self._stage = options.stage
        self._shards = OrderedShards(options.stage) if options.stage.fixes_order else GradientShards()
        self._pools: dict[tuple[torch.dtype, torch.device], BucketPool] = {}

    @property
    def is_allocated(self) -> bool:
        return len(self.by_unit) == len(self._units)

    def cut_buckets(self) -> None:
        """Create a bucket for each unit; called again after a param group was added."""
        buckets = [self._create_bucket(unit) for unit in self._units]
        self.buckets = sorted(buckets, key=lambda bucket: -self._units.position(self._units[bucket.index]))
        if self.is_allocated:
            self._connect_shards()

    def _create_bucket(self, unit: Unit) -> Bucket:
        pool = self._pool(unit) if self._stage.lends_buffers(unit) else None
        keep = None if self._stage.fixes_order else unit.placement.keeper(adds=pool is not None)
        return Bucket(
            unit.index,
            unit.layout,
            shapes=unit.shapes,
            memory=(lambda: self.by_unit[unit.index]) if pool is None else None,
            pool=pool,
            result=self._stage.result(unit),
            kept=self._stage.contributed(unit),
            wire_dtype=self._options.wire_dtype,
            keep=self._shards.add_up if keep is None and pool is not None else keep,
        )

    def _pool(self, unit: Unit) -> BucketPool:
        dtype, device = self._options.gradient_dtype(unit.dtype), unit.device
        new = BucketPool(MAX_IN_FLIGHT, lambda numel: self._backend.allocate(numel, dtype, device))
        return self._pools.setdefault((dtype, device), new)

    def allocate(self) -> None:
        """Allocate the memory of units that have none. Called at the first backward, so an engine that only evaluates
        allocates nothing."""
        if self.is_allocated:
            return
        for index in range(len(self.by_unit), len(self._units)):
            unit = self._units[index]
            self.by_unit.append(self._create(unit))
            reduced_S = unit.placement.home_of_gradients(unit, self._own(unit))
            reduced_S[reduced_S.numel() - unit.layout.padding(unit.rank) :].zero_()
            self.reduced.append(reduced_S)
        self._connect_shards()

    def _create(self, unit: Unit) -> Tensor:
        dtype = self._options.gradient_dtype(unit.dtype)
        if not self._stage.lends_buffers(unit):
            return unit.placement.pinned(unit.ranks.shard_group.allocate(unit.layout.padded_numel, dtype, unit.device))
        numel = 0 if unit.placement.is_offloaded else unit.layout.shard_numel
        return self._shards.create(unit, numel, dtype)

    def _own(self, unit: Unit) -> Tensor:
        """Return this rank's part of the memory of a unit, 1-D."""
        memory = self.by_unit[unit.index]
        return memory if self._stage.lends_buffers(unit) else memory[slice(*self._stage.result(unit))]

    def _connect_shards(self) -> None:
        """Point each shard at its reduced gradient. If the bucket writes that memory through a view, use that view as
        the gradient: every tensor object that a step touches slows down a model of many small parameters."""
        self._shards.allocate()
        for bucket in self.buckets:
            unit = self._units[bucket.index]
            if unit.placement.fetches:  # the placement sets gradients for each batch
                continue
            reduced_S = self.reduced[bucket.index]
            views = bucket.lasting()[1] if bucket.is_lasting else ()
            for shard in unit.shards:
                start = shard.fragment.start - unit.shard_slice.start
                shard.grad = reduced_S.narrow(0, start, shard.fragment.numel).view(shard.master.shape)
                if views and _is_same_memory(view := views[shard.fragment.param], shard.grad):
                    shard.grad = view
        self._shards.free()

    def of_units(self) -> Iterator[tuple[Unit, Tensor]]:
        """Yield each unit with this rank's reduced gradients."""
        return zip(self._units, self.reduced, strict=True)

    def zero_without_sum(self) -> None:
        """Zero the shards that no backward reduced, for example if gradients are set from outside."""
        self._shards.zero_without_sum()

    def finish_sums(self) -> None:
        """Bring the sums to where the optimizer finds them, after every reduction of the step is finished."""
        self._shards.finish()

    @property
    def is_final(self) -> bool:
        """Whether backwards may no longer add to the sums of this step."""
        return self._shards.is_final

    def forget(self) -> None:
        """Forget the sums; the step is over."""
        self._shards.forget()

    def leave(self) -> None:
        """Leave the memory to works in flight; the next backward allocates new memory."""
        for bucket in self.buckets:
            bucket.release()
        self.by_unit, self.reduced = [], []
        self._shards.leave()

    def drop_free_buffers(self) -> None:
        """Free the buffers that no bucket uses now."""
        for pool in self._pools.values():
            pool.drop_free()

    @property
    def held_bytes(self) -> int:
        """Bytes of the pooled buffers that no bucket uses now."""
        return sum(pool.free_bytes for pool in self._pools.values())

    def drop(self) -> None:
        """Drop all buckets and memory."""
        self.leave()
        self.buckets = []
        self._pools.clear()


class GradientShards:
    """`GradientShards` holds this rank's reduced gradients by unit if they are sharded (stages 2 and 3).

    A shard has memory from its first sum until the step is over, and none between steps. The tensor objects, and the
    optimizer's views of them, stay; only their storage is resized, as for released weights (`param_unit.py`).
    """

    is_final = False  # whether backwards may no longer add to the sums of this step

    def __init__(self) -> None:
        self._shards: dict[int, Tensor] = {}
        self._summed: set[int] = set()  # units whose shard has memory with a sum of this step

    def create(self, unit: Unit, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the shard [S] of `unit`, with memory until `free` is called."""
        self._shards[unit.index] = torch.empty(numel, dtype=dtype, device=unit.device)
        return self._shards[unit.index]

    def add_up(self, index: int, work: Work, sum_S: Tensor) -> None:
        """Add the reduced values of a bucket to the sum of the step; a `Keep` (`placement.py`)."""
        work.wait()
        if index in self._summed:
            self._shards[index].add_(sum_S)
        else:
            self._take_memory(index).copy_(sum_S)

    def finish(self) -> None:
        """Do nothing: reductions have completed the sums."""

    def zero_without_sum(self) -> None:
        """Zero the shards that no backward reduced, for example if gradients are set from outside."""
        for index in self._without_sum():
            self._take_memory(index).zero_()

    def allocate(self) -> None:
        """Allocate memory with arbitrary contents for shards without a sum: views can be made only with memory."""
        for index in self._without_sum():
            self._resize(self._shards[index], self._shards[index].nbytes)

    def free(self) -> None:
        """Free the memory of shards without a sum."""
        for index in self._without_sum():
            self._resize(self._shards[index], 0)

    def forget(self) -> None:
        """Forget the sums and free their memory; the step is over."""
        self._summed.clear()
        self.free()

    def leave(self) -> None:
        """Drop the shards without freeing their memory: works in flight use it."""
        self._shards.clear()
        self._summed.clear()

    def _take_memory(self, index: int) -> Tensor:
        shard_S = self._shards[index]
        self._resize(shard_S, shard_S.nbytes)
        self._summed.add(index)
        return shard_S

    def _without_sum(self) -> list[int]:
        return [index for index in self._shards if index not in self._summed]

    @staticmethod
    def _resize(shard_S: Tensor, num_bytes: int) -> None:
        shard_S.untyped_storage().resize_(num_bytes)


class PartialSums:
    """`PartialSums` holds the sums of the complete subtrees of one unit's backwards in this step.

    Two subtrees of one size are merged at once, so there are at most log2(number of backwards) + 1 of them.

    Args:
        first_S: the memory of the first sum, and finally of the total.
    """

    def __init__(self, first_S: Tensor) -> None:
        self._first_S = first_S
        self._sums: list[tuple[int, Tensor]] = []  # number of leaves and sum [S] of each subtree, largest first

    def add(self, new_S: Tensor) -> None:
        """Add the gradients of one backward; `new_S` may be overwritten afterwards."""
        leaves, sum_S = 1, new_S
        while self._sums and self._sums[-1][0] == leaves:
            sum_S = self._sums.pop()[1].add_(sum_S)
            leaves *= 2
        if sum_S is new_S:
            sum_S = new_S.clone() if self._sums else self._first_S.copy_(new_S)
        self._sums.append((leaves, sum_S))

    def total(self) -> Tensor:
        """Return the total, adding the smallest subtrees first."""
        _, total_S = self._sums.pop()
        while self._sums:
            total_S = self._sums.pop()[1].add_(total_S)
        return total_S


class OrderedShards(GradientShards):
    """`OrderedShards` is `GradientShards` that adds backwards in the order of a binary tree; see `stages.py`.

    Args:
        stage: decides which part of a unit this rank sums.
    """

    def __init__(self, stage: ZeroStage) -> None:
        super().__init__()
        self._stage = stage
        self._units: dict[int, Unit] = {}
        self._partial: dict[int, PartialSums] = {}  # by unit that this step has reduced

    def create(self, unit: Unit, numel: int, dtype: torch.dtype) -> Tensor:
        self._units[unit.index] = unit
        return super().create(unit, numel, dtype)

    def add_up(self, index: int, work: Work, sum_S: Tensor) -> None:
        work.wait()
        partial = self._partial.get(index)
        if partial is None:
            partial = self._partial[index] = PartialSums(self._first(index, sum_S))
        partial.add(sum_S)

    def _first(self, index: int, sum_S: Tensor) -> Tensor:
        """Return the memory of this rank's sum at the end of the step."""
        unit = self._units[index]
        if unit.placement.is_offloaded:
            return torch.empty_like(sum_S)
        memory = self._take_memory(index)
        return memory if memory.numel() == sum_S.numel() else memory[slice(*self._stage.result(unit))]

    def finish(self) -> None:
        gathers = []
        for index, partial in sorted(self._partial.items()):  # sorted: the order of arrival differs by rank
            unit, total_S = self._units[index], partial.total()
            if (keep := unit.placement.keeper(adds=False)) is not None:
                keep(index, DONE, total_S)
            elif total_S.numel() < unit.layout.shard_numel:
                gathers.append(self._stage.gather_sums(unit, self._shards[index]))
        for work in gathers:
            work.wait()
        self.is_final = self.is_final or bool(self._partial)
        self._partial.clear()

    def forget(self) -> None:
        self._partial.clear()
        self.is_final = False
        super().forget()

    def leave(self) -> None:
        self._units.clear()
        self._partial.clear()
        super().leave()


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors are the same elements in the same shape."""
    return (one.data_ptr(), one.dtype, one.shape) == (other.data_ptr(), other.dtype, other.shape)


class ExposedGrads:
    """`ExposedGrads` lets `param.grad` show the gradients of one step. The object is false while it shows none."""

    def __init__(self) -> None:
        self._units: list[tuple[Unit, Tensor, Sequence[Tensor]]] = []  # with their memory [N] and its views
        self._used: list[bool] = []  # by attached parameter
        # Shown gradients, kept between steps; one entry per shown parameter:
        self._indices: list[int] = []
        self._params: list[Parameter] = []
        self._views: list[Tensor] = []
        self._addresses: list[int] = []  # of the views, which a user may give other `.data`
        self._is_shown = False
        self._versions: list[int] = []  # of the memory, by unit: torch counts writes

    def __bool__(self) -> bool:
        return self._is_shown

    def show(self, units: Units, buckets: Sequence[Bucket], used: Sequence[bool]) -> None:
        """Set `param.grad` of each used parameter to its part of the bucket's memory, if both have one dtype.

        Args:
            buckets: buckets of the units; their buffers live from step to step.
            used: by attached parameter.
        """
        found = [(units[bucket.index], *bucket.lasting()) for bucket in buckets]
        if self._used != used or [id(part) for _, _, part in self._units] != [id(part) for _, _, part in found]:
            self._units = found
            self._used = list(used)
            self._find_views()
        for param, view in zip(self._params, self._views, strict=True):
            param.grad = view
        self._is_shown = bool(self._params)
        self._versions = self._count_versions()

    def _find_views(self) -> None:
        alike = [
            (unit.first_index + place, param, view)
            for unit, memory_N, views in self._units
            if memory_N.dtype == unit.dtype
            for place, (param, view) in enumerate(zip(unit.params, views, strict=True))
        ]
        shown = [(index, param, view) for index, param, view in alike if self._used[index]]
        self._indices = [index for index, _, _ in shown]
        self._params = [param for _, param, _ in shown]
        self._views = [view for _, _, view in shown]
        self._addresses = [view.data_ptr() for view in self._views]

    def _memory(self, index: int) -> Tensor:
        """Return the gradient memory of parameter `index`, in the parameter's shape."""
        for unit, memory_N, _ in self._units:
            if 0 <= (place := index - unit.first_index) < len(unit.params):
                shape = unit.shapes[place]
                return memory_N.narrow(0, unit.layout.offsets[place], shape.numel()).view(shape)
        raise AssertionError(f"the parameter {index} is in no unit")

    def take(self) -> list[int]:
        """Copy the user's changes of `param.grad` to the gradient memory; return the parameters whose gradient was set
        to None.

        Every rank has whole gradients and the user does the same on every rank, so no communication is needed.
        """
        if not self._is_shown:
            return []
        found = [param.grad for param in self._params]
        if all(map(operator.is_, found, self._views)) and not self._has_other_data():
            return []
        changed = [
            place
            for place, grad in enumerate(found)
            if grad is not self._views[place] or grad.data_ptr() != self._addresses[place]
        ]
        for place in changed:
            self._take_changed(place)
        return [self._indices[place] for place in changed if found[place] is None]

    def _take_changed(self, place: int) -> None:
        memory, grad = self._memory(self._indices[place]), self._params[place].grad
        if grad is None:
            memory.zero_()
        else:  # another tensor, or other `.data`
            memory.copy_(grad.clone())  # which may be a view of the memory: transposed, for example
            self._params[place].grad = self._views[place]
        self._views[place].data = memory

    def _has_other_data(self) -> bool:
        return list(map(Tensor.data_ptr, self._views)) != self._addresses

    def restore_views(self) -> None:
        """Restore the memory of the views, before gradients are written through them; a user may have kept a view."""
        if self._has_other_data():
            for index, view in zip(self._indices, self._views, strict=True):
                view.data = self._memory(index)

    def were_written(self) -> bool:
        """Return whether the gradient memory was written since it was shown, or since the last call."""
        former, self._versions = self._versions, self._count_versions()
        return former != self._versions

    def _count_versions(self) -> list[int]:
        return [memory_N._version for _, memory_N, _ in self._units]

    def forget(self) -> None:
        """Stop showing gradients; the caller sets `param.grad`."""
        self._is_shown = False


#: by the name in torch's module: the name that scripts call, and the alternative
_INSTEAD = {
    "_clip_grads_with_norm_": (
        "clip_grad_norm_",
        "set gradient_clipping in the configuration, with which engine.step() clips, and read the norm with "
        "engine.get_global_grad_norm()",
    ),
    "clip_grad_value_": (
        "clip_grad_value_",
        "set gradient_clipping in the configuration, with which engine.step() clips by the norm, or change gradients "
        "between backward and step with deepspeed.utils.safe_get_full_grad and safe_set_full_grad",
    ),
}


def hint_at_clipping() -> None:
    """Add the warning to torch's functions. Called when an engine with hidden gradients is built. Idempotent."""
    for name, (called, instead) in _INSTEAD.items():
        closure: tuple[CellType, ...] = getattr(getattr(clip_grad, name, None), "__closure__", None) or ()
        if len(closure) == 1 and callable(former := closure[0].cell_contents) and not hasattr(former, "_is_of_zero"):
            closure[0].cell_contents = _hinting(former, called, instead)


def _hinting(former: Callable[..., Any], called: str, instead: str) -> Callable[..., Any]:
    @functools.wraps(former)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **keys: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if _are_hidden(listed, called, instead):
            return None  # torch's clip_grad_value_ would fail for an empty list of gradients
        return former(listed, *args, **keys)

    clip._is_of_zero = True  # type: ignore[attr-defined]
    return clip


def _are_hidden(params: list[Tensor], called: str, instead: str) -> bool:
    """Return whether an engine holds the gradients; warn once if so."""
    if any(param.grad is not None for param in params):
        return False
    manager = next((found for param in params if (found := manager_of(param)) is not None), None)
    if manager is None or manager.options.stage.shows_gradients or manager.optimizer is None:
        return False
    stage, name = manager.stage, type(manager.optimizer).__name__
    where = f"at zero_optimization.stage {stage}" if stage > 0 else f"with {name}"
    if stage == 0 and manager.options.stage.fixes_order:
        where = "with deterministic.enabled"
    warn_once(
        f"{called}: clips nothing, since {where} the engine holds the gradients and param.grad is None; {instead}"
    )
    return True
