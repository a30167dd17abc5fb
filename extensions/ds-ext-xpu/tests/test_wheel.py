"""The wheel: it carries the sources, and an environment with it alone starts, reports and falls back."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


def run(program, **options):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """(file name, folder into which it was unpacked)."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("*.egg-info", "build", "tests", "__pycache__")
    shutil.copytree(PROJECT, folder / "project", ignore=ignored)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DS_BUILD_")}
    run("from setuptools.build_meta import build_wheel; build_wheel('dist')", cwd=folder / "project", env=kept)
    (built,) = (folder / "project" / "dist").glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "site")
    return built.name, folder / "site"


def test_it_carries_sources_and_no_library(wheel):
    name, site = wheel
    assert name.endswith("-py3-none-any.whl")
    package = PROJECT / "src" / "ds_ext_xpu"
    wanted = {path.relative_to(package) for path in package.rglob("*") if path.suffix in (".h", ".cpp", ".py")}
    assert {path.relative_to(site / "ds_ext_xpu") for path in (site / "ds_ext_xpu").rglob("*.*")} >= wanted
    assert (site / "ds_ext_xpu/py.typed").is_file()
    assert list(site.rglob("*.so")) == []


def test_its_entry_point_and_extra(wheel):
    _, site = wheel
    (info,) = site.glob("*.dist-info")
    assert (info / "entry_points.txt").read_text().split() == [
        "[deepspeed.accelerators]",
        "xpu",
        "=",
        "ds_ext_xpu.plugin",
    ]
    assert 'Requires-Dist: ds-ext-cpu; extra == "host-ops"' in (info / "METADATA").read_text()


def test_an_environment_with_it_starts_and_says_why_not(wheel):
    """No GPU, or no torch for it: an offer with a reason, and another device."""
    program = (
        "import json, deepspeed\n"
        "from deepspeed.accelerator import get_accelerator\n"
        "from deepspeed.plugins import plugin_manager\n"
        "offer = plugin_manager().probe('xpu')\n"
        "print(json.dumps([offer.available, offer.reason, get_accelerator().device_name()]))\n"
    )
    kept = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    path = os.pathsep.join([str(wheel[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    available, reason, device = json.loads(run(program, env={**kept, "PYTHONPATH": path}))
    assert reason
    assert (device == "xpu") == available
