"""torch.autocast and GradScaler on the simulated device, by themselves and in the engine."""

from itertools import product

import deepspeed
import pytest
import torch
from deepspeed.testing.tiers import swept


def dtypes(dtype):
    x, weight = torch.ones(2, 3, device="sim"), torch.ones(4, 3, device="sim")
    with torch.autocast("sim", dtype=dtype):
        product = torch.nn.functional.linear(x, weight)
        assert product.dtype == dtype
        assert (x @ weight.t()).dtype == dtype
        assert torch.softmax(product, -1).dtype == torch.float32
        assert torch.nn.functional.mse_loss(product, product).dtype == torch.float32
        assert torch.addcmul(product, x.new_ones(4), product).dtype == torch.float32
        with torch.autocast("sim", enabled=False):
            assert (x @ weight.t()).dtype == torch.float32
    assert (x @ weight.t()).dtype == torch.float32
    return torch.get_autocast_dtype("sim")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operators_choose_their_dtype(sim, dtype):
    sim(dtypes, dtype)


def scaled():
    scaler = torch.amp.GradScaler("sim", init_scale=8.0, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(3, device="sim"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scales = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, weight.tolist()


def test_a_scaler_skips_infinite_gradients_and_grows(sim):
    scales, weight = sim(scaled)[0]
    assert scales == [8.0, 4.0, 4.0, 8.0]
    assert weight == [1 - 3 * 0.5] * 3


def train(dtype, stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 2))
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "torch_autocast": {"enabled": True, "dtype": dtype},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    seen = []
    engine.module[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    losses = []
    for seed in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(engine.device)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, seen[0]


@pytest.mark.parametrize(
    ("dtype", "stage"),
    swept(product(("bfloat16", "float16"), (0, 2)), lambda dtype, stage: (dtype == "bfloat16") is (stage == 2)),
)
def test_the_engine_trains_under_it_as_on_the_cpu(sim, cpu, dtype, stage):
    (losses, seen), (expected, _) = sim(train, dtype, stage)[0], cpu(train, dtype, stage)[0]
    assert seen == getattr(torch, dtype)
    assert losses == pytest.approx(expected, rel=2e-2)
