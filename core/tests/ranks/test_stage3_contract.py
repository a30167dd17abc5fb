"""Stage 3 as libraries and users meet it: engines that share a module, contexts around forwards, `zero.Init`."""

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.testing.distributed import run_ranks
from deepspeed.zero import GatheredParameters
from torch import nn

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10},
}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def create_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 2))
    net[1].requires_grad_(False)
    return net


def create_engine(net: nn.Module, *, trains: bool) -> Any:
    return deepspeed.initialize(model=net, config={**CONFIG, **(ADAM if trains else {})})[0]


def train(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()


def evaluate(engine: Any) -> float:
    with torch.no_grad():
        return float(engine(torch.ones(1, 8)).sum())


def plain_values() -> list[float]:
    """Of an evaluation before each of two steps, and after them."""
    net = create_net()
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.1)
    values = [evaluate(net)]
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        values.append(evaluate(net))
    return values


def evaluate_beside_training(forgets_hooks: bool) -> list[float]:
    net = create_net()
    trainer = create_engine(net, trains=True)
    values = [evaluate(trainer)]
    train(trainer)
    if forgets_hooks:  # as Lightning does between fit and test
        for module in net.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
    evaluator = create_engine(net, trains=False)
    values.append(evaluate(evaluator))
    evaluator.destroy()
    train(trainer)
    values.append(evaluate(trainer))
    trainer.destroy()
    assert net[0].weight.shape == (32, 8)
    return [*values, evaluate(net)]


@pytest.mark.parametrize("forgets_hooks", [False, True])
def test_an_engine_evaluates_what_another_one_goes_on_training(forgets_hooks: bool) -> None:
    values = plain_values()
    for found in run_ranks(2, evaluate_beside_training, forgets_hooks):
        assert found == pytest.approx([*values, values[-1]], rel=1e-5)


def evaluate_then_train() -> list[float]:
    net = create_net()
    evaluator = create_engine(net, trains=False)
    values = [evaluate(evaluator)]
    trainer = create_engine(net, trains=True)
    for engine in (trainer, evaluator):
        train(trainer)
        values.append(evaluate(engine))
    evaluator.destroy()
    assert net[0].weight.ds_numel == 256  # they are still the trainer's
    trainer.destroy()
    return values


def test_an_evaluating_engine_leaves_its_parameters_to_one_that_trains() -> None:
    for found in run_ranks(2, evaluate_then_train):
        assert found == pytest.approx(plain_values(), rel=1e-5)


def gather_around() -> dict[str, Any]:
    net = create_net()
    engine = create_engine(net, trains=True)
    rank = deepspeed.comm.get_rank()
    with GatheredParameters(net.parameters(), modifier_rank=0):
        evaluate(engine)
        inside = net[0].weight.numel()
        if rank == 0:
            nn.init.ones_(net[2].weight)
            nn.init.ones_(net[2].bias)  # small, whole on every rank, trained
            nn.init.constant_(net[1].bias, 2.0)  # frozen
    facts = {"inside": inside, "sums": [], "whole": net[2].bias.ds_persist and net[2].bias.ds_tensor is net[2].bias}
    with GatheredParameters([net[2].weight, net[1].bias]):
        facts["sums"] = [float(param.sum()) for param in (net[2].weight, net[2].bias, net[1].bias)]
    facts["master"] = float(deepspeed.utils.safe_get_full_fp32_param(net[2].bias).sum())
    engine.destroy()
    facts["left"] = [name for param in net.parameters() for name in vars(param) if name.startswith("ds_")]
    return facts


def test_a_context_keeps_parameters_whole_around_a_forward_and_brings_small_ones_to_all_ranks() -> None:
    expected = {"inside": 256, "sums": [64.0, 2.0, 64.0], "whole": True, "master": 2.0, "left": []}
    assert run_ranks(2, gather_around) == [expected, expected]


class Parent(nn.Module):
    """Changes weights of its children, as nanoGPT and transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        nn.init.xavier_uniform_(self.body[0].weight)
        for name, param in self.body.named_parameters():
            if name.startswith("1."):
                param.requires_grad_(True)
                nn.init.normal_(param, std=0.02)
        with torch.no_grad():
            self.body[2].weight.copy_(torch.ones(8, 8)).mul_(3)


def build_under_init() -> list[bool]:
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        net = Parent()
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    plain = Parent()
    same_stream = torch.equal(state, torch.random.get_rng_state())
    with GatheredParameters(net.parameters()):
        equal = [torch.equal(one, other) for one, other in zip(net.parameters(), plain.parameters(), strict=True)]
    return [same_stream, *equal]


def test_what_an_init_of_a_parent_does_to_weights_of_its_children_stays() -> None:
    assert run_ranks(2, build_under_init) == [[True] * 7] * 2
