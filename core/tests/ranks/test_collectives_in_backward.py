"""A model that runs a collective of its own in its backward, as experts and SyncBatchNorm do, while ranks leave out
different parameters.

A hook that waited there for a peer's part of a bucket would wait for ever: the peer may be in the model's collective,
which needs this rank.
"""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch.utils.checkpoint import checkpoint

NUM_LAYERS, WIDTH, NUM_STEPS = 9, 24, 3  # many more buckets than may be in flight


class SummedInBackward(torch.autograd.Function):
    """Identity, whose gradient is averaged over the ranks of a group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad / dist.get_world_size(ctx.group), None


class Net(torch.nn.Module):
    """`skipped` layers are left out; before each layer there is a collective in the backward."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.group = None

    def forward(self, x, skipped):
        for number, layer in enumerate(self.layers):
            x = SummedInBackward.apply(x, self.group)
            x = x if number in skipped else torch.tanh(layer(x))
        return x.square().mean()


def skipped_by(rank, step):
    return {(rank * 3 + step + offset) % NUM_LAYERS for offset in range(3)}


def train_job(stage, mesh_param=None):
    """The parameters after the steps; with `mesh_param` the model communicates in its data-parallel group."""
    torch.manual_seed(0)
    net = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": WIDTH * WIDTH + WIDTH},
    }
    engine, *_ = deepspeed.initialize(model=net, config=config, mesh_param=mesh_param)
    net.group = engine.mesh.group("dp") if mesh_param else None
    assert len(engine.sharding.gradients.memory.buckets) == NUM_LAYERS
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        x = torch.randn(2, WIDTH, generator=generator, requires_grad=True)
        engine.backward(engine(x, skipped_by(dist.get_rank(), step)))
        engine.step()
    engine.destroy()
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize(
    ("world_size", "stage", "direct"),
    swept(
        [(world, stage, direct) for world in (2, 3) for stage in (0, 1, 2) for direct in ("1", "0")],
        lambda world, stage, direct: world == 3 and stage == 2,
    ),
)
def test_hooks_wait_for_nobody(world_size, stage, direct):
    ranks = run_ranks(world_size, train_job, stage, timeout_s=60, environment={"DS_COMM_DIRECT": direct})
    for other in ranks[1:]:
        assert all(map(torch.equal, ranks[0], other))


def parts_of_the_world_job(stage):
    """As `train_job` on two data-parallel groups, whose ranks have made different numbers of groups before."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    return train_job(stage, {"dp": 2, "tp": 2})


@pytest.mark.parametrize("stage", swept([0, 1, 2], lambda stage: stage == 2))
def test_so_is_it_in_groups_of_some_ranks(stage):
    ranks = run_ranks(4, parts_of_the_world_job, stage, environment={"DS_COMM_DIRECT": "0"})
    for first, second in ((0, 2), (1, 3)):
        assert all(map(torch.equal, ranks[first], ranks[second]))


class NetWithTwice(torch.nn.Module):
    """The second layer runs twice on rank 0 and not at all on others; a collective precedes it in the forward."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, checkpoints):
        x = SummedInBackward.apply(self.first(x), None)
        for _ in range(2 if dist.get_rank() == 0 else 0):
            x = checkpoint(self.twice, x, use_reentrant=True) if checkpoints else self.twice(x)
        return x.square().mean()


def late_gradient_job(stage):
    """Weights after the steps, without checkpoints and with them: then autograd gives `twice` two gradients, the second
    of them after its bucket was launched on rank 0, and before the model's collective, which rank 1 is in."""
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": WIDTH * WIDTH + WIDTH},
        }
        engine, *_ = deepspeed.initialize(model=NetWithTwice(), config=config)
        for step in range(2 * NUM_STEPS):
            generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
            engine.backward(engine(torch.randn(2, WIDTH, generator=generator, requires_grad=True), checkpoints))
            dist.all_reduce(torch.ones(1))
            engine.step()
        module = engine.module
        engine.destroy()
        found.append([param.detach().clone() for param in module.parameters()])
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_late_gradient_waits_for_nobody(stage):
    for plain, checkpointed in run_ranks(2, late_gradient_job, stage, timeout_s=60):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-6, atol=1e-7)
