"""A stage's state as values and back: moments, scalars that differ, states of odd shapes, refusals."""

import deepspeed
import pytest
import torch
from deepspeed.errors import CheckpointError
from deepspeed.zero import state_dict
from torch import nn


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


class Factored(torch.optim.Optimizer):
    """Keeps one moment per row, as Adafactor does, and a count."""

    is_elementwise = False

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                rows = param.grad.reshape(param.shape[0], -1).abs().sum(1)
                state["rows"] = state.get("rows", torch.zeros(param.shape[0])) + rows
                state["count"] = state.get("count", 0) + 1
                param.data.sub_(group["lr"] * param.grad)


def train(engine, num_steps=2):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        x = torch.randn(4, 4, generator=generator).to(next(engine.parameters()).dtype)
        engine.backward(engine(x).float().pow(2).sum())
        engine.step()


def settings(stage, dtype):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero, **({"bf16": {"enabled": True}} if dtype == "bf16" else {})}


@pytest.mark.parametrize("piece_numel", [5, 2**19])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_restored_run_goes_on_as_the_first(make_engine, monkeypatch, stage, dtype, piece_numel):
    monkeypatch.setattr("deepspeed.zero.units.WIDENED_NUMEL", piece_numel)
    first = make_engine(make_model(), **settings(stage, dtype))
    train(first)
    saved = _copied(state_dict.collect(first.sharding))
    train(first)
    second = make_engine(make_model(seed=5), **settings(stage, dtype))
    state_dict.load(second.sharding, saved)
    train(second)
    for one, other in zip(first.module.parameters(), second.module.parameters()):
        assert torch.equal(one, other)


def test_what_is_in_it(make_engine):
    engine = make_engine(make_model(), **settings(1, "bf16"))
    train(engine, 3)
    state = state_dict.collect(engine.sharding)
    numel = sum(p.numel() for p in engine.module.parameters())
    padded = -(-numel // 2) * 2
    assert state["zero_stage"] == 1
    assert state["partition_count"] == [1]
    assert state["group_paddings"] == [padded - numel]
    (master,) = state["single_partition_of_fp32_groups"]
    assert (master.dtype, master.shape) == (torch.float32, (padded,))
    base = state["base_optimizer_state"]
    assert {name: tuple(v.shape) for name, v in base["state"][0].items() if name != "step"} == {
        "exp_avg": (padded,),
        "exp_avg_sq": (padded,),
    }
    assert float(base["state"][0]["step"]) == 3
    assert base["param_groups"][0]["lr"] == 0.1
    assert "params" not in base["param_groups"][0]


def test_states_of_odd_shape_and_plain_numbers_come_back(make_engine):
    def build(seed):
        model = make_model(seed)
        return make_engine(
            model,
            arguments={"optimizer": Factored(model.parameters())},
            optimizer=None,
            zero_optimization={"stage": 1},
            zero_allow_untested_optimizer=True,
        )

    first, second = build(0), build(5)
    train(first)
    saved = _copied(state_dict.collect(first.sharding))
    flat = saved["base_optimizer_state"]["state"][0]
    assert flat["count"] == 2
    assert flat["parameter_states"]["rows"][0].shape == (3,)
    state_dict.load(second.sharding, saved)
    for one, other in zip(_states(first), _states(second)):
        assert one["count"] == other["count"]
        assert torch.equal(one["rows"], other["rows"])
    train(first)
    train(second)
    assert torch.equal(first.module[0].weight, second.module[0].weight)


@pytest.mark.parametrize("optimizer", ["AdamW", "Lamb"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_parameter_without_dimensions_keeps_its_moments(make_engine, stage, optimizer):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.gain = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return super().forward(x) * self.gain

    def build():
        torch.manual_seed(0)
        return make_engine(
            Scaled(),
            zero_optimization={"stage": stage},
            zero_allow_untested_optimizer=True,
            bf16={"enabled": True},
            optimizer={"type": optimizer, "params": {"lr": 0.1}},
        )

    first, second = build(), build()
    train(first)
    state_dict.load(second.sharding, _copied(state_dict.collect(first.sharding)))
    for one, other in zip(_states(first), _states(second)):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def test_state_of_an_optimizer_that_stepped_before_is_kept(make_engine):
    model = make_model()
    optimizer = Factored(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    engine = make_engine(
        model,
        arguments={"optimizer": optimizer},
        optimizer=None,
        zero_optimization={"stage": 1},
        zero_allow_untested_optimizer=True,
    )
    assert [state["rows"].tolist() for state in _states(engine)] == [[4.0] * 3, [1.0] * 3, [3.0] * 2, [1.0] * 2]


def test_scalars_that_differ_are_kept_one_by_one(make_engine):
    def build(seed):
        return make_engine(make_model(seed), zero_optimization={"stage": 2})

    first, second = build(0), build(5)
    x = torch.randn(4, 4)
    train(first)
    first.backward(first.module[0](x).sum())  # the last layer gets no gradient
    first.step()
    steps = [float(state["step"]) for state in _states(first)]
    assert steps == [3, 3, 2, 2]
    saved = _copied(state_dict.collect(first.sharding))
    state_dict.load(second.sharding, saved)
    assert [float(state["step"]) for state in _states(second)] == steps


def test_a_fragment_that_was_never_updated_stays_without_state(make_engine):
    first, second = (make_engine(make_model(), zero_optimization={"stage": 1}) for _ in range(2))
    first.backward(first.module[0](torch.randn(4, 4)).sum())
    first.step()
    state_dict.load(second.sharding, _copied(state_dict.collect(first.sharding)))
    assert ["step" in state for state in _states(second)] == [True, True, False, False]


def test_masters_alone(make_engine):
    first, second = (make_engine(make_model(seed), zero_optimization={"stage": 1}) for seed in (0, 5))
    train(first)
    state_dict.load(second.sharding, _copied(state_dict.collect(first.sharding)), load_optimizer_states=False)
    assert torch.equal(first.module[0].weight, second.module[0].weight)
    assert not any(_states(second))


def test_another_models_state_is_refused(make_engine):
    first = make_engine(make_model(), zero_optimization={"stage": 1})
    saved = state_dict.collect(first.sharding)
    wider = make_engine(nn.Linear(8, 8), zero_optimization={"stage": 1})
    with pytest.raises(CheckpointError, match=r"0: found a partition of 24 elements, this run has 72; build the model"):
        state_dict.load(wider.sharding, saved)
    model = make_model()
    groups = [{"params": list(layer.parameters())} for layer in model]
    split = make_engine(model, arguments={"model_parameters": groups}, zero_optimization={"stage": 1})
    with pytest.raises(CheckpointError, match="found 1 parameter group, this run has 2"):
        state_dict.load(split.sharding, saved)


def _states(engine):
    optimizer = engine.basic_optimizer
    return [optimizer.state.get(shard.master, {}) for group in engine.sharding.units for shard in group.shards]


def _copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


class Wide(nn.Module):
    """Of weights that have more bits than fp32, or are complex, beside others."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3, dtype=dtype)

    def forward(self, x):
        return self.second(self.first(x).to(self.second.weight.dtype)).abs().square().mean()


def engine_of_wide(make_engine, dtype, stage):
    torch.manual_seed(3)
    model = Wide(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return make_engine(model, arguments={"optimizer": optimizer}, optimizer=None, zero_optimization={"stage": stage})


def weights_after(engine, num_steps):
    generator = torch.Generator().manual_seed(num_steps)
    for _ in range(num_steps):
        engine.backward(engine(torch.randn(4, 4, generator=generator)))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize(("saved_at", "loaded_at"), [(0, 0), (1, 1), (2, 2), (3, 3), (1, 3), (3, 0), (0, 2)])
def test_wide_weights_go_on_bit_for_bit(make_engine, tmp_path, dtype, saved_at, loaded_at):
    engine = engine_of_wide(make_engine, dtype, saved_at)
    weights_after(engine, 2)
    engine.save_checkpoint(tmp_path)
    expected = weights_after(engine, 3)
    again = engine_of_wide(make_engine, dtype, loaded_at)
    assert again.load_checkpoint(tmp_path)[0] is not None
    found = weights_after(again, 3)
    assert [each.dtype for each in found] == [torch.float32] * 2 + [dtype] * 2
    assert all(map(torch.equal, found, expected))
