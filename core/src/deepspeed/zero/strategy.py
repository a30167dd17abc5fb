"""`Sharding`: how gradients are reduced and weights updated. The base class *is* stage 0.

The engine calls, for every micro-batch and then once for the step:

    1. window.open / close       around `loss.backward()`; a plain `loss.backward()` does it through hooks
    2. (hooks, per parameter)    gradient -> bucket; a full bucket is launched
    3. reduce()                  every exchange done, norm and use of parameters agreed on by all ranks
    4. norm()                    global L2 norm of the gradients as they are (still scaled)
    5. update(scale)             gradients times `scale`, optimizer step, weights published
    6. zero_grad()

A stage answers, above all: who owns a fragment (`_cuts`), where a bucket's gradients live (`_bucket_memory`), which
exchange a full bucket gets (`_exchange`), and what follows the update (`_publish`). All that it may answer stands under
"what a stage decides"; `stage1.py` and `stage2.py` answer differently. One step as a walk, with the stages side by
side: docs/explanation/one-step.md. ZeRO: arXiv 1910.02054.

Legend: N padded numel of a flat group, S numel of this rank's partition, W ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from deepspeed.comm.backend import Backend, Piece, Work
from deepspeed.errors import ConfigError, StateError
from deepspeed.log import warn_once
from deepspeed.zero import state_dict as states
from deepspeed.zero.backward_window import BackwardWindow
from deepspeed.zero.bucket import Bucket, Slot
from deepspeed.zero.flat_group import FlatGroup, Unit
from deepspeed.zero.layout import BucketSpec, Fragment, GroupLayout, cut_buckets, update_batches
from deepspeed.zero.placement import Placement
from deepspeed.zero.update import Batch, OptimizerUpdate, takes_one_pass

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
    placement: Placement = field(default_factory=Placement)  # where masters, states and reduced gradients live


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """What the schedule says of the backward that begins."""

    reduces: bool  # whether the gradients are needed after it
    factor: float  # by which its gradients are multiplied, besides the averaging over ranks
    refusal: Exception | None = None  # raised if a parameter gets a gradient in it


class Sharding:
    """Stage 0: every rank holds everything, gradients are averaged."""

    stage = 0
    #: whether gradients are exchanged after every backward, or only when they are needed
    reduces_always = False
    #: whether a bucket is summed into its owner only
    _sums_to_owners = False

    def __init__(self, options: ShardingOptions, backend: Backend, group: ProcessGroup | None = None) -> None:
        self.options = options
        self.backend = backend
        self.group = group
        self.placement = options.placement
        self.world_size = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)
        self.window = BackwardWindow(self._begin_backward, self._end_backward, self._abort_backward)
        self.optimizer: Optimizer | None = None
        self.groups: list[FlatGroup] = []
        self.params: list[Parameter] = []
        self.buckets: list[Bucket] = []
        self._is_whole = False
        self._widens = False  # gradients are copied to fp32 before the update, piece by piece
        self._slots: list[list[Slot]] = []  # by parameter
        self._used: list[bool] = []  # by parameter: a gradient arrived on this rank since the last step
        self._used_anywhere: list[bool] = []
        self._launched = 0
        self._reduces = False
        self._refusal: Exception | None = None
        self._shows_gradients = False  # param.grad is a view of bucket memory
        self._gradients: list[Tensor] = []  # by group: what buckets live in
        self._reduced: list[Tensor] = []  # by group: where the optimizer finds this rank's sums, padding zero
        self._max_in_flight = self.placement.max_in_flight
        self._is_launched = True  # no gradient waits on this rank for its exchange
        self._factor = 1.0
        self._norm: float | None = None
        self._updates: OptimizerUpdate | None = None
        self._hooks: list[RemovableHandle] = []
        self._positions: dict[int, int] = {}
        average = options.predivide_factor or float(self.world_size)
        self._before_sum = 1.0 / average
        self._after_sum = average / self.world_size

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
        return self.backend.allocate(group.layout.padded_numel, dtype, group.params[0].device)

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

    def _exchange(self, bucket: Bucket, wire_N: Tensor) -> Work:
        return self.backend.reduce(wire_N, self.group)

    def _publish(self, batch: Batch) -> Work | None:
        """Give the weights that were just updated to those who do not own them."""
        return None

    def _owned_gradients(self) -> list[Tensor]:
        """This rank's part of what buckets live in, one 1-D tensor per group."""
        return self._gradients

    def _norm_part(self) -> list[Tensor]:
        """The gradients whose squares this rank adds up; in stage 0 every rank has all, and takes a W-th of each."""
        return [grads.tensor_split(self.world_size)[self.rank] for grads in self._reduced]

    # ---- building -----------------------------------------------------------------------------------------------

    def attach(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer | None,
        plan: Callable[[bool], BackwardPlan],
        *,
        is_elementwise: bool = True,
    ) -> None:
        """Take over the parameters of `module` that `optimizer` updates (without one: all that require a gradient).

        The optimizer's groups are changed in place: under sharding they hold fragments instead of parameters.

        Args:
            plan: asked at the beginning of every backward, with True if the user started it.
            is_elementwise: whether the optimizer's update of an element depends on that element only.
        """
        self.optimizer = optimizer
        # asked of the weights: where masters will be in another memory the host's kernel says no, and pieces are short
        self._widens = self.options.model_dtype is not None and not takes_one_pass(optimizer)
        self._plan = plan
        self._is_whole = not is_elementwise
        self._positions = {id(param): place for place, param in enumerate(module.parameters())}
        self._named = list(module.named_parameters())
        groups = optimizer.param_groups if optimizer is not None else [{"params": list(module.parameters())}]
        for index, param_group in enumerate(groups):
            for param in param_group["params"]:
                if param.requires_grad and id(param) not in self._positions:
                    raise ConfigError(
                        f"optimizer.param_groups[{index}]: a parameter of shape {tuple(param.shape)} is not in the "
                        "model given to initialize(); hand over parameters of that model"
                    )
            self._attach_group(index, param_group["params"])
        self._finish_groups()
        if optimizer is not None:  # a group that only the optimizer knew would train without averaging
            optimizer.add_param_group = self.add_param_group  # type: ignore[method-assign]
            optimizer.zero_grad = self._zero_grad_of_optimizer  # type: ignore[method-assign]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take over one more group; `param_group` as torch's `Optimizer.add_param_group` has it."""
        assert self.optimizer is not None
        if self.window.is_open or any(self._used):
            raise StateError("add_param_group: found gradients of a step that is not over; call it after step()")
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        self._refuse_attached(len(self.optimizer.param_groups), given)
        type(self.optimizer).add_param_group(self.optimizer, {**param_group, "params": given})
        last = len(self.optimizer.param_groups) - 1
        for handle in self._hooks:
            handle.remove()
        self._attach_group(last, self.optimizer.param_groups[last]["params"])
        self._finish_groups()

    def _attach_group(self, index: int, params: Sequence[Parameter]) -> None:
        """Split one optimizer group by dtype and lay out each part."""
        self._refuse_attached(index, params)
        by_dtype: dict[torch.dtype, list[Parameter]] = {}
        for param in params:
            if param.requires_grad and param.numel() > 0:
                by_dtype.setdefault(param.dtype, []).append(param)
        units: list[Unit] = []
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
            units.extend(group.units)
            if self.optimizer is not None:
                states.adopt(self.optimizer, group)
        if self.optimizer is not None:
            self.optimizer.param_groups[index]["params"] = [unit.master for unit in units]

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
        self._connect_units()

    def _finish_groups(self) -> None:
        """Buckets, hooks and update batches for all groups; again after a group was added."""
        itemsize = max((self._accumulation_dtype(group).itemsize for group in self.groups), default=4)
        wish = self.backend.preferred_bucket_bytes(self.world_size, to_owners=self._sums_to_owners) // itemsize
        wish = min(wish, max(MIN_BUCKET_NUMEL, sum(group.layout.numel for group in self.groups) // 3))
        positions = [[self._positions.get(id(param), 0) for param in group.params] for group in self.groups]
        specs = cut_buckets([group.layout for group in self.groups], positions, min(self.options.bucket_numel, wish))
        self.buckets = [self._create_bucket(spec) for spec in specs]
        self._slots = [[] for _ in self.params]
        for bucket in self.buckets:
            first = self.groups[bucket.spec.group].first_index
            for slot in bucket.slots:
                self._slots[first + slot.fragment.param].append(slot)
        managed = {id(param) for param in self.params}
        self._others = [(name, param) for name, param in self._named if id(param) not in managed]
        self._used = [False] * len(self.params)
        self._used_anywhere = list(self._used)
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._take_gradient, index, self._slots[index]))
            for index, param in enumerate(self.params)
        ]
        if self.optimizer is not None:
            self._updates = OptimizerUpdate(self.optimizer, list(self._batches()), self._used_anywhere, self.placement)
        if len(self._gradients) == len(self.groups):
            self._connect_units()

    def _batches(self) -> Iterator[Batch]:
        if not self._is_flat() and not self._widens:  # nothing to publish
            yield Batch(None, [unit for group in self.groups for unit in group.units], [])
            return
        for index, group in enumerate(self.groups):
            unit_of = {unit.fragment: unit for unit in group.units}
            for per_rank in update_batches(group.layout, self._batch_numel()):
                mine = [unit_of[fragment] for fragment in per_rank[self._owner_rank]]
                yield Batch(index, mine, [_span(fragments) for fragments in per_rank if fragments])

    def _connect_units(self) -> None:
        """Tell each unit where its reduced gradient is."""
        for group, reduced_S in zip(self.groups, self._reduced, strict=True):
            for unit in group.units:
                start = unit.fragment.start - group.partition_start
                grad = reduced_S.narrow(0, start, unit.fragment.numel)
                unit.grad = grad.view(unit.master.shape)

    # ---- one backward -------------------------------------------------------------------------------------------

    def _begin_backward(self, by_user: bool) -> None:
        plan = self._plan(by_user)
        if len(self._gradients) < len(self.groups):
            self._allocate_gradients()
        self._refusal = plan.refusal
        self._reduces = plan.reduces or self.reduces_always
        self._factor = plan.factor * self._before_sum
        self._launched = 0
        self._is_launched = self._shows_gradients = False
        self._norm = None
        for bucket in self.buckets:
            bucket.begin_backward()
        for param in self.params:
            param.grad = None  # what it shows is the sum of the last backward, which lives in its bucket

    def _take_gradient(self, index: int, slots: list[Slot], param: Tensor) -> None:
        """Hook: autograd has put the gradient of one parameter into `param.grad`."""
        if self._refusal is not None:
            raise self._refusal
        grad = param.grad
        assert grad is not None
        param.grad = None
        if not self.window.is_open:
            if self._shows_gradients:  # autograd has just added into the bucket's own memory
                raise StateError(
                    "backward: found a second backward before step() that does not pass through the engine's outputs; "
                    "add the losses up and call engine.backward(loss) once"
                )
            self.window.open_from_autograd()
        if grad.requires_grad:  # of a backward with create_graph=True; the step needs no graph
            grad = grad.detach()
        if grad.is_sparse:  # of an embedding with sparse=True; its bucket is dense
            grad = grad.to_dense()
        self._used[index] = True
        for slot in slots:
            slot.bucket.write(slot, grad, self._factor)
        if self._reduces and self.options.overlap:
            while self._launched < len(self.buckets) and self.buckets[self._launched].num_missing == 0:
                self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._launched]
        if self._max_in_flight is not None and self._launched >= self._max_in_flight:
            self.buckets[self._launched - self._max_in_flight].finish()
        self._launched += 1
        bucket.launch(partial(self._exchange, bucket))

    def _end_backward(self) -> None:
        if self._reduces:
            self._launch_rest()
            self._after_launch()
        for name, param in self._others:
            if param.grad is not None:
                warn_once(
                    f"the parameter {name} got a gradient, and the optimizer does not have it: it is not trained. If "
                    "it was unfrozen after initialize(), call engine.optimizer.add_param_group"
                )

    def _after_launch(self) -> None:
        """Stage 0 waits, so that `param.grad` can be read, and clipped, when the backward is over."""
        self.reduce()

    def _launch_rest(self) -> None:
        while self._launched < len(self.buckets):
            self._launch_next()
        self._is_launched = True

    def _abort_backward(self) -> None:
        """A backward that failed leaves gradients of which nobody knows how much is in them: the step starts anew."""
        self.zero_grad()

    # ---- one step -----------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Finish every exchange, and agree with the other ranks on the norm and on which parameters were used.

        One small all-reduce carries [sum of squares, per parameter whether it was used, per bucket whether a
        gradient came after its launch]. Late gradients (a block that a checkpoint runs twice in one backward) are
        then exchanged in a second round, on all ranks alike.
        """
        if self._norm is not None:
            return
        if len(self._gradients) < len(self.groups):
            self._allocate_gradients()
        if not self._is_launched:  # the boundary was declared after the backward
            self._launch_rest()
        while True:
            for bucket in self.buckets:
                bucket.finish()
            self.placement.settle()
            late = [float(bucket.is_late) for bucket in self.buckets]
            facts = self._sum_over_ranks([self._local_square_sum(), *map(float, self._used), *late])
            num_used = len(self._used)
            self._used_anywhere[:] = [count > 0 for count in facts[1 : 1 + num_used]]
            late = facts[1 + num_used :]
            if not any(late):
                break
            for bucket, is_late in zip(self.buckets, late, strict=True):
                if is_late:
                    bucket.is_late = False
                    bucket.launch(partial(self._exchange, bucket))
        if not (self.options.allows_unused or all(self._used_anywhere)):
            self._refuse_unused()
        if not any(self._used_anywhere):  # no backward: what lies in the gradient memory is of a former step
            facts[0] = 0.0
        self._norm = _rounded(math.sqrt(facts[0]) * self._after_sum) if facts[0] >= 0 else math.nan
        self._after_reduce()

    def _refuse_unused(self) -> None:
        names = {id(param): name for name, param in self._named}
        unused = [
            names.get(id(param), "?") for param, used in zip(self.params, self._used_anywhere, strict=True) if not used
        ]
        raise StateError(
            f"zero_optimization.ignore_unused_parameters is false and {len(unused)} parameters got no gradient: "
            f"{', '.join(unused[:10])}; let the loss depend on them, freeze them, or set the key to true"
        )

    def _after_reduce(self) -> None:
        """Stage 0 shows the averaged gradients as `param.grad`, as plain data parallelism does."""
        if self._after_sum != 1.0:
            return
        for group, gradients in zip(self.groups, self._gradients, strict=True):
            if gradients.dtype != group.dtype:
                continue
            for index, param in enumerate(group.params):
                if self._used_anywhere[group.first_index + index]:
                    offset = group.layout.offsets[index]
                    param.grad = gradients.narrow(0, offset, param.numel()).view(param.shape)
                    self._shows_gradients = True

    def _local_square_sum(self) -> float:
        return self.placement.square_sum(self._norm_part())

    def _sum_over_ranks(self, values: list[float]) -> list[float]:
        if self.world_size == 1:
            return values
        device = self.params[0].device if self.params else "cpu"
        dtype = torch.float64 if torch.device(device).type == "cpu" else torch.float32  # some devices lack fp64
        facts = torch.tensor(values, dtype=dtype, device=device)
        torch.distributed.all_reduce(facts, group=self.group)
        return facts.tolist()

    def norm(self) -> float:
        """Global L2 norm of the reduced gradients, as scaled as the losses were; inf or nan after an overflow."""
        assert self._norm is not None, "norm() follows reduce()"
        return self._norm

    def update(self, scale: float = 1.0) -> None:
        """One optimizer step with every gradient multiplied by `scale`; all ranks end with the same weights."""
        assert self._updates is not None
        for param in self.params:
            param.grad = None  # the update points masters at their gradients, batch by batch
        published = [
            work for batch in self._updates.step(scale * self._after_sum) if (work := self._publish(batch)) is not None
        ]
        for work in published:
            work.wait()
        self.placement.finish_sending()

    def zero_grad(self) -> None:
        """Forget every gradient."""
        for bucket in self.buckets:
            bucket.clear()
        self.placement.forget()
        for index, param in enumerate(self.params):
            param.grad = None
            self._used[index] = False
        self._is_launched = True
        self._shows_gradients = False
        self._norm = None

    def _zero_grad_of_optimizer(self, set_to_none: bool = True) -> None:
        """What the user's own optimizer does at `zero_grad()`: what the buckets hold is forgotten too."""
        self.zero_grad()

    @property
    def is_attached(self) -> bool:
        """Whether gradients of the module come here."""
        return bool(self._hooks)

    def destroy(self) -> None:
        """Remove the hooks; the module can then be used without the engine."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        if self.optimizer is not None:
            vars(self.optimizer).pop("add_param_group", None)
            vars(self.optimizer).pop("zero_grad", None)
        self.zero_grad()
        self.placement.release()

    # ---- states and single parameters ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's masters and optimizer state; keys as in DeepSpeed's `*_optim_states.pt`."""
        return states.collect(self)

    def load_state_dict(self, state: dict[str, Any], *, load_optimizer_states: bool = True) -> None:
        """Take masters and optimizer state of a run with as many ranks and the same stage."""
        states.restore(self, state, load_optimizer_states=load_optimizer_states)
        self.publish_all()

    def masters_from_weights(self) -> None:
        """Start the masters anew after the module's weights were loaded or changed from outside."""
        for group in self.groups:
            group.masters_from_weights()

    def publish_all(self) -> None:
        """Bring the masters of all ranks into the model's weights."""
        for group in self.groups:
            group.weights_from_masters()
        for batch in self._batches():
            work = self._publish(batch)
            if work is not None:
                work.wait()

    def was_used(self, index: int) -> bool:
        """Whether any rank has a gradient for the attached parameter `index`; known after `reduce()`."""
        return self._used_anywhere[index]

    @property
    def exchange_bytes(self) -> int:
        """Bytes that stay allocated between steps for exchanges: no states, but held."""
        return self.backend.held_bytes + self.placement.held_bytes

    @property
    def average_factor(self) -> float:
        """What reduced gradients are still to be multiplied by to be averages over ranks; `update` does."""
        return self._after_sum

    def gradient_was_replaced(self, index: int) -> None:
        """The reduced gradient of an attached parameter was written from outside, on all ranks alike."""
        self._used[index] = True
        self._norm = None
        self.placement.gradients_changed()

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


def _rounded(norm: float) -> float:
    """To 20 bits, a millionth. Stages cut the same gradients differently, so their sums differ in the last bits; with
    the norm rounded all stages clip by the same factor and stay equal bit by bit."""
    if not math.isfinite(norm):
        return norm
    mantissa, exponent = math.frexp(norm)
    return math.ldexp(round(mantissa * 2**20), exponent - 20)


def _span(fragments: Sequence[Fragment]) -> Piece:
    return Piece(fragments[0].start, fragments[-1].stop, fragments[0].owner)
