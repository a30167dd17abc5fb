"""What users hold as `engine.optimizer`: a torch optimizer's face over a sharding stage."""

import deepspeed
import pytest
import torch
from deepspeed.log import warn_once
from deepspeed.zero.optimizer import DeepSpeedOptimizer, ZeroOptimizer
from torch import nn
from torch.optim import lr_scheduler


@pytest.fixture
def engine(make_engine):
    torch.manual_seed(0)
    return make_engine(nn.Linear(4, 2), zero_optimization={"stage": 2})


def run_backward(engine):
    engine.backward(engine(torch.ones(4, 4)).sum())


def test_it_is_a_torch_optimizer(engine):
    optimizer = engine.optimizer
    assert isinstance(optimizer, (torch.optim.Optimizer, DeepSpeedOptimizer))
    assert type(optimizer) is ZeroOptimizer
    assert optimizer.defaults["lr"] == 0.1
    assert "stage=2" in repr(optimizer)


def test_param_groups_are_the_ones_that_count(engine):
    optimizer = engine.optimizer
    assert optimizer.param_groups is engine.basic_optimizer.param_groups
    optimizer.param_groups[0]["lr"] = 0.0
    before = engine.module.weight.detach().clone()
    run_backward(engine)
    engine.step()
    assert torch.equal(engine.module.weight, before)


def test_plain_fp32_without_sharding_gets_the_users_own(make_engine):
    model = nn.Linear(4, 2)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = make_engine(model, arguments={"optimizer": mine}, optimizer=None)
    assert engine.optimizer is mine
    assert all(hook.reads_no_gradients for hook in mine._optimizer_step_pre_hooks.values()), "see takes_one_pass"


def test_step_and_zero_grad_are_the_engines(engine):
    before = engine.module.weight.detach().clone()
    run_backward(engine)
    engine.optimizer.zero_grad()
    run_backward(engine)
    engine.optimizer.step()
    assert engine.global_steps == 1
    assert engine.get_global_grad_norm() == pytest.approx((8 * 4**2 + 2 * 4**2) ** 0.5)
    assert not torch.equal(engine.module.weight, before)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("by_user", [False, True])
def test_steps_on_part_of_an_accumulation_are_named(make_engine, lines, stage, by_user):
    """As under Lightning's Fabric, whose optimizer steps after each micro-batch."""
    warn_once.cache_clear()
    sizes = {"train_batch_size": 12, "gradient_accumulation_steps": 3}
    engine = make_engine(nn.Linear(4, 2), **sizes, zero_optimization={"stage": stage})

    def step(num_backwards, make_step, **kwargs):
        for _ in range(num_backwards):
            loss = engine(torch.ones(4, 4)).sum()
            loss.backward() if by_user else engine.backward(loss, **kwargs)
        make_step()

    for num_backwards in (1, 3, 2):  # the rest of an epoch, a whole accumulation, a rest
        step(num_backwards, engine.optimizer.step)
    for _ in range(3):
        step(1, engine.step)
    step(1, engine.optimizer.step)
    engine.set_gradient_accumulation_boundary(True)
    step(1, engine.optimizer.step)
    step(1, engine.optimizer.step)
    engine.set_gradient_accumulation_boundary(None)
    if not by_user:
        step(1, engine.optimizer.step, scale_wrt_gas=False)
        step(1, engine.optimizer.step, scale_wrt_gas=False)
    assert not any("in a row" in text for _, text in lines)
    for _ in range(3):
        step(1, engine.optimizer.step)
    (line,) = [text for _, text in lines if "in a row" in text]
    assert "found a second step in a row after 1 backward of a loss divided by 3" in line
    assert "gradient_accumulation_steps" in line


def test_what_it_lacks_is_not_blamed_on_the_optimizer_in_it(engine):
    assert not hasattr(engine.optimizer, "bit16_groups")
    with pytest.raises(AttributeError, match=r"^bit16_groups: this member of DeepSpeed's .*safe_get_full_fp32_param"):
        engine.optimizer.bit16_groups
    with pytest.raises(
        AttributeError, match=r"^neither the engine's optimizer nor the .* in it has 'my_groups' .*safe"
    ):
        engine.optimizer.my_groups


def test_a_closure_is_refused(engine):
    with pytest.raises(ValueError, match="found a closure"):
        engine.optimizer.step(lambda: 1.0)


def test_torchs_schedulers_take_it(engine):
    schedules = {
        "StepLR": lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5),
        "OneCycleLR": lr_scheduler.OneCycleLR(engine.optimizer, 1.0, total_steps=10),
    }
    engine.set_lr(0.1)
    for scheduler in schedules.values():
        run_backward(engine)
        engine.step()  # the optimizer's step is made by the engine, and torch must not warn that it was left out
        scheduler.step()
    assert engine.get_lr() == schedules["OneCycleLR"].get_last_lr()


def test_it_backwards_with_the_scale_of_the_engine(make_engine):
    engine = make_engine(
        nn.Linear(4, 2), zero_optimization={"stage": 1}, fp16={"enabled": True, "initial_scale_power": 4}
    )
    optimizer = engine.optimizer
    assert (optimizer.cur_scale, optimizer.loss_scale, optimizer.dynamic_loss_scale) == (16.0, 16.0, True)
    optimizer.backward(engine(torch.ones(4, 4, dtype=torch.float16)).sum())
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx((10 * 4.0**2) ** 0.5, rel=1e-3)
    assert optimizer.overflow is False


def test_overflow_is_seen(make_engine):
    engine = make_engine(
        nn.Linear(4, 2), zero_optimization={"stage": 1}, fp16={"enabled": True, "loss_scale": 128, "hysteresis": 1}
    )
    before = engine.module.weight.detach().clone()
    engine.backward(engine(torch.full((4, 4), 6e4, dtype=torch.float16)).float().sum())
    engine.step()
    assert engine.optimizer.overflow is True
    assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
    assert torch.equal(engine.module.weight, before)


def test_a_group_added_later_is_trained(make_engine):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    engine = make_engine(model, arguments={"model_parameters": model[1].parameters()}, zero_optimization={"stage": 1})
    before = model[0].weight.detach().clone()
    engine.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.5})
    run_backward(engine)
    engine.step()
    assert engine.get_lr() == [0.1, 0.5]
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_group_is_added_while_another_parameter_is_frozen(make_engine, stage):
    """As plain torch, over a run that freezes what it trained and unfreezes what it did not."""

    def train(model, backward, optimizer, step):
        for phase in range(3):
            if phase == 1:
                model[1].requires_grad_(False)
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
            elif phase == 2:
                model[1].requires_grad_(True)
            backward(torch.ones(4, 4))
            step()

    def build():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        return model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)

    plain, optimizer = build()

    def step_plain():
        optimizer.step()
        optimizer.zero_grad()

    train(plain, lambda x: plain(x).square().mean().backward(), optimizer, step_plain)
    model, given = build()
    engine = make_engine(model, arguments={"optimizer": given}, optimizer=None, zero_optimization={"stage": stage})
    train(model, lambda x: engine.backward(engine(x).square().mean()), engine.optimizer, engine.step)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_unfrozen_is_said_once_per_engine_and_can_be_added(make_engine, lines, stage):
    def train(model, step):
        for _ in range(3):
            step(model(torch.ones(4, 4)).square().mean())

    def build():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    plain, optimizer = build()
    plain[0].requires_grad_(True)

    def step_plain(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train(plain, step_plain)
    for is_added in (False, True, False):
        model, given = build()
        engine = make_engine(model, arguments={"optimizer": given}, optimizer=None, zero_optimization={"stage": stage})

        def step_engine(loss, engine=engine):
            engine.backward(loss)
            engine.step()

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            before = model[0].weight.detach().clone()
        model[0].requires_grad_(True)
        if is_added:
            engine.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
        train(model, step_engine)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            torch.testing.assert_close(model[0].weight, plain[0].weight if is_added else before)
    said = [text for _, text in lines if "will not be trained" in text]
    assert len(said) == 2
    assert "2 parameters got a gradient and will not be trained, such as 0.weight" in said[0]
    assert "engine.optimizer.add_param_group" in said[0]


def test_the_rest_is_answered_by_the_inner_optimizer(engine):
    engine.basic_optimizer.its_own = 5
    assert engine.optimizer.its_own == 5
    with pytest.raises(AttributeError):
        engine.optimizer.nothing_of_that_name


def test_state_dict_round_trip(make_engine):
    engines = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        engines.append(make_engine(nn.Linear(4, 2), zero_optimization={"stage": 1}, bf16={"enabled": True}))
    first, second = engines
    first.backward(first(torch.ones(4, 4).bfloat16()).sum())
    first.step()
    saved = first.optimizer.state_dict()
    assert "loss_scaler" in saved
    second.optimizer.load_state_dict(saved)
    assert torch.equal(first.module.weight, second.module.weight)
