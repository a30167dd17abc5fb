"""ds_report says what is installed, what is offered, and why which accelerator was chosen."""

import json
import sys
import types

import pytest
from deepspeed.accelerator import current
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.cli import report
from deepspeed.plugins import ACCELERATORS, Offer, PluginManager, hookimpl


@pytest.fixture
def shelf(monkeypatch):
    """Two plugins, one broken; nothing chosen."""
    module = types.ModuleType("plugin_good")
    module.ds_probe = hookimpl(lambda: Offer("good", 7, reason="one device [bold]"))

    @hookimpl
    def ds_accelerator():
        return PlainAccelerator()

    module.ds_accelerator = ds_accelerator

    def explode():
        raise ImportError("libbad.so is missing")

    entries = [
        types.SimpleNamespace(name="good", value="good", dist=None, load=lambda: module),
        types.SimpleNamespace(name="bad", value="bad", dist=None, load=explode),
    ]
    manager = PluginManager(lambda group: entries if group == ACCELERATORS else [])
    for holder in (current, report):
        monkeypatch.setattr(holder, "plugin_manager", lambda: manager)
    monkeypatch.setattr(current, "_choice", None)
    monkeypatch.setattr(current, "_accelerator", None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return module


def test_json_holds_everything(shelf, capsys):
    assert report.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "ds-core", "DeepSpeed API", "plugin API", "pluggy", "pydantic"} <= set(told["versions"])
    good, bad = told["accelerators"]
    assert good == {"name": "good", "priority": 7, "available": True, "reason": "one device [bold]", "chosen": True}
    assert (bad["name"], bad["available"], bad["chosen"]) == ("bad", False, False)
    assert "libbad.so is missing" in bad["reason"]
    assert told["chosen"]["plugin"] == "good"
    assert told["chosen"]["class"] == "deepspeed.accelerator.plain.PlainAccelerator"
    assert told["device"]["communication_backend_name"] == "gloo"
    assert told["device"]["supported_dtypes"] == ["float32", "float16", "bfloat16"]
    assert told["overwritten_by"] is None


def test_tables_for_people(shelf, capsys):
    assert report.main([]) == 0
    text = capsys.readouterr().out
    for part in ("Versions", "ds-core", "good *", "one device [bold]", "libbad.so is missing", "Chosen: cpu", "gloo"):
        assert part in text


def test_explain_shows_only_the_choice(shelf, capsys, monkeypatch):
    assert report.main(["--explain-accelerator"]) == 0
    text = capsys.readouterr().out
    assert "priority 7 is the highest available" in text
    assert "DS_ACCELERATOR: not set" in text
    assert "pydantic" not in text


def test_no_choice_is_shown_and_is_an_exit_code(shelf, capsys, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "nosuch")
    assert report.main([]) == 1
    assert "no accelerator named 'nosuch' is installed" in capsys.readouterr().out


def test_a_vendors_failing_answer_is_shown_in_its_place(shelf, monkeypatch):
    def fail(self):
        raise OSError("driver gone")

    monkeypatch.setattr(PlainAccelerator, "device_count", fail)
    device = report.collect()["device"]
    assert device["device_count"] == "failed: OSError: driver gone"
    assert device["communication_backend_name"] == "gloo"


def test_another_deepspeed_over_ours_is_told(shelf, capsys, monkeypatch):
    ours, theirs = (types.SimpleNamespace(version=version) for version in ("0.19.6+core.0.1.0", "0.18.2"))
    monkeypatch.setattr(report.importlib_metadata, "distributions", lambda name: [ours])
    assert report.foreign_deepspeed() is None
    monkeypatch.setattr(report.importlib_metadata, "distributions", lambda name: [ours, theirs])
    assert report.foreign_deepspeed() == "0.18.2"
    assert report.main([]) == 1
    assert "Another DeepSpeed (0.18.2) is installed over these files" in capsys.readouterr().out


def test_an_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit):
        report.main(["--nosuch"])
    assert "--nosuch" in capsys.readouterr().err
