"""`MiCS_Init` and what its configuration must have. ranks/test_mics_and_hpz.py trains what it builds."""

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError


def test_a_configuration_without_shard_size_is_refused():
    with pytest.raises(ConfigError, match="MiCS_Init: found no configuration; pass config_dict_or_path"):
        deepspeed.zero.MiCS_Init()
    with pytest.raises(ConfigError, match="MiCS_Init: zero_optimization.mics_shard_size is -1; give the number of"):
        deepspeed.zero.MiCS_Init(config={"zero_optimization": {"stage": 3}})
    with pytest.raises(ConfigError, match="zero.Init: zero_optimization.stage is 2, so no parameter would be sharded"):
        deepspeed.zero.MiCS_Init(config_dict_or_path={"zero_optimization": {"stage": 2, "mics_shard_size": 1}})


def test_it_is_zero_init_under_its_old_names():
    with deepspeed.zero.MiCS_Init(enabled=False):
        assert torch.nn.Linear(2, 2).weight.shape == (2, 2)
    assert issubclass(deepspeed.zero.MiCS_Init, deepspeed.zero.Init)
    assert deepspeed.runtime.zero.mics.MiCS_Init is deepspeed.runtime.zero.MiCS_Init is deepspeed.zero.MiCS_Init
