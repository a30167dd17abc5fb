"""Real packages on the path: what a pip install leaves behind is what the core finds, also in forked children."""

import inspect
import json
import os
import subprocess
import sys

import pytest
import torch
from deepspeed.plugins import PLUGIN_API, hookspecs
from deepspeed.testing.tiers import swept

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


# ----- plugins of former versions of the API -------------------------------------------------------------------------

# Each is written for one version of the plugin API, with every hook of it and all arguments that the hook had then.
# The texts are frozen: such a plugin is installed somewhere, and goes on working until the first number grows. No
# release had one of these versions yet: 1.1 gave `ds_comm_backend` the group, 1.2 gave `Offer` its `impersonates`,
# 1.3 brought `ds_device_faults`.
# When `PLUGIN_API` grows, add a plugin of the new version and keep the former ones.
PLUGIN_1_1 = """
from deepspeed.plugins import Offer, hookimpl

DS_PLUGIN_API = ">=1.1,<2"
HEARD = []

@hookimpl
def ds_probe():
    HEARD.append("ds_probe")
    return Offer("kept", 100, available=True, reason="it is always here")

@hookimpl
def ds_accelerator():
    HEARD.append("ds_accelerator")
    from deepspeed.accelerator import DeepSpeedAccelerator

    class Kept_Accelerator(DeepSpeedAccelerator):
        _name = "cpu"
        _communication_backend_name = "gloo"

        def is_synchronized_device(self):
            return True

        def device_count(self):
            return 1

    return Kept_Accelerator()

@hookimpl
def ds_op_builders():
    HEARD.append("ds_op_builders")
    return {}

@hookimpl
def ds_check_config(config):
    HEARD.append("ds_check_config")

@hookimpl
def ds_comm_backend(name, group):
    HEARD.append("ds_comm_backend")

@hookimpl
def ds_optimizer(name, params, arguments):
    HEARD.append("ds_optimizer")
    if name == "Kept":
        import torch

        return torch.optim.SGD(params, lr=arguments["rate"])

@hookimpl
def ds_sharding(name):
    HEARD.append("ds_sharding")

@hookimpl
def ds_checkpoint_store(name, arguments):
    HEARD.append("ds_checkpoint_store")

class Monitor:
    def write_events(self, events):
        HEARD.append("write_events")

@hookimpl
def ds_monitor(name, arguments):
    HEARD.append("ds_monitor")
    return Monitor() if name == "kept" else None

@hookimpl
def ds_launcher(name):
    HEARD.append("ds_launcher")

@hookimpl
def ds_engine_ready(engine):
    HEARD.append("ds_engine_ready")

@hookimpl
def ds_step_end(stats):
    assert stats.applied and stats.global_step >= 0
    HEARD.append("ds_step_end")

@hookimpl
def ds_checkpoint_saved(directory, tag):
    HEARD.append("ds_checkpoint_saved")
"""
PLUGIN_1_0 = PLUGIN_1_1.replace(">=1.1,", ">=1.0,").replace(
    "def ds_comm_backend(name, group)", "def ds_comm_backend(name)"
)
PLUGIN_1_2 = PLUGIN_1_1.replace(">=1.1,", ">=1.2,").replace('always here")', 'always here", impersonates="cpu")')
PLUGIN_1_3 = (
    PLUGIN_1_2.replace(">=1.2,", ">=1.3,")
    + """
@hookimpl
def ds_device_faults(index):
    HEARD.append("ds_device_faults")
    return {"memory errors, corrected": HEARD.count("ds_device_faults")}
"""
)
FROZEN = {"1.0": PLUGIN_1_0, "1.1": PLUGIN_1_1, "1.2": PLUGIN_1_2, "1.3": PLUGIN_1_3}

TRAIN = """
import json
import deepspeed, torch
import vendor_kept
from deepspeed.accelerator import get_accelerator
from deepspeed.ops import registry

registry.resolve("fused_adam")
torch.manual_seed(0)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Kept", "params": {"rate": 0.1}},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0,
    "monitor_plugins": {"kept": {}},
    "watch": {"device_faults_every": 2},
}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 1), config=config)
losses = []
for step in range(3):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(engine.device)
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
engine.save_checkpoint("saved")
print(json.dumps([type(get_accelerator()).__name__, losses, sorted(set(vendor_kept.HEARD))]))
"""


def losses_of_plain_torch():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("version", swept(FROZEN, lambda version: version in list(FROZEN)[-2:]))
def test_a_plugin_of_this_or_a_former_version_trains(site, tmp_path, monkeypatch, version):
    monkeypatch.chdir(tmp_path)
    site.install("kept", FROZEN[version])
    done = site.run(TRAIN, DS_ACCELERATOR="kept", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    kind, losses, heard = json.loads(done.stdout.splitlines()[-1])
    assert kind == "Kept_Accelerator"
    assert losses == pytest.approx(losses_of_plain_torch(), rel=1e-5)
    hooks = {hook.__name__ for _, hooks in hookspecs.GROUPS.values() for hook in hooks}
    kept = {hook for hook in hooks if f"def {hook}(" in FROZEN[version]}
    assert set(heard) >= kept - {"ds_launcher"} | {"write_events"}  # no job of many hosts
    if "ds_device_faults" in kept:
        assert "since they were last read, cpu:0 of " in done.stderr
        assert "had 1 more memory errors, corrected (2 in all)" in done.stderr
    else:
        assert "watch.device_faults_every: found 2, but no plugin" in done.stderr


def test_the_version_of_today_and_the_one_before_are_kept():
    *_, before, today = FROZEN
    assert today == PLUGIN_API, f"the plugin API is {PLUGIN_API}: add a plugin of that version to FROZEN"
    major, minor = map(int, today.split("."))
    assert before == f"{major}.{minor - 1}" or minor == 0


def test_the_plugin_of_today_has_every_hook_with_all_arguments():
    scope = {}
    exec(FROZEN[PLUGIN_API], scope)  # noqa: S102 - text of this file
    for _, hooks in hookspecs.GROUPS.values():
        for hook in hooks:
            assert (
                inspect.signature(scope[hook.__name__]).parameters.keys() == inspect.signature(hook).parameters.keys()
            )
