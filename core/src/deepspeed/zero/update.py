"""Run the optimizer's step in batches of shards, so that few buffers are alive and results can be gathered early.

`Sharding.update` calls it. An optimizer with a one-pass kernel reads the gradients as they are and writes master
weights and the model's weights in the same pass. For any other optimizer, a batch's low-precision gradients are widened
to fp32 in one buffer that all batches share, the step updates the fp32 master weights, and the result is rounded into
the model's weights.

If master weights and states are in swap files, every second step goes through the batches in reverse order, so that it
begins with batches that are still in memory (`offload/swap_slots.py`).

An optimizer that takes only sparse gradients gets the rows for which some rank has a gradient (`TouchedRows`).
Muon needs whole matrices. `MatrixExchange` gathers each of them on one rank, which orthogonalizes it for all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend
from deepspeed.errors import StateError, counted
from deepspeed.ops.optimizer import OnePass, ReferenceOptimizer
from deepspeed.zero.matrix_exchange import MatrixExchange
from deepspeed.zero.placement import Placement
from deepspeed.zero.step_agreement import Scalar
from deepspeed.zero.unit import ParamShard


@dataclass(slots=True)
class UpdateBatch:
    """`UpdateBatch` holds shards that one optimizer call updates, and the units that are complete after it."""

    shards: list[ParamShard]
    finished: list[int]  # unit indices, in the same order on all ranks
    placement: Placement = field(default_factory=Placement)  # of all its shards
    started: list[int] = field(default_factory=list)  # units without a shard in an earlier batch


@dataclass(slots=True)
class _UpdatePass:
    """`_UpdatePass` holds the batches in one order, and the shards of each that are updated."""

    batches: list[UpdateBatch]
    calls: list[list[list[ParamShard]]]  # updated shards, by batch and optimizer group
    updated: list[list[ParamShard]]  # updated shards, by batch


class OptimizerUpdate:
    """`OptimizerUpdate` steps a torch optimizer batch by batch.

    Args:
        used: by parameter, whether any rank has a gradient for it; its owner writes it before each step. A shard
            without gradient is not updated, like a parameter with `grad = None` in torch's optimizers.
        rows: for an optimizer that takes only sparse gradients; else None.
        matrices: for Muon; else None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        batches: list[UpdateBatch],
        used: list[bool],
        rows: "TouchedRows | None" = None,
        matrices: MatrixExchange | None = None,
    ) -> None:
        self._rows = rows
        self._matrices = matrices
        self._optimizer = optimizer
        self._placements = list({id(batch.placement): batch.placement for batch in batches}.values())
        turns = any(placement.fetches for placement in self._placements)
        self._orders = [batches, turned_around(batches)] if turns else [batches]
        self._num_groups = len(optimizer.param_groups)
        self._num_steps = 0
        self._used = used
        self._used_before: list[bool] = []  # in the last step
        self._passes: list[_UpdatePass] = []  # one for each order

    def step(self, scale: Scalar) -> Iterator[UpdateBatch]:
        """Update one batch after the other and yield it when its weights are final.

        Args:
            scale: factor on the gradients; a float for an optimizer with a one-pass kernel.

        While a batch is updated, the optimizer's groups hold only its shards, so that the optimizer does not iterate
        over all shards for each batch.
        """
        groups = self._optimizer.param_groups
        if len(groups) != self._num_groups:
            raise StateError(
                f"optimizer.param_groups: found {counted(len(groups), 'group')}, and the engine has "
                f"{self._num_groups}; leave the list as it is: to train a group no more, set its lr to 0 or its "
                "parameters' requires_grad to False, and to add one call engine.optimizer.add_param_group"
            )
        all_params = [group["params"] for group in groups]
        widened: Tensor | None = None
        if self._used != self._used_before or not self._passes:  # without parameters there is nothing to be used
            self._passes = [self._pass(batches, len(groups)) for batches in self._orders]
            self._used_before = list(self._used)
        the_pass = self._passes[self._num_steps % len(self._passes)]
        self._num_steps += 1
        self._plan(the_pass)
        try:
            takes = self._takes_one_pass(groups, the_pass)
            calls = zip(the_pass.batches, the_pass.calls, the_pass.updated, strict=True)
            for number, (batch, by_group, shards) in enumerate(calls):
                communicates = self._matrices is not None and self._matrices.begin(batch.shards, batch.finished)
                if shards or communicates:
                    placement = batch.placement
                    if shards:
                        placement.fetch(number)
                    for group, its in zip(groups, by_group, strict=True):
                        group["params"] = [shard.master for shard in its]
                    all_copies = placement.copies(shards) if shards else []
                    copies = _divided(all_copies, by_group)
                    if takes[id(placement)]:
                        assert isinstance(scale, float)
                        assert isinstance(self._optimizer, ReferenceOptimizer)
                        self._optimizer.step(one_pass=_one_pass(by_group, copies, scale))
                    else:
                        widened = self._step_widened(by_group, copies, scale, widened)
                    if shards:
                        placement.send(shards, all_copies)
                        placement.store(number)
                yield batch
        finally:
            if self._matrices is not None:
                self._matrices.end()
            for group, params in zip(groups, all_params, strict=True):
                group["params"] = params

    def _takes_one_pass(self, groups: list[dict[str, Any]], the_pass: _UpdatePass) -> dict[int, bool]:
        """Return by placement id whether one pass updates its shards; placements may be in different memory."""
        if len(self._placements) == 1:
            return {id(self._placements[0]): takes_one_pass(self._optimizer)}
        takes = {}
        for placement in self._placements:
            calls = zip(the_pass.batches, the_pass.calls, strict=True)
            own = [by_group for batch, by_group in calls if batch.placement is placement]
            masters = [[shard.master for by_group in own for shard in by_group[index]] for index in range(len(groups))]
            takes[id(placement)] = takes_one_pass_of(self._optimizer, masters)
        return takes

    def _plan(self, the_pass: _UpdatePass) -> None:
        """Pass to each placement that fetches which of its shards are updated, by batch."""
        for placement in self._placements:
            if placement.fetches:
                both = zip(the_pass.batches, the_pass.updated, strict=True)
                updated = [shards if batch.placement is placement else [] for batch, shards in both]
                placement.plan(self._optimizer, updated)

    def _pass(self, batches: list[UpdateBatch], num_groups: int) -> _UpdatePass:
        calls = [self._used_of(batch, num_groups) for batch in batches]
        return _UpdatePass(batches, calls, [[shard for shards in by_group for shard in shards] for by_group in calls])

    def _used_of(self, batch: UpdateBatch, num_groups: int) -> list[list[ParamShard]]:
        """Return the shards of a batch that are updated, by optimizer group."""
        used = [shard for shard in batch.shards if self._used[shard.index]]
        return [[shard for shard in used if shard.param_group == index] for index in range(num_groups)]

    def _step_widened(
        self, by_group: list[list[ParamShard]], copies: list[list[Tensor]], scale: Scalar, widened: Tensor | None
    ) -> Tensor | None:
        """Run the step of any torch optimizer through `.grad`; return the buffer for the next batch."""
        updated = [shard for shards in by_group for shard in shards]
        widened = self._set_gradients(updated, scale, widened)
        homes = [shard.master.data for shard in updated]
        self._optimizer.step()
        for shard, home in zip(updated, homes, strict=True):
            if not shard.master.is_set_to(home):  # the optimizer assigns `p.data = p.data - lr * p.grad`
                home.copy_(shard.master.data)
                shard.master.data = home
        for shards, its_copies in zip(by_group, copies, strict=True):
            for shard in shards:
                shard.master.grad = None
            for copy, shard in zip(its_copies, shards, strict=bool(its_copies)):
                copy.copy_(shard.master)
        return widened

    def _set_gradients(self, shards: list[ParamShard], scale: Scalar, widened: Tensor | None) -> Tensor | None:
        """Set every master's `.grad` to its gradient times `scale`; return the buffer for the next batch."""
        to_widen = [shard for shard in shards if _grad(shard).dtype != shard.master.dtype]
        if to_widen:
            numel = sum(shard.fragment.numel for shard in to_widen)
            if widened is None or widened.numel() < numel or widened.device != to_widen[0].master.device:
                widened = torch.empty(numel, dtype=to_widen[0].master.dtype, device=to_widen[0].master.device)
            start = 0
            for shard in to_widen:
                wide = widened.narrow(0, start, shard.fragment.numel).view(shard.master.shape)
                shard.master.grad = wide.copy_(_grad(shard))
                start += shard.fragment.numel
            multiply(widened[:start], scale)
        for shard in shards:
            grad = _grad(shard)
            if grad.dtype == shard.master.dtype:
                multiply(grad, scale)
                shard.master.grad = grad
            if self._rows is not None and shard.master.grad is not None:
                shard.master.grad = self._rows.pick(shard.index, shard.master.grad)
        return widened


def turned_around(batches: list[UpdateBatch]) -> list[UpdateBatch]:
    """Return the batches in reverse order. All ranks then finish units in the same order, too."""
    return [
        UpdateBatch(batch.shards, batch.started[::-1], batch.placement, batch.finished[::-1])
        for batch in reversed(batches)
    ]


def takes_one_pass(optimizer: Optimizer | None) -> TypeGuard[ReferenceOptimizer]:
    """Return whether one pass reads gradients and writes master and model weights; loads the optimizer's kernel."""
    return isinstance(optimizer, ReferenceOptimizer) and optimizer.takes_one_pass


def takes_one_pass_of(optimizer: Optimizer, params: list[list[Tensor]]) -> bool:
    """Return `takes_one_pass` with `params`, by group, in place of the optimizer's parameters."""
    groups = optimizer.param_groups
    own = [group["params"] for group in groups]
    try:
        for group, its in zip(groups, params, strict=True):
            group["params"] = its
        return takes_one_pass(optimizer)
    finally:
        for group, its in zip(groups, own, strict=True):
            group["params"] = its


def multiply(gradients: Tensor, scale: Scalar) -> None:
    """Multiply contiguous `gradients` in place.

    Low-precision gradients are multiplied in fp32 and rounded once. (A 0-D tensor `scale` would be rounded to their
    dtype first.)
    """
    if isinstance(scale, Tensor):
        gradients.view(-1).mul_(scale.view(1))
    elif scale != 1.0:
        gradients.mul_(scale)


def _divided(copies: list[Tensor], by_group: list[list[ParamShard]]) -> list[list[Tensor]]:
    """Return the copies of all shards by group; each list is empty if there are no copies."""
    rest = iter(copies)
    return [[next(rest) for _ in shards] if copies else [] for shards in by_group]


def _one_pass(by_group: list[list[ParamShard]], copies: list[list[Tensor]], scale: float) -> OnePass:
    for its_copies, shards in zip(copies, by_group, strict=True):
        assert len(its_copies) in (0, len(shards)), "master weights are kept for all parameters of a model or for none"
    grads = [[grad for shard in shards if (grad := shard.grad) is not None] for shards in by_group]
    assert list(map(len, grads)) == list(map(len, by_group)), "a shard that is updated has a gradient"
    return OnePass(grads, copies, scale)


def _grad(shard: ParamShard) -> Tensor:
    assert shard.grad is not None
    return shard.grad


class TouchedRows:
    """`TouchedRows` marks parameter rows with a gradient, for an optimizer that takes only sparse ones (SparseAdam).

    Buckets are dense. Such an optimizer updates exactly the rows that a gradient names, even if their gradient is zero.
    So each rank marks the rows of its sparse gradients, the ranks that hold the parameter sum these marks once per
    step, and the update picks the marked rows out of the dense sum. `Sharding` creates it.

    Args:
        params: the attached parameters.
        ranks: by parameter, the ranks that hold it.
    """

    def __init__(self, params: Sequence[Tensor], ranks: Sequence[GroupBackend]) -> None:
        numels = [len(param) if param.dim() > 0 else 1 for param in params]
        self._by_param: dict[int, Tensor] = {}
        #: by group of ranks: one element per row of its parameters; a row is marked if the element is not 0
        self._marks: dict[GroupBackend, Tensor] = {}
        for group in dict.fromkeys(ranks):
            places = [place for place, each in enumerate(ranks) if each is group]
            counts = [numels[place] for place in places]
            self._marks[group] = group.allocate(sum(counts), torch.float32, params[places[0]].device).zero_()
            self._by_param.update(zip(places, self._marks[group].split(counts), strict=True))

    def add_up(self) -> None:
        """Mark each row that any rank has marked. A collective of each group."""
        for group, marks in self._marks.items():
            group.all_reduce(marks).wait()

    def note(self, index: int, grad: Tensor, name: str) -> None:
        """Mark the rows of a gradient of the parameter `index`, which is called `name`.

        Raises:
            StateError: if the gradient is dense, or sparse in more than its rows.
        """
        if not grad.is_sparse or grad.sparse_dim() != 1:
            kind = (
                "a dense one"
                if not grad.is_sparse
                else f"one that is sparse in {counted(grad.sparse_dim(), 'dimension')}"
            )
            raise StateError(
                f"backward: SparseAdam takes sparse gradients only, and {name} got {kind}; use "
                "torch.nn.Embedding(sparse=True), or an optimizer for dense gradients such as AdamW"
            )
        self._by_param[index][grad._indices()[0]] = 1.0

    def note_all(self, index: int) -> None:
        """Mark all rows of the parameter `index`, because its whole gradient was replaced."""
        self._by_param[index].fill_(1.0)

    def pick(self, index: int, grad: Tensor) -> Tensor:
        """Return the marked rows of `grad`, the whole reduced gradient of the parameter `index`, as a sparse tensor."""
        rows = self._by_param[index].nonzero().flatten().to(grad.device)
        return torch.sparse_coo_tensor(rows[None], grad[rows], grad.shape, is_coalesced=True, check_invariants=False)

    def clear(self) -> None:
        for marks in self._marks.values():
            marks.zero_()
