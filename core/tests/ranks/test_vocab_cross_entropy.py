"""Cross entropy over a divided vocabulary, and over divided tokens, beside torch's."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.sequence.loss import vocab_parallel_cross_entropy, vocab_sequence_parallel_cross_entropy
from deepspeed.testing.distributed import run_ranks
from torch.nn.functional import cross_entropy

TOKENS, BATCH, VOCABULARY = 6, 2, 12


def data(dtype):
    generator = torch.Generator().manual_seed(1)
    logits = (30 * torch.randn(TOKENS, BATCH, VOCABULARY, generator=generator)).to(dtype)  # exp(x) alone would overflow
    target = torch.randint(0, VOCABULARY, (TOKENS, BATCH), generator=generator)
    target[1, 0] = -100
    return logits, target, torch.randn(TOKENS, BATCH, generator=generator)


def whole(dtype):
    """Losses and gradient of torch."""
    logits, target, weight = data(dtype)
    logits.requires_grad_()
    losses = cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none").view(TOKENS, BATCH)
    (losses * weight).sum().backward()
    return losses.detach(), logits.grad


def loss_job(dim, dtype):
    """Losses and the gradient of this rank's part, of the vocabulary (dim 2) or of the tokens (dim 0)."""
    logits, target, weight = data(dtype)
    rank, size = dist.get_rank(), dist.get_world_size()
    own = logits.chunk(size, dim)[rank].clone().requires_grad_()
    if dim == 2:
        losses = vocab_parallel_cross_entropy(own, target, dist.get_world_group())
    else:
        losses = vocab_sequence_parallel_cross_entropy(own, target.chunk(size)[rank], dist.get_world_group())
    (losses * weight).sum().backward()
    return losses.detach(), own.grad


@pytest.mark.parametrize(
    ("world", "dim", "dtype"),
    [(2, 2, torch.float32), (3, 2, torch.bfloat16), (3, 0, torch.float32), (2, 0, torch.bfloat16)],
)
def test_losses_and_gradients_of_the_whole(world, dim, dtype):
    expected, grad = whole(dtype)
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 2e-2}
    for rank, (losses, own) in enumerate(run_ranks(world, loss_job, dim, dtype)):
        assert torch.allclose(losses, expected, rtol=1e-6, atol=1e-5)
        assert own.dtype == dtype
        assert torch.allclose(own, grad.chunk(world, dim)[rank], **tolerance)


def outside_job():
    group = dist.get_world_group()
    logits = torch.zeros(2, 4)
    for target in (8, -1, -101):
        with pytest.raises(IndexError, match=f"found target {target}, and the vocabulary has the tokens 0 to 7"):
            vocab_parallel_cross_entropy(logits, torch.tensor([0, target]), group)
    return vocab_parallel_cross_entropy(logits, torch.tensor([7, -100]), group).tolist()


def test_targets_outside_of_the_vocabulary_are_refused():
    for one, ignored in run_ranks(2, outside_job):
        assert one == pytest.approx(2.0794415)
        assert ignored == 0


def refused_job():
    group = dist.get_world_group()
    target = torch.zeros(3, dtype=torch.int64)
    messages = []
    for width in (4, 4 + dist.get_rank()):
        with pytest.raises(ValueError) as caught:
            vocab_parallel_cross_entropy(torch.zeros(3 if width > 4 or messages else 2, width), target, group)
        messages.append(str(caught.value))
    return messages


def test_wrong_shapes_are_refused_on_every_rank():
    for target, widths in run_ranks(2, refused_job):
        assert "logits have the shape (2, 4), target (3,)" in target
        assert "(3, 4) of 4 bytes on rank 0, (3, 5) of 4 bytes on rank 1" in widths
