"""Values that users put into parameters after `initialize` are trained on as in plain torch, at every stage.

What cannot be taken is refused with the parameter's name.
"""

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.errors import StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

LR = 0.5
BATCHES = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1))


def create_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def create_engine(net: nn.Module, stage: int, dtype: str = "fp32", **more: Any) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **more},  # small parameters stay whole in stage 3
        "bf16": {"enabled": dtype == "bf16"},
    }
    return deepspeed.initialize(model=net, config=config)[0]


def by_vector(net: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(net.parameters()) * 0.75, net.parameters())


def by_transposition(net: nn.Module) -> None:
    net[0].weight.data = net[0].weight.data.t()


def in_place(net: nn.Module) -> None:
    net.load_state_dict({name: value * 0.75 for name, value in net.state_dict().items()})


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "vector": by_vector,
    "transposed": by_transposition,
    "in place": in_place,
}


def expected(dtype: str, change: Callable[[nn.Module], None], after: int) -> list[Tensor]:
    """The weights of plain torch; in bf16 with fp32 weights beside the model's, which follow what was changed."""
    net = create_net()
    masters = [param.detach().clone() for param in net.parameters()]
    net = net.to(torch.bfloat16) if dtype == "bf16" else net
    for number, batch in enumerate(BATCHES):
        if number == after:
            change(net)
            masters = [followed(*pair) for pair in zip(masters, net.parameters(), strict=True)]
        net.zero_grad()
        net(batch.to(net[0].weight.dtype)).float().square().mean().backward()
        for param, master in zip(net.parameters(), masters, strict=True):
            assert param.grad is not None
            master.sub_(param.grad.float(), alpha=LR)
            param.data = master.to(param.dtype)
    return masters


def followed(master: Tensor, weight: Tensor) -> Tensor:
    """The master weight after a change of the weight: what rounds to the weight, as the diagonal of a transposed one,
    keeps its precision."""
    return torch.where(master.to(weight.dtype) == weight, master, weight.detach().float())


def train(stage: int, dtype: str, kind: str, more: dict[str, Any]) -> None:
    net = create_net()
    engine = create_engine(net, stage, dtype, **more)
    for number, batch in enumerate(BATCHES):
        if number == 2:
            before = safe_get_full_fp32_param(net[0].weight)
            CHANGES[kind](net)
            value = net[0].weight.detach().clone()
            found = safe_get_full_fp32_param(net[0].weight)
            torch.testing.assert_close(found, followed(before, value), rtol=0, atol=0)
        engine.backward(engine(batch.to(net[0].weight.dtype)).float().square().mean())
        engine.step()
    for param, want in zip(net.parameters(), expected(dtype, CHANGES[kind], 2), strict=True):
        tolerance = {"rtol": 2e-2, "atol": 2e-3} if dtype == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(param.detach().float(), want, **tolerance)
    engine.destroy()


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("stage", "dtype", "kind", "more"),
    swept(
        [
            (stage, dtype, kind, more)
            for stage in range(4)
            for dtype in ("fp32", "bf16")
            for kind in CHANGES
            for more in ({}, OFFLOADED)
            if stage or not more
        ],
        lambda stage, dtype, kind, more: (
            (stage, dtype, kind, bool(more))
            in {
                (0, "bf16", "vector", False),
                (1, "fp32", "vector", False),
                (1, "bf16", "in place", False),
                (2, "fp32", "transposed", False),
                (2, "fp32", "in place", True),
                (3, "fp32", "vector", False),
                (3, "bf16", "vector", True),
            }
        ),
    ),
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_changed_parameter_is_trained_on(world_size, stage, dtype, kind, more):
    run_ranks(world_size, train, stage, dtype, kind, more)


def refuse(stage: int) -> dict[str, str]:
    """What the next step says after a change that cannot be taken."""

    def replace(net: Any) -> None:
        net.load_state_dict(net.state_dict(), assign=True)

    def cut(net: Any) -> None:
        net[2].weight.data = net[2].weight.data[:1]

    def cast(net: Any) -> None:
        net[0].bias.data = net[0].bias.data.double()

    said = {}
    for name, change in (("replaced", replace), ("cut", cut), ("cast", cast)):
        net = create_net()
        engine = create_engine(net, stage)
        engine.backward(engine(BATCHES[0]).square().mean())
        change(net)
        with pytest.raises(StateError) as caught:
            engine.step()
        said[name] = str(caught.value)
        engine.destroy()
    return said


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", swept([1, 2], lambda size: size == 2))
def test_what_cannot_be_taken_is_refused_by_name(world_size, stage):
    for said in run_ranks(world_size, refuse, stage):
        assert "parameter 0.weight: found another Parameter in its place since initialize()" in said["replaced"]
        assert "parameter 2.weight: found a value of shape (1, 6)" in said["cut"]
        assert "parameter 0.bias: found a value of shape (6,) in torch.float64" in said["cast"]


CONVERSIONS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "half": (lambda net: net.half(), "torch.float16 .* set fp16.enabled"),
    "bfloat16": (lambda net: net.to(torch.bfloat16), "torch.bfloat16 .* set bf16.enabled"),
    "double": (lambda net: net.double(), r"torch.float64 .* convert the model before initialize\(\)"),
    "float": (lambda net: net.float(), "torch.float32 .* with neither bf16.enabled nor fp16.enabled"),
    "a layer": (lambda net: net[2].half(), "2.weight: found .*torch.float16 .* set fp16.enabled"),
    "meta": (lambda net: net.to("meta"), "on meta, .* no values"),
    "device": (lambda net: net.to("cpu"), None),
    "there and back": (lambda net: net.double().to(net.former), None),
    "format": (lambda net: net.to(memory_format=torch.channels_last), None),
}


def convert(stage: int, dtype: str, more: dict[str, Any], converts_inputs: bool = False) -> None:
    """Convert the module after `initialize`: before a forward, and between backward and step."""
    own = torch.bfloat16 if dtype == "bf16" else torch.float32
    for name, (change, said) in CONVERSIONS.items():
        for is_late in (False, True):
            net = create_net()
            net.former = own
            engine = create_engine(net, stage, dtype, **more)

            def run(is_late: bool = is_late, engine: Any = engine, change: Any = change, net: Any = net) -> None:
                for number in range(2):
                    if number == 0 and not is_late:
                        change(net)
                    given = (
                        net[0].weight.dtype if converts_inputs and not is_late and not net[0].weight.is_meta else own
                    )
                    engine.backward(engine(BATCHES[0].to(given)).float().square().mean())
                    if number == 0 and is_late:
                        change(net)
                    engine.step()

            if said is None or {"float": torch.float32, "bfloat16": torch.bfloat16}.get(name) == own:
                run()
            else:
                with pytest.raises(StateError, match=f"(?s){said}"):
                    run()
            engine.destroy()


@pytest.mark.parametrize(
    ("stage", "dtype", "more"),
    swept(
        [
            (stage, dtype, more)
            for stage in range(4)
            for dtype in ("fp32", "bf16")
            for more in ({}, {"offload_optimizer": {"device": "cpu"}})
            if stage or not more
        ],
        lambda stage, dtype, more: (stage % 2 == 0) == (dtype == "fp32") and bool(more) == (stage == 2),
    ),
)
def test_a_conversion_after_initialize_names_the_key(stage, dtype, more):
    run_ranks(1, convert, stage, dtype, more)


@pytest.mark.parametrize("stage", range(4))
def test_a_conversion_of_the_module_and_its_inputs_names_the_key(stage):
    run_ranks(1, convert, stage, "fp32", {}, True)


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def train_moved(stage: int) -> None:
    net = create_net()
    engine = create_engine(net, stage)
    weight, bias = net[0].weight, net[2].bias
    parametrize.register_parametrization(net[0], "weight", Half())
    net[2].bias = None  # taken out
    before = weight.detach().clone(), bias.detach().clone()
    engine.backward(engine(BATCHES[0]).square().mean())
    engine.step()
    assert not torch.equal(weight, before[0])
    assert torch.equal(bias, before[1])
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_may_move_in_the_model_or_leave_it(stage):
    run_ranks(1, train_moved, stage)


def train_replaced(stage: int, is_given: bool) -> None:
    net = create_net()
    engine = create_engine(net, stage, stage3_param_persistence_threshold=0)
    engine.backward(engine(BATCHES[0]).square().mean())
    engine.step()
    net[2] = head = nn.Linear(6, 2)  # a new head, as `resize_token_embeddings` makes it
    if is_given:
        engine.optimizer.add_param_group({"params": list(head.parameters())})
        before = head.bias.detach().clone()
    engine.backward(engine(BATCHES[1]).square().mean())
    if is_given:
        engine.step()
        with deepspeed.zero.GatheredParameters(list(head.parameters())):
            assert not torch.equal(head.bias, before)
    else:
        with pytest.raises(StateError, match=r"parameter 2\.weight: found another Parameter .*add_param_group"):
            engine.step()
    engine.destroy()


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_a_module_that_was_replaced_is_not_left_untrained(stage, is_given):
    run_ranks(2, train_replaced, stage, is_given)
