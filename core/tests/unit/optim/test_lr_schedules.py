"""Schedules against values worked out by hand, their state, and what they accept as an optimizer."""

import argparse
import math

import pytest
import torch
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.optim import lr_schedules
from deepspeed.optim.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


class Face:
    """As little of an optimizer as a schedule needs."""

    def __init__(self, *lrs, **keys):
        self.param_groups = [{"params": [], "lr": lr, **keys} for lr in lrs]


def _lrs(schedule, num_steps):
    """Learning rates of the first group at construction, and after each step."""
    found = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(num_steps):
        schedule.step()
        found.append(schedule.optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == schedule.get_lr()
    return found


def test_warmup_log():
    lrs = _lrs(WarmupLR(Face(1.0), warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4), 6)
    half, most = 0.1 + 0.4 * 0.5, 0.1 + 0.4 * math.log(3) / math.log(4)
    assert lrs == pytest.approx([0.1, 0.1, half, most, 0.5, 0.5, 0.5])


def test_warmup_linear():
    schedule = WarmupLR(Face(1.0), warmup_max_lr=0.4, warmup_num_steps=4, warmup_type="linear")
    assert _lrs(schedule, 6) == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.4])


@pytest.mark.parametrize("arguments", [{}, {"warmup_max_lr": None}])
def test_warmup_leads_to_the_own_rate_of_each_group(arguments):
    optimizer = Face(1.0, 4.0)
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear", **arguments)
    assert _lrs(schedule, 6) == pytest.approx([0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0])
    assert optimizer.param_groups[1]["lr"] == pytest.approx(4.0)
    optimizer.param_groups.append({"params": [], "lr": 9.0})
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([1.0, 4.0, 9.0])


def test_warmup_decay_leads_to_0_001_unless_it_is_told():
    optimizer = Face(1.0, 4.0)
    schedule = WarmupDecayLR(optimizer, 8, warmup_num_steps=4, warmup_type="linear")
    assert _lrs(schedule, 6)[-2:] == pytest.approx([0.001, 0.00075])
    own = WarmupDecayLR(Face(1.0), 8, warmup_max_lr=None, warmup_num_steps=4, warmup_type="linear")
    assert _lrs(own, 9) == pytest.approx([0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_warmup_of_one_step():
    for short in (1, 2, 2.0):
        schedule = WarmupLR(Face(1.0), warmup_max_lr=0.4, warmup_num_steps=short)
        assert _lrs(schedule, 3) == pytest.approx([0.0, 0.0, 0.4, 0.4])


@pytest.mark.parametrize("found", [0, -1, 0.5, 1.5, math.inf, False, None, "auto"])
@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_a_warmup_without_steps_is_refused(kind, found):
    total = () if kind is WarmupLR else (10,)
    with pytest.raises(ConfigError, match=rf"^warmup_num_steps: found {found!r}, .* whole number.*give 1"):
        kind(Face(1.0), *total, warmup_num_steps=found)


def test_warmup_decay():
    schedule = WarmupDecayLR(
        Face(1.0), 6, warmup_min_lr=0.2, warmup_max_lr=1.2, warmup_num_steps=2, warmup_type="linear"
    )
    assert _lrs(schedule, 9) == pytest.approx([0.2, 0.2, 0.7, 1.2, 0.95, 0.7, 0.45, 0.2, 0.2, 0.2])


def test_warmup_cosine_scales_each_group():
    optimizer = Face(1.0, 10.0)
    schedule = WarmupCosineLR(
        optimizer, 6, warmup_min_ratio=0.2, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear"
    )
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * q)) / 2 for q in (0.25, 0.5, 0.75, 1.0)]
    assert _lrs(schedule, 8) == pytest.approx([0.0, 0.2, 0.6, *cosine, 0.1, 0.1])
    assert optimizer.param_groups[1]["lr"] == pytest.approx(1.0)
    assert cosine[1] == pytest.approx(0.55)


def test_warmup_cosine_log():
    schedule = WarmupCosineLR(Face(2.0), 100, warmup_num_steps=10)
    schedule.step(4)
    assert schedule.get_last_lr() == pytest.approx([2.0 * math.log(5) / math.log(10)])


def test_lr_range_test():
    arguments = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0}
    assert _lrs(LRRangeTest(Face(9.0), **arguments), 4) == pytest.approx([0.1, 0.25, 0.4, 0.55, 0.7])
    staircase = LRRangeTest(Face(9.0), **arguments, lr_range_test_staircase=True)
    assert _lrs(staircase, 4) == pytest.approx([0.1, 0.1, 0.4, 0.4, 0.7])


def test_one_cycle_with_decay():
    optimizer = Face(9.0, betas=(0.5, 0.999))
    schedule = OneCycle(
        optimizer,
        cycle_min_lr=0.1,
        cycle_max_lr=0.5,
        decay_lr_rate=1.0,
        cycle_first_step_size=2,
        cycle_second_step_size=4,
        decay_step_size=2,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
        decay_mom_rate=0.1,
    )
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    lrs, moms = [0.1], []
    for _ in range(8):
        schedule.step()
        lrs.append(optimizer.param_groups[0]["lr"])
        moms.append(optimizer.param_groups[0]["betas"][0])
    assert lrs == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5, 0.1 / 2])
    assert moms == pytest.approx([0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9 * 1.05, 0.9 * 1.1])
    assert optimizer.param_groups[0]["betas"][1] == 0.99


def test_one_cycle_stairs_and_no_decay():
    schedule = OneCycle(Face(1.0, betas=(0.5, 0.9)), 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert _lrs(schedule, 9) == pytest.approx([0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0, 0])
    assert schedule.optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    # as 0.19.6 printed it, for 3 stairs up and 4 down
    sizes = {"cycle_first_step_size": 4, "cycle_second_step_size": 6}
    other = OneCycle(Face(1.0), 0.1, 0.5, **sizes, cycle_first_stair_count=3, cycle_second_stair_count=4)
    up, down = [0.1, 0.1, 0.1 + 0.4 / 3, 0.1 + 0.8 / 3, 0.5], [0.4, 0.3, 0.3, 0.2, 0.1, 0.1]
    assert _lrs(other, 10) == pytest.approx([*up, *down])


def test_one_cycle_leaves_a_momentum_that_is_not_a_beta(monkeypatch):
    said = []
    monkeypatch.setattr(lr_schedules, "warn_once", said.append)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.7)
    schedule = OneCycle(optimizer, 0.0, 1.0, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.5)
    _lrs(schedule, 6)
    assert optimizer.param_groups[0]["momentum"] == 0.7
    assert "SGD has no betas" in said[0]


@pytest.mark.parametrize("name", lr_schedules.VALID_LR_SCHEDULES)
def test_one_that_begins_later_writes_nothing_before_its_first_step(name):
    arguments = {
        "LRRangeTest": {},
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 3},
        "WarmupLR": {},
        "WarmupDecayLR": {"total_num_steps": 2000},
        "WarmupCosineLR": {"total_num_steps": 2000},
    }[name]
    optimizer = Face(0.25, betas=(0.75, 0.9))
    schedule = getattr(lr_schedules, name)(optimizer, **arguments, last_batch_iteration=2)
    with pytest.raises(AssertionError, match="need to call step"):
        schedule.get_last_lr()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.25, (0.75, 0.9))
    schedule.step()
    assert schedule.last_batch_iteration == 3
    assert optimizer.param_groups[0]["lr"] != 0.25


def test_one_cycle_without_momentum_warns_and_goes_on(monkeypatch):
    said = []
    monkeypatch.setattr(lr_schedules, "warn_once", said.append)
    schedule = OneCycle(Face(1.0), 0.0, 1.0, cycle_first_step_size=2)
    assert "Face has no betas" in said[0]
    assert schedule.get_mom() is None
    assert _lrs(schedule, 2) == pytest.approx([0.0, 0.5, 1.0])
    OneCycle(Face(1.0), 0.0, 1.0, cycle_momentum=False)
    assert len(said) == 1


MAKERS = {
    "LRRangeTest": lambda o: LRRangeTest(o, lr_range_test_step_size=3),
    "OneCycle": lambda o: OneCycle(o, 0.01, 0.1, cycle_first_step_size=3, decay_step_size=2, decay_lr_rate=0.5),
    "WarmupLR": lambda o: WarmupLR(o, warmup_num_steps=5),
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 12, warmup_num_steps=5),
    "WarmupCosineLR": lambda o: WarmupCosineLR(o, 12, warmup_num_steps=5),
}


def test_makers_are_all_schedules():
    assert list(MAKERS) == lr_schedules.VALID_LR_SCHEDULES


@pytest.mark.parametrize("name", MAKERS)
def test_state_round_trip(name):
    first = MAKERS[name](Face(0.3, betas=(0.9, 0.99)))
    assert first.get_last_lr() == [first.optimizer.param_groups[0]["lr"]]
    for _ in range(7):
        first.step()
    assert first.state_dict() == {"last_batch_iteration": 6}
    second = MAKERS[name](Face(0.3, betas=(0.9, 0.99)))
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr()
    assert second.optimizer.param_groups == first.optimizer.param_groups
    first.step()
    second.step()
    assert second.get_last_lr() == first.get_last_lr()


def test_foreign_state_is_refused():
    with pytest.raises(CheckpointError, match=r"WarmupLR: .* no last_batch_iteration \(found: \['last_epoch'\]\)"):
        WarmupLR(Face(1.0)).load_state_dict({"last_epoch": 3})


def test_step_to_a_count():
    schedule = WarmupLR(Face(1.0), warmup_max_lr=1.0, warmup_num_steps=10, warmup_type="linear")
    schedule.step(5)
    assert schedule.get_last_lr() == [0.5]
    schedule.step()
    assert schedule.get_last_lr() == [0.6]


def test_torch_optimizers_wrappers_and_tensor_rates():
    rate = torch.tensor(1.0)
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)

    class Wrapper:
        optimizer = inner

    schedule = WarmupLR(Wrapper(), warmup_max_lr=0.5, warmup_num_steps=2)
    schedule.step(7)
    assert inner.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    assert schedule.get_last_lr() == [0.5]
    with pytest.raises(TypeError, match="object is not an optimizer: it has no param_groups"):
        WarmupLR(object())


def test_one_value_per_group_and_groups_added_later():
    optimizer = Face(1.0, 1.0)
    listed = WarmupLR(optimizer, warmup_min_lr=[0.0, 0.1], warmup_max_lr=[1.0, 2.0], warmup_num_steps=2)
    listed.step(5)
    assert listed.get_last_lr() == [1.0, 2.0]
    cosine = WarmupCosineLR(optimizer, 10, warmup_num_steps=2)
    optimizer.param_groups.append({"params": [], "lr": 4.0})
    cosine.step(1)
    assert cosine.get_last_lr() == pytest.approx([1.0, 2.0, 4.0])
    with pytest.raises(ConfigError, match="warmup_min_lr: found 2 values.*3 param groups"):
        listed.step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: WarmupLR(o, warmup_type="exp"), "^warmup_type: found 'exp'.*log.*linear"),
        (lambda o: WarmupCosineLR(o, 10, cos_min_ratio=2.0), r"^cos_min_ratio: found 2\.0"),
        (lambda o: LRRangeTest(o, lr_range_test_step_size=0), "^lr_range_test_step_size: found 0"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_first_step_size=0), "^cycle_first_step_size: found 0"),
        (lambda o: OneCycle(o, 0.1, 0.2, decay_step_size=-1), "^decay_step_size: found -1"),
        (lambda o: WarmupLR(o, warmup_max_lr=math.nan), "^warmup_max_lr: found nan, .* a finite number"),
        (lambda o: WarmupLR(o, warmup_min_lr=[math.inf]), "^warmup_min_lr: found inf, .* one for each param group"),
        (lambda o: WarmupLR(o, warmup_min_lr="fast"), "^warmup_min_lr: found 'fast'"),
        (lambda o: WarmupDecayLR(o, 10, warmup_max_lr=True), "^warmup_max_lr: found True"),
        (lambda o: WarmupDecayLR(o, 10, warmup_min_lr=math.nan), "^warmup_min_lr: found nan"),
        (lambda o: WarmupCosineLR(o, 10, cos_min_ratio=math.nan), "^cos_min_ratio: found nan"),
        (lambda o: WarmupCosineLR(o, 10, warmup_min_ratio=None), "^warmup_min_ratio: found None"),
        (lambda o: LRRangeTest(o, lr_range_test_min_lr=math.nan), "^lr_range_test_min_lr: found nan"),
        (lambda o: LRRangeTest(o, lr_range_test_step_rate=math.inf), "^lr_range_test_step_rate: found inf"),
        (lambda o: LRRangeTest(o, lr_range_test_step_size=math.nan), "^lr_range_test_step_size: found nan"),
        (lambda o: OneCycle(o, math.nan, 0.2), "^cycle_min_lr: found nan"),
        (lambda o: OneCycle(o, 0.1, None), "^cycle_max_lr: found None"),
        (lambda o: OneCycle(o, 0.1, 0.2, decay_lr_rate=math.nan), "^decay_lr_rate: found nan"),
        (lambda o: OneCycle(o, 0.1, 0.2, decay_mom_rate=math.nan), "^decay_mom_rate: found nan"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_max_mom=math.nan), "^cycle_max_mom: found nan"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_min_mom=[math.nan]), "^cycle_min_mom: found nan"),
        (lambda o: OneCycle(o, 0.1, 0.2, decay_step_size=math.nan), "^decay_step_size: found nan"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_second_step_size=math.nan), "^cycle_second_step_size: found nan"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_first_stair_count="two"), "^cycle_first_stair_count: found 'two'"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make(Face(1.0))


def test_a_momentum_that_a_decay_raises_to_one_is_told(lines):
    optimizer = Face(1.0, betas=(0.9, 0.99))
    schedule = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=1, decay_step_size=1, decay_mom_rate=0.2)
    said = []
    for _ in range(4):
        schedule.step()
        said.append(sum("decay_mom_rate 0.2 has raised betas[0] to 1 or more" in text for _, text in lines))
    assert said == [0, 0, 1, 1]


def test_text_that_yaml_gives_for_a_number_is_one():
    schedule = WarmupLR(Face(1.0), warmup_min_lr="1e-4", warmup_max_lr=["1e-2"], warmup_num_steps=2)
    schedule.step(7)
    assert schedule.get_last_lr() == [1e-2]


def _parsed(*words):
    return lr_schedules.add_tuning_arguments(argparse.ArgumentParser()).parse_args(list(words))


def test_command_line():
    args = _parsed("--lr_schedule", "OneCycle", "--cycle_max_lr", "0.3", "--cycle_momentum")
    config, problem = lr_schedules.get_config_from_args(args)
    assert problem is None
    assert config["type"] == "OneCycle"
    assert config["params"]["cycle_max_lr"] == 0.3
    assert config["params"]["cycle_momentum"] is True
    assert lr_schedules.get_lr_from_config(config) == (0.3, "")
    # the defaults of the command line (-1: not given) make a schedule
    schedule = OneCycle(Face(1.0, momentum=0.0), **config["params"])
    assert schedule.second_step_size == 1000
    assert schedule.second_stair_count == 0


def test_command_line_faults():
    assert lr_schedules.get_config_from_args(_parsed())[0] is None
    config, problem = lr_schedules.get_config_from_args(_parsed("--lr_schedule", "Nope"))
    assert config is None
    assert "Nope is not supported" in problem
    assert lr_schedules.get_lr_from_config({"type": "WarmupLR", "params": {}})[0] is None
    assert lr_schedules.get_lr_from_config({"params": {}})[0] is None
    assert lr_schedules.get_lr_from_config({"type": "WarmupLR"})[0] is None
    assert "not a valid" in lr_schedules.get_lr_from_config({"type": "X", "params": {}})[1]


@pytest.mark.parametrize("word", ["True", "false"])
def test_booleans_on_the_command_line(word):
    args = _parsed("--lr_range_test_staircase", word)
    assert args.lr_range_test_staircase is (word == "True")


def test_override_params():
    params = {"warmup_num_steps": 3, "kept": 1}
    lr_schedules.override_params(argparse.Namespace(warmup_num_steps=8, warmup_min_lr=None), params)
    assert params == {"warmup_num_steps": 8, "kept": 1}
