"""Lengths and shares of layers by the step: DeepSpeed's numbers, and what the model's forward gets."""

import math
from weakref import WeakSet

import deepspeed
import pytest
import torch
from deepspeed.data import curriculum
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop
from torch import nn

CURRICULUM = {"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64}
LINEAR = {
    **CURRICULUM,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}

# What DeepSpeed 0.19.6 answers for the steps 0 to 13.
ANSWERS = {
    "fixed_linear": (
        {"total_curriculum_step": 10, "difficulty_step": 8},
        [8, 8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64, 64],
    ),
    "fixed_root": (
        {"total_curriculum_step": 10, "difficulty_step": 8, "root_degree": 2},
        [8, 24, 32, 32, 40, 40, 48, 48, 56, 56, 64, 64, 64, 64],
    ),
    "fixed_discrete": (
        {"difficulty": [8, 16, 32], "max_step": [2, 5]},
        [8, 8, 8, 16, 16, 16, 32, 32, 32, 32, 32, 32, 32, 32],
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_difficulties_are_deepspeeds(kind):
    options, answers = ANSWERS[kind]
    schedule = CurriculumScheduler({**CURRICULUM, "schedule_type": kind, "schedule_config": options})
    assert schedule.get_current_difficulty() == 8
    assert [schedule.update_difficulty(step) for step in range(14)] == answers
    state = schedule.get_state()
    assert state["current_difficulty"] == answers[-1]
    other = CurriculumScheduler(LINEAR)
    other.set_state(state)
    assert other.get_current_difficulty() == answers[-1]


def test_a_schedule_of_ones_own():
    schedule = CurriculumScheduler({**CURRICULUM, "schedule_type": "custom"})
    with pytest.raises(ConfigError, match="found 'custom' and no function; call set_custom_get_difficulty"):
        schedule.update_difficulty(1)
    schedule.set_custom_get_difficulty(lambda step: 8 + 2 * step)
    assert schedule.update_difficulty(3) == 14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_difficulty": None}, "min_difficulty: found nothing; a curriculum needs min_difficulty, max_difficulty"),
        ({"schedule_type": "linear"}, "schedule_type: found 'linear'; choose one of 'fixed_linear', 'fixed_root'"),
        ({"schedule_config": {}}, "schedule_config.total_curriculum_step: found nothing; fixed_linear needs"),
        (
            {"schedule_config": {"total_curriculum_step": 0, "difficulty_step": 8}},
            "total_curriculum_step: found 0; give a number above 0",
        ),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1, 2], "max_step": [1, 2]}},
            r"max_step: found \[1, 2\] for difficulty \[1, 2\]; give rising steps",
        ),
        ({"min_difficulty": 65}, "min_difficulty: found 65, above max_difficulty 64"),
    ],
)
def test_wrong_curricula(change, message):
    config = {name: value for name, value in {**LINEAR, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=f"^curriculum_learning.*{message}"):
        CurriculumScheduler(config)


def test_share_of_layers_is_the_papers():
    drop = ProgressiveLayerDrop(theta=0.5, gamma=0.01)
    shares = []
    for step in (0, 1, 10, 100, 1000):
        drop.update_state(step)
        shares.append(drop.get_theta())
    answers = [
        1.0,
        0.995024916874584,
        0.9524187090179798,
        0.6839397205857212,
        0.5000226999648812,
    ]  # of DeepSpeed 0.19.6
    assert shares == pytest.approx(answers, rel=1e-12)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": drop.get_theta()}


# ---- what an engine gives its model ---------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.given = []

    def forward(self, x, **kwargs):
        self.given.append(kwargs)
        return self.layer(x).square().mean()


def create(**keys):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        **keys,
    }
    engine, *_ = deepspeed.initialize(model=Net(), config=config)
    return engine


def steps(engine, count):
    """What the forwards of so many steps were given."""
    engine.module.given.clear()
    for _ in range(2 * count):
        engine.backward(engine(torch.ones(1, 4)))
        engine.step()
    return list(engine.module.given)


def test_forwards_get_the_length_of_their_step(single_rank, tmp_path):
    section = {**LINEAR, "enabled": True, "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8}}
    engine = create(curriculum_learning=section)
    lengths = [given["curriculum_seqlen"] for given in steps(engine, 3)]
    assert lengths == [16, 16, 32, 32, 48, 48]  # both micro-batches of a step
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 48
    assert engine.curriculum_enabled_legacy()
    engine.save_checkpoint(tmp_path)
    engine.eval()
    engine(torch.ones(1, 4))
    assert engine.module.given[-1] == {}
    engine.destroy()
    again = create(curriculum_learning=section)
    again.load_checkpoint(tmp_path)
    assert [given["curriculum_seqlen"] for given in steps(again, 1)] == [64, 64]
    again.destroy()


def test_another_kind_of_difficulty_is_only_counted(single_rank):
    engine = create(curriculum_learning={**LINEAR, "enabled": True, "curriculum_type": "rarity"})
    assert steps(engine, 2) == [{}] * 4
    assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 16
    engine.destroy()


@pytest.fixture
def no_schedulers(monkeypatch):
    """No schedule of another test counts as one that a script asks."""
    monkeypatch.setattr(curriculum, "_SCHEDULERS", WeakSet())
    warn_once.cache_clear()


@pytest.mark.parametrize("who_asks", ["nobody", "the script", "a schedule of the script's own", "the forward"])
def test_a_curriculum_that_nothing_asks_is_said_once(single_rank, lines, no_schedulers, who_asks):
    kind = "seqlen" if who_asks == "the forward" else "rarity"
    engine = create(curriculum_learning={**LINEAR, "enabled": True, "curriculum_type": kind})
    own = CurriculumScheduler(LINEAR) if who_asks == "a schedule of the script's own" else None
    if who_asks == "the script":
        assert engine.curriculum_scheduler_legacy.get_current_difficulty() == 8
    steps(engine, 2)
    engine.destroy()
    expected = (
        "curriculum_learning: found a curriculum of no length, and nothing that asks for its difficulty, so that it "
        "changes nothing; let your data follow engine.curriculum_scheduler_legacy.get_current_difficulty()"
    )
    warned = [text for level, text in lines if level == "WARNING" and "curriculum" in text]
    assert warned == ([expected] if who_asks == "nobody" else []), own


def test_forwards_get_the_share_of_layers(single_rank):
    engine = create(progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.1})
    given = steps(engine, 3)
    shares = [0.5 * math.exp(-0.1 * step) + 0.5 for step in (0, 0, 1, 1, 2, 2)]
    assert [each["pld_theta"] for each in given] == pytest.approx(shares)
    assert all(each["progressive_layer_drop"] is True for each in given)
    assert engine.get_pld_theta() == engine.progressive_layer_drop.get_theta() == pytest.approx(shares[-1])
    assert engine.pld_params() == {"theta": 0.5, "gamma": 0.1}
    engine.destroy()


def test_without_the_sections_a_forward_gets_nothing(single_rank):
    engine = create()
    assert steps(engine, 1) == [{}, {}]
    assert engine.get_pld_theta() is None
    assert engine.curriculum_scheduler_legacy is None
    engine.destroy()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"progressive_layer_drop": {"enabled": True, "theta": 1.5}}, "progressive_layer_drop.theta: found 1.5"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.min_difficulty: found nothing"),
    ],
)
def test_wrong_sections(single_rank, keys, message):
    with pytest.raises(ConfigError, match=message):
        create(**keys)
