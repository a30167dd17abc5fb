"""The core alone, with each extension of this repository, with all of them: a choice is made, the documented one.

Each case is a fresh interpreter whose path holds what this environment holds, but for installed extensions, and the
sources of those of the case with the metadata that a `pip install` would leave.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from deepspeed.testing.tiers import swept

ROOT = Path(__file__).parents[4]
EXTENSIONS = sorted(path.name for path in (ROOT / "extensions").glob("ds-ext-*") if (path / "pyproject.toml").exists())
CASES = {"core alone": (), **{name: (name,) for name in EXTENSIONS}, "all": tuple(EXTENSIONS)}
# What a user does first; `get_accelerator` is asked before the report, so that the choice is its own.
PROGRAM = """
import contextlib, io, json, sys
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.cli import report
name = get_accelerator()._name
def told(*flags):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        return report.main(flags), out.getvalue()
(code, text), (code_of_text, _) = told("--json"), told("--verbose")
print(json.dumps({"name": name, "codes": [code, code_of_text], "report": json.loads(text)}))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The environment's packages without extensions: links, and no `.pth` file is read."""
    folder = tmp_path_factory.mktemp("base")
    for kind in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(kind).iterdir():
            is_extension = path.name.startswith(("ds_ext", "__editable__", "deepspeed")) or path.suffix == ".pth"
            if not is_extension and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder


def announce(name, folder):
    """The metadata of the extension `name`, read from its pyproject.toml (there is no tomllib in Python 3.10)."""
    text = (ROOT / "extensions" / name / "pyproject.toml").read_text()
    heading = r'^\[project\.entry-points\."([\w.]+)"\]\n((?:[^\[\n].*\n?|\n)*)'
    sections = dict(re.findall(heading, text, flags=re.MULTILINE))
    info = folder / f"{name.replace('-', '_')}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    announced = "".join(f"[{group}]\n{lines}" for group, lines in sections.items())
    (info / "entry_points.txt").write_text(announced.replace('"', ""))
    return re.findall(r'^([\w-]+) = "', sections["deepspeed.accelerators"], flags=re.MULTILINE)


@pytest.fixture
def run(base, tmp_path):
    """Runs a program where only the extensions called `names` are installed; the process, and the devices announced."""

    def run(program, names):
        announced = [device for name in names for device in announce(name, tmp_path)]
        sources = [ROOT / "core/src", *(ROOT / "extensions" / name / "src" for name in names)]
        left_out = ("DS_ACCELERATOR", "DS_PLUGINS", "DS_PLUGINS_BLOCK", "DS_PLUGINS_AUTOLOAD", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, [*sources, tmp_path, base]))
        done = subprocess.run(
            [sys.executable, "-S", "-c", program],
            env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done, announced

    return run


@pytest.mark.parametrize("case", swept(CASES, lambda case: case in ("core alone", "ds-ext-cpu", "all")))
def test_the_choice_of(case, run):
    done, announced = run(PROGRAM, CASES[case])
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["codes"] == [0, 0]
    rows = {row["name"]: row for row in told["report"]["accelerators"]}
    assert set(rows) == {*announced, "plain"}
    assert {name: row["reason"] for name, row in rows.items() if row["state"] == "broken"} == {}
    failed = {name: answer for name, answer in told["report"]["device"].items() if str(answer).startswith("failed")}
    assert failed == {}
    available = [row for row in rows.values() if row["available"] and row["name"] != "plain"]
    expected = max(available, key=lambda row: row["priority"])["name"] if available else "plain"
    assert [name for name, row in rows.items() if row["chosen"]] == [expected]
    warned = "running on the plain CPU device" in done.stderr
    assert warned is (expected == "plain")
    if not announced:
        assert "ds-ext-cpu" in done.stderr
        assert told["name"] == "cpu"


FORK = """
import os, sys
import torch
from deepspeed.accelerator import get_accelerator
accelerator = get_accelerator()
accelerator.is_available(), accelerator.device_count()
modules = [getattr(torch, name, None) for name in ("cuda", "xpu", "npu", "mtia")]
opened = [module.__name__ for module in modules if hasattr(module, "is_initialized") and module.is_initialized()]
child = os.fork()
if child == 0:
    x = torch.ones(4, device=accelerator.current_device_name()) + 1
    os._exit(0 if get_accelerator() is accelerator and float(x.sum()) == 8 else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), opened)
"""


def test_after_the_choice_among_all_no_device_is_open_and_a_forked_child_can_use_it(run):
    done, _ = run(FORK, EXTENSIONS)
    assert done.stdout.splitlines()[-1] == "0 []"


BUILDERS = """
import json
from deepspeed.plugins import plugin_manager
told = {}
for name in plugin_manager().names():
    for builder_name, kind in plugin_manager().op_builders(name).items():
        builder = kind()
        told[f"{name}.{builder_name}"] = [bool(builder.is_compatible()), builder.reason]
print(json.dumps(told))
"""


def test_every_builder_can_be_asked_without_its_device_and_says_why_not(run):
    done, _ = run(BUILDERS, EXTENSIONS)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told
    assert {name for name, (works, reason) in told.items() if not works and not reason} == set()
