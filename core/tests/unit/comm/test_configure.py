"""`deepspeed.comm.configure` reads `comms_logger` with the checks of the whole config."""

import deepspeed.comm as dist
import pytest
from deepspeed.comm import comms_logger
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError


@pytest.fixture(autouse=True)
def off_again():
    yield
    comms_logger.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)


def test_a_dict_with_a_mistyped_key_is_refused():
    with pytest.raises(ConfigError, match=r"^comms_logger\.enable: found an unknown key; did you mean 'enabled'"):
        dist.configure({"comms_logger": {"enable": True}})
    with pytest.raises(ConfigError, match=r"^comms_logger\.enabled: found 'perhaps'"):
        dist.configure({"comms_logger": {"enabled": "perhaps"}})
    assert not comms_logger.enabled


def test_dicts_and_configs_say_the_same():
    keys = {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": "all_reduce"}}
    for source in (keys, DeepSpeedConfig({"train_batch_size": 1, **keys})):
        comms_logger.configure(enabled=False)
        dist.configure(source)
        assert (comms_logger.enabled, comms_logger.prof_all, comms_logger.prof_ops) == (True, False, {"all_reduce"})
    dist.configure({"other": 1})
    assert comms_logger.enabled
