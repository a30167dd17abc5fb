"""The extension as the core finds it: its offer for every state of a machine, and vendor packages that are broken."""

import os
import subprocess
import sys
import types
from pathlib import Path

import ds_ext_npu.plugin as door
import pytest
from deepspeed.errors import PluginError
from deepspeed.plugins import ACCELERATORS, PluginManager
from ds_ext_npu import vendor

PROJECT = Path(__file__).parents[1]


class Entry:
    name, value, dist = "npu", "ds_ext_npu.plugin", None

    @staticmethod
    def load():
        return door


@pytest.fixture
def manager():
    return PluginManager(lambda group: [Entry] if group == ACCELERATORS else [])


class Machine:
    """A machine of files: what `vendor.obstacle` looks at. The package raises when it is imported."""

    def __init__(self, root, monkeypatch):
        self.root, self.monkeypatch = root, monkeypatch
        self.devices, self.libraries = root / "dev", root / "lib"
        for folder in (self.devices, self.libraries, root / "site"):
            folder.mkdir()
        self.environment = {"LD_LIBRARY_PATH": f"{root / 'nowhere'}:{self.libraries}"}
        (self.devices / "davinci_manager").touch()
        monkeypatch.syspath_prepend(root / "site")

    def add_package(self):
        (self.root / "site/torch_npu").mkdir()
        (self.root / "site/torch_npu/__init__.py").write_text("raise AssertionError('was imported')")
        return self

    def add_devices(self, *numbers):
        for number in numbers:
            (self.devices / f"davinci{number}").touch()
        return self

    def add_libraries(self):
        for name in vendor.LIBRARIES:
            (self.libraries / name).touch()
        return self

    def obstacle(self, **environment):
        return vendor.obstacle({**self.environment, **environment}, self.devices, self.root / "ld.so.cache")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_the_entry_point_is_announced():
    project = (PROJECT / "pyproject.toml").read_text()
    assert '[project.entry-points."deepspeed.accelerators"]\nnpu = "ds_ext_npu.plugin"\n' in project
    assert 'host-ops = ["ds-ext-cpu>=0.1"]\n' in project


def test_nothing_stands_against_a_whole_machine(machine):
    machine.add_package().add_devices(0, 1).add_libraries()
    assert machine.obstacle() is None
    assert "torch_npu" not in sys.modules


def test_each_missing_piece_is_the_reason(machine):
    assert machine.obstacle() == "torch_npu is not installed; pip install torch-npu in the version of your torch"
    machine.add_package()
    assert machine.obstacle() == f"no device: no {machine.devices}/davinci*"
    machine.add_devices(0, 1)
    assert machine.obstacle(ASCEND_RT_VISIBLE_DEVICES="-1").startswith("no device: ASCEND_RT_VISIBLE_DEVICES=-1 leaves")
    reason = machine.obstacle()
    assert reason.startswith("torch_npu is installed, and libhccl.so, libascendcl.so of CANN is in no folder")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in reason
    assert "set_env.sh" in reason
    machine.add_libraries()
    (machine.libraries / "libhccl.so").unlink()
    assert ", and libhccl.so of CANN" in machine.obstacle()


def test_libraries_that_the_system_knows_are_there(machine):
    machine.add_package().add_devices(0)
    names = [name.encode() for name in vendor.LIBRARIES]
    (machine.root / "ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1\0" + b"\0/opt/x\0".join(names) + b"\0/opt/x\0")
    assert machine.obstacle() is None


def test_a_folder_without_a_package_is_not_taken_for_one(machine):
    (machine.root / "site/torch_npu/lib").mkdir(parents=True)
    assert "is a folder without a package" in machine.add_devices(0).obstacle()


@pytest.mark.parametrize(
    ("listed", "count"),
    [("", 4), ("1", 1), ("0,2", 2), ("1, 2,3", 1), ("1,2,-1,3", 2), ("x", 0), ("0,1,2,3,4,5", 4), ("3,", 1)],
)
def test_devices_are_counted_as_the_vendor_reads_the_variable(machine, listed, count):
    machine.add_devices(0, 1, 2, 3)
    assert vendor.num_devices({"ASCEND_RT_VISIBLE_DEVICES": listed}, machine.devices) == count


def test_the_offer_says_what_was_found(manager, monkeypatch):
    monkeypatch.setattr(vendor, "obstacle", lambda: None)
    monkeypatch.setattr(vendor, "num_devices", lambda: 8)
    offer = manager.probe("npu")
    assert (offer.priority, offer.available, offer.reason) == (100, True, "8 Ascend devices")


def test_the_offer_says_what_is_missing(manager, monkeypatch):
    monkeypatch.setattr(vendor, "obstacle", lambda: "no device: none")
    offer = manager.probe("npu")
    assert (offer.priority, offer.available, offer.reason) == (100, False, "no device: none")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
        OSError("libascendcl.so: undefined symbol: aclInit"),
        RuntimeError("Two accelerators cannot be used at the same time\nin PyTorch"),
    ],
)
def test_a_vendors_package_that_fails_is_a_plugin_error(manager, monkeypatch, tmp_path, error):
    (tmp_path / "torch_npu.py").write_text(f"raise {error!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError) as raised:
        manager.build_accelerator("npu")
    first = str(error).splitlines()[0]
    assert f"torch_npu cannot be imported: {type(error).__name__}: {first}; " in str(raised.value)


def test_a_runtime_without_devices_is_a_plugin_error(manager, monkeypatch):
    from ds_ext_npu.accelerator import NPU_Accelerator

    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(vendor, "num_devices", lambda: 2)
    monkeypatch.setattr(NPU_Accelerator, "is_available", lambda accelerator: False)
    with pytest.raises(PluginError, match="torch.npu finds none of 2 Ascend devices in /dev"):
        manager.build_accelerator("npu")


def test_the_hook_names_the_builders(manager):
    assert sorted(manager.op_builders("npu")) == ["FusedAdamBuilder", "InferenceBuilder"]


# ----- in a process of its own: what a user sees ---------------------------------------------------------------------

# What the library's absence does to the vendor's package.
BROKEN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"


def run(tmp_path, code, **variables):
    """Standard output and error of `code` where the extension and a broken torch_npu are installed."""
    site = tmp_path / "site"
    if not site.exists():
        (site / "torch_npu").mkdir(parents=True)
        (site / "torch_npu/__init__.py").write_text(BROKEN)
        for name, entry in {
            "torch_npu": "[torch.backends]\ntorch_npu = torch_npu:_autoload\n",
            "ds_ext_npu": "[deepspeed.accelerators]\nnpu = ds_ext_npu.plugin\n",
        }.items():
            info = site / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(entry)
    path = os.pathsep.join([str(site), str(PROJECT / "src"), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_door_imports_neither_torch_nor_the_vendors_package(tmp_path):
    code = "import sys, ds_ext_npu.plugin as p; p.ds_probe(); print({'torch', 'torch_npu'} & set(sys.modules))"
    assert run(tmp_path, code)[:2] == (0, "set()\n")


def test_import_deepspeed_does_not_meet_the_broken_package(tmp_path):
    assert run(tmp_path, "import deepspeed; print(deepspeed.__name__)")[:2] == (0, "deepspeed\n")


def test_without_torchs_autoload_another_accelerator_is_chosen(tmp_path):
    code = "from deepspeed.accelerator import get_accelerator; print(get_accelerator().device_name())"
    assert run(tmp_path, code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")[:2] == (0, "cpu\n")


def test_with_it_torch_itself_names_the_package_and_the_variable(tmp_path):
    code, _, told = run(tmp_path, "import torch")
    assert code == 1
    assert "Failed to load the backend extension: torch_npu" in told
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in told


def test_asked_for_by_name_the_reason_is_told(tmp_path):
    variables = {"DS_ACCELERATOR": "npu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    code, _, told = run(tmp_path, "from deepspeed.accelerator import get_accelerator as g; g()", **variables)
    assert code == 1
    assert "DS_ACCELERATOR=npu: that accelerator cannot be used here: " in told


def test_asked_for_by_hand_the_reason_is_told(tmp_path):
    code = "from ds_ext_npu.accelerator import NPU_Accelerator; NPU_Accelerator()"
    code, _, told = run(tmp_path, code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert code == 1
    assert "PluginError: torch_npu cannot be imported: ImportError: libhccl.so: cannot open shared object file" in told
