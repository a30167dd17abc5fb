"""Gradients of gradients through the collectives of a divided model, as penalties of gradients and forces have them.

A gradient that autograd does not see makes a second one that lacks its part, without an error.
"""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm.torch_group import group_backend
from deepspeed.moe.dispatch import _Drop, _Gather, send_rows
from deepspeed.sequence.blockwise import ChunkedAttention
from deepspeed.sequence.exchange import gather_heads, scatter_heads
from deepspeed.sequence.loss import _GatherTokens, vocab_parallel_cross_entropy
from deepspeed.sequence.ring import RingAttention
from deepspeed.tensor_parallel.ranks import (
    TensorRanks,
    gather_for_all,
    gather_for_block,
    gather_last_dim,
    scatter_sum,
    sum_gradient,
    sum_over,
    take_part,
)
from deepspeed.testing.distributed import run_ranks

WORLD = 2


def penalized(net, x_BTD, weights):
    """The gradients of a penalty of the gradient of the inputs."""
    x_BTD = x_BTD.clone().requires_grad_()
    weights = [weight.clone().requires_grad_() for weight in weights]
    (grad,) = torch.autograd.grad(net(x_BTD, *weights).pow(3).sum(), x_BTD, create_graph=True)
    return [x_BTD, *weights], grad.pow(2).sum()


def tensors(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def features_job(divides_sequence):
    """A block of a column-parallel and a row-parallel product, and a divided output layer whose parts are gathered."""
    x, first, second, last = tensors((2, 4, 6), (6, 8), (8, 6), (6, 4))
    ranks = TensorRanks(torch.distributed.group.WORLD, torch.distributed.new_group([dist.get_rank()]))

    def whole(x, first, second, last):
        return (torch.tanh(torch.tanh(x @ first) @ second) + x) @ last

    def divided(x, first, second, last):
        if divides_sequence:
            part = take_part(x, ranks)
            hidden = torch.tanh(gather_for_block(part, ranks) @ first)
            y = gather_for_all(torch.tanh(scatter_sum(hidden @ second, ranks)) + part, ranks)
        else:
            y = torch.tanh(sum_over(torch.tanh(sum_gradient(x, ranks) @ first) @ second, ranks)) + x
        return gather_last_dim(sum_gradient(y, ranks) @ last, (2, 2), ranks)

    leaves, penalty = penalized(whole, x, [first, second, last])
    wanted = torch.autograd.grad(penalty, leaves)
    own = slice(4 * ranks.rank, 4 * ranks.rank + 4), slice(2 * ranks.rank, 2 * ranks.rank + 2)
    leaves, penalty = penalized(divided, x, [first[:, own[0]], second[own[0]], last[:, own[1]]])
    found = torch.autograd.grad(penalty, leaves)
    wanted = [wanted[0], wanted[1][:, own[0]], wanted[2][own[0]], wanted[3][:, own[1]]]
    return [torch.allclose(*pair) for pair in zip(found, wanted, strict=True)]


def sequence_job():
    """Heads and sequence change places and back; two query heads share the keys, whose gradients are added."""
    rank, backend = dist.get_rank(), group_backend(torch.distributed.group.WORLD)
    backend.connect()
    q, k = tensors((2, 4, 2, 3), (2, 4, 1, 3))
    heads, shared = ((0, 1), (1, 2)), ((0, 1), (0, 1))

    def whole(q, k):
        return torch.einsum("bthd,bsgd->bthd", torch.tanh(q), k.sin())

    def divided(q, k):
        q, k = scatter_heads(backend, (q, k), (heads, shared), sequence_dim=1, head_dim=2)
        return gather_heads(backend, whole(q, k), heads, sequence_dim=1, head_dim=2)

    leaves, penalty = penalized(whole, q, [k])
    wanted = torch.autograd.grad(penalty, leaves)
    own = slice(2 * rank, 2 * rank + 2)
    leaves, penalty = penalized(divided, q[:, own], [k[:, own]])
    found = torch.autograd.grad(penalty, leaves)
    return [torch.allclose(a, b[:, own]) for a, b in zip(found, wanted, strict=True)]


def tokens_job(kind):
    """Tokens that tensor-parallel ranks divide and join, or that travel between ranks."""
    rank, backend = dist.get_rank(), group_backend(torch.distributed.group.WORLD)
    backend.connect()
    x, weight = tensors((4, 3), (3, 3))
    own = slice(2 * rank, 2 * rank + 2)

    def whole(x, weight):
        return torch.tanh(x @ weight)

    def divided(x, weight):
        if kind == "tensor_ranks":
            return _Gather.apply(torch.tanh(_Drop.apply(x, 0, backend) @ weight), 0, backend)
        if kind == "losses":
            return _GatherTokens.apply(torch.tanh(x @ weight), backend)
        return send_rows(torch.tanh(send_rows(x, [1, 1], [1, 1], backend) @ weight), [1, 1], [1, 1], backend)

    leaves, penalty = penalized(whole, x, [weight])
    (wanted,) = torch.autograd.grad(penalty, leaves[:1])
    leaves, penalty = penalized(divided, x if kind == "tensor_ranks" else x[own], [weight])
    (found,) = torch.autograd.grad(penalty, leaves[:1])
    return [torch.allclose(found, wanted if kind == "tensor_ranks" else wanted[own])]


def refused_job(kind):
    group = torch.distributed.group.WORLD
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    y = {
        "chunked": lambda: ChunkedAttention(2)(q, q, q),
        "ring": lambda: RingAttention(group)(q, q, q),
        "vocabulary": lambda: vocab_parallel_cross_entropy(q, torch.zeros(1, 4, 2, dtype=torch.long), group),
    }[kind]()
    (grad,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()
    return []


@pytest.mark.parametrize(
    ("job", "args"),
    [
        (features_job, (False,)),
        (features_job, (True,)),
        (sequence_job, ()),
        (tokens_job, ("tensor_ranks",)),
        (tokens_job, ("losses",)),
        (tokens_job, ("experts",)),
        (refused_job, ("chunked",)),
        (refused_job, ("ring",)),
        (refused_job, ("vocabulary",)),
    ],
)
def test_gradients_of_gradients(job, args):
    assert [all(each) for each in run_ranks(WORLD, job, *args)] == [True] * WORLD
