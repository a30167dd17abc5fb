"""`ParamUnit` shards, gathers and releases a set of parameters together (stage 3, `zero.Init`).

The parameters lie end to end in one flat buffer of N elements, cut into W equal shards. A rank keeps its shard. An
all-gather fills the flat buffer, and the parameters become views of it; a release frees its memory. The shard may be
kept in another memory (`ShardHome`), even if one rank holds everything.

[Note: the storage stays] Autograd saves views of a weight, such as the transpose in a linear layer. They refer to the
flat buffer's storage. So a release does not drop that storage but resizes it to zero bytes, and a gather resizes it
back: the saved views are valid again when the backward reads them, and no memory outlives its use. A read while the
storage is empty would be invalid, so every module that owns a parameter gathers before its forward and before its
backward (`module_hooks.py`).

[Note: views that a user keeps] A tensor that a user takes from a whole parameter inside `GatheredParameters`, such as
`param.data` or (on a CPU) `param.cpu()`, shares the storage. So if anything besides the unit refers to the storage when
a context ends, the next release leaves the storage to the views, and the unit gets a new one. The same holds for a
storage that cannot be resized any more because it was shared with numpy or moved to shared memory.

[Note: exact weights] For modules the all-gather may send int8 (ZeRO++, `quantized.py`); shards and master weights stay
exact. Code that reads whole weights for another purpose, or changes them, calls `gather`, which repeats an all-gather
that was not exact.

Legend: N padded numel of the unit, S = N / W numel of a shard, W ranks.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.parted import RanksParted
from deepspeed.errors import CommError, StateError
from deepspeed.parallel.model_part import Reshard
from deepspeed.zero import quantized
from deepspeed.zero.backward_window import is_in_backward
from deepspeed.zero.layout import UnitLayout
from deepspeed.zero.param_marks import LEGAL_MOVES, ZeroParamStatus, mark, unmark
from deepspeed.zero.placement import SecondaryShard, ShardHome
from deepspeed.zero.unit_groups import UnitRanks, source_in

#: freed blocks of at least this size go back to the device while parameters are taken over
_MIN_BYTES_TO_RETURN = 2**17
_num_takings = 0  # contexts of `freed_memory_returned` that are open


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Return freed memory of whole parameters at once, so that it leaves no gaps in a heap. May be nested."""
    global _num_takings
    accelerator = get_accelerator()
    if _num_takings == 0:
        accelerator.return_freed_memory(_MIN_BYTES_TO_RETURN)
    _num_takings += 1
    try:
        yield
    finally:
        _num_takings -= 1
        if _num_takings == 0:
            accelerator.return_freed_memory(None)


@dataclass(slots=True)
class LiveNumel:
    """`LiveNumel` counts the elements of one engine's units that are gathered or in flight."""

    numel: int = 0


class ParamUnit:
    """`ParamUnit` holds parameters of one dtype that are gathered together. Its creation leaves only this rank's shard.

    Args:
        params: parameters with at least one element, with the same dtype and requires_grad.
        names: names for errors and tables.
        ranks: the groups that hold the shards and the same parameters.
        dtype: dtype of the weights; default: their own.
        device: device of shards and gathered weights.
        from_first_rank: whether to use the weights of the group's first rank; else they are equal on all ranks.
        home: where the shard is kept between all-gathers; None: on `device`.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        names: Sequence[str],
        ranks: UnitRanks,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        from_first_rank: bool = False,
        home: ShardHome | None = None,
    ) -> None:
        self.params = list(params)
        self.names = list(names)
        self.unit_ranks = ranks
        self.ranks = ranks.shard_group
        self.shapes = [shape_of(param) for param in params]
        numels = [shape.numel() for shape in self.shapes]
        self.layout = UnitLayout.even(numels, ranks.world_size)
        self.start, self.stop = self.layout.shard(ranks.rank)
        self.status = ZeroParamStatus.AVAILABLE
        self.num_users = 0  # modules that use the unit in a running forward
        self.num_contexts = 0  # open `GatheredParameters` that hold the unit whole
        self.num_changes_seen = -1  # `num_changes` when the latest `GatheredParameters` ended
        self.num_gradients = 0  # expected in a backward, one for each parameter; 0 if they do not train
        self.num_missing = 0  # of these, still to arrive; negative if more arrived than expected
        self.num_changes = 0  # of the shards
        self.num_gathers = 0  # all-gathers since the unit was created
        self.is_exact = True  # whole parameters equal the shards and are not rounded to int8
        #: the `ModuleHooks` that gather it; weak, since a graph may hold the unit, and hooks hold the module
        self.hooks_ref: weakref.ref[Any] | None = None
        self.reshard: Reshard | None = None  # set if it was created without an engine; see parallel/model_part.py
        self.checks_values = False  # read-only contexts compare it with the shards (`enable_sanity_checks`)
        self.is_moved = False  # its shard is temporarily in host memory (`offload_states`)
        self.live = LiveNumel(self.numel)
        self._work: Work | None = None
        self._near = SecondaryShard(ranks.secondary_group) if ranks.secondary_group is not None else None
        self.gathered_over = self.ranks  # the group of the latest all-gather
        self.shard_S: Tensor  # this rank's part of the weights
        self._fill(torch.empty(self.layout.padded_numel, dtype=params[0].dtype, device=device), dtype, from_first_rank)
        self.nothing = self.shard_S.new_empty(0)
        self.offloaded = home.keep(self.shard_S, self.names[0]) if home is not None else None
        if self.offloaded is not None:
            self.shard_S = self.offloaded.shard_S
        self._versions: list[int | None] = []  # None: any version
        self._renew_buffer()
        for param in self.params:
            if param.device.type != self.nothing.device.type:
                set_data(param, self.nothing.clone())
        for index, param in enumerate(self.params):
            mark(param, self, index)
        if not self.is_sharded:  # the shard is everything, and the parameters stay views of it
            self._views = self._cut(self.shard_S)
            self._point_at_views()
        self.accept_changes()
        self.release()

    def _fill(self, full_N: Tensor, dtype: torch.dtype | None, from_first_rank: bool) -> None:
        """Copy the weights end to end into `full_N` and keep this rank's shard in `dtype`."""
        full_N[self.layout.numel :].zero_()
        for param, view in zip(self.params, self._cut(full_N), strict=True):
            with whole(param) as value:
                view.copy_(value)
        if from_first_rank and self.unit_ranks.reduce_group.world_size > 1:
            self._broadcast_first(full_N)
        self.source_dtype = full_N.dtype
        #: this rank's part of the weights before rounding to `dtype`: the initial fp32 master weights
        self.source_S: Tensor | None = full_N[self.start : self.stop].clone()
        self.shard_S = self.source_S if dtype in (None, full_N.dtype) else self.source_S.to(dtype)

    def _broadcast_first(self, full_N: Tensor) -> None:
        try:
            self.unit_ranks.reduce_group.broadcast(full_N, 0, tag=self.names[0]).wait()
        except CommError as error:
            raise CommError(
                f"zero.Init: broadcast of the parameter {self.names[0]} of shape {tuple(self.shapes[0])}: {error}. All "
                "ranks build the same modules, in the same order, inside zero.Init"
            ) from error

    def _cut(self, full_N: Tensor) -> list[Tensor]:
        """Return the parameters as views of a flat buffer."""
        return [
            full_N.narrow(0, offset, shape.numel()).view(shape)
            for shape, offset in zip(self.shapes, self.layout.offsets, strict=True)
        ]

    def _renew_buffer(self) -> None:
        """Create a flat buffer whose storage is empty until a gather."""
        self._full_N = self.nothing.new_empty(self.layout.padded_numel)
        self._views = self._cut(self._full_N)
        self._full_N.untyped_storage().resize_(0)
        self._num_own_references = num_references(self._full_N)
        self._is_viewed = False  # other tensors refer to the storage and must stay valid

    @property
    def numel(self) -> int:
        """Number of elements of a gathered unit, padding included."""
        return self.layout.padded_numel

    @property
    def hooks(self) -> Any:
        """The `ModuleHooks` that gather it; None if there are none, or if its engine and module are gone."""
        return None if self.hooks_ref is None else self.hooks_ref()

    @property
    def is_sharded(self) -> bool:
        """Whether a gather has to copy data."""
        return self.ranks.world_size > 1 or self.is_offloaded

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard is kept in another memory than the whole parameters."""
        return self.offloaded is not None

    @property
    def device(self) -> torch.device:
        """The device of whole parameters."""
        return self.nothing.device

    @property
    def kept_bytes(self) -> int:
        """Bytes of weights that this rank keeps between uses: its shard, and its secondary shard (hpZ)."""
        near = self._near.ranks.world_size if self._near is not None else 0
        return self.shard_S.nbytes + (self.numel // near * self._full_N.itemsize if near else 0)

    def kept_tensors(self) -> list[Tensor]:
        """Return the weights that this rank keeps between uses: its shard, and its secondary shard, if any."""
        near_S = None if self._near is None else self._near.shard
        return [self.shard_S] if near_S is None else [self.shard_S, near_S]

    def shard_of(self, index: int) -> Tensor:
        """Return this rank's elements of the parameter `index`, 1-D; may be empty. On the meta device if on disk."""
        first, last = self.layout.fragment_of(index, self.ranks.rank)
        return self.shard_S[first - self.start : last - self.start]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of whole parameters."""
        return self.nothing.dtype

    def set_shard(self, values_S: Tensor) -> None:
        """Store `values_S` as this rank's shard."""
        self._store(0, values_S)

    def _store(self, start: int, values: Tensor) -> None:
        """Store new values of this rank's elements from `start` on."""
        self.shards_changed()
        if self.offloaded is None:
            self.shard_S.narrow(0, start, values.numel()).copy_(values)
        else:
            self.offloaded.store(start, values)
            self.offloaded.settle()

    def set_shard_of(self, param: Parameter, value: Tensor) -> None:
        """Store this rank's elements of a parameter from its whole value."""
        index = next(place for place, each in enumerate(self.params) if each is param)
        first, last = self.layout.fragment_of(index, self.ranks.rank)
        start = first - self.layout.offsets[index]
        self._versions[index] = param._version
        self.set_local(index, value.detach().reshape(-1)[start : start + last - first])

    def set_local(self, index: int, values: Tensor) -> None:
        """Store `values`, 1-D, as this rank's elements of the parameter `index`."""
        first, _ = self.layout.fragment_of(index, self.ranks.rank)
        self._store(first - self.start, values)

    # ---- gather and release --------------------------------------------------------------------------------------

    def read_ahead(self) -> bool:
        """Start to read an offloaded shard that is used soon. False: do not read ahead for units after this one."""
        if self.offloaded is None:
            return False
        return self.status is not ZeroParamStatus.NOT_AVAILABLE or self.offloaded.read_ahead()

    def launch(self, *, quantizes: bool = False) -> None:
        """Issue the all-gather, with `quantizes` in int8. All ranks issue all-gathers in the same order."""
        self.refuse_changes()
        self._refuse_moved()
        near = self._near if self._near is not None and self._near.serves(exact=not quantizes) else None
        if near is None and self.offloaded is not None:
            self.offloaded.prepare()
        self._move(ZeroParamStatus.INFLIGHT)
        self.live.numel += self.numel
        self._full_N.untyped_storage().resize_(self._full_N.numel() * self._full_N.itemsize)
        self.gathered_over = self.ranks if near is None else near.ranks
        try:
            if near is not None:
                assert near.shard is not None
                self._work = near.ranks.all_gather(self._full_N, near.shard, tag=self.names[0])
                self.is_exact = near.is_exact
            else:
                self.is_exact = not quantizes
                self._work = self._all_gather(self._full_N, quantizes)
        except CommError as error:
            raise self._explained(error) from error
        self.num_gathers += 1

    def _all_gather(self, full_N: Tensor, quantizes: bool) -> Work:
        """Start the all-gather of the shards of all ranks into `full_N`."""
        gather = partial(quantized.all_gather, self.ranks) if quantizes else self.ranks.all_gather
        if self.offloaded is None:
            return gather(full_N, self.shard_S, tag=self.names[0])
        own_S = full_N[self.start : self.stop]
        with self.offloaded.copied_to(own_S):
            return gather(full_N, own_S, tag=self.names[0])

    def finish(self) -> None:
        """Wait for the all-gather, after which the parameters are whole."""
        assert self._work is not None
        try:
            self._work.wait()
        except CommError as error:
            raise self._explained(error) from error
        self._work = None
        if self.offloaded is not None:
            self.offloaded.arrived()
        if self._near is not None:
            self._near.keep(self._full_N, is_exact=self.is_exact)
        self._move(ZeroParamStatus.AVAILABLE)
        self._point_at_views()

    def shards_changed(self) -> None:
        """Invalidate copies of the shards: the weights change, or ranks may have gathered differently."""
        self.num_changes += 1
        if self.offloaded is not None:
            self.offloaded.settle()
        if self._near is not None:
            self._near.forget()

    def _explained(self, error: CommError) -> CommError:
        kind = next((each for each in (PeerFailed, RanksParted) if isinstance(error, each)), CommError)
        return kind(
            f"all-gather of the parameters {', '.join(self.names[:3])}{' ...' * (len(self.names) > 3)}: {error}. In "
            "stage 3 all ranks take the same way through the model, and enter GatheredParameters together; where they "
            "cannot, as among experts, call deepspeed.utils.set_z3_leaf_modules for the module around them"
        )

    def _refuse_moved(self) -> None:
        if self.is_moved:
            raise StateError(
                f"parameters {', '.join(self.names[:3])}: their shards were moved to host memory by offload_states(); "
                "call engine.reload_states() before they are gathered"
            )

    def gather(self) -> None:
        """Make the parameters whole and exact, whatever their state; see [Note: exact weights]."""
        self._refuse_moved()
        if self.status is ZeroParamStatus.INFLIGHT:
            self.finish()
        if not self.is_exact:
            self.release()
        if self.status is ZeroParamStatus.NOT_AVAILABLE:
            self.launch()
            self.finish()

    def gather_to_read(self) -> bool:
        """Call `gather` for a reader that is not a module. Return whether to release afterwards: True if the parameters
        were not whole, or were rounded for modules and no module reads them now."""
        stays = self.status is ZeroParamStatus.AVAILABLE and (self.is_exact or self.is_read)
        self.gather()
        return not stays

    @property
    def is_read(self) -> bool:
        """Whether a module reads the parameters now, if they are whole; else they are only kept for a later use."""
        return self.num_users > 0 or is_in_backward()

    def release(self) -> None:
        """Free the memory of the whole parameters, unless a context holds them. Must not be called while an all-gather
        is in flight."""
        if self.status is ZeroParamStatus.NOT_AVAILABLE or not self.is_sharded or self.num_contexts > 0:
            return
        self._move(ZeroParamStatus.NOT_AVAILABLE)
        self.live.numel -= self.numel
        for param in self.params:
            param.data = self.nothing
        self._free()

    def _free(self) -> None:
        """Free the memory of the flat buffer; see [Note: views that a user keeps]."""
        storage = self._full_N.untyped_storage()
        if self._is_viewed or not storage.resizable():
            self._renew_buffer()
        else:
            storage.resize_(0)

    def keep_assigned(self) -> None:
        """Copy values that were assigned to `param.data` into the flat buffer.

        Raises:
            ValueError: for a value of another shape.
        """
        for param, view, name in zip(self.params, self._views, self.names, strict=True):
            if param.is_set_to(view):
                continue
            if param.shape != view.shape:
                raise ValueError(
                    f"parameter {name}: param.data was set to a value of shape {tuple(param.shape)} inside "
                    f"deepspeed.zero.GatheredParameters; the parameter has the shape {tuple(view.shape)}"
                )
            view.copy_(param.data)

    def enter_context(self) -> None:
        """Gather the unit for a `GatheredParameters` that begins.

        Raises:
            StateError: if parameters were changed before, outside of a context.
        """
        self.refuse_changes()
        self.gather()
        if self.num_contexts == 0:
            self.accept_changes()
        self.num_contexts += 1

    def leave_context(self, *, is_left: bool) -> None:
        """Note that a `GatheredParameters` ends; changes that it keeps were stored before.

        Args:
            is_left: whether an exception ended it. If not, an assignment on a single rank stays, as one from outside.
        """
        self.num_contexts -= 1
        self.num_changes_seen = self.num_changes
        if self.num_contexts == 0:
            self.accept_changes()
            if self.is_sharded or is_left:
                self._point_at_views()
            own = self._num_own_references + len(self.params)
            self._is_viewed = self._is_viewed or (self.is_sharded and num_references(self._full_N) > own)

    def renew_held(self) -> None:
        """Gather the shards, which have new values, into the parameters that a context holds. A collective of the ranks
        that hold the shards; they are in the same contexts."""
        if self.offloaded is not None:
            self.offloaded.prepare()
        self._all_gather(self._full_N, quantizes=False).wait()
        if self.offloaded is not None:
            self.offloaded.arrived()
        self._point_at_views()
        self.accept_changes()

    def refuse_unkept(self, asked: str) -> None:
        """Refuse a user's change in a context that has not ended, because `renew_held` would drop it.

        Args:
            asked: name of the function that the user called.

        Raises:
            StateError: names the parameter.
        """
        if names := self.seen_changes():
            raise StateError(
                f"{asked}: found a change of the parameter {names[0]} inside a GatheredParameters that has not ended, "
                f"which keeps it at its end; leave the context before {asked}"
            )

    def accept_changes(self) -> None:
        """Accept all changes so far, which were kept or dropped on purpose, so that only later ones are detected."""
        self._versions = [param._version for param in self.params]

    def expect_load(self, index: int) -> None:
        """Allow one load of an empty tensor into the empty parameter `index`, whose values are in the shards."""
        self._versions[index] = None

    def seen_changes(self) -> list[str]:
        """Return the names of the whole parameters that were changed since the last `accept_changes`, as far as torch
        counts changes: operations on `param.data` are not counted."""
        each = zip(self.names, self.params, self._versions, self._views, strict=False)
        return [name for name, param, version, view in each if param._version != version or not param.is_set_to(view)]

    def changes(self) -> dict[str, bool]:
        """Compare whole parameters with their shards. Return by name, for those that differ, whether the difference is
        only rounding. A collective of the ranks that hold the shards; needs memory for the unit a second time."""
        shards_N = self.nothing.new_empty(self.layout.padded_numel)
        if self.offloaded is not None:
            self.offloaded.prepare()
        self._all_gather(shards_N, quantizes=False).wait()
        if self.offloaded is not None:
            self.offloaded.arrived()
        both = zip(self.names, self.params, self._cut(shards_N), strict=True)
        return {name: is_rounded(param.data, value) for name, param, value in both if not is_same(param.data, value)}

    def refuse_changes(self, *, compares: bool = False) -> None:
        """Raise if a change outside of `GatheredParameters` would be lost. Called before the parameters are gathered
        and before they are released.

        Torch counts in-place operations on a parameter, even while it is an empty tensor. It does not count operations
        on `param.data`. Replacing the tensor without changing values is no change: another tensor with equal values,
        or, while the parameter is empty, another empty tensor (as `module.to(device)` assigns).

        Args:
            compares: also compare the values, which detects operations on `param.data` of whole parameters; the CPU
                waits for the device.

        Raises:
            StateError: names a parameter; only once per change, so that a later cleanup does not fail.
        """
        if not self.is_sharded or self.num_contexts > 0:
            return
        is_whole = self.status is ZeroParamStatus.AVAILABLE
        compares = compares and is_whole and self.is_exact and not self._is_all_as_sharded()
        for index, param in enumerate(self.params):
            expected = self._views[index] if is_whole else self.nothing
            is_in_place = param.is_set_to(expected)
            is_seen = not is_in_place or param._version != self._versions[index]
            if is_in_place and self._versions[index] is None:
                self._versions[index], is_seen = param._version, False
            if not is_seen and not compares:
                continue
            if is_in_place:
                is_changed, change = not is_whole or not self._is_as_sharded(index), "an in-place change"
            else:
                is_changed = param.numel() > 0 and not is_same(param.data, expected)
                change = f"a value of shape {tuple(param.shape)} that was put into it"
                set_data(param, expected)
            self._versions[index] = param._version
            if is_changed:
                self.accept_changes()
                raise StateError(
                    f"parameter {self.names[index]}: found {change} outside of deepspeed.zero.GatheredParameters. The "
                    "parameter is sharded, so the change would be lost; make it inside "
                    "deepspeed.zero.GatheredParameters(params, modifier_rank=0)"
                )

    def _is_as_sharded(self, index: int) -> bool:
        """Return whether this rank's elements of a whole parameter equal the shard."""
        if not self.is_exact:  # rounded for the modules
            return False
        return self._holds(*self.layout.fragment_of(index, self.ranks.rank))

    def _is_all_as_sharded(self) -> bool:
        """Return `_is_as_sharded` for all parameters together."""
        return self._holds(self.start, min(self.stop, self.layout.numel))

    def _holds(self, first: int, last: int) -> bool:
        """Return whether the elements [first, last) are the same in the whole parameters and in the shard."""
        start, numel = first - self.start, max(last - first, 0)
        kept = self.shard_S[start : start + numel] if self.offloaded is None else self.offloaded.load(start, numel)
        return is_same(self._full_N[first : first + numel].to(kept.device), kept)

    def abandon(self) -> tuple[GroupBackend, Work] | None:
        """Forget an all-gather in flight without waiting for it; return the group that is to get its work, and it."""
        if self.status is not ZeroParamStatus.INFLIGHT:
            return None
        work, self._work = self._work, None
        if self.offloaded is not None:
            self.offloaded.arrived()
        self._move(ZeroParamStatus.AVAILABLE)
        self._renew_buffer()  # peers may still read the former buffer, which the backend holds
        self.release()
        return None if work is None else (self.gathered_over, work)

    def take_from_full(self) -> None:
        """Store this rank's part of the whole parameters, which were changed."""
        if self.is_sharded:
            if not self.is_exact:
                raise StateError(
                    f"parameters {', '.join(self.names[:3])}: found weights that were gathered in int8 for a module, "
                    "so the shards cannot be taken from them; gather them with deepspeed.zero.GatheredParameters, and "
                    "change them there"
                )
            self.set_shard(self._full_N[self.start : self.stop])
        self.shards_changed()
        self.accept_changes()

    def broadcast(self, source: int) -> None:
        """Broadcast the whole parameters of the global rank `source`, or of the first rank that has them."""
        everyone = self.unit_ranks.reduce_group
        if everyone.world_size > 1:
            whole_N = self._full_N if self.is_sharded else self.shard_S
            everyone.broadcast(whole_N, source_in(everyone.group, source)).wait()

    def restore_plain(self) -> None:
        """Turn the parameters into whole, ordinary parameters, each with its own memory."""
        self.gather()
        self.let_go()

    def let_go(self) -> None:
        """Turn the parameters into ordinary ones with their current values; these are empty if not gathered."""
        for param in self.params:
            param.data = param.data.clone()
            unmark(param)
        self._full_N, self._views = self.nothing, []  # a remaining graph may read the former buffer
        self.params, self._versions = [], []

    def _point_at_views(self) -> None:
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view

    def _move(self, to: ZeroParamStatus) -> None:
        if (self.status, to) not in LEGAL_MOVES:
            raise StateError(
                f"parameters {', '.join(self.names[:3])}: {self.status.name} -> {to.name} is not a legal move"
            )
        self.status = to
        for param in self.params:
            param.ds_status = to  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"ParamUnit({', '.join(self.names[:3])}{', ...' if len(self.names) > 3 else ''}; {self.status.name})"


def unit_of(param: Tensor) -> ParamUnit | None:
    """Return the unit that shards `param`; None for an ordinary parameter."""
    return getattr(param, "ds_unit", None)


def set_data(param: Parameter, value: Tensor) -> None:
    """Set `param.data = value`, even between kinds of devices for which torch refuses the assignment."""
    if torch._has_compatible_shallow_copy_type(param, value):
        param.data = value
        return
    attributes = dict(vars(param))
    torch.utils.swap_tensors(param, Parameter(value, requires_grad=param.requires_grad))
    vars(param).update(attributes)


def is_same(value: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and elements; NaN equals NaN."""
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(value, other) or torch.allclose(value, other, rtol=0.0, atol=0.0, equal_nan=True)


def is_rounded(value: Tensor, other: Tensor) -> bool:
    """Return whether `value` is `other` up to rounding, as after `w + d - d`, relative to the largest element."""
    if (value.shape, value.dtype) != (other.shape, other.dtype) or not other.is_floating_point():
        return False
    exact = torch.promote_types(other.dtype, torch.float32)
    largest = 4 * torch.finfo(other.dtype).eps * other.to(exact).abs().max()
    return bool((value.to(exact) - other.to(exact)).abs().max() <= largest)


def num_references(tensor: Tensor) -> int:
    """Return how many tensors and other objects share the memory of `tensor`."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


def shape_of(param: Tensor) -> torch.Size:
    """Return the shape of the whole parameter."""
    unit = unit_of(param)
    return param.shape if unit is None else unit.shapes[param.ds_index]  # type: ignore[attr-defined]


@contextmanager
def whole(param: Parameter) -> Iterator[Tensor]:
    """Yield the value of the whole parameter, detached. A collective if the parameter is sharded."""
    unit = unit_of(param)
    if unit is None:
        yield param.data
        return
    is_released = unit.gather_to_read()
    try:
        yield param.data
    finally:
        if is_released:
            unit.release()


def whole_in_turn(params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter with its whole value, detached and valid until the next one; one unit is gathered at a time.
    A collective."""
    held: ParamUnit | None = None
    try:
        for param in params:
            unit = unit_of(param)
            if held is not None and unit is not held:
                held.release()
                held = None
            if unit is not None and unit is not held and unit.gather_to_read():
                held = unit
            yield param, param.data
    finally:
        if held is not None:
            held.release()
