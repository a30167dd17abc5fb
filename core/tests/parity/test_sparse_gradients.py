"""`torch.nn.Embedding(sparse=True)` with `torch.optim.SparseAdam` under every stage, against plain torch on two ranks.

The reference adds the ranks' sparse gradients up by hand; SparseAdam then updates the rows that any rank used, and
leaves the moments of all others alone.
"""

import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from torch import nn

NUM_STEPS, ROWS, WIDTH = 6, 23, 5
every_stage = pytest.mark.parametrize("stage", [0, 1, 2])


class Embeddings(nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.places = nn.EmbeddingBag(7, WIDTH, sparse=sparse)

    def forward(self, tokens_BT):
        return (self.words(tokens_BT).mean(1) + self.places(tokens_BT % 7)).square().sum()


def tokens_of(step, micro):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
    return torch.randint(ROWS, (2, 3), generator=generator)


def create_net():
    torch.manual_seed(5)
    return Embeddings()


def train_plain(num_micro, clip):
    net = create_net()
    optimizer = torch.optim.SparseAdam(list(net.parameters()), lr=1e-2)
    for step in range(NUM_STEPS):
        for micro in range(num_micro):
            (net(tokens_of(step, micro)) / num_micro).backward()
        for param in net.parameters():
            param.grad = summed(param.grad.coalesce()) / dist.get_world_size()
        norm = torch.stack([param.grad.coalesce().values().norm() for param in net.parameters()]).norm()
        for param in net.parameters():
            param.grad = param.grad * min(1.0, clip / (norm.item() + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in net.parameters()], norm.item()


def summed(grad):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (grad.indices(), grad.values()))
    sparse = [torch.sparse_coo_tensor(*part, grad.shape, check_invariants=True) for part in parts]
    return sum(sparse[1:], sparse[0]).coalesce()


def create_engine(stage, net, num_micro=1, clip=0.0, **keys):
    return make_engine(
        net,
        stage,
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=num_micro,
        gradient_clipping=clip,
        optimizer={"type": "SparseAdam", "params": {"lr": 1e-2}},
        zero_allow_untested_optimizer=True,
        sparse_gradients=True,
        **keys,
    )


def train(engine, first, last):
    for step in range(first, last):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(tokens_of(step, micro)))
            engine.step()


def parity_job(stage, num_micro, clip, folder):
    expected, norm = train_plain(num_micro, clip)
    engine = create_engine(stage, create_net(), num_micro, clip)
    assert engine.sparse_tensor_module_names == {"words.weight", "places.weight"}
    train(engine, 0, NUM_STEPS // 2)
    engine.save_checkpoint(folder, tag="half")
    engine.destroy()
    engine = create_engine(stage, create_net(), num_micro, clip)
    engine.load_checkpoint(folder, tag="half")
    train(engine, NUM_STEPS // 2, NUM_STEPS)
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    for found, wanted in zip(engine.module.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=1e-6)
    saved = torch.load(f"{folder}/half/mp_rank_00_model_states.pt", weights_only=True)
    assert saved["sparse_tensor_module_names"] == engine.sparse_tensor_module_names


@pytest.mark.parametrize(("num_micro", "clip"), [(1, 1e9), (2, 0.05)])
@every_stage
def test_sparse_adam_equals_plain_torch(stage, num_micro, clip, tmp_path):
    run_ranks(2, parity_job, stage, num_micro, clip, str(tmp_path))


def dense_job(stage):
    engine = create_engine(stage, Embeddings(sparse=False))
    with pytest.raises(StateError, match=r"SparseAdam takes sparse gradients only, and places\.weight got a dense one"):
        engine.backward(engine(tokens_of(0, 0)))


def test_a_dense_gradient_for_sparse_adam_is_refused():
    run_ranks(2, dense_job, 0)


def bf16_job(stage):
    """fp32 master weights step; rows that no rank used keep their values."""
    net = create_net()
    before = net.words.weight.detach().bfloat16().clone()
    engine = create_engine(stage, net, bf16={"enabled": True})
    tokens = torch.tensor([[1, 2], [3, 3]]) + dist.get_rank()
    engine.backward(engine(tokens).float())
    engine.step()
    changed = (net.words.weight.detach() != before).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2, 3, 4]


@every_stage
def test_in_bf16_the_rows_that_any_rank_used_are_updated(stage):
    run_ranks(2, bf16_job, stage)
