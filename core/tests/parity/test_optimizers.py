"""Optimizers other than the config's AdamW: stages 1 and 2 against stage 0, and stage 0 against plain torch."""

from itertools import product

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import nn

STAGES = (0, 1, 2)
NUM_STEPS = 8

CLIENTS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "AdamW, amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "Adam, foreach": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
}
NAMED = {
    "Lamb": {"lr": 1e-2},
    "Muon": {"lr": 1e-2, "momentum": 0.9},
    "Lion": {"lr": 1e-3},
    "Adagrad": {"lr": 1e-2},
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}


def create_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def loss_of(net, step):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return (net(torch.randn(4, 5, generator=generator)) - 1.0).square().mean()


def train_plain(create):
    net = create_net()
    optimizer = create(net.parameters())
    for step in range(NUM_STEPS):
        loss_of(net, step).backward()
        for param in net.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return copies(net)


def train_engine(stage, optimizer=None, name=None, **zero):
    """`optimizer`: a callable, given as it is or as what it makes; `name`: of the config; `zero`: of its section
    zero_optimization."""
    net = create_net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 40, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0,
    }
    if name:
        config["optimizer"] = {"type": name, "params": NAMED[name]}
    engine, face, *_ = deepspeed.initialize(model=net, optimizer=optimizer and optimizer(net), config=config)
    for step in range(NUM_STEPS):
        engine.backward(loss_of(engine, step))
        engine.step()
    assert isinstance(face, torch.optim.Optimizer)
    return copies(net)


def copies(net):
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        return [param.detach().clone() for param in net.parameters()]


def assert_close(found, expected, tolerance):
    """max |a - b| / max |b| of each tensor."""
    for one, other in zip(found, expected, strict=True):
        difference = (one - other).abs().max() / other.abs().max()
        assert difference <= tolerance, difference.item()


def client_job(name, as_callable):
    create = CLIENTS[name]
    expected = train_plain(create)
    for stage in STAGES:
        weights = train_engine(stage, (lambda net: create) if as_callable else (lambda net: create(net.parameters())))
        assert_close(weights, expected, 1e-5)


@pytest.mark.parametrize(
    ("name", "as_callable"), swept(product(CLIENTS, (False, True)), lambda name, by_call: by_call is (name == "AdamW"))
)
def test_the_clients_optimizer(name, as_callable):
    run_ranks(2, client_job, name, as_callable)


def named_job(name):
    start = copies(create_net())
    results = [train_engine(stage, name=name) for stage in ((*STAGES, 3) if name == "Muon" else STAGES)]
    assert not any(map(torch.equal, results[0], start))
    for weights in results[1:]:
        assert_close(weights, results[0], 1e-6)


@pytest.mark.parametrize("world_size", swept([2, 3], lambda world: world == 3))
@pytest.mark.parametrize("name", NAMED)
def test_by_name_every_stage_is_the_same(name, world_size):
    run_ranks(world_size, named_job, name)


# ---- the norm and clipping ----------------------------------------------------------------------------------------

CLIP = 0.05
KEYS = {"gradient_clipping": CLIP}
IN_BF16 = {**KEYS, "bf16": {"enabled": True, "check_grad_overflow": False}}


def create_poisoned_net(value):
    """On rank 1 one bias gets a gradient of `value` in the last step; None: never."""
    net, count = create_net(), iter(range(NUM_STEPS))

    def poison(grad):
        is_last = next(count) == NUM_STEPS - 1
        return torch.full_like(grad, value) if is_last and value is not None and dist.get_rank() == 1 else grad

    net[2].bias.register_hook(poison)
    return net


def train_plain_clipped(value):
    """Weights of plain torch, and norms, which `clip_grad_norm_` takes in fp64."""
    net = create_poisoned_net(value)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    norms = []
    for step in range(NUM_STEPS):
        loss_of(net, step).backward()
        for param in net.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        doubles = [nn.Parameter(param.detach().double()) for param in net.parameters()]
        for double, param in zip(doubles, net.parameters(), strict=True):
            double.grad = param.grad.double()
        norms.append(nn.utils.clip_grad_norm_(doubles, CLIP).item())
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return norms, copies(net)


def train_engine_clipped(stage, value, keys=KEYS):
    net = create_poisoned_net(value)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 40},
        "steps_per_print": 1_000_000,
        **keys,
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    norms = []
    for step in range(NUM_STEPS):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))
        engine.backward((engine(x.to(net[0].weight.dtype)) - 1.0).square().mean())
        engine.step()
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return norms, copies(net)


def norm_job():
    expected_norms, expected = train_plain_clipped(None)
    for stage in STAGES:
        norms, weights = train_engine_clipped(stage, None)
        assert norms == pytest.approx(expected_norms, rel=1e-7), stage
        assert_close(weights, expected, 1e-5)


def test_the_norm_is_that_of_clip_grad_norm():
    run_ranks(2, norm_job)


def not_finite_job(value):
    _, expected = train_plain_clipped(value)
    for stage in STAGES:
        norms, weights = train_engine_clipped(stage, value)
        torch.testing.assert_close(torch.tensor(norms[-1]), torch.tensor(value), equal_nan=True)
        torch.testing.assert_close(weights, expected, equal_nan=True)
        _, in_bf16 = train_engine_clipped(stage, value, IN_BF16)
        for found, wanted in zip(in_bf16, expected, strict=True):
            assert torch.equal(found.isnan(), wanted.isnan()), "one-pass kernels spread it too"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_clips_as_in_torch(value):
    """nan spreads to every weight; inf makes the finite gradients 0, and nan of the infinite ones."""
    run_ranks(2, not_finite_job, value)


class Whole(torch.optim.SGD):
    """Its update looks at the whole tensor; the engine has not heard of it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * param.grad / (param.grad.norm() + 1e-3)


def whole_job():
    expected = train_plain(lambda params: Whole(params, lr=1e-2))
    for stage in STAGES:
        assert_close(train_engine(stage, lambda net: Whole(net.parameters(), lr=1e-2)), expected, 1e-5)


def test_an_unknown_optimizer_gets_whole_parameters():
    run_ranks(2, whole_job)


class Assigning(torch.optim.SGD):
    """It puts another tensor into `param.data`, where others write into the memory of the parameter."""

    is_elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = 0.9 * self.state[param].get("momentum", 0.0) + param.grad
                    self.state[param]["momentum"] = momentum
                    param.data = param.data - group["lr"] * momentum


def assigning_job(nvme_path):
    expected = train_plain(lambda params: Assigning(params, lr=1e-2))
    offloads = [{}, {"offload_optimizer": {"device": "cpu"}}]
    offloads += [{"offload_optimizer": {"device": "nvme", "nvme_path": nvme_path}}]
    for stage, offload in [(0, {}), *product((1, 2, 3), offloads)]:
        found = train_engine(stage, lambda net: Assigning(net.parameters(), lr=1e-2), **offload)
        assert_close(found, expected, 1e-5)


def test_an_optimizer_that_assigns_the_data_of_parameters(tmp_path):
    run_ranks(2, assigning_job, str(tmp_path))


def untested_job(stage):
    net = create_net()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    with pytest.raises(ConfigError, match="zero_allow_untested_optimizer"):
        deepspeed.initialize(model=net, optimizer=Whole(net.parameters(), lr=1e-2), config=config)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_unknown_optimizer_must_be_allowed(stage):
    run_ranks(2, untested_job, stage)
