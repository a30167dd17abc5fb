"""Losses of a divided sequence: the mean over all tokens, and cross entropy over a divided vocabulary.

Each rank has the mean loss of its own tokens. Because of prompts and padding (label -100), ranks have different numbers
of tokens that count, so averaging the ranks' means is wrong. `mean_over_sequence` returns the mean over all tokens:

    loss = mean_over_sequence(loss, (shift_labels != -100).sum(), engine.mesh.group("sp"))
    engine.backward(loss)

The ranks of a sequence have the hidden states of their own tokens. The logits can be divided by vocabulary instead:
`vocab_parallel_cross_entropy` takes [T, B, V / P], and no rank has a whole row of logits. DeepSpeed's
`vocab_sequence_parallel_cross_entropy` takes whole rows of this rank's tokens and returns the losses of all tokens.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend
from deepspeed.sequence.exchange import channel, check_layout, fails_with_engine


@fails_with_engine
def mean_over_sequence(loss: torch.Tensor, num_tokens: torch.Tensor | int, group: ProcessGroup) -> torch.Tensor:
    """Return the mean loss per token of the whole sequence, equal on all its ranks. A collective of two numbers.

    The sum over ranks r of `num_tokens_r * loss_r`, divided by the sum of `num_tokens_r`. Its gradient is multiplied by
    the number of ranks, because the engine averages gradients over the ranks of a sequence, as over data.

    Args:
        loss: scalar, the mean over this rank's tokens; any value, even NaN, if the rank has no tokens that count.
        num_tokens: number of this rank's tokens that count in `loss`; 0 on all ranks gives the loss 0.
        group: the ranks that share the sequence; all of them call this.
    """
    return _MeanOverSequence.apply(loss, num_tokens, group)  # type: ignore[no-any-return,no-untyped-call]


class _MeanOverSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, num_tokens: torch.Tensor | int, group: ProcessGroup) -> torch.Tensor:
        backend = channel(group)
        count = torch.as_tensor(num_tokens, dtype=torch.float32, device=loss.device)
        own = torch.where(count > 0, loss.detach().float() * count, torch.zeros_like(count))
        sums_2 = torch.stack((own, count))
        backend.all_reduce(sums_2, tag="sequence loss").wait()
        total = sums_2[1].clamp(min=1)
        ctx.save_for_backward(backend.world_size * count / total)
        return (sums_2[0] / total).to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return (grad * weight).to(grad.dtype), None, None


@fails_with_engine
def vocab_parallel_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, group: ProcessGroup, ignore_index: int = -100
) -> torch.Tensor:
    """Return the cross entropy of each token in nats, from logits divided by vocabulary; equal on all ranks.

    The softmax over ranks r is exp(x - m) / sum_r sum(exp(x_r - m)), with m the maximum over all ranks (Megatron-LM,
    arXiv 1909.08053, section 3). It takes an all-gather and an all-reduce of few numbers per token. Sums are in fp32.
    The gradient of this rank's logits is softmax minus one-hot, times the incoming gradient, which must be equal on all
    ranks.

    Args:
        logits: [..., V / P], rank r has the entries from r * V / P on.
        target: [...], int64, entries of the whole vocabulary or `ignore_index`; equal on all ranks.
        group: the ranks that divide the vocabulary.
        ignore_index: the target of tokens with loss 0.

    Returns:
        [...], fp32.

    Raises:
        ValueError: if the shapes differ between ranks (on every rank), or the target's shape is not the logits' rows.
        IndexError: on the host, for a target outside the vocabulary; a device raises its own error.
    """
    backend = channel(group)
    _check_target(logits, target)
    check_layout(backend, (logits,), "vocab_parallel_cross_entropy")
    _check_in_vocabulary(target[target != ignore_index], logits.shape[-1] * backend.world_size)
    return _VocabParallel.apply(logits, target, backend, ignore_index)  # type: ignore[no-any-return,no-untyped-call]


@fails_with_engine
def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, sp_group: ProcessGroup
) -> torch.Tensor:
    """Return the cross entropy of every token of the sequence in nats, from the rows of this rank's tokens.

    The incoming gradient [T, B] must be equal on all ranks; a rank's logits get the gradient of their own rows.

    Args:
        vocab_parallel_logits: [T / P, B, V], this rank's tokens.
        target: [T / P, B], int64; -100 is ignored, with loss 0.
        sp_group: the ranks that share the sequence.

    Returns:
        [T, B], fp32, in the order of ranks.

    Raises:
        ValueError: if the shapes differ between ranks (on every rank), or the target's shape is not the logits' rows.
    """
    backend = channel(sp_group)
    _check_target(vocab_parallel_logits, target)
    check_layout(backend, (vocab_parallel_logits,), "vocab_sequence_parallel_cross_entropy")
    rows = vocab_parallel_logits.flatten(0, -2).float()
    own = torch.nn.functional.cross_entropy(rows, target.flatten(), reduction="none").view(target.shape)
    return _GatherTokens.apply(own, backend)  # type: ignore[no-any-return,no-untyped-call]


class _GatherTokens(torch.autograd.Function):
    """All-gather along dim 0; backward keeps this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, backend: GroupBackend) -> torch.Tensor:
        ctx.backend, ctx.num_own = backend, own.shape[0]
        whole = backend.allocate(own.numel() * backend.world_size, own.dtype, own.device)
        backend.all_gather(whole, own.detach().contiguous().view(-1), tag="sequence tokens").wait()
        return whole.view(-1, *own.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _OwnTokens.apply(grad, ctx.backend, ctx.num_own), None  # type: ignore[no-untyped-call]


class _OwnTokens(torch.autograd.Function):
    """The backward of `_GatherTokens`."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, backend: GroupBackend, num_own: int) -> torch.Tensor:
        ctx.backend = backend
        return whole.narrow(0, backend.rank * num_own, num_own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _GatherTokens.apply(grad, ctx.backend), None, None  # type: ignore[no-untyped-call]


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, backend: GroupBackend, ignore_index: int
    ) -> torch.Tensor:
        num_own = logits.shape[-1]
        rows = logits.detach().flatten(0, -2).float()
        labels = target.flatten()
        # an all-gather, since the backend has no maximum reduction
        maxima = backend.allocate(rows.shape[0] * backend.world_size, rows.dtype, rows.device)
        backend.all_gather(maxima, rows.max(dim=-1).values, tag="vocabulary maxima").wait()
        shifted = rows - maxima.view(backend.world_size, -1).max(dim=0).values[:, None]
        place = labels - backend.rank * num_own
        counts = labels != ignore_index
        is_own = (place >= 0) & (place < num_own) & counts
        # Targets outside the vocabulary stay out of range, so a device raises its own error.
        is_known = ~counts | ((labels >= 0) & (labels < num_own * backend.world_size))
        place = place.masked_fill(~is_own & is_known, 0)
        chosen = shifted.gather(-1, place[:, None]).squeeze(-1).masked_fill(~is_own, 0.0)
        exponentials = shifted.exp_()
        sums = torch.cat((exponentials.sum(dim=-1), chosen))
        backend.all_reduce(sums, tag="vocabulary sums").wait()
        total, chosen = sums.chunk(2)
        ctx.save_for_backward(exponentials.div_(total[:, None]), place, is_own, counts)
        ctx.dtype = logits.dtype
        return (total.log() - chosen).masked_fill(~counts, 0.0).view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        softmax, place, is_own, counts = ctx.saved_tensors
        rows = softmax.clone()
        rows.scatter_add_(-1, place[:, None], -is_own.to(rows.dtype)[:, None])
        rows.mul_(grad.flatten().masked_fill(~counts, 0.0)[:, None])
        return rows.view(*grad.shape, -1).to(ctx.dtype), None, None, None


def _check_target(logits: torch.Tensor, target: torch.Tensor) -> None:
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross entropy: logits have the shape {tuple(logits.shape)}, target {tuple(target.shape)}; target needs "
            "that of the logits without the last dim"
        )


def _check_in_vocabulary(targets: torch.Tensor, vocabulary: int) -> None:
    """Raise IndexError for a target outside the vocabulary. Skipped on a device, to avoid a synchronization."""
    if targets.device.type == "cpu" and targets.numel():
        for target in map(int, targets.aminmax()):
            if not 0 <= target < vocabulary:
                raise IndexError(
                    f"cross entropy: found target {target}, and the vocabulary has the tokens 0 to {vocabulary - 1}"
                )
