"""Attention in chunks beside torch's."""

import pytest
import torch
from deepspeed.sequence.blockwise import ChunkedAttention
from torch.nn.functional import scaled_dot_product_attention


@pytest.mark.parametrize(
    ("chunk_size", "causal", "num_kv", "dims", "dtype"),
    [
        (4, True, 4, (1, 2), torch.float32),
        (5, False, 2, (2, 1), torch.float32),
        (11, True, 1, (0, 2), torch.float32),
        (3, True, 2, (1, 2), torch.bfloat16),
    ],
)
def test_context_and_gradients_of_whole_attention(chunk_size, causal, num_kv, dims, dtype):
    torch.manual_seed(0)
    sequence_dim, head_dim = dims
    order = [({0, 1, 2} - set(dims)).pop(), head_dim, sequence_dim, 3]
    back = [order.index(dim) for dim in range(4)]
    whole = [torch.randn(2, heads, 11, 8, dtype=dtype).requires_grad_() for heads in (4, num_kv, num_kv)]
    grad = torch.randn(2, 4, 11, 8, dtype=dtype)
    exact = [each.detach().float().requires_grad_() for each in whole]
    expected = scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=True)
    expected.backward(grad.float())
    attention = ChunkedAttention(chunk_size, causal, sequence_dim=sequence_dim, head_dim=head_dim)
    found = attention(*(each.permute(back) for each in whole)).permute(order)
    found.backward(grad)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert found.dtype == dtype
    assert torch.allclose(found.float(), expected, atol=tolerance)
    for mine, theirs in zip(whole, exact, strict=True):
        assert torch.allclose(mine.grad.float(), theirs.grad, atol=tolerance)


def test_no_block_is_larger_than_a_chunk(monkeypatch):
    from deepspeed.sequence import blockwise

    shapes = []
    forward = blockwise.forward_block
    monkeypatch.setattr(
        blockwise, "forward_block", lambda q, k, *rest: shapes.append((q.shape[2], k.shape[2])) or forward(q, k, *rest)
    )
    q = torch.randn(1, 10, 1, 4)
    ChunkedAttention(4)(q, q, q)
    assert shapes == [(4, 4), (4, 4), (4, 4), (2, 4), (2, 4), (2, 2)]  # and none above the diagonal


def test_a_chunk_has_a_token():
    with pytest.raises(ValueError, match="chunk_size is 0"):
        ChunkedAttention(0)


@pytest.mark.parametrize("which", range(3))
def test_an_input_changed_in_place_is_refused(which):
    inputs = [torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3)]
    copies = [each.clone() for each in inputs]
    context = ChunkedAttention(4)(*copies)
    with torch.no_grad():
        copies[which].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        context.sum().backward()


def test_a_context_may_be_changed_in_place():
    q = torch.randn(1, 8, 2, 4, requires_grad=True)
    grads = []
    for changes in (False, True):
        context = ChunkedAttention(4)(q, q, q)
        (context.mul_(2) if changes else context * 2).sum().backward()
        grads.append(q.grad)
        q.grad = None
    assert torch.equal(*grads)
