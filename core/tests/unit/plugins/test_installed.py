"""Real packages on the path: what a pip install leaves behind is what the core finds."""

import json
import os
import subprocess
import sys

import pytest

GOOD = """
from deepspeed.plugins import Offer, hookimpl
@hookimpl
def ds_probe():
    return Offer("good", 50, reason="found")
"""
PRINT_OFFERS = """
import json, sys
from deepspeed.plugins import plugin_manager
told = {offer.name: [offer.available, offer.reason] for offer in plugin_manager().offers()}
told["imported"] = sorted(name for name in sys.modules if name.startswith("vendor_") or name == "torch")
print(json.dumps(told))
"""


@pytest.fixture
def site(tmp_path):
    """Installs packages of one module, each announcing an accelerator; runs code that sees them."""

    class Site:
        def install(self, name, source):
            (tmp_path / f"vendor_{name}.py").write_text(source)
            info = tmp_path / f"ds_ext_{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ds-ext-{name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[deepspeed.accelerators]\n{name} = vendor_{name}\n")

        def run(self, code, **environment):
            path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
            return subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": path, **environment},
                capture_output=True, text=True, check=False,
            )  # fmt: skip

    return Site()


def test_broken_packages_are_told_apart_and_stop_no_other(site):
    site.install("good", GOOD)
    site.install("missing", "import a_library_that_is_not_there")
    site.install("future", "DS_PLUGIN_API = '>=7'\n")
    site.install("syntax", "def (:\n")
    site.install("probe", GOOD.replace("    return", "    1 / 0; return"))
    done = site.run(PRINT_OFFERS, DS_PLUGINS_BLOCK="cpu")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["good"] == [True, "found"]
    for name, reason in {
        "missing": "ds-ext-missing 1.0 cannot be imported from vendor_missing: ModuleNotFoundError",
        "future": "made for plugin API '>=7'",
        "syntax": "SyntaxError",
        "probe": "failed in ds_probe: ZeroDivisionError: division by zero",
        "cpu": "blocked by DS_PLUGINS_BLOCK",
    }.items():
        available, why = told[name]
        assert not available, name
        assert reason in why
    assert "torch" not in told["imported"]


def test_by_name_the_others_are_not_even_imported(site):
    site.install("good", GOOD)
    site.install("missing", "raise SystemExit('was imported')")
    code = "import sys; from deepspeed.plugins import plugin_manager as p; p().load('good'); print(*sys.modules)"
    done = site.run(code)
    assert done.returncode == 0, done.stderr
    assert "vendor_good" in done.stdout.split()
    assert "vendor_missing" not in done.stdout.split()
