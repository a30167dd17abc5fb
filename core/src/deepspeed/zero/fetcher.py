"""`ParamFetcher` decides which units are gathered at which moment (stage 3).

Modules call it through their hooks (`module_hooks.py`): `use` before a module reads a unit, `release_or_keep` when the
module is done with it. The fetcher gathers, prefetches, keeps units that are used again soon, and releases the rest.

[Note: the order of use] Prefetching needs to know which unit comes next. The fetcher records each use as the successor
of the two uses before it. When these two uses follow each other again, the fetcher prefetches the recorded unit, then
that unit's successor, and so on, up to `prefetch_numel` elements. If the control flow has changed, the record is
corrected: a wrong guess costs one all-gather and never a wrong result. All ranks see the same uses, so they issue the
same all-gathers in the same order.

[Note: ranks that differ] A library may match all-gathers by their order alone (gloo). Then ranks that use different
modules may get each other's weights. A step detects this in its small all-reduce. An evaluation has no step, so a
forward of the whole model without gradients ends with one, if it has gathered anything (`compare_order`).

[Note: left whole] A script may change parameters that a forward leaves gathered. If a backward follows, they are
released soon; after an evaluation they stay gathered. torch does not count changes through `param.data`. So units that
were gathered after such a forward are compared with the shards before a step and when they are released.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.errors import StateError
from deepspeed.zero.gradient_reduction import GradientReduction
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import LiveNumel, ParamUnit

_AVAILABLE, _NOT_AVAILABLE = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE

#: the two latest uses
_Place = tuple[ParamUnit | None, ParamUnit | None]


P = ParamSpec("P")
T = TypeVar("T")


def _outside_transforms(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Run `method` outside of `torch.func` transforms, so that they do not wrap the memory that it manages."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **keys: P.kwargs) -> T:
        if peek_interpreter_stack() is None:
            return method(self, *args, **keys)
        with temporarily_clear_interpreter_stack():
            return method(self, *args, **keys)

    return call


class ParamFetcher:
    """`ParamFetcher` gathers and releases units.

    Args:
        units: all units of one engine.
        prefetch_numel: maximum of elements that are gathered ahead (`stage3_prefetch_bucket_size`).
        max_live_numel: maximum of gathered elements; above it unused units are released and nothing is gathered ahead
            (`stage3_max_live_parameters`).
        max_reuse_numel: a unit is kept if its next use comes before this many elements of other units are used
            (`stage3_max_reuse_distance`).
        quantizes: all-gathers send int8 (`zero_quantized_weights`).
        reduction: the gradient reduction; its buffers are freed once an all-gather shows that the peers are that far.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        *,
        prefetch_numel: int,
        max_live_numel: int,
        max_reuse_numel: int,
        quantizes: bool = False,
        reduction: GradientReduction | None = None,
    ) -> None:
        self.units = list(units)
        self._prefetch_numel = prefetch_numel
        self._max_live_numel = max_live_numel
        self._max_reuse_numel = max_reuse_numel
        self._quantizes = quantizes
        self._reduction = None if reduction is None else weakref.ref(reduction)  # weak: `reduction` holds the engine
        self._num_issued: dict[ParamUnit, int] = {}  # reductions issued before the latest all-gather of a unit
        self._next: dict[_Place, ParamUnit] = {}
        self._place: _Place = (None, None)
        whole = [unit for unit in units if unit.status is not _NOT_AVAILABLE]  # left by an earlier fetcher
        self._unused = dict.fromkeys(whole)  # gathered or in flight, and not in use; oldest first
        self._kept: set[ParamUnit] = set()  # gathered until the weights change
        self._is_evaluated = False  # no backward has followed the latest forward
        self._left_whole: set[ParamUnit] = set()  # gathered after such a forward
        self._live = LiveNumel(sum(unit.numel for unit in whole))
        self._total_numel = sum(unit.numel for unit in units)
        for unit in units:
            unit.live = self._live
        self._uncompared: dict[GroupBackend, None] = {}  # groups that may have gathered different units on each rank

    # ---- called around modules -----------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin an outermost forward that is not inside a backward."""
        self._note_left_whole()
        self._is_evaluated = True

    def begin_backward(self) -> None:
        """A backward begins."""
        self._is_evaluated = False

    def refuse_left_whole(self) -> None:
        """Check at the start of a step that nothing was changed since an evaluation; see [Note: left whole].

        Raises:
            StateError: names a parameter that was changed.
        """
        self._note_left_whole()
        left, self._left_whole = self._left_whole, set()
        for unit in left:
            unit.refuse_changes(compares=True)

    def _note_left_whole(self) -> None:
        if self._is_evaluated:
            self._left_whole.update(unit for unit in self.units if unit.status is _AVAILABLE)

    @_outside_transforms
    def use(self, unit: ParamUnit) -> None:
        """Return when the parameters of `unit` are gathered."""
        if unit.status is _AVAILABLE and unit not in self._unused:  # in use
            return
        self._note(unit)
        self._unused.pop(unit, None)
        if unit.status is _NOT_AVAILABLE:
            self._make_room(unit.numel)
            self._launch(unit)
        self._prefetch()
        if unit.status is not _AVAILABLE:
            unit.finish()
            if (reduction := self._live_reduction()) is not None and unit.gathered_over is unit.ranks:
                reduction.finish_issued_before(self._num_issued.get(unit, 0), unit.ranks)

    @_outside_transforms
    def release_or_keep(self, unit: ParamUnit) -> None:
        """Release a unit after its last use, or keep it gathered for its next use (`max_reuse_numel`).

        A kept unit is released when room is needed or when the weights change, at the latest in the step.
        """
        if unit.status is not _AVAILABLE or unit.num_contexts or unit in self._kept:
            return
        if self._is_used_again_soon(unit):
            self._unused[unit] = None
            self._make_room(0)
        else:
            self._release(unit)

    def keep(self, unit: ParamUnit) -> None:
        """Do not release `unit` before the weights change, because a graph outside of any module reads it."""
        self._kept.add(unit)

    def forget(self, unit: ParamUnit) -> None:
        """Stop managing `unit` and leave it in its current state."""
        if unit in self.units:
            if unit.status is ZeroParamStatus.INFLIGHT:
                unit.finish()
            self.units.remove(unit)
            self._live.numel -= unit.numel if unit.status is _AVAILABLE else 0
            self._total_numel -= unit.numel
            unit.live = LiveNumel(unit.numel if unit.status is _AVAILABLE else 0)
            unit.num_users = 0
        self._unused.pop(unit, None)
        self._kept.discard(unit)
        self._left_whole.discard(unit)
        self._num_issued.pop(unit, None)
        self.invalidate_trace()
        self._place = (None, None)

    def _live_reduction(self) -> GradientReduction | None:
        return None if self._reduction is None else self._reduction()

    def finish_all(self) -> None:
        """Wait for the all-gathers in flight."""
        for unit in self.units:
            if unit.status is ZeroParamStatus.INFLIGHT:
                unit.finish()

    @_outside_transforms
    def compare_order(self) -> None:
        """Raise if ranks have gathered different units; see [Note: ranks that differ]. Runs a collective in each group
        that gathered something since the last call, if its library matches collectives by order alone.

        Raises:
            CommError: on every rank; names what two ranks have gathered.
        """
        gathered, self._uncompared = self._uncompared, {}
        for ranks in gathered:
            if ranks.capabilities.matches_by_order:
                ranks.all_reduce(torch.zeros(1, dtype=torch.float64), tag="order").wait()

    def release_all(self) -> None:
        """Release every unit, because the weights are about to change or have changed.

        Raises:
            StateError: if changes of parameters would be lost. All units are released first, as on the peers.
        """
        self._note_left_whole()
        self.finish_all()
        refusals: list[StateError] = []
        for unit in self.units:
            unit.num_users = 0
            if unit.status is _AVAILABLE:
                try:
                    unit.refuse_changes(compares=unit in self._left_whole)
                except StateError as error:
                    refusals.append(error)
            unit.release()
        self._forget_whole()
        if refusals:
            raise refusals[0]

    @_outside_transforms
    def abandon(self) -> list[tuple[GroupBackend, Work]]:
        """Forget the all-gathers in flight without waiting for them; return the group and the work of each."""
        works = []
        for unit in self.units:
            if (work := unit.abandon()) is not None:
                works.append(work)
            unit.num_users = 0
            unit.release()
        self._forget_whole()
        self.invalidate_trace()  # ranks that failed at different places have recorded different parts of it
        return works

    def _forget_whole(self) -> None:
        self._unused.clear()
        self._kept.clear()
        self._left_whole.clear()
        self._place = (None, None)

    # ---- the order of use ----------------------------------------------------------------------------------------

    def is_invalid_trace(self) -> bool:
        """Return whether no order of use is known."""
        return not self._next

    def invalidate_trace(self) -> None:
        """Forget the order of use."""
        self._next.clear()

    _invalidate_trace = invalidate_trace  # the name that libraries call

    def _note(self, unit: ParamUnit) -> None:
        self._next[self._place] = unit
        self._place = (self._place[1], unit)

    def _upcoming(self) -> Iterator[ParamUnit]:
        """Yield the units that came next the last time, in order; at most 4 per unit of the engine."""
        place = self._place
        for _ in range(4 * len(self.units)):
            unit = self._next.get(place)
            if unit is None:
                return
            yield unit
            place = (place[1], unit)

    def _prefetch(self) -> None:
        ahead = 0
        gathers = True  # else shards are only read ahead from where they are stored
        for unit in self._upcoming():
            ahead += unit.numel
            has_room = unit.status is not _NOT_AVAILABLE or self._live.numel + unit.numel <= self._max_live_numel
            gathers = gathers and ahead <= self._prefetch_numel and has_room
            if gathers and unit.status is _NOT_AVAILABLE:
                self._launch(unit)
                self._unused[unit] = None
            elif not gathers and not unit.read_ahead():
                return

    def _is_used_again_soon(self, unit: ParamUnit) -> bool:
        if self._total_numel <= self._max_reuse_numel:
            return True
        between = 0
        for other in self._upcoming():
            if other is unit:
                return True
            between += other.numel
            if between > self._max_reuse_numel:
                return False
        return False

    # ---- memory --------------------------------------------------------------------------------------------------

    def _make_room(self, numel: int) -> None:
        """Release unused units, oldest first, until `numel` more elements fit."""
        excess = self._live.numel + numel - self._max_live_numel
        for unit in list(self._unused):
            if excess <= 0:
                return
            if unit.status is _AVAILABLE and not unit.num_contexts:
                excess -= unit.numel
                self._release(unit)

    def _launch(self, unit: ParamUnit) -> None:
        if (reduction := self._live_reduction()) is not None:
            self._num_issued[unit] = reduction.num_issued
        unit.launch(quantizes=self._quantizes)
        self._uncompared[unit.gathered_over] = None

    def _release(self, unit: ParamUnit) -> None:
        self._unused.pop(unit, None)
        compares = unit in self._left_whole
        self._left_whole.discard(unit)
        unit.refuse_changes(compares=compares)
        unit.release()
