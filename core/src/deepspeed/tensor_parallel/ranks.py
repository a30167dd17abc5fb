"""`TensorRanks` has the collectives of divided layers, and the state that these layers share while a block runs.

[Note: a divided block] A column-parallel layer begins a block and a row-parallel layer ends it; in between, each rank
has different features. Two things hold for a whole block:

- Layers that read the same input (query, key and value) read one copy of it, so its gradient is summed over the ranks
  once.
- Dropout inside a block must differ between ranks, since their heads differ; dropout outside must agree. Outside, the
  ranks have the same random state. Inside, each rank has its own, seeded by a number drawn from the common state. So if
  activation checkpointing restores the common state and recomputes the block, the block gets the same numbers.

[Note: whose state] Each forward decides whether the sequence is divided between blocks (`sequence_norms.py`). Its
backward must sum gradients and recompute blocks accordingly, whatever forwards came in between. So hooks on the outputs
of a forward, and of modules with gradients that depend on this state, restore the state when a backward reaches them.

Each collective over parts of a sequence is the backward of another one, so second-order gradients work.
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
    """`TensorRanks` represents the ranks over which the layers of a model are divided.

    All ranks of the group create it together, once per model; every divided layer refers to it.

    Args:
        data_group: the ranks that hold the same parts as this rank.
    """

    def __init__(self, group: ProcessGroup, data_group: ProcessGroup) -> None:
        self.group, self.data_group = group, data_group
        self.backend = group_backend(group)
        self.backend.connect()
        self.rank, self.world_size = self.backend.rank, self.backend.world_size
        self.has_dropout = False  # set when a model is divided: whether blocks need their own random states
        #: whether the current forward, or the forward of the current backward, divides it; see [Note: whose state]
        self.sequence_is_divided = False
        self.in_layers = False  # the current forward is in the layers that divide the sequence
        self.num_tokens = 0  # the whole sequence of the last forward that divided it
        self._backward = _NO_BACKWARD
        self._block: str | None = None  # the block that runs now
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
        """Return the input of a column-parallel layer, with its gradient summed; see [Note: a divided block].

        Args:
            x: any shape, equal on all ranks.
            block: the name of the block, equal for all layers that begin it.
            is_gathered: the sequence was gathered for this block. The gather sums the gradient, and the random state is
                already this rank's own.
        """
        if self._block != block:
            # An exception left a block that did not end: the user's, or the exception with which activation
            # checkpointing stops a recomputation early; checkpointing restores the random state itself.
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
        """End the block. Called by its row-parallel layer, after an exception, and at the begin and end of forwards."""
        self._copies.clear()
        self._block = None
        if self._common_state is not None:
            get_accelerator().set_rng_state(self._common_state)
            self._common_state = None

    def enter_layer(self, *, training: bool) -> None:
        """Begin a layer. If the sequence is divided, ranks have different tokens and use their own random state."""
        self.leave_layer()
        self.in_layers = True
        if self.sequence_is_divided and training and self.has_dropout:
            self._common_state_of_layer = self._use_own_random_state()

    def leave_layer(self) -> None:
        """End a layer, also after an exception."""
        if self._common_state_of_layer is not None:
            get_accelerator().set_rng_state(self._common_state_of_layer)
            self._common_state_of_layer = None

    def begin_forward(self, *, divides_sequence: bool = False) -> None:
        """Begin a forward of the model."""
        self.end_forward()
        self.sequence_is_divided = divides_sequence
        enter(self._model)

    def end_forward(self) -> None:
        """End a forward of the model, also after an exception."""
        self.leave()
        self.leave_layer()
        self.in_layers = False
        leave(self._model)

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Restore the current state of `sequence_is_divided` when a backward reaches `outputs`."""
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
        """All-gather tensors of one shape to [W, *shape]."""
        gathered = values.new_empty((self.world_size, *values.shape))
        self.backend.all_gather(gathered.view(-1), values.contiguous().view(-1)).wait()
        return gathered

    def copy_from_first(self, values: Tensor) -> None:
        """Overwrite `values`, on any device, with the values of the group's first rank."""
        device = values.device if serves(self.group, values.device) else get_accelerator().current_device_name()
        flat = values.detach().to(device).contiguous().view(-1)
        self.backend.broadcast(flat, 0).wait()
        if flat.data_ptr() != values.data_ptr():
            values.copy_(flat.view(values.shape))

    def agree_on_random_state(self) -> None:
        """Set the random state of host and device on all ranks to the first rank's."""
        host = torch.get_rng_state()
        self.copy_from_first(host)
        torch.set_rng_state(host)
        accelerator = get_accelerator()
        if torch.device(accelerator.current_device_name()).type != "cpu":
            state = accelerator.get_rng_state()
            self.copy_from_first(state)
            accelerator.set_rng_state(state)

    def _use_own_random_state(self) -> Tensor:
        """Switch the accelerator to this rank's own random state. Returns the common state."""
        seed = int(torch.randint(2**62, (1,), device="cpu"))  # drawn from the host's common state, which advances
        accelerator = get_accelerator()
        common = accelerator.get_rng_state()
        accelerator.manual_seed(seed + self.rank)
        return common


def mark_divided(model: nn.Module, ranks: TensorRanks) -> None:
    """Mark the model as divided over `ranks`."""
    object.__setattr__(model, _MARK, ranks)


def ranks_of(model: nn.Module) -> TensorRanks | None:
    """Return the ranks over which the model is divided; None if it is whole."""
    return getattr(model, _MARK, None)


def divided_modules(model: nn.Module) -> list[tuple[nn.Module, TensorRanks]]:
    """Return the divided modules with their ranks: the model itself, a module inside (for example if PEFT wraps the
    model), or experts."""
    return [(module, ranks) for module in model.modules() if (ranks := ranks_of(module)) is not None]


def ranks_asked_by(model: nn.Module) -> tuple[str, str, int | None]:
    """Return the size of the axis "tp" that a divided model needs, in the form that `merge_sizes` takes."""
    ranks = next((ranks for _, ranks in divided_modules(model)), None)
    return "the model, which is divided already", "tp", None if ranks is None else ranks.world_size


def sum_gradient(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Return `x`; backward sums its gradient over the ranks (f of arXiv 1909.08053, section 3)."""
    result: Tensor = _SumGradient.apply(x, ranks)
    return result


def sum_over(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Sum `x` over the ranks, in place; the gradient passes unchanged (g of arXiv 1909.08053, section 3)."""
    result: Tensor = _Sum.apply(x, ranks)
    return result


def gather_last_dim(x: Tensor, sizes: tuple[int, ...], ranks: TensorRanks) -> Tensor:
    """Gather the ranks' parts of the last dim: [..., n] -> [..., sum(sizes)].

    The gradient of the whole must be equal on all ranks; backward keeps this rank's part.

    Args:
        sizes: the size of each rank's last dim.
    """
    result: Tensor = _GatherLastDim.apply(x, sizes, ranks)
    return result


@contextmanager
def same_random_numbers(group: ProcessGroup | None) -> Iterator[None]:
    """Make the ranks of `group` draw the same random numbers inside. If their random states differ, they use a state
    derived from the first rank's, and restore their own at the end. A collective of `group`; None: does nothing.
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
            torch.rand((), device=accelerator.current_device_name())  # advance the state, for different numbers next


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_over(grads[0], ctx.ranks), None  # in place: a matrix product made it, and no other code holds it


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
    """Return this rank's part of a sequence that all ranks have; backward gathers the gradient."""
    result: Tensor = _TakePart.apply(whole, ranks)
    return result


def gather_for_all(part: Tensor, ranks: TensorRanks) -> Tensor:
    """Gather the whole sequence, which all ranks use in the same way; backward takes this rank's part."""
    result: Tensor = _GatherForAll.apply(part, ranks)
    return result


def gather_for_block(part: Tensor, ranks: TensorRanks) -> Tensor:
    """Gather the whole sequence, for a block in which ranks have different features; backward reduce-scatters."""
    result: Tensor = _GatherForBlock.apply(part, ranks)
    return result


def scatter_sum(whole: Tensor, ranks: TensorRanks) -> Tensor:
    """Reduce-scatter `whole` over the sequence; backward gathers the gradient."""
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
