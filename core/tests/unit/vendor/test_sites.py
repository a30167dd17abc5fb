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

ROOT = Path(__file__).parents[4]
EXTENSIONS = sorted(path.name for path in (ROOT / "extensions").glob("ds-ext-*") if (path / "pyproject.toml").exists())
CASES = {"core alone": (), **{name: (name,) for name in EXTENSIONS}, "all": tuple(EXTENSIONS)}
# Prints what a user sees first; `get_accelerator` is asked before the report, so that the choice is its own.
PROGRAM = """
import contextlib, io, json, sys
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.cli import report
name = get_accelerator()._name
out = io.StringIO()
with contextlib.redirect_stdout(out):
    code = report.main(["--explain-accelerator", "--json"])
print(json.dumps({"name": name, "code": code, "report": json.loads(out.getvalue())}))
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


@pytest.mark.parametrize("case", CASES)
def test_the_choice_of(case, base, tmp_path):
    announced = [device for name in CASES[case] for device in announce(name, tmp_path)]
    sources = [ROOT / "core/src", *(ROOT / "extensions" / name / "src" for name in CASES[case])]
    left_out = ("DS_ACCELERATOR", "DS_PLUGINS", "DS_PLUGINS_BLOCK", "DS_PLUGINS_AUTOLOAD", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*sources, tmp_path, base]))
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["code"] == 0
    rows = {row["name"]: row for row in told["report"]["accelerators"]}
    assert set(rows) == {*announced, "plain"}
    assert {name: row["reason"] for name, row in rows.items() if row["state"] == "broken"} == {}
    available = [row for row in rows.values() if row["available"] and row["name"] != "plain"]
    expected = max(available, key=lambda row: row["priority"])["name"] if available else "plain"
    assert [name for name, row in rows.items() if row["chosen"]] == [expected]
    warned = "running on the plain CPU device" in done.stderr
    assert warned is (expected == "plain")
    if not announced:
        assert "pip install ds-ext-cpu" in done.stderr
        assert told["name"] == "cpu"
