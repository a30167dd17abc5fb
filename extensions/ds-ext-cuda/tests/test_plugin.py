"""The door: what is offered for which machine and torch, and what an answer costs."""

import subprocess
import sys

import pytest
from deepspeed.plugins import Offer
from ds_ext_cuda import devices, installed_torch, plugin

CUDA = ("13.0", "torch 2.13.0+cu130")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with these files; returns how to make it."""
    present = devices.present

    def make(*files, cuda=CUDA, visible=None, driver="libc.so.6"):
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        monkeypatch.setattr(devices, "present", lambda: present(tmp_path))
        monkeypatch.setattr(plugin, "cuda_of_torch", lambda: cuda)
        monkeypatch.setattr(devices, "DRIVER", driver)
        if visible is None:
            monkeypatch.delenv(devices.VISIBLE_DEVICES, raising=False)
        else:
            monkeypatch.setenv(devices.VISIBLE_DEVICES, visible)
        return plugin.ds_probe()

    return make


def test_a_device_and_a_torch_that_can_use_it_are_offered(machine):
    offer = machine("dev/nvidia1", "dev/nvidia0", "dev/nvidia10", "dev/nvidiactl", "dev/nvidia-uvm")
    where = "/dev/nvidia0, /dev/nvidia1, /dev/nvidia10"
    assert offer == Offer("cuda", 100, True, f"3 NVIDIA devices ({where}), torch 2.13.0+cu130 with CUDA 13.0")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["dev/nvidia3", "proc/driver/nvidia/gpus/0000:01:00.0/information"], "1 NVIDIA device (/dev/nvidia3)"),
        (["proc/driver/nvidia/gpus/0000:01:00.0/information"], "1 NVIDIA device (/proc/driver/nvidia/gpus)"),
        (["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"], "1 NVIDIA device (/dev/dxg, through WSL)"),
        (["dev/nvmap"], "1 NVIDIA device (/dev/nvmap, on a Tegra)"),
    ],
)
def test_where_a_device_shows(machine, files, found):
    offer = machine(*files)
    assert offer.available
    assert offer.reason.startswith(found)


@pytest.mark.parametrize("file", ["dev/null", "dev/dxg"])
def test_a_machine_without_a_device_says_where_it_looked(machine, file):
    offer = machine(file)  # WSL has its node for the GPUs of others, too
    assert not offer.available
    assert offer.reason == "no NVIDIA device here (no /dev/nvidia0, no /dev/dxg, no /dev/nvmap)"


def test_a_torch_without_cuda_is_the_reason_where_there_is_a_device(machine):
    offer = machine("dev/nvidia0", cuda=(None, "torch 2.13.0+cpu is built without CUDA; ..."))
    assert not offer.available
    assert offer.reason == "1 NVIDIA device here (/dev/nvidia0), but torch 2.13.0+cpu is built without CUDA; ..."


def test_nodes_without_a_driver_are_not_offered(machine):
    offer = machine("dev/nvidia0", driver="libcuda-that-is-not-here.so.1")
    assert not offer.available
    assert offer.reason.startswith("1 NVIDIA device here (/dev/nvidia0), but the driver's library cannot be loaded: ")
    assert "libcuda-that-is-not-here.so.1: cannot open shared object file" in offer.reason


def test_an_empty_file_in_place_of_the_driver_is_no_driver(machine, tmp_path):
    (tmp_path / "libcuda.so.1").touch()
    offer = machine("dev/nvidia0", driver=str(tmp_path / "libcuda.so.1"))
    assert not offer.available
    assert "libcuda.so.1: file too short" in offer.reason


def test_the_driver_is_not_loaded_where_there_is_no_device_for_it(machine):
    offers = machine(driver="missing.so"), machine("dev/nvidia0", driver="missing.so", visible="")
    assert [offer.available for offer in offers] == [False, False]
    assert not any("missing.so" in offer.reason for offer in offers)


def test_hidden_devices_are_not_offered(machine):
    offer = machine("dev/nvidia0", "dev/nvidia1", visible="")
    assert not offer.available
    assert offer.reason == "CUDA_VISIBLE_DEVICES leaves none of 2 NVIDIA devices (/dev/nvidia0, /dev/nvidia1)"


@pytest.mark.parametrize(
    ("stated", "count"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        (" 2, 0", 2),
        ("0,-1,1", 1),
        ("-1", 0),
        ("1,7,2", 1),
        ("1,1", 0),
        ("01,1", 0),
        ("none", 0),
        ("GPU-8f3, GPU-9a1", 2),
        ("MIG-1,MIG-2", 1),
        ("0,1,2,3,0", 0),
    ],
)
def test_visible_devices_are_counted_as_the_driver_counts(stated, count):
    environment = {} if stated is None else {devices.VISIBLE_DEVICES: stated}
    assert devices.visible(4, environment) == count


@pytest.mark.parametrize(
    ("text", "cuda", "said"),
    [
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0", "cu130"),
        ("__version__ = '2.6.0'\ncuda = \"12.4\"\n", "12.4", "torch 2.6.0"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", None, "without CUDA"),
        ("__version__ = '2.13.0+rocm'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", None, "for ROCm"),
        ("", None, "torch is not installed"),
    ],
)
def test_what_torch_was_built_for_is_read_from_its_files(monkeypatch, tmp_path, text, cuda, said):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('was imported')")
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found, reason = installed_torch.cuda_of_torch()
    assert found == cuda
    assert said in reason


def test_this_torch_is_described_alike_from_memory_and_from_disk(monkeypatch):
    import torch

    loaded = installed_torch.cuda_of_torch()
    assert loaded[0] == torch.version.cuda
    monkeypatch.delitem(sys.modules, "torch")
    assert installed_torch.cuda_of_torch() == loaded


def test_a_probe_imports_no_torch_and_takes_milliseconds():
    code = (
        "import sys, time; from ds_ext_cuda import plugin; t = time.perf_counter(); plugin.ds_probe();"
        "print(time.perf_counter() - t); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < 0.05


def test_every_builder_is_offered_and_can_be_made():
    made = {name: kind() for name, kind in plugin.ds_op_builders().items()}
    assert "FusedAdamBuilder" in made
    for name, builder in made.items():
        assert type(builder).__name__ == name
        assert builder.absolute_name() == f"ds_ext_cuda.op_builder.{builder.name}_op"
        assert f"DS_BUILD_{builder.name.upper()}" == builder.BUILD_VAR
        assert all(source.endswith(".cu") for source in builder.sources())


def test_the_accelerator_is_built_without_asking_a_driver():
    assert plugin.ds_accelerator().device_name() == "cuda"
