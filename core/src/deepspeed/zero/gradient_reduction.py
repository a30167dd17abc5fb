"""`GradientReduction` brings the gradients of a step from autograd to their sums over the ranks.

    begin            a backward begins
    (hooks)          gradients are in `param.grad`; hooks take them into their bucket (`bucket.py`)
    end              the backward is over: remaining gradients are taken, and launched if this backward reduces
    finish           the sums are complete; gradients that came after the launch of their bucket are still to be reduced

`Gradients` uses it. The stage decides how a bucket is reduced (`stages.py`). `ReplicaSum` completes the sums once per
step.

[Note: which parameters have hooks] A hook in every backward costs as much as the backward of a tiny layer. So only
these parameters have one: large parameters, whose hook takes the gradient at once, and the first parameter of each
bucket, which a backward reaches last and whose hook takes all gradients of the bucket. The end of the backward takes
the rest. A large gradient is taken at once because it is still in the CPU's cache. On a device that gains nothing, and
the CPU time of a backward is the bottleneck, so only the first parameter of each bucket has a hook. All parameters of a
sharded unit (stage 3) have one, because the unit is released after its last gradient. If gradients are shown on a
device (stage 0), every backward must be detected, so all other parameters have a hook that does nothing while the
window is open; otherwise the step would average a gradient too late for its readers.

[Note: after the script's hooks] A hook that the script registers on a parameter, before or after `initialize`, must
find this rank's gradient of this backward in `param.grad`, and its changes must be reduced. So the hook that takes
the gradient runs last, whenever it was registered: `_HooksThenOurs` keeps it behind the others.
"""

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.zero.backward_window import BackwardWindow
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.param_unit import ParamUnit
from deepspeed.zero.stages import MAX_IN_FLIGHT
from deepspeed.zero.unit import Unit
from deepspeed.zero.units import ShardingOptions, Units
from deepspeed.zero.update import TouchedRows


class GradientReduction:
    """`GradientReduction` takes the gradients of a step into their buckets and sums the buckets over the ranks.

    Args:
        window: the window of the backwards; it opens with the first gradient at the latest.
        units: the units whose gradients are reduced.
        buckets: one for each unit, in the order of their launch, which is the same on all ranks.
        rows: touched rows, for an optimizer that needs sparse gradients; else None.
        open_window: called in a hook before the first gradient of a backward is taken, if the window is not open.
        after_arrival: called when a gradient of a sharded unit was taken, with the unit (stage 3).
        waits_on_device: whether waiting for a collective blocks the device and not the CPU.
    """

    def __init__(
        self,
        window: BackwardWindow,
        units: Units,
        buckets: Sequence[Bucket],
        options: ShardingOptions,
        rows: TouchedRows | None,
        *,
        open_window: Callable[[], None],
        after_arrival: Callable[[ParamUnit], None],
        waits_on_device: bool,
    ) -> None:
        self._window = window
        self._units = list(units)
        self._buckets = buckets
        self._by_unit = {bucket.index: bucket for bucket in buckets}
        self._stage = options.stage
        self._open_window = open_window
        self._after_arrival = after_arrival
        self._name_of = units.name_of
        self._overlaps = options.overlap  # launch a bucket when it is full, not when the backward is over
        #: number of launched buckets above which sums are taken out during the backward; None: only at its end
        lends = self._stage.divides_gradients or self._stage.fixes_order  # buffers are lent for one reduction
        self._max_in_flight = MAX_IN_FLIGHT if lends else options.placement.max_in_flight
        self._waits_on_device = waits_on_device
        self._rows = rows
        self._places = [(self._by_unit[unit.index], place) for unit in units for place in range(len(unit.params))]
        self.used = [False] * len(self._places)  # by parameter: a gradient was taken since the last step
        self._launched = 0  # number of buckets
        self.num_issued = 0  # reductions launched since the object was created
        self._in_flight: deque[tuple[int, Bucket]] = deque()  # with `num_issued` at the launch
        self.is_launched = True  # no gradient of this rank still waits for the launch of its reduction
        self._reduces = False
        self._refusal: Exception | None = None
        self._inspects = False  # inspect every gradient of this backward, not only sparse ones or those with a graph
        self._hooks: list[RemovableHandle] = []
        opens = _opening_hook(weakref.ref(self), window.running)
        for index, unit in enumerate(self._units):
            for place, param in enumerate(unit.params):
                is_large = unit.device.type == "cpu" and unit.shapes[place].numel() >= LARGE_NUMEL
                if unit.sharded is not None or place == 0 or is_large:
                    self._hooks.append(_register_last(param, _gradient_hook(weakref.ref(self), index, place)))
                elif not self._stage.divides_states:
                    self._hooks.append(_register(param, opens))
        weakref.finalize(self, _remove, self._hooks).atexit = False  # for an engine that was dropped

    def remove_hooks(self) -> None:
        """Stop taking gradients. Idempotent."""
        _remove(self._hooks)

    # ---- one backward -------------------------------------------------------------------------------------------

    def begin(self, *, reduces: bool, factor: float, refusal: Exception | None) -> None:
        """Begin a backward.

        Args:
            reduces: whether to reduce its gradients.
            factor: multiplies its gradients as they are written to their bucket; includes the division by the number
                of ranks (`ZeroStage.begin_backward`), so that the sum over the ranks is an average.
            refusal: an error to raise when a gradient is taken; None: gradients are accepted.
        """
        self._reduces = reduces
        self._refusal = refusal
        self._inspects = refusal is not None or self._rows is not None
        self._launched = 0
        self.is_launched = False
        for bucket in self._buckets:
            bucket.kept = self._stage.contributed(self._units[bucket.index])
            bucket.begin_backward(factor)

    def arrived(self, index: int, place: int) -> None:
        """Take gradients; called by the hook of a parameter. See [Note: which parameters have hooks]."""
        if not self._window.is_running:
            self._open_window()
        self._take(index, None if place == 0 else (place,))
        if (sharded := self._units[index].sharded) is not None:
            self._after_arrival(sharded)
        if self._reduces and self._overlaps:
            self._launch_full(taken=index if place == 0 else None)

    def _take(self, index: int, places: Iterable[int] | None = None) -> None:
        """Move the present gradients of a unit into its bucket; `places` selects parameters (default: all)."""
        unit = self._units[index]
        params = unit.params
        found = enumerate(params) if places is None else ((place, params[place]) for place in places)
        grads = {place: grad for place, param in found if (grad := param.grad) is not None}
        if not grads:
            return
        first = unit.first_index
        for place in grads:
            params[place].grad = None
        if len(grads) == len(params):
            self.used[first : first + len(params)] = [True] * len(params)
        else:
            for place in grads:
                self.used[first + place] = True
        if self._inspects or torch.is_grad_enabled() or [grad for grad in grads.values() if grad.is_sparse]:
            grads = {place: self._inspected(first + place, params[place], grad) for place, grad in grads.items()}
        self._by_unit[index].write(grads)

    def _inspected(self, index: int, param: Parameter, grad: Tensor) -> Tensor:
        """Return a gradient in the form for its bucket: dense, without a graph."""
        if self._refusal is not None:
            raise self._refusal
        grad = grad.detach()  # from a backward with create_graph=True; the step needs no graph
        if self._rows is not None:
            self._rows.note(index, grad, self._name_of(param))
        return grad.to_dense() if grad.is_sparse else grad  # sparse: from an embedding with sparse=True

    def end(self) -> None:
        """End the backward: take the remaining gradients and launch their buckets if this backward reduces."""
        for index in range(len(self._units)):
            self._take(index)
        if self._reduces:
            self.launch_rest()
        else:
            for bucket in self._buckets:
                bucket.flush()

    # ---- collectives --------------------------------------------------------------------------------------------

    def _launch_full(self, taken: int | None) -> None:
        """Launch full buckets in order, up to the first one that is not full; `taken`: the unit just taken whole."""
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if bucket.index != taken:
                self._take(bucket.index)
            if bucket.num_missing:
                break
            self._launch_next()

    def launch_rest(self) -> None:
        """Launch the buckets that this backward has not launched yet."""
        while self._launched < len(self._buckets):
            self._launch_next()
        self.is_launched = True

    def _launch_next(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        self._launch(bucket)
        if self._max_in_flight is not None:
            self._in_flight.append((self.num_issued, bucket))
            self._finish_early(self._max_in_flight)

    def _launch(self, bucket: Bucket) -> None:
        self.num_issued += 1
        bucket.launch(partial(self._stage.reduce, self._units[bucket.index]))

    def _finish_early(self, max_in_flight: int) -> None:
        """Take sums out of the oldest buckets to free their buffers. This runs in a hook in the middle of the user's
        backward, where a peer may wait for this rank in a collective of the model: so the CPU must not block."""
        while self._in_flight and (
            self._in_flight[0][1].poll() or (self._waits_on_device and len(self._in_flight) > max_in_flight)
        ):
            self._in_flight.popleft()[1].finish()

    def finish_issued_before(self, num_issued: int, ranks: GroupBackend) -> None:
        """Finish old reductions after a collective over `ranks` that was issued after `num_issued` reductions. Every
        rank of the group has issued these reductions as well and does not wait for this rank, so blocking is safe. The
        CPU waits until fewer than the maximum are in flight: with slow peers, buffers would pile up."""
        while self._max_in_flight is not None and len(self._in_flight) >= self._max_in_flight:
            number, bucket = self._in_flight[0]
            if number > num_issued or self._units[bucket.index].ranks.shard_group is not ranks:
                return
            self._in_flight.popleft()
            bucket.finish()

    def finish(self) -> None:
        """Wait for the collectives in flight and store the sums."""
        self._in_flight.clear()
        for bucket in self._buckets:
            bucket.finish()

    @property
    def late(self) -> list[bool]:
        """List by bucket whether this rank has a gradient that came after the launch, for example of a block that a
        checkpoint runs twice in one backward."""
        return [bucket.is_late for bucket in self._buckets]

    def launch_late(self, late: Sequence[float]) -> None:
        """Launch again the buckets for which `late` is not 0: a rank has a late gradient."""
        for bucket, is_late in zip(self._buckets, late, strict=True):
            if is_late:
                bucket.is_late = False
                self._launch(bucket)

    def abandon(self) -> Iterator[tuple[GroupBackend, Work]]:
        """Forget the collectives in flight without waiting for them; yield the group and the work of each."""
        self._in_flight.clear()
        for bucket in self._buckets:
            if (work := bucket.abandon()) is not None:
                yield self._units[bucket.index].ranks.shard_group, work

    # ---- the end of a step --------------------------------------------------------------------------------------

    def drop(self, index: int) -> None:
        """Forget the taken gradient of the parameter `index`."""
        self.used[index] = False
        bucket, place = self._places[index]
        bucket.forget(place)

    def clear(self) -> None:
        """Forget all gradients."""
        for bucket in self._buckets:
            bucket.clear()
        self.used = [False] * len(self.used)
        self.is_launched = True


def _remove(hooks: list[RemovableHandle]) -> None:
    while hooks:
        hooks.pop().remove()


class _HooksThenOurs(OrderedDict[int, Callable[[Tensor], None]]):
    """`_HooksThenOurs` replaces torch's dictionary of a parameter's hooks, by number; the hook `last` stays last."""

    last: int | None = None

    def __setitem__(self, number: int, hook: Callable[[Tensor], None]) -> None:
        super().__setitem__(number, hook)
        if self.last is not None and number != self.last and self.last in self:
            super().__setitem__(self.last, self.pop(self.last))


def _register_last(param: Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register `hook` so that it stays the last one of `param`; see [Note: after the script's hooks]."""
    hooks = param._post_accumulate_grad_hooks
    if not isinstance(hooks, _HooksThenOurs):
        former, hooks = hooks, _HooksThenOurs()
        if former:  # owners of these hooks remove them from the former dictionary
            hooks[-1] = partial(_call_all, former)
        param._post_accumulate_grad_hooks = hooks
    handle = _register(param, hook)
    hooks.last = handle.id
    return handle


def _register(param: Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register `hook`, also on a frozen parameter that may train again: torch refuses hooks on frozen parameters."""
    trains = param.requires_grad
    param.requires_grad_(True)
    try:
        return param.register_post_accumulate_grad_hook(hook)
    finally:
        param.requires_grad_(trains)


def _call_all(hooks: dict[int, Callable[[Tensor], None]], param: Tensor) -> None:
    for hook in list(hooks.values()):
        hook(param)


def _opening_hook(reduction: "weakref.ref[GradientReduction]", running: list[bool]) -> Callable[[Tensor], None]:
    """Return a hook that opens the window when a gradient is in `param.grad` but does not take the gradient."""

    def call(_: Tensor) -> None:
        if not running[0] and (owner := reduction()) is not None:
            owner._open_window()

    return call


def _gradient_hook(reduction: "weakref.ref[GradientReduction]", index: int, place: int) -> Callable[[Tensor], None]:
    """Return the hook that autograd calls when it has put a gradient into `param.grad`.

    The parameter holds the hook, and the hook holds a weak reference, so it does not keep the engine alive.
    """

    def call(param: Tensor) -> None:
        owner = reduction()
        if owner is not None:
            owner.arrived(index, place)

    return call


class ReplicaSum:
    """`ReplicaSum` sums the gradients of a step over copies of the weights (MiCS, and parameters of several stages).

    A bucket is reduce-scattered in the shard group after every backward. The shards are summed over the replicas once
    per step, which moves the fewest bytes between shard groups (the two hops of MiCS, arXiv 2205.00119).

    [Note: a second sum in a step] After the sum every replica holds the total. If more is added before the step, only
    one replica may contribute the total; the others contribute new gradients only, so they zero their copy.

    Args:
        wire_dtype: dtype of the reduction; None means the gradients' dtype.
    """

    def __init__(self, wire_dtype: torch.dtype | None) -> None:
        self._wire_dtype = wire_dtype
        self._is_done = False
        self._in_flight: list[tuple[GroupBackend, Work]] = []

    def add_up(self, units: Iterable[tuple[Unit, Tensor]]) -> None:
        """Sum the reduced shards [S] of `units` over the replicas of each, in place. A collective; once per step."""
        if self._is_done:
            return
        for unit, gradients_S in units:
            replicas = unit.ranks.replicate_group
            if replicas is None:
                continue
            wire_S = gradients_S.to(unit.device, self._wire_dtype or gradients_S.dtype)
            self._in_flight.append((replicas, replicas.all_reduce(wire_S, tag=wire_S.numel())))
            if wire_S is not gradients_S:  # a copy; the next copy reuses its memory
                self._wait()
                gradients_S.copy_(wire_S)
        self._wait()
        self._is_done = True

    def _wait(self) -> None:
        for _, work in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def abandon(self) -> list[tuple[GroupBackend, Work]]:
        """Forget the sums in flight without waiting for them; return the group and the work of each. A work may still
        use the memory of the gradients."""
        in_flight, self._in_flight = self._in_flight, []
        return in_flight

    def reopen(self, units: Iterable[tuple[Unit, Tensor]]) -> None:
        """Prepare for another backward in this step; see [Note: a second sum in a step]."""
        if not self._is_done:
            return
        for unit, gradients_S in units:
            if unit.ranks.replicate_group is not None and unit.ranks.replicate_group.rank > 0:
                gradients_S.zero_()
        self._is_done = False

    def forget(self) -> None:
        """Forget that the sum is done; the step is over."""
        self._is_done = False


#: numel from which a parameter in host memory is large: its gradient is taken at once
LARGE_NUMEL = 2**13
