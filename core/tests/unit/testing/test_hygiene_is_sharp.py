"""The suite's tests of a plugin's manners, on plugins that have none: each fault is caught by the test for it."""

import contextlib
import sys
import types

import pytest
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.current import reset_accelerator
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.plugins import Offer
from deepspeed.testing.suite import test_hygiene as hygiene

OFFER = 'from deepspeed.plugins import Offer\nDS_PLUGIN_API = ">=1,<2"\n'
PROBE = '\ndef ds_probe():\n    return Offer("{name}")\n'

#: fault -> (module, the test that catches it)
PLUGINS = {
    "stateless": (OFFER.replace("DS_PLUGIN_API", "API") + PROBE, "test_the_plugin_states_its_api"),
    "unreadable": (OFFER.replace(">=1,<2", "one") + PROBE, "test_the_plugin_states_its_api"),
    "settler": (OFFER + 'import os\nos.environ["X"] = "1"\n' + PROBE, "test_importing_the_plugin_changes_nothing"),
    "pather": (OFFER + 'import sys\nsys.path.append("/x")\n' + PROBE, "test_importing_the_plugin_changes_nothing"),
    "seeder": (OFFER + "import random\nrandom.seed(1)\n" + PROBE, "test_importing_the_plugin_changes_nothing"),
    "heavy": (OFFER + "import torch\n" + PROBE, "test_probing_is_cheap"),
    "late": (OFFER + PROBE.replace("return", "import torch; return"), "test_probing_is_cheap"),
    "writer": (OFFER + PROBE.replace("return", "import os; os.environ['X'] = '1'; return"), "test_probing_is_cheap"),
    "fickle": (
        OFFER + "asked = []\n" + PROBE.replace("return", "asked.append(1); return").replace('")', '", len(asked))'),
        "test_the_offer_is_steady_and_under_its_own_name",
    ),
}
TESTS = (
    "test_the_plugin_states_its_api",
    "test_importing_the_plugin_changes_nothing",
    "test_probing_is_cheap",
    "test_probing_creates_no_context",
)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Announces a module as the plugin of that name, to processes that are started from here."""

    def write(name, code):
        info = tmp_path / f"ds_ext_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ds-ext-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[deepspeed.accelerators]\n{name} = ds_ext_{name}\n")
        (tmp_path / f"ds_ext_{name}.py").write_text(code.format(name=name))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(hygiene, "_fresh_plugin", lambda: hygiene._look(name))

    return write


@pytest.mark.parametrize("name", PLUGINS)
def test_a_fault_of_a_plugin_is_caught(install, name):
    code, test = PLUGINS[name]
    install(name, code)
    with pytest.raises((AssertionError, ValueError)):
        getattr(hygiene, test)()


def test_a_plugin_with_manners_passes(install):
    install("mannerly", OFFER + PROBE)
    for test in TESTS:
        getattr(hygiene, test)()


@pytest.mark.parametrize(("impersonates", "is_caught"), [("", True), ("cuda", True), ("cpu", False)])
def test_an_offer_that_hides_whose_device_it_is_is_caught(monkeypatch, impersonates, is_caught):
    offer = Offer("poser", impersonates=impersonates)
    monkeypatch.setattr(hygiene, "plugin_manager", lambda: types.SimpleNamespace(probe={"poser": offer}.get))
    monkeypatch.setattr(hygiene, "explain", lambda: types.SimpleNamespace(plugin="poser"))
    monkeypatch.setattr(hygiene.requirements.plugin, "check", lambda: None)
    with pytest.raises(AssertionError, match="impersonates='cpu'") if is_caught else contextlib.nullcontext():
        hygiene.test_the_offer_claims_the_device_of_torch(PlainAccelerator())


def test_a_probe_that_takes_longer_than_it_may_is_caught(install, monkeypatch):
    install("slow", OFFER + PROBE)
    monkeypatch.setattr(hygiene, "_PROBE_LIMIT_S", 0.0)
    with pytest.raises(AssertionError):
        hygiene.test_probing_is_cheap()


ACCELERATOR = """
from pathlib import Path
from deepspeed.accelerator.plain import PlainAccelerator

class FusedAdamBuilder:
    def is_compatible(self, verbose=False):
        return True

    def load(self, verbose=False):
        Path(__file__).with_name("built.so").write_text("")
        return object()

class Untidy_Accelerator(PlainAccelerator):
    def get_op_builder(self, class_name):
        return FusedAdamBuilder if class_name == "FusedAdamBuilder" else None
"""


def test_a_builder_that_writes_into_its_package_is_caught(tmp_path, monkeypatch):
    package = tmp_path / "ds_ext_untidy"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "accelerator.py").write_text(ACCELERATOR)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        from ds_ext_untidy.accelerator import Untidy_Accelerator

        set_accelerator(Untidy_Accelerator())
        with pytest.raises(AssertionError, match=r"built\.so"):
            hygiene.test_nothing_is_written_where_it_is_installed(get_accelerator())
    finally:
        reset_accelerator()
        for name in [name for name in sys.modules if name.startswith("ds_ext_untidy")]:
            del sys.modules[name]
