"""`pip install ./core` leaves the source tree as it was."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2]
# what pip calls, each in a process of its own
HOOKS = ("get_requires_for_build_wheel", "prepare_metadata_for_build_wheel", "build_wheel")
CALL = "import sys; sys.path[0] = ''; import build_backend; print(getattr(build_backend, sys.argv[1])(*sys.argv[2:]))"


@pytest.mark.skipif(not (CORE / "build_backend.py").is_file(), reason="not a checkout")
def test_a_wheel_is_built_beside_the_sources_and_holds_no_old_file(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "core"
    shutil.copytree(CORE, tree, ignore=shutil.ignore_patterns("tests", "build", "*.egg-info", "__pycache__"))
    stale = tree / "build" / "lib" / "deepspeed" / "stale.py"  # of a build before this backend
    stale.parent.mkdir(parents=True)
    stale.touch()
    before = sorted(tree.rglob("*"))
    out = tmp_path / "out"
    out.mkdir()
    for hook in HOOKS:
        command = [sys.executable, "-B", "-c", CALL, hook, *([] if hook == HOOKS[0] else [str(out)])]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert sorted(tree.rglob("*")) == before
    wheel = zipfile.ZipFile(out / done.stdout.splitlines()[-1])
    names = wheel.namelist()
    assert {"deepspeed/__init__.py", "deepspeed/py.typed", "deepspeed/runtime/constants.py"} <= set(names)
    assert not any("_old" in name.split("/") for name in names)
    assert b"from deepspeed import utils as utils" in wheel.read("deepspeed/__init__.pyi")
    assert "deepspeed/stale.py" not in names
