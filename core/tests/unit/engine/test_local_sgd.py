"""What `local_sgd` does not go with is refused, and why."""

import pytest
from deepspeed.errors import ConfigError
from torch import nn

ENABLED = {"enabled": True, "sync_every": 2}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"zero_optimization": {"stage": 1}}, "found true with zero_optimization.stage 1, which divides states"),
        ({"zero_optimization": {"stage": 3}}, "found true with zero_optimization.stage 3, which divides states"),
        (
            {"watch": {"compare_weights_every": 5}},
            "found true with watch.compare_weights_every 5, and the copies differ",
        ),
        ({"zero_optimization": {"stage": 0, "enable_sanity_checks": True}}, "enable_sanity_checks true"),
        ({"deterministic": {"enabled": True}}, "local_sgd"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2}}}, "found true with OnebitAdam"),
        ({"local_sgd": {**ENABLED, "sync_every": 0}}, "sync_every"),
        ({"local_sgd": {**ENABLED, "outer_momentum": 1.0}}, "outer_momentum"),
        ({"local_sgd": {**ENABLED, "outer_lr": 0}}, "outer_lr"),
    ],
)
def test_what_divides_a_model_or_compares_its_copies_is_refused(make_engine, keys, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(nn.Linear(3, 2), **{"local_sgd": ENABLED, "zero_optimization": {"stage": 0}, **keys})
