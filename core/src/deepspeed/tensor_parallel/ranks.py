"""`TensorRanks`: the collectives of divided layers, and what they share while one block runs.

[Note: a divided block] A column-parallel layer begins it and a row-parallel one ends it; between them each rank has
other features. Two things hold for a whole block:

- Layers that read the same input (query, key and value) read one copy of it, so that its gradient is summed over the
  ranks once.
- Dropout inside is to differ between ranks, whose heads differ, and dropout outside is to agree. The ranks have the
  same random state outside; inside each has its own, seeded by a number drawn from the common one. So a block that is
  computed again by activation checkpointing, which restores the common state, gets the same numbers.

[Note: whose state] Whether the sequence is divided between blocks (`sequence_norms.py`) belongs to a forward: its
backward sums gradients and computes blocks again accordingly, whatever forwards came in between. So the tensors that a
forward returns, and those of modules whose gradients depend on it, bring its state back when a backward reaches them.

Each of the collectives over parts of a sequence is the backward of another one, so that gradients have gradients.
Shapes: whole [B, T, D], a part [B, T/W, D].
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.backend import serves
from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError
from deepspeed.parallel.running import RunningModel, enter, leave

_NO_BACKWARD = -1
_MARK = "ds_tensor_ranks"


class TensorRanks:
    """The ranks over which the layers of a model are divided.

    Made once per model, by all ranks of the group together; every divided layer has it.

    Args:
        data_group: the ranks that hold the same parts as this one.
    """

    def __init__(self, group: ProcessGroup, data_group: ProcessGroup) -> None:
        self.group, self.data_group = group, data_group
        self.backend = group_backend(group)
        self.backend.connect()
        self.rank, self.world_size = self.backend.rank, self.backend.world_size
        self.has_dropout = False  # set when a model is divided: whether blocks need random states of their own
        #: between the blocks of the current forward, or of the one whose backward runs; see [Note: whose state]
        self.sequence_is_divided = False
        self.in_layers = False  # the current forward is where the sequence is divided
        self._backward = _NO_BACKWARD
        self._block: str | None = None  # that runs now
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._common_state: Tensor | None = None
        self._common_state_of_layer: Tensor | None = None
        self._model = RunningModel(lambda: group, lambda: self.activations_differ, self.end_forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorRanks":
        return self  # a copy of the model is divided over the same ranks

    @property
    def activations_differ(self) -> bool:
        """Whether the ranks have different activations at this place of the current forward."""
        return self._block is not None or (self.in_layers and self.sequence_is_divided)

    def enter(self, x: Tensor, block: str, *, training: bool, is_gathered: bool = False) -> Tensor:
        """The input of a column-parallel layer, whose gradient is summed over the ranks; see [Note: a divided block].

        Args:
            x: any shape, equal on all ranks.
            block: the same for the layers that begin one block.
            is_gathered: the block is inside a layer that has a part of the sequence: its gradient is summed where the
                sequence was gathered, and the random state is this rank's own already.
        """
        if self._block != block:
            # One that did not end was left by an exception: the caller's, or that of activation checkpointing, which
            # computes no further than it needs and restores the random state itself.
            self._copies.clear()
            self._block, self._common_state = block, None
            if training and self.has_dropout and not is_gathered:
                self._common_state = self._use_own_random_state()
        if not torch.is_grad_enabled() or is_gathered:
            return x
        for known, copy in self._copies:
            if known is x:
                return copy
        copy = sum_gradient(x, self)
        self._copies.append((x, copy))
        return copy

    def leave(self) -> None:
        """The block ends: called by its row-parallel layer, where an exception has left it, and around forwards."""
        self._copies.clear()
        self._block = None
        if self._common_state is not None:
            get_accelerator().set_rng_state(self._common_state)
            self._common_state = None

    def enter_layer(self, *, training: bool) -> None:
        """A layer begins. Where it has a part of the sequence, its random numbers are for other tokens on each rank."""
        self.leave_layer()
        self.in_layers = True
        if self.sequence_is_divided and training and self.has_dropout:
            self._common_state_of_layer = self._use_own_random_state()

    def leave_layer(self) -> None:
        """A layer has ended, maybe by an exception."""
        if self._common_state_of_layer is not None:
            get_accelerator().set_rng_state(self._common_state_of_layer)
            self._common_state_of_layer = None

    def begin_forward(self, *, divides_sequence: bool = False) -> None:
        """A forward of the model begins."""
        self.end_forward()
        self.sequence_is_divided = divides_sequence
        enter(self._model)

    def end_forward(self) -> None:
        """A forward of the model has ended, maybe by an exception."""
        self.leave()
        self.leave_layer()
        self.in_layers = False
        leave(self._model)

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """A backward that reaches `outputs` has the state that the forward has now."""
        state = self.sequence_is_divided
        for tensor in outputs:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda _: self._begin_backward(state))

    def _begin_backward(self, is_divided: bool) -> None:
        task: int = torch._C._current_graph_task_id()
        if self._backward == task and is_divided != self.sequence_is_divided:
            raise ConfigError(
                "tensor_parallel.sequence_parallel: one backward goes through a forward in training mode, whose "
                "sequence is divided, and through one in evaluation mode, whose sequence is whole; call backward for "
                "each, or run both in training mode"
            )
        self._backward, self.sequence_is_divided = task, is_divided

    def sum_in_place(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in `values` itself if it is contiguous."""
        values = values.contiguous()
        self.backend.all_reduce(values.view(-1)).wait()
        return values

    def gather(self, values: Tensor) -> Tensor:
        """[W, *shape] from the ranks' tensors of one shape."""
        gathered = values.new_empty((self.world_size, *values.shape))
        self.backend.all_gather(gathered.view(-1), values.contiguous().view(-1)).wait()
        return gathered

    def copy_from_first(self, values: Tensor) -> None:
        """Overwrite `values`, of any device, with those of the group's first rank."""
        device = values.device if serves(self.group, values.device) else get_accelerator().current_device_name()
        flat = values.detach().to(device).contiguous().view(-1)
        self.backend.broadcast(flat, 0).wait()
        if flat.data_ptr() != values.data_ptr():
            values.copy_(flat.view(values.shape))

    def agree_on_random_state(self) -> None:
        """All ranks take the random state of the first, of the host and of the device."""
        host = torch.get_rng_state()
        self.copy_from_first(host)
        torch.set_rng_state(host)
        accelerator = get_accelerator()
        if torch.device(accelerator.current_device_name()).type != "cpu":
            state = accelerator.get_rng_state()
            self.copy_from_first(state)
            accelerator.set_rng_state(state)

    def _use_own_random_state(self) -> Tensor:
        """Returns the common state."""
        seed = int(torch.randint(2**62, (1,), device="cpu"))  # from the common state, which moves on
        accelerator = get_accelerator()
        common = accelerator.get_rng_state()
        accelerator.manual_seed(seed + self.rank)
        return common


def mark_divided(model: nn.Module, ranks: TensorRanks) -> None:
    """Say that the model is divided over `ranks`."""
    object.__setattr__(model, _MARK, ranks)


def ranks_of(model: nn.Module) -> TensorRanks | None:
    """The ranks over which the model is divided; None: it is whole."""
    return getattr(model, _MARK, None)


def divided_modules(model: nn.Module) -> list[tuple[nn.Module, TensorRanks]]:
    """Return the modules that were divided, with their ranks: the model, one inside, as where PEFT has wrapped it, or
    experts."""
    return [(module, ranks) for module in model.modules() if (ranks := ranks_of(module)) is not None]


def ranks_asked_by(model: nn.Module) -> tuple[str, str, int | None]:
    """The size of the axis "tp" that a divided model needs, as `merge_sizes` takes it."""
    ranks = next((ranks for _, ranks in divided_modules(model)), None)
    return "the model, which is divided already", "tp", None if ranks is None else ranks.world_size


def sum_gradient(x: Tensor, ranks: TensorRanks) -> Tensor:
    """`x`, whose gradient is summed over the ranks (f of arXiv 1909.08053, section 3)."""
    result: Tensor = _SumGradient.apply(x, ranks)
    return result


def sum_over(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum of `x` over the ranks, in its memory; the gradient passes as it is (g of arXiv 1909.08053, section 3)."""
    result: Tensor = _Sum.apply(x, ranks)
    return result


def gather_last_dim(x: Tensor, sizes: tuple[int, ...], ranks: TensorRanks) -> Tensor:
    """The ranks' parts of the last dim, side by side: [..., n] -> [..., sum(sizes)].

    The gradient of the whole must be equal on all ranks: each takes its own part.

    Args:
        sizes: of each rank's last dim.
    """
    result: Tensor = _GatherLastDim.apply(x, sizes, ranks)
    return result


@contextmanager
def same_random_numbers(group: ProcessGroup | None) -> Iterator[None]:
    """Inside, the ranks of `group` draw the same random numbers: from their state, if all have the same, else from one
    made of the first rank's, and then from their own again. A collective of `group`; None: one rank, nothing changes.
    """
    if group is None:
        yield
        return
    accelerator = get_accelerator()
    state = accelerator.get_rng_state()
    digests = all_gather_values(hashlib.sha256(bytes(state.tolist())).hexdigest(), group)
    differs = len(set(digests)) > 1
    if differs:
        accelerator.manual_seed(int(digests[0][:15], 16))
    try:
        yield
    finally:
        if differs:
            accelerator.set_rng_state(state)
            torch.rand((), device=accelerator.current_device_name())  # the next numbers are others


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_over(grads[0], ctx.ranks), None  # from a matrix product, so nobody else has it


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        total = ranks.sum_in_place(x)
        if total is x:
            ctx.mark_dirty(x)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return (sum_gradient(grads[0], ctx.ranks) if torch.is_grad_enabled() else grads[0]), None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], ranks: TensorRanks) -> Tensor:
        ctx.sizes, ctx.ranks = sizes, ranks
        padded = torch.nn.functional.pad(x, (0, max(sizes) - x.shape[-1]))
        parts = ranks.gather(padded)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        own: Tensor = _OwnOfLastDim.apply(grads[0], ctx.sizes, ctx.ranks)
        return own, None, None


class _OwnOfLastDim(torch.autograd.Function):
    """The backward of `_GatherLastDim`."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, sizes: tuple[int, ...], ranks: TensorRanks) -> Tensor:
        ctx.sizes, ctx.ranks = sizes, ranks
        return whole.narrow(-1, sum(sizes[: ranks.rank]), sizes[ranks.rank])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gather_last_dim(grads[0], ctx.sizes, ctx.ranks), None, None


def take_part(whole: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's part of what all ranks have; the gradients of the parts are gathered."""
    result: Tensor = _TakePart.apply(whole, ranks)
    return result


def gather_for_all(part: Tensor, ranks: TensorRanks) -> Tensor:
    """The whole, which all ranks use alike: each takes its part of the gradient."""
    result: Tensor = _GatherForAll.apply(part, ranks)
    return result


def gather_for_block(part: Tensor, ranks: TensorRanks) -> Tensor:
    """The whole, of which each rank uses other features: the gradient is summed and scattered."""
    result: Tensor = _GatherForBlock.apply(part, ranks)
    return result


def scatter_sum(whole: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's part of the sum of `whole` over the ranks; the gradients of the parts are gathered."""
    result: Tensor = _ScatterSum.apply(whole, ranks)
    return result


def _part_of(whole: Tensor, ranks: TensorRanks) -> Tensor:
    return whole.chunk(ranks.world_size, dim=1)[ranks.rank].contiguous()


def _gathered(part: Tensor, ranks: TensorRanks) -> Tensor:
    return torch.cat(ranks.gather(part).unbind(0), dim=1)


def _scattered(whole: Tensor, ranks: TensorRanks) -> Tensor:
    parts = torch.stack(whole.chunk(ranks.world_size, dim=1))
    own = torch.empty_like(parts[0])
    ranks.backend.reduce_scatter(own.view(-1), parts.view(-1)).wait()
    return own


class _TakePart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _part_of(whole, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_for_all(grads[0], ctx.ranks), None


class _GatherForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _gathered(part, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return take_part(grads[0], ctx.ranks), None


class _GatherForBlock(_GatherForAll):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return scatter_sum(grads[0], ctx.ranks), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _scattered(whole, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_for_block(grads[0], ctx.ranks), None
