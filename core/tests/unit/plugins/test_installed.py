"""Real packages on the path: what a pip install leaves behind is what the core finds, also in forked children."""

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
                capture_output=True, text=True, check=False, timeout=120,
            )  # fmt: skip

    return Site()


def test_broken_packages_are_told_apart_and_stop_no_other(site):
    site.install("good", GOOD)
    site.install("missing", "import a_library_that_is_not_there")
    site.install("future", "DS_PLUGIN_API = '>=7'\n")
    site.install("syntax", "def (:\n")
    site.install("past", "DS_PLUGIN_API = '<1'\n")
    site.install("probe", GOOD.replace("    return", "    1 / 0; return"))
    site.install("exit", "raise SystemExit('no licence')")
    site.install("hangs", GOOD.replace("    return", "    import threading; threading.Event().wait(60); return"))
    done = site.run(PRINT_OFFERS, DS_PLUGINS_BLOCK="cpu", DS_PROBE_TIMEOUT="0.2")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["good"] == [True, "found"]
    for name, reason in {
        "missing": "ds-ext-missing 1.0 cannot be imported from vendor_missing: ModuleNotFoundError",
        "future": "made for plugin API '>=7'",
        "past": "made for plugin API '<1'",
        "syntax": "SyntaxError",
        "exit": "SystemExit: no licence",
        "hangs": "no answer within 0.2 s",
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


def test_without_autoload_nothing_installed_is_imported(site):
    site.install("good", GOOD)
    done = site.run(PRINT_OFFERS, DS_PLUGINS_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["imported"] == []
    assert told["good"] == [False, "not loaded because of DS_PLUGINS_AUTOLOAD=0; DS_ACCELERATOR=good loads it"]
    done = site.run(PRINT_OFFERS, DS_PLUGINS_AUTOLOAD="0", DS_ACCELERATOR="good")
    assert json.loads(done.stdout)["good"] == [True, "found"], done.stderr


FORK_WHILE_CHOOSING = """
import os, signal, sys, threading
from deepspeed.plugins import Offer, hookimpl, plugin_manager
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.plain import PlainAccelerator

class Slow:
    building, forked = threading.Event(), threading.Event()

    @hookimpl
    def ds_probe(self):
        return Offer("slow", 9)

    @hookimpl
    def ds_accelerator(self):
        if threading.current_thread() is chooser and os.getpid() == parent:
            self.building.set()
            self.forked.wait(60)
        return PlainAccelerator()

parent = os.getpid()
plugin_manager().register(Slow(), "slow")
chooser = threading.Thread(target=get_accelerator)
chooser.start()
Slow.building.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)  # a deadlock ends the child, and the test fails
    chosen = get_accelerator()
    os._exit(0 if chosen is get_accelerator() and type(chosen) is PlainAccelerator else 3)
_, status = os.waitpid(child, 0)
Slow.forked.set()
chooser.join()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_while_another_thread_chooses_leaves_a_child_that_can_choose(site):
    done = site.run(FORK_WHILE_CHOOSING, DS_PLUGINS_BLOCK="cpu", PYTHONWARNINGS="default")
    assert done.returncode == 0, done.stderr


def test_a_child_of_a_fork_keeps_the_choice_of_its_parent(site):
    site.install("good", GOOD)
    code = """
import os, sys
from deepspeed.plugins import plugin_manager
offer = plugin_manager().probe("good")
child = os.fork()
if child == 0:
    os._exit(0 if plugin_manager().probe("good") is offer else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert site.run(code, DS_PLUGINS_BLOCK="cpu").returncode == 0


PACKAGE_THAT_ASKS = """
from deepspeed.plugins import plugin_manager
offer = plugin_manager().probe("asks")
"""


def test_a_package_may_ask_for_the_accelerator_while_it_is_imported(site, tmp_path):
    """Its plugin is then imported in the same thread: another one would wait for the package's import lock."""
    (tmp_path / "asking").mkdir()
    (tmp_path / "asking" / "__init__.py").write_text(PACKAGE_THAT_ASKS)
    (tmp_path / "asking" / "plugin.py").write_text(GOOD.replace("good", "asks"))
    site.install("asks", "")
    announced = tmp_path / "ds_ext_asks-1.0.dist-info" / "entry_points.txt"
    announced.write_text("[deepspeed.accelerators]\nasks = asking.plugin\n")
    done = site.run("import asking; print(asking.offer)", DS_PROBE_TIMEOUT="20")
    assert done.returncode == 0, done.stderr
    assert "available=True, reason='found'" in done.stdout


def test_entry_points_are_read_through_importlib_metadata(site):
    """Not through the module of the standard library, whose API differs between the Pythons that are supported."""
    site.install("good", GOOD)
    without = "import importlib.metadata as standard\nstandard.entry_points = standard.distributions = None\n"
    done = site.run(without + PRINT_OFFERS, DS_PLUGINS_BLOCK="cpu")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["good"] == [True, "found"]
