"""A config that is broken or made to break: a ConfigError of one line, at once, and never another exception."""

import base64
import json

import pytest
from deepspeed.config import DeepSpeedConfig, read_config
from deepspeed.config.intake import parse_section
from deepspeed.config.zero import ZeroConfig
from deepspeed.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
SIZE = '"train_batch_size": 8'


def refused(source, **arguments):
    with pytest.raises(ConfigError) as caught:
        DeepSpeedConfig(source, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 2000
    return message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEEP, "is nested too deeply"),
        ('{"a":' + "[" * 100_000, "is nested too deeply"),
        ("{a:" * 100_000, "is nested too deeply"),
        (f'{{{SIZE}, "optimizer": {{"type": "Adam", "params": {"[" * 200 + "]" * 200}}}}}', "is nested too deeply"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "found an integer of 5000 digits; at most 20"),
        ("{train_batch_size: " + "9" * 5000 + "}", "found an integer of 5000 digits; at most 20"),
        ('{"train_batch_size": ' + "9" * 20 + "}", "an integer of more than 64 bits"),
        (f'{{{SIZE}, "gradient_clipping": NaN}}', "gradient_clipping: found nan; allowed: a number"),
        ('{"train_batch_size": 1e400}', "train_batch_size: found inf; allowed: an integer >= 1"),
        ('{"train_batch_size": Infinity}', "train_batch_size: found inf; allowed: an integer >= 1"),
        (f'{{{SIZE}, "fp16": {{"loss_scale": 1e400}}}}', "fp16.loss_scale: found inf; allowed: a finite number >= 0"),
        (f'{{{SIZE}, "fp16": {{"initial_scale_power": 2000}}}}', "fp16.initial_scale_power: found 2000; allowed:"),
        (f'{{{SIZE}, "fp16": {{"enabled": "{"x" * 10**6}"}}}}', "fp16.enabled: found 'xxx"),
        (f'{{{SIZE}, "fp16": {{"{"x" * 10**6}": 1}}}}', "fp16.xxx"),
        (f'{{{SIZE}, "train_batch_size": "{"x" * 10**6}"}}', "appears twice"),
        ("{a:" + "'''", "is neither JSON nor hjson"),
        (json.dumps({str(number): 1 for number in range(30_000)}), "found more than 20000 values"),
        ("{" + " " * 1_100_000 + "}", "characters; a config has at most"),
    ],
    ids=range(18),
)
def test_text(text, message):
    assert message in refused(text)


@pytest.mark.parametrize("payload", [b"\xff\xfe\x00", b"{" + b"\xff" * 9, b"\x00" * 12, b"{" * 3000])
def test_base64(payload):
    refused(base64.b64encode(payload).decode())


def test_files(tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(b'{"a": "\xff"}')
    assert "cannot read the file" in refused(path)
    path.write_bytes(b"\xef\xbb\xbf{" + SIZE.encode() + b"}")
    assert DeepSpeedConfig(path).train_batch_size == 8, "Windows' editors write a byte order mark"
    path.write_text("{" + " " * 1_100_000 + "}")
    assert "characters; a config has at most" in refused(path)
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    assert "cannot read the file" in refused(loop)
    assert "neither a file" in refused(str(loop))
    assert "cannot read the file" in refused(tmp_path)
    assert "cannot read the file" in refused(tmp_path / "no\0file")
    assert "neither a file" in refused("no\0file.json")
    assert "neither a file" in refused("x" * 10**6)


def test_dicts():
    loop = {"train_batch_size": 8}
    loop["optimizer"] = {"type": "Adam", "params": loop}
    assert "is nested too deeply" in refused(loop)
    assert "an integer of more than 64 bits" in refused({"train_batch_size": 10**5000})
    assert "is nested too deeply" in refused({"train_batch_size": 8, "optimizer": json_nested(50_000)})
    assert "optimizer.params: the key 3 is not text" in refused({"optimizer": {"type": "Adam", "params": {3: 4}}})
    with pytest.raises(ConfigError, match=r"^zero_optimization\.reduce_bucket_size: found an integer of more than"):
        parse_section(ZeroConfig, {"reduce_bucket_size": 10**5000}, "zero_optimization")


def json_nested(depth):
    value = {}
    for _ in range(depth):
        value = {"params": value}
    return value


NAMES = st.sampled_from(["train_batch_size", "fp16", "enabled", "optimizer", "params", "type", "stage", "loss_scale"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("auto")
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)
TEXTS = st.dictionaries(NAMES | st.text(max_size=3), VALUES, max_size=4).map(json.dumps)
NOISE = st.text(alphabet="{}[]\":,.-+eE0123456789 \n\\u#/'trufalsn\x00\ud800é", max_size=12)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, noise=NOISE, at=st.integers(0, 200), length=st.integers(0, 4))
def test_any_text_gives_a_config_or_a_config_error(text, noise, at, length):
    for source in (text, "{" + text[:at] + noise + text[at + length :], noise):
        message = ""
        try:
            config = DeepSpeedConfig(source, batch_required=False)
            assert config.describe()
            config.check_supported()
        except ConfigError as error:
            message = str(error)
        assert "\n" not in message


def test_reading_again_gives_the_same_dict():
    value = {"train_batch_size": 8, "steps_per_print": 2**63 - 1, "gradient_clipping": 0.5}
    assert read_config(json.dumps(value)) == value
