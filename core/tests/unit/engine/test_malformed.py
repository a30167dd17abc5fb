"""Malformed configs through `deepspeed.initialize`: one line each, which names the key and what to do."""

import deepspeed
import pytest
from deepspeed.errors import ConfigError
from torch import nn

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}

#: case -> (config, the key that the message names, words of its remedy)
MALFORMED = {
    "no batch size": ({**ADAM}, "train_batch_size", "give"),
    "batch sizes that disagree": (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1},
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ),
    "a number in quotes": ({"train_batch_size": "8"}, "train_batch_size", "without quotes"),
    "a stage that there is not": (
        {"train_batch_size": 4, "zero_optimization": {"stage": 7}},
        "zero_optimization.stage",
        "0 or 1 or 2 or 3",
    ),
    "a feature of a later version": (
        {"train_batch_size": 4, "zero_optimization": {"parameter_alignment": True}, **ADAM},
        "zero_optimization.parameter_alignment",
        "false",
    ),
    "two precisions": (
        {"train_batch_size": 4, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "bf16.enabled",
        "keep one",
    ),
    "clipping in words": ({"train_batch_size": 4, "gradient_clipping": "much"}, "gradient_clipping", "a number"),
    "an unknown optimizer": (
        {"train_batch_size": 4, "optimizer": {"type": "Adamm", "params": {"lr": 0.1}}},
        "optimizer.type",
        "AdamW",
    ),
    "an unknown parameter of the optimizer": (
        {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"learning_rate": 0.1}}},
        "optimizer.params.learning_rate",
        "lr",
    ),
    "a wrong type in the optimizer": (
        {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": "fast"}}},
        "optimizer.params.lr",
        "number",
    ),
    "an unknown schedule": (
        {"train_batch_size": 4, **ADAM, "scheduler": {"type": "Warmup", "params": {}}},
        "scheduler.type",
        "WarmupLR",
    ),
    "an unfilled auto": (
        {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
        "optimizer.params.lr",
        "give a value",
    ),
    "JSON that is cut off": ('{"train_batch_size": 4,', "config", "line 1"),
    "a list": ([4], "config", "dict"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_one_line_names_the_key_and_the_remedy(single_rank, case):
    config, key, remedy = MALFORMED[case]
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    message = str(caught.value)
    assert "\n" not in message
    assert key in message
    assert remedy in message


def test_no_config_at_all(single_rank):
    with pytest.raises(ConfigError, match=r"config=.*--deepspeed_config"):
        deepspeed.initialize(model=nn.Linear(2, 2))


def test_no_model(single_rank):
    with pytest.raises(ConfigError, match=r"model is NoneType.*torch\.nn\.Module"):
        deepspeed.initialize(config={"train_batch_size": 4})
