"""Packages broken in every way, installed beside one that works: each is reported, and the program runs on the rest."""

import json
import os
import subprocess
import sys

import pytest
from deepspeed.plugins.hookspecs import PLUGIN_API
from deepspeed.testing.tiers import swept

GOOD = """
from deepspeed.plugins import Offer, hookimpl
DS_PLUGIN_API = ">=1,<2"
@hookimpl
def ds_probe():
    return Offer("{name}", {priority}, reason="one device")
@hookimpl
def ds_accelerator():
    from deepspeed.accelerator.plain import PlainAccelerator
    return type("GOOD_Accelerator", (PlainAccelerator,), dict())()
"""
HANGS = "    import threading; threading.Event().wait(60)\n    return"
BROKEN = {
    "importless": (lambda text: "import a_library_that_is_missing", "No module named 'a_library_that_is_missing'"),
    "future": (
        lambda text: text.replace(">=1,<2", ">=2"),
        f"made for plugin API '>=2', and this ds-core speaks {PLUGIN_API}",
    ),
    "past": (lambda text: text.replace(">=1,<2", "<1"), "the plugin is too old"),
    "raises": (lambda text: text.replace("    return Offer", "    1 / 0; return Offer"), "ZeroDivisionError"),
    "hangs": (lambda text: text.replace("    return", HANGS, 1), "no answer within 0.3 s"),
    "hangs_at_import": (lambda text: "import threading; threading.Event().wait(60)", "no answer within 0.3 s"),
    "exits": (lambda text: "import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "unbuilt": (lambda text: text.replace("    return type", "    import libxyz\n    return type"), "No module named"),
}
# What a user does first, with everything that is told as one JSON object at the end.
PROGRAM = """
import io, json, sys, contextlib
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.cli import report
try:
    chosen = type(get_accelerator()).__name__
except deepspeed.errors.DeepSpeedError as error:
    chosen = str(error)
def told(*flags):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        return report.main(flags), out.getvalue()
(code, text), (code_of_pages, pages) = told("--explain-accelerator", "--json"), told("--verbose")
assert code == code_of_pages
print(json.dumps({"chosen": chosen, "code": code, "report": json.loads(text), "pages": pages}))
"""


@pytest.fixture
def site(tmp_path, python):
    """`install(name, source)` as pip does; `run(**environment)` the program, in a process that sees the packages."""

    class Site:
        def install(self, name, source):
            (tmp_path / f"vendor_{name}.py").write_text(source)
            info = tmp_path / f"ds_ext_{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ds-ext-{name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[deepspeed.accelerators]\n{name} = vendor_{name}\n")

        def run(self, **environment):
            left_out = ("DS_ACCELERATOR", "DS_PLUGINS", "DS_PLUGINS_BLOCK", "DS_PLUGINS_AUTOLOAD")
            variables = {name: value for name, value in os.environ.items() if name not in left_out}
            path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
            done = subprocess.run(
                [python, "-c", PROGRAM],
                env={**variables, "PYTHONPATH": path, "DS_PROBE_TIMEOUT": "0.3", **environment},
                capture_output=True, text=True, check=False, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout.splitlines()[-1])

    return Site()


def test_every_broken_package_is_reported_and_the_rest_works(site):
    for name, (breaks, _) in BROKEN.items():
        site.install(name, breaks(GOOD.format(name=name, priority=1000)))
    site.install("good", GOOD.format(name="good", priority=50))
    told = site.run()
    assert (told["chosen"], told["code"]) == ("GOOD_Accelerator", 0)
    rows = {row["name"]: row for row in told["report"]["accelerators"]}
    assert rows["good"]["chosen"]
    for name, (_, reason) in BROKEN.items():
        assert (rows[name]["state"], rows[name]["verdict"]) == ("broken", "lost: it is broken"), name
        assert reason in rows[name]["reason"]
        assert "Traceback" in rows[name]["traceback"] or "PluginError" in rows[name]["traceback"]
        assert rows[name]["origin"] == f"ds-ext-{name} 1.0 (vendor_{name})"
        assert f"{name} failed:" in told["pages"]


@pytest.mark.parametrize(
    "name", swept(["importless", "hangs", "hangs_at_import"], lambda name: name != "hangs_at_import")
)
def test_by_name_a_broken_package_is_the_error(site, name):
    breaks, reason = BROKEN[name]
    site.install(name, breaks(GOOD.format(name=name, priority=1000)))
    told = site.run(DS_ACCELERATOR=name)
    assert told["code"] == 1
    assert told["chosen"] == told["report"]["chosen"]["error"]
    assert told["chosen"].startswith(f"DS_ACCELERATOR={name}: ")
    assert reason in told["chosen"]


def test_two_with_equal_priority_are_reported_and_one_can_be_named(site):
    for name in ("first", "second"):
        site.install(name, GOOD.format(name=name, priority=50))
    told = site.run()
    assert told["code"] == 1
    assert "'first' and 'second' are both available with priority 50" in told["chosen"]
    verdicts = {row["name"]: row["verdict"] for row in told["report"]["accelerators"]}
    assert verdicts["first"] == "undecided: 'second' offers the same priority 50"
    told = site.run(DS_ACCELERATOR="second")
    assert (told["chosen"], told["code"]) == ("GOOD_Accelerator", 0)


def test_one_that_breaks_torch_itself_breaks_neither_the_import_nor_the_report(site, tmp_path):
    """`import torch` loads packages announced in `torch.backends`, and fails with them."""
    site.install("good", GOOD.format(name="good", priority=50))
    (tmp_path / "torch_half.py").write_text("raise ImportError('libhalf.so: cannot open shared object file')")
    info = tmp_path / "torch_half-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_half\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nhalf = torch_half:load\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    environment.pop("DS_ACCELERATOR", None)

    def run(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)

    assert run("-c", "import deepspeed; deepspeed.__version__").returncode == 0
    assert "Failed to load the backend extension: half" in run("-c", "import torch").stderr
    done = run("-m", "deepspeed.cli.report", "--json", "--explain-accelerator")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert report["chosen"]["plugin"] == "good"
    (row,) = report["torch_backends"]
    assert (row["name"], row["origin"]) == ("half", "torch_half 1.0")
    assert row["error"] == "ImportError: libhalf.so: cannot open shared object file"
    told = " ".join(run("-m", "deepspeed.cli.report").stdout.split())
    assert "import torch fails, because it loads 'half' of torch_half 1.0" in told
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading it" in told
