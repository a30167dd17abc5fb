"""ds_report says what is installed, what is offered, and why which accelerator was chosen."""

import io
import json
import os
import resource
import runpy
import shutil
import sys
import types

import pytest
import torch
from deepspeed import _installation, env_report
from deepspeed.accelerator import candidates, current
from deepspeed.accelerator.current import reset_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.cli import report, report_parts
from deepspeed.errors import OpUnavailable
from deepspeed.log import warn_once
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.toolchain import Toolchain
from deepspeed.plugins import ACCELERATORS, FEATURES, Offer, PluginManager, hookimpl
from rich.console import Console


@pytest.fixture
def shelf(monkeypatch):
    """Two accelerators and two feature plugins, one of each broken; nothing chosen."""
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
    feature = types.ModuleType("plugin_feature")
    feature.ds_step_end = hookimpl(lambda stats: None)
    features = [
        types.SimpleNamespace(name="extra", value="extra", dist=None, load=lambda: feature),
        types.SimpleNamespace(name="worse", value="worse", dist=None, load=explode),
    ]
    manager = PluginManager({ACCELERATORS: entries, FEATURES: features}.__getitem__)
    for holder in (current, candidates, report, report_parts):
        monkeypatch.setattr(holder, "plugin_manager", lambda: manager)
    monkeypatch.setattr(current, "_choice", None)
    monkeypatch.setattr(current, "installed", None)
    for variable in ("DS_ACCELERATOR", "DS_PLUGINS_BLOCK", "DS_PLUGINS_AUTOLOAD", "DS_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return module


def test_json_holds_everything(shelf, capsys):
    assert report.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "ds-core", "DeepSpeed API", "plugin API", "pluggy", "pydantic"} <= set(told["versions"])
    good, bad, plain = told["accelerators"]
    assert good == {
        "name": "good", "priority": 7, "available": True, "reason": "one device [bold]", "chosen": True,
        "origin": "an unnamed distribution (good)", "api": None, "state": "available", "traceback": None,
        "verdict": "won: priority 7 is the highest available (one device [bold])", "impersonates": "",
    }  # fmt: skip
    assert (bad["name"], bad["available"], bad["chosen"], bad["state"]) == ("bad", False, False, "broken")
    assert "libbad.so is missing" in bad["reason"]
    assert "in explode" in bad["traceback"]
    assert bad["verdict"] == "lost: it is broken"
    assert (plain["name"], plain["chosen"], plain["verdict"]) == ("plain", False, "lost: 'good' can be used")
    extra, worse = told["features"]
    assert (extra["name"], extra["state"], extra["hooks"]) == ("extra", "active", ["ds_step_end"])
    assert (worse["name"], worse["state"]) == ("worse", "broken")
    assert "libbad.so is missing" in worse["reason"]
    assert told["chosen"]["plugin"] == "good"
    assert told["chosen"]["class"] == "deepspeed.accelerator.plain.PlainAccelerator"
    assert told["device"]["communication_backend_name"] == "gloo"
    assert told["device"]["supported_dtypes"] == ["float32", "float16", "bfloat16"]
    assert told["overwritten_by"] is None


class Sim:
    """Builders of ops by their toolchain: a compiler that begins with its name, one that is not here, a broken one."""

    class Compiles(OpBuilder):
        def absolute_name(self):
            return "sim.op"

        def sources(self):
            return []

        def toolchain(self):
            return Toolchain(("simcc", "-m64"), "simcc: a compiler\nCopyright (c) 2005-2025\nrelease 7.1, build 3\n")

        def __init__(self):
            super().__init__("op")

    class Lacks(Compiles):
        def toolchain(self):
            raise OpUnavailable("no simcc: SIM_HOME is not set")

    class Breaks(Compiles):
        def toolchain(self):
            raise OSError("driver gone")


def test_paths_toolkits_and_limits_are_told(shelf, capsys, monkeypatch):
    shelf.__file__ = "/site/good/plugin.py"
    shelf.ds_op_builders = hookimpl(
        lambda: {"A": Sim.Compiles, "B": Sim.Lacks, "C": Sim.Breaks, "D": Sim.Compiles, "E": object}
    )
    monkeypatch.setattr(shutil, "which", {"simcc": "/opt/sim/simcc"}.get)
    monkeypatch.setattr(report_parts, "find_compiler", lambda: Toolchain(("g++",), "(Debian 12.2.0) 12.2.0\nfree"))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 * 2**20, resource.RLIM_INFINITY))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(total=64 * 2**30, free=3 * 2**29))
    assert report.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["paths"]["accelerator 'good'"] == "/site/good"
    assert told["paths"]["accelerator 'bad'"] is None
    assert told["paths"]["torch"] == os.path.dirname(torch.__file__)
    toolkits = told["toolkits"]
    simcc = {"used_by": ["good"], "command": "/opt/sim/simcc -m64", "version": "release 7.1, build 3", "reason": ""}
    assert toolkits[0] == {"used_by": ["core"], "command": "g++", "version": "(Debian 12.2.0) 12.2.0", "reason": ""}
    assert simcc in toolkits
    reasons = [row["reason"] for row in toolkits if row["used_by"] == ["good"]]
    assert reasons == ["", "no simcc: SIM_HOME is not set", "OSError: driver gone"]
    assert told["machine"] == {
        "shared_memory_bytes": 64 * 2**30, "shared_memory_free_bytes": 3 * 2**29, "memlock_bytes": 8 * 2**20
    }  # fmt: skip
    assert report.main([]) == 0
    text = capsys.readouterr().out
    for part in ("/site/good", "release 7.1", "no simcc", "64.00 GiB, 1.50 GiB free", "8.00 MiB", "/dev/shm"):
        assert part in text


def test_a_machine_without_shared_memory_and_without_a_limit(shelf, capsys, monkeypatch):
    monkeypatch.setattr(report_parts, "_SHARED_MEMORY", "/nowhere")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert set(report_parts.collect_machine().values()) == {None}
    assert report.main([]) == 0
    assert "unlimited" in capsys.readouterr().out


def test_states_are_in_color_on_a_terminal_only(shelf, capsys, monkeypatch):
    assert report.main([]) == 0
    assert "\x1b" not in capsys.readouterr().out
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    monkeypatch.setattr(report, "make_console", lambda: terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert report.main([]) == 0
    assert "\x1b[32mavailable\x1b[0m" in terminal.file.getvalue()
    assert "\x1b[1;31mbroken\x1b[0m" in terminal.file.getvalue()


def test_ops_can_be_hidden_and_are_not_looked_at(shelf, capsys, monkeypatch):
    monkeypatch.setattr(report_parts, "collect_ops", lambda: pytest.fail("ops were looked at"))
    assert report.main(["--hide_operator_status"]) == 0
    text = capsys.readouterr().out
    assert "Chosen: cpu" in text
    assert "torch reference" not in text


def test_errors_and_warnings_can_be_hidden(shelf, capsys, monkeypatch):
    op = {"op": "gemm", "front": None, "offered": True, "builder": None, "source": "reference", "state": "failed"}
    op |= {"library": None, "rejected": [["here", "driver too old"]], "remark": "no compiler"}
    monkeypatch.setattr(report_parts, "collect_ops", lambda: [op])
    monkeypatch.setattr(report, "foreign_deepspeed", lambda: "0.18.2")
    told = ("driver too old", "no compiler", "DeepSpeed itself", "[WARNING]")
    warn_once.cache_clear()
    assert report.main([]) == 1
    shown = "".join(capsys.readouterr())
    assert [part for part in told if part not in shown] == []
    reset_accelerator()
    warn_once.cache_clear()
    assert report.main(["--hide_errors_and_warnings"]) == 1  # hidden, and yet a fault
    shown = "".join(capsys.readouterr())
    assert [part for part in told if part in shown] == []
    assert "gemm" in shown
    assert report.main(["--explain-accelerator", "--verbose", "--hide_errors_and_warnings"]) == 1
    assert "Traceback" not in capsys.readouterr().out


def test_it_has_deepspeeds_address(shelf, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["env_report", "--hide_operator_status", "--json"])
    monkeypatch.delitem(sys.modules, "deepspeed.env_report", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("deepspeed.env_report", run_name="__main__")
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["ops"] == []
    assert env_report.main(hide_operator_status=True) is None  # whatever the arguments of the process are
    assert "torch reference" not in capsys.readouterr().out


def test_tables_for_people(shelf, capsys):
    assert report.main([]) == 0
    text = capsys.readouterr().out
    for part in ("Versions", "ds-core", "good *", "one device [bold]", "libbad.so is missing", "Chosen: cpu", "gloo"):
        assert part in text
    assert "extra" in text.split("Feature plugins")[1]
    assert "Traceback" not in text


def test_explain_shows_only_the_choice(shelf, capsys, monkeypatch):
    assert report.main(["--explain-accelerator"]) == 0
    text = capsys.readouterr().out
    assert "* good: available, priority 7\n    one device [bold]\n    won: priority 7 is the highest available" in text
    assert "  bad: broken" in text
    assert "DS_ACCELERATOR: not set" in text
    assert "--verbose shows the traceback" in text
    assert "pydantic" not in text
    assert "Traceback" not in text


def test_a_device_that_poses_as_another_is_told(shelf, capsys):
    shelf.ds_probe = hookimpl(lambda: Offer("good", 7, reason="one device", impersonates="cpu"))
    assert report.main(["--explain-accelerator"]) == 0
    assert "poses as torch's device 'cpu'" in capsys.readouterr().out
    assert report.main([]) == 0
    assert "good (as cpu) *" in capsys.readouterr().out


def test_verbose_shows_where_each_broken_plugin_failed(shelf, capsys):
    assert report.main(["--explain-accelerator", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "in explode" in text.split("bad failed:")[1]
    assert report.main(["-v"]) == 0
    text = capsys.readouterr().out
    assert "in explode" in text.split("bad failed:")[1].split("worse failed:")[0]
    assert "in explode" in text.split("worse failed:")[1]
    assert "an unnamed distribution (extra)" in text


def test_explain_as_json(shelf, capsys):
    assert report.main(["--explain-accelerator", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"chosen", "accelerators", "environment", "overwritten_by", "torch_backends"}
    assert [row["name"] for row in told["accelerators"]] == ["good", "bad", "plain"]
    assert told["environment"]["DS_PLUGINS_BLOCK"] is None


def test_a_plugin_that_the_environment_keeps_out_is_told(shelf, monkeypatch):
    monkeypatch.setenv("DS_PLUGINS_BLOCK", "bad,worse")
    told = report.collect()
    assert [row["state"] for row in told["accelerators"]] == ["available", "blocked", "available"]
    assert [row["state"] for row in told["features"]] == ["active", "blocked"]
    assert "DS_PLUGINS_BLOCK" in told["features"][1]["reason"]


def test_a_feature_plugin_that_was_named_and_is_missing_is_told(shelf, monkeypatch):
    monkeypatch.setenv("DS_PLUGINS", "good,nosuch")
    states = {row["name"]: row["state"] for row in report.collect_features()}
    assert states == {"extra": "active", "nosuch": "broken", "worse": "broken"}


def test_a_variable_that_holds_nonsense_is_the_error(shelf, monkeypatch, capsys):
    monkeypatch.setenv("DS_PROBE_TIMEOUT", "soon")
    assert report.main(["--explain-accelerator"]) == 1
    assert "No accelerator: DS_PROBE_TIMEOUT=soon" in capsys.readouterr().out


def test_no_choice_is_shown_and_is_an_exit_code(shelf, capsys, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "nosuch")
    assert report.main([]) == 1
    told = capsys.readouterr().out
    assert "no accelerator named 'nosuch' is installed" in told
    assert "The chosen device" not in told


def test_a_pipe_is_not_folded(shelf, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    name = "a driver of " + "many words " * 30 + "and its end"
    shelf.ds_probe = hookimpl(lambda: Offer("good", 7, reason=name))
    assert report.main([]) == 0
    assert [line.count(name) for line in capsys.readouterr().out.splitlines() if "good *" in line] == [1]


def test_a_vendors_failing_answer_is_shown_in_its_place(shelf, monkeypatch):
    def fail(self):
        raise OSError("driver gone")

    monkeypatch.setattr(PlainAccelerator, "device_count", fail)
    device = report.collect()["device"]
    assert device["device_count"] == "failed: OSError: driver gone"
    assert device["communication_backend_name"] == "gloo"


def test_another_deepspeed_over_ours_is_told(shelf, capsys, monkeypatch):
    ours, theirs = (types.SimpleNamespace(version=version) for version in ("0.19.6+core.0.1.0", "0.18.2"))
    monkeypatch.setattr(_installation.importlib_metadata, "distributions", lambda name: [ours])
    assert report.foreign_deepspeed() is None
    monkeypatch.setattr(_installation.importlib_metadata, "distributions", lambda name: [ours, theirs])
    assert report.foreign_deepspeed() == "0.18.2"
    assert report.main([]) == 1
    assert "DeepSpeed itself (0.18.2) is installed over the files of ds-core" in capsys.readouterr().out


def test_an_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit):
        report.main(["--nosuch"])
    assert "--nosuch" in capsys.readouterr().err


def test_headings_and_rows_that_people_paste(capsys):
    report.main([])
    lines = capsys.readouterr().out.splitlines()
    assert "DeepSpeed C++/CUDA extension op report" in lines
    assert any(line.startswith("op name ....") and line.endswith("compatible") for line in lines)
    assert any(line.startswith("cpu_adam ....") and line.endswith(("[OKAY]", "[NO]")) for line in lines)
    assert "DeepSpeed general environment info:" in lines
    for name in ("torch version", "torch install path", "deepspeed install path", "deepspeed info"):
        assert any(line.startswith(f"{name} ...") for line in lines), name
    report.main(["--hide_operator_status"])
    assert "extension op report" not in capsys.readouterr().out


def test_counts_of_faults_of_several_plugins_are_added_up(monkeypatch):
    counts = {("one", "sparks"): 1, ("other", "sparks"): 2, ("other", "fans that stand"): 0}
    monkeypatch.setattr(report.plugin_manager(), "providers", lambda _: ["one", "other"])
    monkeypatch.setattr(report.plugin_manager(), "device_faults", lambda _: (counts, ["a third failed"]))
    device = types.SimpleNamespace(device_count=lambda: 1, device_name=lambda _: "meta:0")
    faults = report._faults(device)
    assert faults == {"meta:0": {"sparks": 3, "fans that stand": 0}}
    assert report._shown_device({"faults": faults})["faults"] == "meta:0: 3 sparks"
    counts.clear()
    assert report._faults(device) == "a third failed"
