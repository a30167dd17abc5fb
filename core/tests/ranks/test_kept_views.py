"""What users keep of whole parameters after they are sharded again (stage 3)."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.errors import StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.zero import GatheredParameters, Init
from torch import nn

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
#: units are released after each module / stay whole until the step
REUSE = (0, 10**9)


def create_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def create_engine(net: nn.Module, reuse: int) -> Any:
    zero = {**CONFIG["zero_optimization"], "stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": 0}
    return deepspeed.initialize(model=net, config={**CONFIG, "zero_optimization": zero})[0]


def train(engine: Any) -> float:
    loss = engine(torch.ones(1, 8)).square().sum()
    engine.backward(loss)
    engine.step()
    return loss.item()


def keep_views(reuse: int, path: str) -> None:
    """As DeepSpeed-Chat saves its models: `.cpu()` copies nothing where the accelerator is the CPU."""
    net = create_net()
    start = {name: param.detach().clone() for name, param in net.named_parameters()}
    engine = create_engine(net, reuse)
    kept = {}
    for name, param in net.named_parameters():
        with GatheredParameters(param):
            kept[name] = param.data.cpu()
            param.detach().numpy()  # after which torch does not resize the storage any more
    train(engine)
    torch.save(kept, f"{path}/{deepspeed.comm.get_rank()}.pt")
    train(engine)
    for values in (kept, torch.load(f"{path}/{deepspeed.comm.get_rank()}.pt")):
        for name, value in values.items():
            torch.testing.assert_close(value, start[name], rtol=0, atol=0)
    with GatheredParameters(net[0].weight):
        assert not torch.equal(net[0].weight, start["0.weight"])
    sizes = [unit._full_N.untyped_storage().nbytes() for unit in engine.sharding.units.modules.all]
    assert sum(sizes) == 0  # what users keep is theirs
    engine.destroy()


@pytest.mark.parametrize("reuse", REUSE)
def test_what_is_taken_of_a_gathered_parameter_stays(tmp_path, reuse):
    run_ranks(2, keep_views, reuse, str(tmp_path))


def make_parameters_of_parameters() -> list[float]:
    with Init(config_dict_or_path=CONFIG):
        net = create_net()
        first = nn.utils.weight_norm(net[0])
    start = create_net()[0].weight
    with GatheredParameters([first.weight_g, first.weight_v]):
        torch.testing.assert_close(first.weight_v, start, rtol=0, atol=0)
    engine = create_engine(net, 0)
    return [train(engine) for _ in range(2)]


def test_a_parameter_made_of_the_data_of_a_sharded_one():
    """`weight_norm` on a module that zero.Init has sharded: `Parameter(weight.data)`."""
    net = create_net()
    nn.utils.weight_norm(net[0])
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = net(torch.ones(1, 8)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found in run_ranks(2, make_parameters_of_parameters):
        assert found == pytest.approx(losses, rel=1e-5)


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    assert file.tell() < 20_000  # the whole weights, and not the buffers that they were gathered in
    file.seek(0)
    return torch.load(file, weights_only=False)


def copy_module(built_in_init: bool, copied: Callable[[nn.Module], Any]) -> None:
    """As an exponential moving average begins."""
    with Init(config_dict_or_path=CONFIG, enabled=built_in_init):
        net = create_net()
    engine = None if built_in_init else create_engine(net, 0)
    told = (
        r"weight of shape \(16, 8\) is sharded, so its copy would be empty; .* inside deepspeed.zero.GatheredParameters"
    )
    with pytest.raises(StateError, match=told):
        copied(net)
    with GatheredParameters(net.parameters()):
        twin = copied(net)
    expected = create_net()(torch.ones(1, 8))
    torch.testing.assert_close(twin(torch.ones(1, 8)), expected, rtol=0, atol=0)
    assert not any(name.startswith("ds_") for param in twin.parameters() for name in vars(param))
    assert built_in_init or not list(twin.ds_external_parameters())  # as libraries list them
    second = create_engine(twin, 0)  # a copy is a module like any other
    losses = [train(second) for _ in range(2)]
    engine = engine or create_engine(net, 0)
    assert [train(engine) for _ in range(2)] == losses


@pytest.mark.parametrize("built_in_init", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_a_copy_of_a_module_is_whole_or_refused(built_in_init, copied):
    run_ranks(2, copy_module, built_in_init, copied)


def assign_data() -> None:
    net = create_net()
    engine = create_engine(net, 0)
    weight = net[0].weight
    with GatheredParameters(weight, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            weight.data = torch.full((16, 8), 0.5)
    is_alone = deepspeed.comm.get_world_size() == 1
    is_read_only = (
        contextlib.nullcontext() if is_alone else pytest.raises(StateError, match="0.weight changed on ranks")
    )
    with is_read_only, GatheredParameters(weight):
        assert weight.eq(0.5).all()
        weight.data = torch.full((16, 8), 0.5 if is_alone else 0.0)
    with GatheredParameters([weight, None]):
        assert weight.eq(0.5).all()
    context = GatheredParameters(weight, modifier_rank=0)
    with (
        pytest.raises(ValueError, match=r"weight: param.data was set to a value of shape \(3,\) .* \(16, 8\)"),
        context,
    ):
        weight.data = torch.zeros(3)
    loss = train(engine)
    assert deepspeed.utils.safe_get_full_fp32_param(weight).sub(0.5).abs().max() <= 0.1 + 1e-6  # one step of Adam
    assert loss > 0
    for rank in (-1, deepspeed.comm.get_world_size(), "0"):
        with pytest.raises(ValueError, match="modifier_rank is .*; give a global rank from 0 to"):
            GatheredParameters(weight, modifier_rank=rank)
    for params in (net, [[weight]], "weight"):
        with pytest.raises(TypeError, match="wanted a parameter or an iterable of parameters"):
            GatheredParameters(params)
    loss = engine(torch.ones(1, 8)).square().sum()
    engine.destroy()
    loss.backward()  # its graph reads what the engine had gathered
    with pytest.raises(StateError, match=r"save_checkpoint: the engine was destroyed"):
        engine.save_checkpoint("nowhere")


@pytest.mark.parametrize("world_size", [1, 2])
def test_data_that_is_assigned_in_a_context_counts(world_size):
    run_ranks(world_size, assign_data)
