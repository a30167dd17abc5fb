"""Cross entropy of logits that are divided over ranks by vocabulary (arXiv 1909.08053, section 3).

With one all-gather of two numbers per token instead of one of all logits. Legend: N tokens, v entries of the vocabulary
on this rank, W ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.tensor_parallel.ranks import TensorRanks


def vocab_parallel_cross_entropy(
    logits_Nv: Tensor,
    targets_N: Tensor,
    ranks: TensorRanks,
    *,
    start: int,
    vocabulary: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Losses [N] in nats, fp32, equal on all ranks; 0 where the target is ignored.

    log(sum over the vocabulary of exp(logit)) - logit of the target. A collective.

    Args:
        logits_Nv: this rank's part, floating point.
        targets_N: tokens of the whole vocabulary, integers, equal on all ranks.
        start: the token of this rank's first logit.
        vocabulary: tokens of all ranks; None: asked of them, in one more collective.
        ignore_index: the target that has no loss.

    Raises:
        IndexError: on the host, for a target outside of the vocabulary; a device stops with an error of its own.
    """
    if vocabulary is None:
        vocabulary = int(ranks.gather(targets_N.new_tensor([logits_Nv.shape[1]])).sum())
    check_tokens(targets_N[targets_N != ignore_index], vocabulary, "cross entropy: found target")
    losses: Tensor = _CrossEntropy.apply(logits_Nv, targets_N, ranks, start, vocabulary, ignore_index)
    return losses


def check_tokens(tokens: Tensor, vocabulary: int, found: str) -> None:
    """Raise `IndexError` for tokens that are in no part of a vocabulary. On a device nothing waits for their values."""
    if tokens.device.type == "cpu" and tokens.numel():
        for token in map(int, tokens.aminmax()):
            if not 0 <= token < vocabulary:
                raise IndexError(f"{found} {token}, and the vocabulary has the tokens 0 to {vocabulary - 1}")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        targets_N: Tensor,
        ranks: TensorRanks,
        start: int,
        vocabulary: int,
        ignore_index: int,
    ) -> Tensor:
        ctx.dtype = logits_Nv.dtype
        logits_Nv = logits_Nv.float()
        own_N = targets_N - start
        is_own_N = (own_N >= 0) & (own_N < logits_Nv.shape[1])
        is_ignored_N = targets_N == ignore_index
        # Targets of no rank stay out of range, where a device refuses them.
        is_known_N = is_ignored_N | ((targets_N >= 0) & (targets_N < vocabulary))
        own_N = own_N.masked_fill(~is_own_N & is_known_N, 0)
        of_target_N = logits_Nv.gather(1, own_N.unsqueeze(1)).squeeze(1).masked_fill(~is_own_N, 0)
        both_W2N = ranks.gather(torch.stack([logits_Nv.logsumexp(1), of_target_N]))
        log_sum_N = both_W2N[:, 0].logsumexp(0)
        ctx.save_for_backward(logits_Nv, log_sum_N, own_N, is_own_N, is_ignored_N)
        return (log_sum_N - both_W2N[:, 1].sum(0)).masked_fill_(is_ignored_N, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """softmax - one-hot of the target, of this rank's part."""
        logits_Nv, log_sum_N, own_N, is_own_N, is_ignored_N = ctx.saved_tensors
        grad_Nv = (logits_Nv - log_sum_N.unsqueeze(1)).exp_()
        grad_Nv.scatter_add_(1, own_N.unsqueeze(1), -is_own_N.to(grad_Nv.dtype).unsqueeze(1))
        grad_Nv.mul_(grads[0].masked_fill(is_ignored_N, 0).unsqueeze(1))
        return grad_Nv.to(ctx.dtype), None, None, None, None, None
