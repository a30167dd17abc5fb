"""The loss of a sequence from the losses of its parts.

Each rank has the mean loss of its own tokens. Prompts and padding (label -100) leave ranks with different numbers of
tokens that count, so the mean of the ranks' means is not the mean over the tokens. `mean_over_sequence` is:

    loss = mean_over_sequence(loss, (shift_labels != -100).sum(), engine.mesh.group("sp"))
    engine.backward(loss)
"""

from typing import Any

import torch
from torch.distributed import ProcessGroup

from deepspeed.sequence.channel import channel, fails_with_engine


@fails_with_engine
def mean_over_sequence(loss: torch.Tensor, num_tokens: torch.Tensor | int, group: ProcessGroup) -> torch.Tensor:
    """The mean loss per token of the whole sequence, the same on each of its ranks. A collective of two numbers.

    The sum over ranks r of `num_tokens_r * loss_r`, over that of `num_tokens_r`. Its gradient reaches `loss` times the
    number of ranks, because the engine averages gradients over the ranks of a sequence, as over data.

    Args:
        loss: scalar, the mean over this rank's tokens; anything, NaN too, where it has none.
        num_tokens: of this rank, that count in `loss`; 0 on all ranks gives the loss 0.
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
