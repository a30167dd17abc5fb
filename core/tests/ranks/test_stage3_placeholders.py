"""What leaves sharded parameters as they are: casts and moves of empty ones, parametrizations, between and in steps."""

from collections.abc import Callable
from itertools import product
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def create_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def losses_of(net: nn.Module, threshold: int = 0, **keys: Any) -> list[float]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold, **keys},
    }
    engine = deepspeed.initialize(model=net, config=config)[0]
    losses = []
    for _ in range(3):
        loss = engine(BATCH).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def plain_losses(net: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    losses = []
    for _ in range(3):
        loss = net(BATCH).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def move(net: nn.Module) -> None:
    net.to("cpu:0")


def assign_nothing(net: nn.Module) -> None:
    for param in net.parameters():
        param.data = torch.empty(0)


def cast_and_back(net: nn.Module) -> None:
    net.double()
    net.float()


MOVES: dict[str, Callable[[nn.Module], None]] = {
    "to": move,
    "data": assign_nothing,
    "cast": cast_and_back,
}
OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


def moved_job(kind: str, keys: dict[str, Any]) -> list[float]:
    with deepspeed.zero.Init():
        net = create_net()
    MOVES[kind](net)
    return losses_of(net, **keys)


@pytest.mark.parametrize(
    ("kind", "keys"), swept(product(MOVES, [{}, OFFLOADED]), lambda kind, keys: (kind == "to") is bool(keys))
)
def test_empty_parameters_may_be_moved_between_init_and_initialize(kind, keys):
    expected = plain_losses(create_net())
    for losses in run_ranks(2, moved_job, kind, keys):
        assert losses == pytest.approx(expected, rel=1e-4)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Halved(nn.Module):
    """With a right inverse, so that registering changes the parameter."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * 2.0


class InForward(nn.Module):
    """A parametrization for one forward, as PEFT's `target_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain

        class Delta(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return weight + 0.1 * gain

        parametrize.register_parametrization(self.layer, "weight", Delta())
        try:
            return self.layer(x)
        finally:
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)


def create_parametrized(kind: str) -> nn.Module:
    net = create_net()
    if kind == "spectral":
        net[0] = parametrizations.spectral_norm(nn.Linear(8, 8))
    elif kind == "weight":
        net[0] = parametrizations.weight_norm(nn.Linear(8, 8))
    elif kind == "forward":
        net[0] = InForward()
    else:
        each = Symmetric() if kind == "symmetric" else Halved()
        parametrize.register_parametrization(net[0], "weight", each)
    return net


def parametrized_job(kind: str, in_init: bool, threshold: int) -> list[float]:
    with deepspeed.zero.Init(enabled=in_init):
        net = create_parametrized(kind)
    return losses_of(net, threshold)


@pytest.mark.parametrize(
    ("kind", "in_init", "threshold"),
    swept(
        product(["spectral", "weight", "forward", "symmetric", "halved"], [True, False], [0, 10**6]),
        lambda kind, in_init, threshold: threshold == 0 and (in_init or kind == "forward"),
    ),
)
def test_parametrizations_train_as_in_plain_torch(kind, in_init, threshold):
    expected = plain_losses(create_parametrized(kind))
    for losses in run_ranks(2, parametrized_job, kind, in_init, threshold):
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["forward", "halved"])
def test_parametrizations_on_one_rank(kind):
    assert run_ranks(1, parametrized_job, kind, True, 0)[0] == pytest.approx(
        plain_losses(create_parametrized(kind)), rel=1e-4
    )
