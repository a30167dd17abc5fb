"""Whatever JSON stands under whatever key: a config comes out, or a ConfigError; never another exception."""

import logging

import pytest
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.base import section_of
from deepspeed.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = ["enabled", "stage", "device", "type", "params", "unknown"]
LEAVES = st.none() | st.booleans() | st.integers(-3, 10) | st.floats() | st.text("ab1", max_size=3) | st.just("auto")
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=4,
)


def paths(model):
    for name, info in model.model_fields.items():
        yield (name,)
        section = section_of(info)
        if section is not None:
            yield from ((name, *rest) for rest in paths(section))
    yield from ((old,) for old in model.moved)


@pytest.fixture(autouse=True, scope="module")
def quiet_logger():
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel("ERROR")
    yield
    logger.setLevel(level)


@settings(max_examples=400, deadline=None)
@given(path=st.sampled_from(list(paths(DeepSpeedConfig))), value=JSON)
def test_a_config_or_a_config_error(path, value):
    keys = value
    for name in reversed(path):
        keys = {name: keys}
    try:
        config = DeepSpeedConfig({"train_batch_size": 4, **keys})
        assert config.describe()
        config.check_supported()
    except ConfigError as error:
        message = str(error)
    else:
        return
    assert "\n" not in message
    assert "found" in message or "missing" in message or "appears twice" in message or "given twice" in message
