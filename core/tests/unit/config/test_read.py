import base64
import json
from collections import OrderedDict
from types import MappingProxyType

import pytest
from deepspeed.config import DeepSpeedConfig, read_config
from deepspeed.errors import ConfigError

CONFIG = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "note?>~ü": "?>?>~~~ü"}
TEXT = json.dumps(CONFIG, ensure_ascii=False)


def test_a_dict_stays_the_same_object_and_unchanged():
    config = {"train_batch_size": 8, "zero_optimization": {"cpu_offload": True}, "bfloat16": {"enabled": "auto"}}
    before = json.dumps(config)
    assert read_config(config) is config
    parsed = DeepSpeedConfig(config)
    assert parsed.raw is config
    assert json.dumps(config) == before


def test_other_mappings_become_dicts():
    assert read_config(MappingProxyType(CONFIG)) == CONFIG
    assert read_config(OrderedDict(CONFIG)) == CONFIG


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_path(tmp_path, kind):
    path = tmp_path / "ds.json"
    path.write_text(TEXT, encoding="utf-8")
    assert read_config(kind(path)) == CONFIG


def test_text_and_base64():
    assert read_config(f"\n  {TEXT}") == CONFIG
    standard = base64.b64encode(TEXT.encode()).decode()
    url_safe = base64.urlsafe_b64encode(TEXT.encode()).decode()
    assert standard != url_safe, "the text must reach the two letters in which the alphabets differ"
    for encoded in (standard, url_safe, url_safe.rstrip("="), standard + "\n"):
        assert read_config(encoded) == CONFIG


def test_hjson(tmp_path):
    text = "{\n  # a comment\n  train_batch_size: 8\n  fp16: {enabled: true}\n}"
    path = tmp_path / "ds.hjson"
    path.write_text(text)
    expected = {"train_batch_size": 8, "fp16": {"enabled": True}}
    assert read_config(text) == read_config(path) == expected
    assert read_config(base64.b64encode(text.encode()).decode()) == expected
    assert read_config("// first a comment\n{train_batch_size: 8}") == {"train_batch_size": 8}


@pytest.mark.parametrize(
    "text", ['{"fp16": {"enabled": true, "enabled": false}}', "{fp16: {enabled: true\nenabled: false}}"]
)
def test_a_key_that_stands_twice(text, tmp_path):
    with pytest.raises(ConfigError, match=r"the key 'enabled' appears twice \(True and False\); keep one"):
        read_config(text)
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"ds\.json.*appears twice"):
        read_config(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/file.json", r"'no/such/file\.json' is neither a file that exists, nor JSON text.*check the path"),
        ("", "neither a file"),
        ('{"a": [1, 2}', r"the config text is neither JSON nor hjson: .*line 1 column"),
        ("{\n  // a comment\n  stage: 1\n", r"as JSON, .*line 2 column 3.*; as hjson, .*line 4 column 1"),
        ("{a:" + "'''", "as hjson, the text ends too early"),
        (base64.b64encode(b"[1]").decode(), "neither a file"),
        (None, "found NoneType None; give a dict, a path"),
        (7, "found int 7"),
    ],
)
def test_what_is_no_config(source, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(source)
    assert "\n" not in str(caught.value)


def test_files_that_hold_no_config(tmp_path):
    path = tmp_path / "list.json"
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"list\.json' holds list \[1, 2\]; the outermost"):
        read_config(path)
    with pytest.raises(ConfigError, match="cannot read the file"):
        read_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="cannot read the file"):
        read_config(str(tmp_path))
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="cannot read the file"):
        read_config(tmp_path / "latin.json")
