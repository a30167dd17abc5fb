"""Ulysses: attention over a divided sequence equals that over the whole one; its traffic equals the formula."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm.torch_group import TorchGroup, serve_by
from deepspeed.errors import ConfigError
from deepspeed.sequence import layer
from deepspeed.sequence.exchange import HeadDivision, channel, gather_heads, scatter_heads, sent_bytes
from deepspeed.testing.distributed import run_ranks

TOKENS, BATCH, WIDTH = 12, 2, 4


def attend(q, k, v, sequence_dim, head_dim, flat=False):
    """Causal attention in any layout, with grouped heads; `flat`: heads and width in one dim, as Megatron's core."""
    order = [({0, 1, 2} - {sequence_dim, head_dim}).pop(), head_dim, sequence_dim, 3]
    back = [order.index(dim) for dim in range(4)]
    q, k, v = (each.permute(order) for each in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(back)
    return y.flatten(2) if flat else y


def inputs(num_heads, num_kv_heads, sequence_dim, head_dim):
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads):  # the last one: a gradient
        shape = [BATCH, BATCH, BATCH, WIDTH]
        shape[sequence_dim], shape[head_dim] = TOKENS, heads
        tensors.append(torch.randn(shape, generator=generator))
    return tensors


def part(tensor, dim):
    """This rank's part of a tensor."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def attention_job(num_heads, num_kv_heads, sequence_dim, head_dim, flat):
    """The largest difference from the whole of the context and the gradients, on this rank."""
    *whole, grad = inputs(num_heads, num_kv_heads, sequence_dim, head_dim)
    whole = [tensor.requires_grad_() for tensor in whole]
    expected = attend(*whole, sequence_dim, head_dim)
    expected.backward(grad)
    own = [part(tensor.detach(), sequence_dim).clone().requires_grad_() for tensor in whole]
    attention = layer.DistributedAttention(attend, dist.get_world_group(), head_dim, sequence_dim)
    found = attention(*own, 0, None, sequence_dim, head_dim, flat=flat)
    own_grad = part(grad, sequence_dim)
    found.backward(own_grad.flatten(2) if flat else own_grad)
    assert found.shape == (own_grad.flatten(2) if flat else own_grad).shape
    pairs = [(found, part(expected, sequence_dim).reshape(found.shape))]
    pairs += [(mine.grad, part(theirs.grad, sequence_dim)) for mine, theirs in zip(own, whole, strict=True)]
    return max((found - expected).abs().max().item() for found, expected in pairs)


@pytest.mark.parametrize(
    ("world", "num_heads", "num_kv_heads", "sequence_dim", "head_dim", "flat"),
    [
        (2, 4, 4, 0, 2, True),  # Megatron's layout
        (2, 3, 3, 1, 2, False),  # uneven heads
        (3, 4, 2, 1, 2, False),  # uneven, with KV heads that ranks share
        (3, 6, 2, 2, 1, False),  # the layout of transformers
        (3, 6, 3, 0, 2, True),
        (2, 4, 1, 1, 2, False),  # one KV head for all
    ],
)
def test_attention_of_the_whole_sequence(world, num_heads, num_kv_heads, sequence_dim, head_dim, flat):
    differences = run_ranks(world, attention_job, num_heads, num_kv_heads, sequence_dim, head_dim, flat)
    assert max(differences) < 1e-6


def rotary_job():
    """Rotary embedding inside, where positions are those of the whole sequence."""
    q, k, v, _ = inputs(2, 2, 1, 2)
    angles = torch.outer(torch.arange(TOKENS), torch.tensor([1.0, 0.1])).repeat(1, 2)[:, None]
    rotary = angles.cos(), angles.sin()
    expected = attend(*(layer.apply_rotary_pos_emb(each, *rotary) for each in (q, k)), v, 1, 2)
    attention = layer.DistributedAttention(attend, dist.get_world_group(), 2, 1)
    found = attention(*(part(each, 1) for each in (q, k, v)), 0, rotary, 1, 2)
    return (found - part(expected, 1)).abs().max().item()


def test_rotary_positions_are_those_of_the_whole_sequence():
    assert max(run_ranks(2, rotary_job)) < 1e-6


def single_exchange_job():
    whole = torch.arange(float(TOKENS * 4)).view(TOKENS, 1, 4)
    own = part(whole, 0).clone().requires_grad_()
    group = dist.get_world_group()
    there = layer._SeqAllToAll.apply(group, own, 2, 0, 1)
    assert torch.equal(there, part(whole, 2))
    back = layer._SeqAllToAll.apply(group, there, 0, 2, 1)
    assert torch.equal(back, own)
    there.backward(part(-whole, 2))
    return torch.equal(own.grad, part(-whole, 0))


def test_the_single_exchange_and_its_gradient():
    assert all(run_ranks(2, single_exchange_job))


class Counting(TorchGroup):
    """Counts the bytes that go to other ranks, by tag."""

    def __init__(self, group):
        super().__init__(group)
        self.sent = []

    def all_to_all(self, output_N, input_N, output_numels=None, input_numels=None, *, tag=None):
        numels = input_numels or [input_N.numel() // self.world_size] * self.world_size
        others = sum(numels) - numels[self.rank]
        self.sent.append((tag, others * input_N.element_size()))
        return super().all_to_all(output_N, input_N, output_numels, input_numels, tag=tag)


def traffic_job(num_heads, num_kv_heads, dtype):
    serve_by(Counting)
    *whole, grad = (tensor.to(dtype) for tensor in inputs(num_heads, num_kv_heads, 1, 2))
    own = [part(tensor, 1).clone().requires_grad_() for tensor in whole]
    attention = layer.DistributedAttention(attend, dist.get_world_group(), 2, 1)
    attention(*own, 0, None, 1, 2).backward(part(grad, 1))
    backend = channel(dist.get_world_group())
    heads = HeadDivision(num_heads, num_kv_heads, dist.get_world_size())
    parts = heads.query, heads.key_value, heads.key_value
    said = sent_bytes(own, parts, dist.get_rank(), sequence_dim=1, head_dim=2)
    serve_by(None)
    return [num_bytes for tag, num_bytes in backend.sent if tag == "sequence"], said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_layer_equal_the_formula(dtype):
    """Even heads: four tensors of N * n * d * e bytes in each direction, of which (P - 1) / P**2 leave a rank."""
    world, num_heads = 2, 4
    for sent, said in run_ranks(world, traffic_job, num_heads, num_heads, dtype):
        tensor = BATCH * TOKENS * num_heads * WIDTH * dtype.itemsize * (world - 1) // world**2
        assert sent == [3 * tensor, tensor, tensor, 3 * tensor]  # q, k, v; the context; and their gradients
        assert said == 3 * tensor


def test_bytes_of_uneven_and_shared_heads():
    world, num_heads, num_kv_heads = 3, 4, 2  # query heads 2, 1, 1; KV heads 1, 1, 1 of which the last two are one
    row = BATCH * TOKENS // world * WIDTH * 4  # one head of this rank's tokens
    for rank, (sent, said) in enumerate(run_ranks(world, traffic_job, num_heads, num_kv_heads, torch.float32)):
        own = [2, 1, 1][rank]
        there = row * (num_heads - own + 2 * (3 - 1))
        back = row * own * (world - 1)
        assert said == there
        # the gradient of the context goes as the query came; those of q, k and v as the context went
        assert sent == [there, back, row * (num_heads - own), row * (own + 2) * (world - 1)]


def wrong_job():
    group = dist.get_world_group()
    attention = layer.DistributedAttention(attend, group, 2, 1)
    rank = dist.get_rank()
    messages = []

    def refused(call):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))

    longer = torch.zeros(1, 4 + rank, 2, WIDTH)
    refused(lambda: attention(longer, longer, longer, 0, None, 1, 2))
    one_head = torch.zeros(1, 4, 1, WIDTH)
    refused(lambda: attention(one_head, one_head, one_head, 0, None, 1, 2))
    refused(lambda: attention(torch.zeros(1, 4, 3, WIDTH), longer[:, :4], longer[:, :4], 0, None, 1, 2))
    parts = [(0, 1), (1, 2)]
    odd = torch.zeros(1, 5, 1, WIDTH)
    refused(lambda: gather_heads(channel(group), odd, parts, sequence_dim=1, head_dim=2))
    refused(lambda: layer._SeqAllToAll.apply(group, torch.zeros(4, 1, 3), 2, 0))
    with pytest.raises(ConfigError, match="sequence_process_group: found None; give a process group"):
        layer.DistributedAttention(attend, None)
    refused(lambda: layer.DistributedAttention(lambda q, k, v: q[:, :, 0], group, 2, 1)(*[torch.zeros(1, 4, 4, 3)] * 3))
    fits = torch.zeros(1, 4, 2, WIDTH)
    assert attention(fits, fits, fits, 0, None, 1, 2).shape == fits.shape  # the group still works
    assert scatter_heads(channel(group), (fits,), (parts,), sequence_dim=1, head_dim=2)[0].shape == (1, 8, 1, WIDTH)
    return messages


def test_wrong_uses_are_refused_on_every_rank_and_none_hangs():
    for shapes, heads, groups, tokens, uneven, context in run_ranks(2, wrong_job, timeout_s=60):
        assert "(1, 4, 2, 4) of 4 bytes and (1, 4, 2, 4) of 4 bytes and (1, 4, 2, 4) of 4 bytes on rank 0" in shapes
        assert "(1, 5, 2, 4) of 4 bytes on rank 1" in shapes
        assert "1 attention head for 2 ranks" in heads
        assert "RingAttention" in heads
        assert "3 query heads with 2 key and value heads" in groups
        assert "a sequence of 5 tokens is to be divided among 2 ranks" in tokens
        assert "found 3 in dim 2, which 2 ranks cannot divide" in uneven
        assert "its dim 2 must be a multiple of this rank's 2 heads" in context
