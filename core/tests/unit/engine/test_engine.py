"""The engine around one module: passing on, counting, refusing, printing, letting go."""

import copy
import io
import logging
import pickle
import re
from contextlib import nullcontext

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.errors import ConfigError, StateError
from deepspeed.log import logger, warn_once
from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from deepspeed.utils import safe_get_full_grad, safe_update_full_grad_vectorized
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop = nn.Linear(4, 2), nn.Dropout(0.5)
        self.its_own = "value"

    def forward(self, x, twice=False):
        y = self.drop(self.layer(x))
        return 2 * y if twice else y

    def says(self):
        return "hello"


X = torch.ones(1, 4)


def train(engine, num_steps=1):
    for _ in range(num_steps):
        engine.backward(engine(X.to(engine.module.layer.weight.dtype)).float().sum())
        engine.step()


# ---- the module -------------------------------------------------------------------------------------------------


def test_attributes_of_the_module_are_the_engines(make_engine):
    engine = make_engine(Net())
    assert engine.its_own == "value"
    assert engine.says() == "hello"
    assert engine.layer is engine.module.layer
    with pytest.raises(AttributeError, match="neither DeepSpeedEngine nor the wrapped Net has 'nothing'"):
        engine.nothing
    assert not hasattr(engine, "nothing")


def test_arguments_and_results_are_passed_on(make_engine):
    engine = make_engine(Net()).eval()
    assert torch.equal(engine(X, twice=True), 2 * engine(x=X))


def test_train_and_eval(make_engine):
    engine = make_engine(Net())
    assert engine.eval() is engine
    assert not engine.module.drop.training
    engine.train()
    assert engine.module.drop.training
    engine.train(False)
    assert not engine.module.drop.training


def test_no_gradient_no_hooks(make_engine):
    engine = make_engine(Net())
    with torch.no_grad():
        assert engine(X).grad_fn is None


def test_compile_in_place(make_engine):
    engine = make_engine(Net()).eval()
    before = engine(X)
    assert not engine.is_compiled
    engine.compile(backend="eager")
    assert engine.is_compiled
    assert torch.equal(engine(X), before)
    assert list(engine.module.state_dict()) == ["layer.weight", "layer.bias"]
    train(engine)
    assert engine.global_steps == 1


@pytest.mark.parametrize("option", [{"schedule": [(0, [])]}, {"compiled_autograd_enabled": True}])
def test_compile_refuses_what_is_not_there(make_engine, option):
    with pytest.raises(ConfigError, match="compile: .*not in this version"):
        make_engine(Net()).compile(backend="eager", **option)


# ---- backward and step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (torch.ones(2, requires_grad=True), r"shape \(2,\), requires_grad=True"),
        (torch.tensor(1.0), r"shape \(\), requires_grad=False"),
        (3.0, "found float"),
        (None, "found NoneType"),
    ],
)
def test_what_is_no_loss(make_engine, loss, found):
    with pytest.raises(ValueError, match=f"backward: asked for the gradients of one loss, .*{found}"):
        make_engine(Net()).backward(loss)


def test_backward_returns_the_divided_loss(make_engine):
    engine = make_engine(Net(), train_batch_size=None, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=4)
    engine.eval()
    loss = engine(X).sum()
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 4)
    assert engine.backward(engine(X).sum(), scale_wrt_gas=False).item() == pytest.approx(loss.item())


def test_counters(make_engine):
    engine = make_engine(Net(), train_batch_size=None, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2)
    train(engine, 5)
    assert (engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps) == (5, 2, 12, 0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_plain_backward_does_the_same(make_engine, stage):
    weights = []
    for plain in (False, True):
        engine = make_engine(
            Net(),
            train_batch_size=None,
            train_micro_batch_size_per_gpu=1,
            gradient_accumulation_steps=2,
            optimizer={"type": "SGD", "params": {"lr": 0.1}},
            zero_optimization={"stage": stage},
        ).eval()
        for micro in range(2):
            loss = engine(X * (micro + 1)).pow(2).sum()
            if plain:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        weights.append(engine.module.layer.weight.detach().clone())
    assert torch.equal(*weights)
    torch.manual_seed(0)
    assert not torch.equal(weights[0], nn.Linear(4, 2).weight)


def test_a_plain_backward_of_an_unscaled_fp16_loss_is_refused(make_engine):
    engine = make_engine(Net(), fp16={"enabled": True, "loss_scale": 64}).eval()
    loss = engine(X.half()).float().sum()
    with pytest.raises(StateError, match=r"loss scale is 64 .*engine\.scale\(loss\)\.backward\(\)"):
        loss.backward()
    engine.scale(engine(X.half()).float().sum()).backward()
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(10**0.5, rel=1e-3)


def test_an_exception_in_a_backward_leaves_nothing_behind(make_engine):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("in the middle")

    engine = make_engine(nn.Linear(4, 2), train_batch_size=1, zero_optimization={"stage": 2})
    out = engine(X)
    with pytest.raises(RuntimeError, match="in the middle"):
        engine.backward(out.sum() + Failing.apply(engine.module.weight).sum())
    assert not engine.sharding.gradients.window.is_open
    engine.backward(engine(X).sum())
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(10**0.5)


@pytest.mark.parametrize("where", ["forward", "engine.backward", "loss.backward"])
@pytest.mark.parametrize("stage", range(4))
def test_gradients_that_an_exception_drops_are_named(make_engine, lines, stage, where):
    """A script that catches the error of one micro-batch and goes on hears that the others are gone too."""
    keys = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine = make_engine(Net(), **keys)

    def fail(*_):
        raise RuntimeError("in the middle")

    def backward(fails):
        x = X.clone().requires_grad_()
        hook = engine.module.layer.register_forward_hook(fail) if fails and where == "forward" else nullcontext()
        if fails:
            x.register_hook(fail)
        with hook:
            loss = engine(x).sum()
        loss.backward() if where == "loss.backward" else engine.backward(loss)

    def step(*fails):
        for micro_fails in fails:
            with pytest.raises(RuntimeError, match="in the middle") if micro_fails else nullcontext():
                backward(micro_fails)
            engine.step()
        return [text for level, text in lines if level == "WARNING" and "are dropped too" in text]

    before = engine.module.layer.weight.detach().clone()
    assert len(step(True, False)) == 0
    with deepspeed.zero.GatheredParameters([engine.module.layer.weight]):
        assert not torch.equal(engine.module.layer.weight, before)
    assert len(step(False, True)) == 1
    assert len(step(False, True)) == 2
    assert len(step(False, False)) == 2


def test_an_evaluation_that_fails_costs_no_gradients(make_engine):
    engine = make_engine(Net(), train_batch_size=2, train_micro_batch_size_per_gpu=1).eval()
    train(engine)
    with torch.no_grad(), pytest.raises(RuntimeError):
        engine(torch.ones(1, 5))
    train(engine)
    assert engine.get_global_grad_norm() == pytest.approx(10**0.5)


def test_zero_grad_forgets(make_engine):
    engine = make_engine(Net()).eval()
    engine.backward(engine(X * 100).sum())
    engine.zero_grad()
    train(engine)
    assert engine.get_global_grad_norm() == pytest.approx(10**0.5)


# ---- accumulation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_accumulates_and_refuses_a_step(make_engine, stage):
    engine = make_engine(Net(), zero_optimization={"stage": stage}).eval()
    with engine.no_sync():
        engine.backward(engine(X).sum())
        with pytest.raises(StateError, match=r"step: found inside no_sync\(\)"):
            engine.step()
    train(engine)
    assert engine.get_global_grad_norm() == pytest.approx(2 * 10**0.5)


def test_no_sync_with_sharded_gradients(make_engine):
    with pytest.raises(ConfigError, match=r"no_sync: zero_optimization\.stage is 2.*use stage 0 or 1"):
        make_engine(Net(), zero_optimization={"stage": 2}).no_sync()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_boundary_by_hand(make_engine, stage):
    engine = make_engine(Net(), zero_optimization={"stage": stage}).eval()
    engine.set_gradient_accumulation_boundary(False)
    train(engine, 3)
    assert engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(True)  # after the last backward
    engine.step()
    assert engine.global_steps == 1
    assert engine.get_global_grad_norm() == pytest.approx(3 * 10**0.5)


def test_batch_sizes_can_be_changed(make_engine):
    engine = make_engine(Net(), train_batch_size=None, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)
    engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (8, 2, 4)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (20, 5, 4)
    engine.set_gradient_accumulation_steps(1)
    assert engine.get_batch_info() == (5, 5, 1)


class Counted:
    """An engine of one weight, whose every micro-batch has the gradient 1, with SGD of lr 1."""

    def __init__(self, make_engine, num_steps, **keys):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        sgd = {"type": "SGD", "params": {"lr": 1.0}}
        keys = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1, "optimizer": sgd, **keys}
        self.engine = make_engine(model, gradient_accumulation_steps=num_steps, **keys)
        self.weight = model.weight

    def backward(self, *, by_user=False, fails=False):
        x = torch.ones(1, 1, dtype=self.weight.dtype).requires_grad_()
        if fails:
            x.register_hook(self._fail)
        loss = self.engine(x).sum()
        loss.backward() if by_user else self.engine.backward(loss)

    def _fail(self, grad):
        raise RuntimeError("in the middle")

    def step(self, num_micros=1):
        """How far the weight went, after which of the micro-batches."""
        moves = {}
        for number in range(1, num_micros + 1):
            before, steps = self.engine.module.weight.item(), self.engine.global_steps
            self.backward()
            self.engine.step()
            if self.engine.global_steps > steps:
                moves[number] = round(before - self.engine.module.weight.item(), 1)
        return moves


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_changed_batch_size_counts_from_the_last_step(make_engine, stage, keys):
    """A step averages as many micro-batches as it has, whatever the number of steps and micro-batches before it."""
    job = Counted(make_engine, 2, zero_optimization={"stage": stage}, **keys)
    assert job.step(4) == {2: 1, 4: 1}
    job.engine.set_train_batch_size(3)
    assert job.step(6) == {3: 1, 6: 1}
    job.engine.set_gradient_accumulation_steps(1)
    assert job.step(2) == {1: 1, 2: 1}
    job.engine.set_train_batch_size(4)
    assert job.step(4) == {4: 1}
    assert job.engine.global_samples == 2 * 2 + 2 * 3 + 2 + 4


@pytest.mark.parametrize("by_user", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (3, 1), (3, 2)])
def test_a_batch_size_changed_within_a_step_is_that_of_the_next(make_engine, before, after, by_user):
    job = Counted(make_engine, before)
    job.backward(by_user=by_user)
    job.engine.set_train_batch_size(after)
    assert job.engine.get_batch_info() == (before, 1, before)
    job.engine.step()
    assert job.step(before - 1 + 2 * after) == {before - 1: 1, before - 1 + after: 1, before - 1 + 2 * after: 1}
    assert job.engine.get_batch_info() == (after, 1, after)
    job.backward()
    job.engine.set_train_batch_size(5)
    job.engine.set_train_micro_batch_size(2)
    job.engine.step()
    job.step(after - 1)
    assert job.engine.get_batch_info() == (10, 2, 5)


@pytest.mark.parametrize("is_set_first", [False, True])
def test_a_batch_size_holds_at_once_where_the_gradients_were_forgotten(make_engine, is_set_first):
    job = Counted(make_engine, 1)
    job.backward()  # a trial batch
    if is_set_first:
        job.engine.set_train_batch_size(2)
        assert job.engine.gradient_accumulation_steps() == 1
    job.engine.zero_grad()
    if not is_set_first:
        job.engine.set_train_batch_size(2)
    assert job.engine.get_batch_info() == (2, 1, 2)
    assert job.step(4) == {2: 1, 4: 1}


def test_steps_by_hand_begin_the_count_again(make_engine):
    job = Counted(make_engine, 2, zero_optimization={"stage": 1})
    job.backward()
    job.engine.set_gradient_accumulation_boundary(True)
    job.engine.step()
    job.engine.set_gradient_accumulation_boundary(None)
    assert job.step(4) == {2: 1, 4: 1}
    job.step()
    job.backward()
    job.engine.optimizer.step()  # of the wrapper
    assert job.step(4) == {2: 1, 4: 1}


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("by_user", [False, True])
def test_micro_batches_of_a_failed_step_can_be_repeated(make_engine, stage, by_user):
    """A failed backward drops the gradients of its step; the next one is the first of a whole step."""
    job = Counted(make_engine, 2, zero_optimization={"stage": stage})
    for _ in range(2):
        assert job.step() == {}
        with pytest.raises(RuntimeError, match="in the middle"):
            job.backward(by_user=by_user, fails=True)
        assert job.step(4) == {2: 1, 4: 1}


@pytest.mark.parametrize("size", [0, 3, -2])
def test_batch_sizes_that_do_not_fit(make_engine, size):
    engine = make_engine(Net(), train_batch_size=None, train_micro_batch_size_per_gpu=2)
    told = "which is not a multiple of 2" if size > 0 else "allowed is an integer of at least 1"
    with pytest.raises(ConfigError, match=f"train_batch_size: asked for {size}, {told}"):
        engine.set_train_batch_size(size)
    assert engine.get_batch_info() == (2, 2, 1)
    with pytest.raises(
        ConfigError, match="train_micro_batch_size_per_gpu: asked for 0, allowed is an integer of at least 1"
    ):
        engine.set_train_micro_batch_size(0)


def test_learning_rate_and_momentum(make_engine):
    engine = make_engine(Net())
    engine.set_lr(0.25)
    assert (engine.get_lr(), [tuple(m) for m in engine.get_mom()]) == ([0.25], [(0.9, 0.999)])
    sgd = make_engine(Net(), optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8}})
    assert sgd.get_mom() == [0.8]


# ---- what is printed --------------------------------------------------------------------------------------------


def test_steps_are_printed_as_asked_for(make_engine, lines):
    train(make_engine(Net(), steps_per_print=2), 5)
    printed = [text for _, text in lines if text.startswith("step=")]
    assert [text.split(",")[0] for text in printed] == ["step=2", "step=4"]
    assert re.fullmatch(r"step=2, skipped=0, lr=\[0\.1\], mom=\[.*0\.9.*0\.999.*\], loss=\S+", printed[0])


def test_every_tenth_step_is_printed(make_engine, lines):
    train(make_engine(Net(), steps_per_print=10), 20)
    printed = [text for _, text in lines if text.startswith("step=")]
    assert [text.split(",")[0] for text in printed] == ["step=10", "step=20"]


@pytest.mark.parametrize("every", [None, float("inf")])
def test_no_step_is_printed_by_default_and_with_infinity(make_engine, lines, every):
    train(make_engine(Net(), steps_per_print=every), 20)
    assert [text for _, text in lines if "step=" in text or "phase" in text or "PerSec" in text] == []


def test_one_line_says_what_trains(make_engine, lines):
    make_engine(Net(), bf16={"enabled": True})
    (line,) = [text for _, text in lines if text.startswith("deepspeed ")]
    numel = sum(param.numel() for param in Net().parameters())
    for fact in ("1 rank,", "device cpu", "backend gloo", "ZeRO stage 0", "bf16", f"{numel:,} parameters", "FusedAdam"):
        assert fact in line, line


def test_the_start_line_without_an_optimizer(make_engine, lines):
    net = Net()
    next(net.parameters()).requires_grad_(False)
    make_engine(net, optimizer=None)
    (line,) = [text for _, text in lines if text.startswith("deepspeed ")]
    assert line.endswith("trained), no optimizer")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"gradient_clipping": None}, "gradients clipped to norm 1"),  # the default of 0.19.6
        ({"gradient_clipping": 0.25}, "gradients clipped to norm 0.25"),
        ({"gradient_clipping": 0}, "gradients not clipped"),
        ({"gradient_clipping": -1}, "gradients not clipped"),  # as in 0.19.6
    ],
)
def test_the_start_line_says_the_clipping(make_engine, lines, keys, says):
    make_engine(Net(), **keys)
    (line,) = [text for _, text in lines if text.startswith("deepspeed ")]
    assert line.endswith(says)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda value: torch.save(value, io.BytesIO())]
)
def test_an_engine_and_its_optimizer_are_not_copied(make_engine, stage, copied):
    engine = make_engine(Net(), zero_optimization={"stage": stage})
    with pytest.raises(StateError, match=r"^pickle, torch\.save and copy: found a DeepSpeedEngine.*save_checkpoint"):
        copied(engine)
    copied(engine.module)
    if stage > 0:  # else it is a plain one
        with pytest.raises(StateError, match=r"^pickle, torch\.save and copy: found a ZeroOptimizer.*save_checkpoint"):
            copied(engine.optimizer)


WRONG_CALLS = {
    "set_lr": ["x", None, True, [0.1], -0.1, float("nan"), float("inf")],
    "set_train_batch_size": ["8", None, True, 8.0, 0, -8],
    "set_train_micro_batch_size": ["4", None, True, 4.0, 0, -4],
    "set_gradient_accumulation_steps": ["2", None, True, 2.0, 0, -2],
    "set_gradient_accumulation_boundary": ["x", 2, [], 0.5],
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_setters_refuse_what_is_no_such_value_and_change_nothing(make_engine, call):
    engine = make_engine(Net())
    before = engine.get_lr(), engine.train_batch_size(), engine.gradient_accumulation_steps()
    boundary = engine.is_gradient_accumulation_boundary()
    for value in WRONG_CALLS[call]:
        with pytest.raises(ConfigError, match=f"(asked for|found) {re.escape(repr(value))}"):
            getattr(engine, call)(value)
        assert (engine.get_lr(), engine.train_batch_size(), engine.gradient_accumulation_steps()) == before
        assert engine.is_gradient_accumulation_boundary() is boundary


def test_setters_take_numbers_of_other_libraries(make_engine):
    engine = make_engine(Net())
    engine.set_lr(np.float32(0.5))
    assert engine.get_lr() == [0.5]
    size = engine.train_batch_size()
    engine.set_gradient_accumulation_steps(np.int64(2))
    engine.set_train_batch_size(torch.tensor(2 * size))
    assert type(engine.train_batch_size()) is int


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("keys", "norm"), [({}, 0.0), ({"gradient_clipping": 1.0}, 1.0)])
@pytest.mark.parametrize(
    "gives", [lambda optimizer: optimizer, lambda _: lambda params: torch.optim.SGD(params, lr=1.0)]
)
def test_a_given_optimizer_is_clipped_where_the_configuration_says_so(stage, keys, norm, gives):
    net = nn.Linear(4, 1, bias=False)
    before = net.weight.detach().clone()
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, **keys}
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=gives(torch.optim.SGD(net.parameters(), lr=1.0)), config=config
    )
    engine.backward(engine(torch.full((1, 4), 2.0)).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters([net.weight]):
        moved = (before - net.weight).norm().item()
    engine.destroy()
    assert (engine.gradient_clipping(), round(moved, 4)) == (norm, norm or 4.0)


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_of_the_configuration_is_clipped_to_norm_1_by_default(stage):
    plain, net = nn.Linear(4, 2), nn.Linear(4, 2)
    net.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        plain(10 * X).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
        optimizer.step()
        engine.backward(engine(10 * X).square().sum())
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-5)
    assert min(norms) > 1.0  # every step is clipped
    engine.destroy()
    for param, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("checks", [None, False])
def test_bf16_skips_a_step_whose_gradients_are_not_finite(make_engine, lines, stage, checks):
    """As fp16 does, by default; the step counts of the engine and of the schedule are those of a skipped one."""
    section = {"enabled": True} if checks is None else {"enabled": True, "check_grad_overflow": checks}
    engine = make_engine(Net(), bf16=section, zero_optimization={"stage": stage})
    for factor in (1.0, float("inf"), 1.0):
        loss = engine(X.bfloat16()).sum()
        engine.backward(loss * factor)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        is_finite = all(param.isfinite().all() for param in engine.module.parameters())
    assert (is_finite, engine.skipped_steps, engine.global_steps) == ((True, 1, 3) if checks is None else (False, 0, 3))
    assert ("gradient overflow: step skipped" in [text for _, text in lines]) is (checks is None)


def test_the_level_error_silences_the_lines(make_engine, lines):
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        train(make_engine(Net(), steps_per_print=1), 3)
    finally:
        logger.setLevel(level)
    assert lines == []


def test_wall_clock_breakdown(make_engine, lines):
    train(make_engine(Net(), wall_clock_breakdown=True, steps_per_print=2), 4)
    printed = [text for _, text in lines if text.startswith("time and memory by phase")]
    assert len(printed) == 2
    rows = re.findall(r"^\| (\w+) +\| +\d+\.\d\d \|$", printed[0], flags=re.MULTILINE)
    assert rows == ["forward", "backward", "backward_inner", "backward_allreduce", "step"]
    assert "per step, mean of 2" in printed[1]


def test_dump_state(make_engine, lines):
    make_engine(Net(), dump_state=True, gradient_clipping=0.125)
    printed = "\n".join(text for _, text in lines)
    assert "gradient_clipping" in printed
    assert "0.125" in printed
    lines.clear()
    make_engine(Net())
    assert not any("gradient_clipping" in text for _, text in lines)


@pytest.mark.parametrize("stage", [0, 2])
def test_secrets_are_neither_printed_nor_saved(make_engine, lines, tmp_path, stage):
    secret = "hunter2-hunter2"
    sections = {"comet": {"api_key": secret}, "monitor_plugins": {"mine": {"enabled": False, "key": secret}}}
    engine = make_engine(Net(), dump_state=True, zero_optimization={"stage": stage}, **sections)
    engine.save_checkpoint(str(tmp_path), tag="a")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".pt" for path in files) == (2 if stage else 1)
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert secret not in "".join(text for _, text in lines)
    assert engine.config["comet"]["api_key"] == secret
    model = torch.load(tmp_path / "a" / "mp_rank_00_model_states.pt", weights_only=True)
    assert model["ds_config"]["comet"] == {"api_key": "<redacted>"}


# ---- data, weights, the end -------------------------------------------------------------------------------------


def test_deepspeed_io(make_engine):
    engine = make_engine(Net(), train_batch_size=2)
    data = TensorDataset(torch.arange(6.0))
    shuffled = [value for (batch,) in engine.deepspeed_io(data) for value in batch.tolist()]
    assert sorted(shuffled) == list(range(6))
    in_order = engine.deepspeed_io(
        data, batch_size=4, route="eval", collate_fn=lambda items: [float(i[0]) for i in items]
    )
    assert list(in_order) == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]


def test_training_data_with_a_short_last_batch_dropped(make_engine):
    data = TensorDataset(torch.arange(7.0))
    engine = make_engine(Net(), train_batch_size=2, dataloader_drop_last=True, arguments={"training_data": data})
    assert [len(batch[0]) for batch in engine.training_dataloader] == [2, 2, 2]


@pytest.mark.parametrize("stage", [0, 2])
def test_save_16bit_model(make_engine, tmp_path, stage):
    model = Net()
    model.layer.bias.requires_grad_(False)
    engine = make_engine(model, bf16={"enabled": True}, zero_optimization={"stage": stage})
    assert engine.save_16bit_model(str(tmp_path)) is True
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert {name: value.dtype for name, value in loaded.items()} == dict.fromkeys(
        ("layer.weight", "layer.bias"), torch.bfloat16
    )
    assert torch.equal(loaded["layer.weight"], engine.module.layer.weight)
    engine.save_16bit_model(str(tmp_path), "trained.bin", exclude_frozen_parameters=True)
    assert list(torch.load(tmp_path / "trained.bin", weights_only=True)) == ["layer.weight"]


def test_loaded_weights_reach_the_masters(make_engine):
    engine = make_engine(Net(), bf16={"enabled": True}, zero_optimization={"stage": 2})
    weights = {name: torch.zeros_like(value) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": weights})
    assert deepspeed.zero is not None
    assert all(shard.master.abs().sum() == 0 for group in engine.sharding.units for shard in group.shards)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_destroy_leaves_a_plain_module(make_engine, stage):
    engine = make_engine(Net(), train_batch_size=1, zero_optimization={"stage": stage})
    train(engine)
    model = engine.module
    engine.destroy()
    assert (engine.optimizer, engine.basic_optimizer, engine.lr_scheduler) == (None, None, None)
    model.eval()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.layer.weight.detach().clone()
    model(X).sum().backward()
    assert torch.equal(model.layer.weight.grad, torch.ones(2, 4))
    plain.step()
    assert torch.allclose(model.layer.weight, before - 0.1)


def test_a_step_of_a_destroyed_engine_is_refused(make_engine):
    engine = make_engine(Net())
    engine.destroy()
    with pytest.raises(StateError, match=r"step: the engine was destroyed"):
        engine.step()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_optimizer_outlives_its_engine(make_engine, stage, bf16):
    """After destroy() the given optimizer trains the model, by itself and in the next engine."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    keys = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}, "zero_allow_untested_optimizer": True}
    keys |= {"train_batch_size": 1, "optimizer": None}

    def moves(step):
        before = model.layer.weight.detach().clone()
        step()
        return not torch.equal(model.layer.weight, before)

    def engine_step(engine):
        engine.backward(engine(X.to(model.layer.weight.dtype)).sum())
        engine.step()

    for _ in range(2):
        engine = make_engine(model, arguments={"optimizer": optimizer}, **keys)
        assert moves(lambda engine=engine: engine_step(engine))
        engine.destroy()
        assert [id(param) for param in optimizer.param_groups[0]["params"]] == list(map(id, model.parameters()))
        assert set(optimizer.state) <= set(model.parameters())
    model(X.to(model.layer.weight.dtype)).sum().backward()
    assert moves(optimizer.step)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_that_an_engine_left_is_refused(single_rank, stage):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)  # dropped, and collected by the next one
    with pytest.raises(ConfigError, match=r"param_groups\[0\].* an engine that was not destroyed left there"):
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_of_another_engines_loss_is_told(make_engine, lines, stage):
    """As `accelerator.backward` of a model that was prepared second by one Accelerator."""
    warn_once.cache_clear()
    first, second = (make_engine(nn.Linear(4, 2), zero_optimization={"stage": stage}) for _ in range(2))

    def told():
        return [text for level, text in lines if level == "WARNING" and "no parameter that this engine" in text]

    first.backward(first(torch.ones(4, 4)).sum())
    first.step()
    assert not told()
    for _ in range(2):
        first.backward(second(torch.ones(4, 4)).sum())
        first.step()
    assert len(told()) == 1


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_without_a_backward_is_told_and_counted(make_engine, lines, stage):
    warn_once.cache_clear()
    engine = make_engine(
        nn.Linear(4, 2),
        train_batch_size=2,
        train_micro_batch_size_per_gpu=1,
        zero_optimization={"stage": stage},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    )

    def told():
        return [text for level, text in lines if level == "WARNING" and "no backward since the last step" in text]

    engine(torch.ones(1, 4)).sum().backward()  # the user's own backward is one
    engine.step()
    engine.step()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert not told()
    before, schedule = engine.module.weight.detach().clone(), engine.lr_scheduler.last_batch_iteration
    for _ in range(4):
        engine.step()
    assert len(told()) == 1
    assert engine.global_steps == 4
    assert engine.lr_scheduler.last_batch_iteration == schedule + 2
    assert torch.equal(engine.module.weight, before)


# ---- inputs of another dtype ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "remedy"), [("bf16", "x.to(torch.bfloat16)"), ("fp16", '"fp16": {"auto_cast": true}')])
def test_an_input_of_another_dtype_gets_a_hint(make_engine, key, remedy):
    engine = make_engine(Net(), **{key: {"enabled": True}})
    with pytest.raises(RuntimeError, match="must have the same dtype") as caught:
        engine(torch.randn(2, 4))
    assert remedy in str(caught.value)
    assert f"the config's {key}" in str(caught.value)


def test_an_input_of_another_dtype_gets_a_hint_without_a_dtype_in_the_config(make_engine):
    engine = make_engine(Net())
    with pytest.raises(RuntimeError, match="must have the same dtype") as caught:
        engine(torch.randn(2, 4, dtype=torch.bfloat16))
    assert str(caught.value).endswith(
        "; the model's parameters are float32, and this forward got inputs of bfloat16; cast them before the call "
        "(x.to(torch.float32))"
    )


class Gained(nn.Linear):
    """Computes with a buffer, which stays as it came."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("gain", torch.ones(4, 1))

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.gain)


def test_a_buffer_of_another_dtype_gets_a_hint(make_engine):
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="the same dtype") as caught:
        make_engine(Gained(), bf16={"enabled": True})(x)
    assert str(caught.value).endswith(
        "; the config's bf16 made the model's parameters bfloat16, and found 1 buffer of another type, such as 'gain': "
        "buffers stay as the model came. If the error is about one, cast it where it is used, or all of them with "
        '"data_types": {"buffer_dtype": "bfloat16"}'
    )
    make_engine(Gained(), bf16={"enabled": True}, data_types={"buffer_dtype": "bfloat16"})(x)


def test_other_errors_of_a_forward_stay_as_they_are(make_engine):
    layer = nn.Linear(4, 1)
    layer.register_buffer("angles", torch.ones(1))
    engine = make_engine(layer, bf16={"enabled": True})
    with pytest.raises(RuntimeError) as caught:
        engine(torch.randn(2, 7, dtype=torch.bfloat16))
    assert "config" not in str(caught.value)


class Rotary(nn.Module):
    """Buffers that lose what they are for in 16 bits: angles of late positions, a count."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(2) / 2 + 0.123), persistent=False)
        self.register_buffer("seen", torch.tensor(256.0))
        self.register_buffer("in_half", torch.ones(2, dtype=torch.float16))

    def forward(self, x):
        self.seen += 1
        angles = 3000 * self.inv_freq
        return (self.linear(x) * torch.cat([angles.cos(), angles.sin()]).to(x.dtype)).square().mean()


@pytest.mark.parametrize("built_inside", [False, True])
@pytest.mark.parametrize("key", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_stay_as_they_came(make_engine, stage, key, built_inside):
    if built_inside and stage < 3:
        pytest.skip("zero.Init is for stage 3")
    keys = {key: {"enabled": True}, "zero_optimization": {"stage": stage}}
    config = {"train_batch_size": 4, **keys}
    with deepspeed.zero.Init(config_dict_or_path=config) if built_inside else nullcontext():
        model = Rotary()
    before = {name: buffer.clone() for name, buffer in Rotary().named_buffers()}
    engine = make_engine(model, **keys)
    engine.backward(engine(torch.ones(4, 4, dtype=next(model.parameters()).dtype)))
    engine.step()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, before[name] + (name == "seen"), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_data_types_of_weights_and_buffers(make_engine, stage):
    types = {"param_dtype": "bf16", "buffer_dtype": "bf16", "keep_in_fp32_modules": ["inv_freq"]}
    model = Rotary()
    make_engine(model, data_types=types, zero_optimization={"stage": stage})
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    found = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert found == {"inv_freq": torch.float32, "seen": torch.bfloat16, "in_half": torch.bfloat16}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_weights_of_a_bf16_model_are_trained_in_fp32_if_asked(make_engine, stage):
    model = nn.Linear(4, 1).bfloat16()
    engine = make_engine(model, data_types={"param_dtype": "fp32"}, zero_optimization={"stage": stage})
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_updated_together_and_whole_weights_for_a_generation(make_engine, stage):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = make_engine(nn.Linear(4, 1), zero_optimization=zero, optimizer={"type": "Adam", "params": {"lr": 0.1}})
    engine.backward(engine(torch.ones(4, 4)).sum())
    params = list(engine.module.parameters())
    safe_update_full_grad_vectorized(params, lambda grad: 2 * grad)
    assert safe_get_full_grad(params[0]).tolist() == [[8.0] * 4]
    engine.step()
    with unwrap_model_for_generation(engine) as model:
        assert model.weight.shape == (1, 4)
    assert [engine.get_data_parallel_rank(), engine.get_model_parallel_rank(), engine.get_tensor_parallel_rank()] == [
        0
    ] * 3
