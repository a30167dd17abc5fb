"""Ring attention beside torch's over the whole sequence, with fewer heads than ranks; bytes equal the formula."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm.torch_group import TorchGroup, serve_by
from deepspeed.sequence import ring
from deepspeed.sequence.blockwise import ChunkedAttention, forward_block
from deepspeed.sequence.exchange import channel
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.sequence.ring import RingAttention, zigzag_part
from deepspeed.testing.distributed import run_ranks
from torch.nn.functional import scaled_dot_product_attention

BATCH, TOKENS, WIDTH = 2, 12, 8


class Counting(TorchGroup):
    """Counts the bytes that go to other ranks around the ring."""

    def __init__(self, group):
        super().__init__(group)
        self.sent = 0

    def all_to_all(self, output_N, input_N, output_numels=None, input_numels=None, *, tag=None):
        if tag == "ring":
            self.sent += (sum(input_numels) - input_numels[self.rank]) * input_N.element_size()
        return super().all_to_all(output_N, input_N, output_numels, input_numels, tag=tag)


def inputs(num_heads, num_kv, dtype):
    generator = torch.Generator().manual_seed(2)
    shapes = [(BATCH, heads, TOKENS, WIDTH) for heads in (num_heads, num_kv, num_kv, num_heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def part(tensor, zigzag):
    """This rank's tokens of [B, H, T, K]."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return zigzag_part(tensor, rank, size, dim=2) if zigzag else tensor.chunk(size, 2)[rank]


def ring_job(num_heads, num_kv, causal, dtype, zigzag):
    """Largest differences from the whole, and bytes sent in the forward and in all."""
    serve_by(Counting)
    *whole, grad = inputs(num_heads, num_kv, dtype)
    exact = [each.float().requires_grad_() for each in whole]
    expected = scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=True)
    expected.backward(grad.float())
    own = [part(each.detach(), zigzag).clone().requires_grad_() for each in whole]
    found = RingAttention(dist.get_world_group(), causal=causal, zigzag=zigzag)(*own)
    backend = channel(dist.get_world_group())
    in_forward = backend.sent
    found.backward(part(grad, zigzag))
    pairs = [(found, expected), *[(mine.grad, theirs.grad) for mine, theirs in zip(own, exact, strict=True)]]
    sent = in_forward, backend.sent
    serve_by(None)
    assert found.dtype == dtype
    return max((mine.float() - part(theirs, zigzag)).abs().max().item() for mine, theirs in pairs), sent


@pytest.mark.parametrize(
    ("world", "num_heads", "num_kv", "causal", "dtype", "zigzag"),
    [
        (3, 1, 1, True, torch.float32, False),
        (2, 4, 2, False, torch.float32, False),
        (3, 2, 1, True, torch.bfloat16, False),
        (3, 2, 1, True, torch.float32, True),
        (2, 4, 2, False, torch.float32, True),
    ],
)
def test_attention_of_the_whole_sequence(world, num_heads, num_kv, causal, dtype, zigzag):
    for difference, (forward, total) in run_ranks(world, ring_job, num_heads, num_kv, causal, dtype, zigzag):
        assert difference < (1e-5 if dtype == torch.float32 else 3e-2)
        numel = 2 * BATCH * TOKENS // world * num_kv * WIDTH
        assert forward == (world - 1) * numel * dtype.itemsize
        assert total - forward == (world - 1) * numel * dtype.itemsize + world * numel * 4


def scores_job(zigzag):
    """Scores that this rank computes, of one head."""
    counted = []

    def count(q, k, *others):
        counted.append(q.shape[2] * k.shape[2])
        return forward_block(q, k, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "forward_block", count)
        own = [torch.zeros(1, 1, 8, 2)] * 3
        RingAttention(dist.get_world_group(), zigzag=zigzag)(*own)
    return sum(counted)


def test_a_zigzag_divides_the_scores_evenly():
    assert run_ranks(3, scores_job, False) == [64, 128, 192]
    assert run_ranks(3, scores_job, True) == [128, 128, 128]


def chunked_job():
    """Ulysses with a local attention in chunks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    *whole, grad = (each.transpose(1, 2) for each in inputs(4, 2, torch.float32))
    whole = [each.clone().requires_grad_() for each in whole]
    expected = scaled_dot_product_attention(*(each.transpose(1, 2) for each in whole), is_causal=True, enable_gqa=True)
    expected.transpose(1, 2).backward(grad)
    own = [each.detach().chunk(size, 1)[rank].clone().requires_grad_() for each in whole]
    DistributedAttention(ChunkedAttention(5), dist.get_world_group(), 2, 1)(*own).backward(grad.chunk(size, 1)[rank])
    return max(
        (mine.grad - theirs.grad.chunk(size, 1)[rank]).abs().max().item()
        for mine, theirs in zip(own, whole, strict=True)
    )


def test_ulysses_over_chunks():
    assert max(run_ranks(2, chunked_job)) < 1e-5


def odd_job():
    with pytest.raises(ValueError, match=r"found 3 tokens per rank with zigzag=True, .* pad the sequence to a"):
        RingAttention(dist.get_world_group(), zigzag=True)(*[torch.zeros(1, 1, 3, 2)] * 3)
    with pytest.raises(ValueError, match=r"zigzag_part: found 6 tokens for 2 ranks; pad them to a multiple of 4"):
        zigzag_part(torch.zeros(1, 6), dist.get_rank(), 2, dim=1)


def test_a_zigzag_needs_two_chunks_per_rank():
    run_ranks(2, odd_job)


def refused_job():
    attention = RingAttention(dist.get_world_group())
    messages = []
    for length, heads in ((4, 3), (4 + dist.get_rank(), 4)):
        with pytest.raises(ValueError) as caught:
            attention(torch.zeros(1, heads, length, 2), *[torch.zeros(1, 2, length, 2)] * 2)
        messages.append(str(caught.value))
    return messages


def test_wrong_shapes_are_refused_on_every_rank():
    for heads, shapes in run_ranks(2, refused_job):
        assert "found query (1, 3, 4, 2), key (1, 2, 4, 2)" in heads
        assert "RingAttention: the ranks of one sequence brought different shapes" in shapes
