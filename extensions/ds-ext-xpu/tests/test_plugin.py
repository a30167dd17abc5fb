"""The extension as the core finds it: its offer on every kind of machine, its accelerator, its builders."""

import importlib.util
import subprocess
import sys
import types

import pytest
import torch
from deepspeed.plugins import Offer
from ds_ext_xpu import installed_torch, plugin
from ds_ext_xpu.devices import Gpus

NODE, OTHER = "/dev/dri/renderD128", "/dev/dri/renderD129"
NOT_THERE = "not there, though the kernel has it; give it to the container (--device /dev/dri)"
SHUT = "may not be opened; add the user to the group that owns it (render)"
CPU_BUILD, XPU_BUILD = (None, "torch 2.13.0+cpu is built without XPU; ..."), ("20250302", "torch 2.13.0+xpu")


@pytest.fixture
def offer(monkeypatch):
    """A function that answers for a machine."""

    def ask(nodes=(NODE,), absent=(), closed=(), torch=XPU_BUILD, mask=None):
        monkeypatch.setattr(plugin.devices, "present", lambda: Gpus(tuple(nodes), tuple(absent), tuple(closed)))
        monkeypatch.setattr(plugin, "xpu_of_torch", lambda: torch)
        if mask is None:
            monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
        else:
            monkeypatch.setenv("ZE_AFFINITY_MASK", mask)
        return plugin.ds_probe()

    return ask


def test_a_gpu_and_a_torch_for_it_are_offered(offer):
    reason = f"1 Intel GPU ({NODE}), torch 2.13.0+xpu with XPU 20250302"
    assert offer() == Offer("xpu", 100, True, reason)
    assert offer(nodes=(NODE, OTHER), closed=(NODE,)).reason.startswith("2 Intel GPUs (")


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"nodes": ()}, "no Intel GPU with driver i915 or xe in /sys/class/drm"),
        ({"closed": (NODE,)}, f"{NODE}: {SHUT}"),
        ({"absent": (NODE,)}, f"{NODE}: {NOT_THERE}"),
        (
            {"nodes": (NODE, OTHER), "absent": (NODE,), "closed": (OTHER,)},
            f"{NODE}: {NOT_THERE}; {OTHER}: {SHUT}",
        ),
        ({"mask": "4"}, "ZE_AFFINITY_MASK leaves none of 1 Intel GPU"),
        ({"torch": CPU_BUILD}, "1 Intel GPU here, but torch 2.13.0+cpu is built without XPU; ..."),
        ({"torch": (None, "torch is not installed")}, "1 Intel GPU here, but torch is not installed"),
    ],
)
def test_what_is_missing_is_the_reason(offer, machine, reason):
    assert offer(**machine) == Offer("xpu", 100, False, reason)


def test_the_door_and_its_probe_load_no_torch_and_no_driver():
    code = (
        "import sys, ds_ext_xpu.plugin as p; p.ds_probe(); p.xpu_of_torch();"
        "sys.exit(', '.join({'torch', 'ctypes'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_hooks_give_the_accelerator_and_the_builders():
    assert type(plugin.ds_accelerator()).__name__ == "XPU_Accelerator"
    assert set(plugin.ds_op_builders()) == {"FusedAdamBuilder", "QuantizerBuilder", "InferenceBuilder"}


def test_ccl_is_registered_by_importing_its_bindings(monkeypatch):
    imported = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "oneccl_bindings_for_pytorch" or None)
    monkeypatch.setattr(importlib, "import_module", imported.append)
    assert plugin.ds_comm_backend("gloo") is None
    assert imported == []
    assert plugin.ds_comm_backend("ccl") is None
    assert imported == ["oneccl_bindings_for_pytorch"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    plugin.ds_comm_backend("ccl")
    assert len(imported) == 1


# ----- which torch ---------------------------------------------------------------------------------------------------


def test_the_torch_in_memory_is_asked_first(monkeypatch):
    xpu, told = installed_torch.xpu_of_torch()
    assert (xpu, told.startswith(f"torch {torch.__version__}")) == (getattr(torch.version, "xpu", None), True)
    version = types.SimpleNamespace(__version__="2.13.0+xpu", xpu="20250302")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=version))
    assert installed_torch.xpu_of_torch() == ("20250302", "torch 2.13.0+xpu")


@pytest.mark.parametrize(
    ("lines", "answer"),
    [
        ("__version__ = '2.13.0+xpu'\nxpu: Optional[str] = '20250302'\n", ("20250302", "torch 2.13.0+xpu")),
        ("__version__ = '2.6.0+xpu'\nxpu = \"20250001\"\n", ("20250001", "torch 2.6.0+xpu")),
        ("__version__ = '2.13.0+cpu'\nxpu: Optional[str] = None\n", (None, "torch 2.13.0+cpu is built without XPU")),
        ("", (None, "torch is not installed")),
        (None, (None, "torch is not installed")),
    ],
)
def test_a_torch_on_disk_is_read(monkeypatch, tmp_path, lines, answer):
    monkeypatch.delitem(sys.modules, "torch")
    (tmp_path / "__init__.py").touch()
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if lines is None else spec)
    if lines is not None:
        (tmp_path / "version.py").write_text(lines)
    xpu, told = installed_torch.xpu_of_torch()
    assert (xpu, told.startswith(answer[1])) == (answer[0], True)
