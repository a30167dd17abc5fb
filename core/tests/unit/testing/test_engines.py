"""`make_engine`: defaults, what a test says instead, and what is omitted."""

import torch
from deepspeed.testing import models


def config_of(monkeypatch, *args, **keys):
    given = {}
    monkeypatch.setattr("deepspeed.initialize", lambda **arguments: given.update(arguments) or ["engine"])
    assert models.make_engine(torch.nn.Linear(2, 2), *args, **keys) == "engine"
    return given


def test_keys_win_over_defaults_and_none_omits(monkeypatch):
    given = config_of(
        monkeypatch, 2, arguments={"mpu": 7}, optimizer=None, zero_optimization={"overlap_comm": True}, bf16={}
    )
    assert given["mpu"] == 7
    assert given["config"] == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "steps_per_print": float("inf"),
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 20, "overlap_comm": True},
        "bf16": {},
    }


def test_defaults_stay_as_they_are(monkeypatch):
    config_of(monkeypatch)["config"]["zero_optimization"]["stage"] = 3
    assert config_of(monkeypatch)["config"]["zero_optimization"] == {"stage": 0, "reduce_bucket_size": 20}
