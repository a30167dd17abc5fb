"""The core and vendors' packages installed into a folder that nothing may write to, and code that runs with them."""

import compileall
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import deepspeed
import pytest

OUTSIDER = Path(__file__).parents[2] / "vendor" / "ds_outsider"


class Site:
    """A site-packages of the test, first on the path, with a home and a folder for built ops beside it."""

    def __init__(self, folder, python):
        self.python = python
        self.folder, self.ops, self.home = folder / "site-packages", folder / "built", folder / "home"
        self.folder.mkdir()
        self.ops.mkdir(mode=0o700)
        self.home.mkdir()
        shutil.copytree(Path(deepspeed.__file__).parent, self.folder / "deepspeed")  # with what is compiled already

    def install(self, name, vendor):
        """The outsider's package under the import name `name`, its sources saying whose they are."""
        package = shutil.copytree(OUTSIDER, self.folder / name, ignore=_without_caches)
        for path in package.rglob("*.*"):
            path.write_text(path.read_text().replace("ds_outsider", name).replace("outsider", vendor))
        info = self.folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[deepspeed.accelerators]\n{vendor} = {name}.plugin\n")

    def close(self):
        """What pip does at last (compiled Python files), then nothing may write here."""
        compileall.compile_dir(self.folder, quiet=1)
        for path in [self.folder, *self.folder.rglob("*")]:
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))

    def listing(self):
        """Path -> (content, time of change): root may write where chmod forbids it, so the listing is what counts."""
        return {
            str(path.relative_to(self.folder)): (_digest(path), path.stat().st_mtime_ns)
            for path in sorted(self.folder.rglob("*"))
        }

    def built(self):
        return sorted(path.name for path in self.ops.rglob("*.so"))

    def run(self, code, **environment):
        """Run `code` in a new process, which prints one JSON value; returns it and what was written to stderr."""
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("DS_", "RANK", "WORLD_SIZE"))},
            "PYTHONPATH": os.pathsep.join([str(self.folder), *filter(None, sys.path)]),
            "HOME": str(self.home),
            "TORCH_EXTENSIONS_DIR": str(self.ops),
            "TMPDIR": str(self.home),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "outsider",
            **environment,
        }
        done = subprocess.run(
            [self.python, "-c", PREAMBLE + textwrap.dedent(code)],
            env=variables, cwd=self.home, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr


PREAMBLE = """
import json
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
assert "site-packages" in deepspeed.__file__ and "/home" not in deepspeed.__file__.split("site-packages")[1]
"""


@pytest.fixture(scope="session")
def python(warm_python):
    """A `python` whose processes are forks of one that has imported torch, and nothing of ours."""
    return str(warm_python(is_bare=True) / "python")


@pytest.fixture(scope="package")
def site(tmp_path_factory, python):
    """Two vendors with the same sources but for their names, installed read-only."""
    site = Site(tmp_path_factory.mktemp("vendors"), python)
    site.install("ds_outsider", "outsider")
    site.install("ds_stranger", "stranger")
    site.close()
    yield site
    for path in [site.folder, *site.folder.rglob("*")]:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


def _without_caches(folder, names):
    return [name for name in names if name == "__pycache__"]


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
