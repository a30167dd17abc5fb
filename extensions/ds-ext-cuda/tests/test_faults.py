"""Counts of faults of an NVIDIA device, read by a stand-in for NVIDIA's package, with its names and units."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from ds_ext_cuda import faults

UUID = "GPU-8f3c"


@pytest.fixture
def nvml(monkeypatch):
    faults._nvml.cache_clear()
    module = ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.NVMLError_NotSupported = type("NVMLError_NotSupported", (module.NVMLError,), {})
    module.NVMLError_NoPermission = type("NVMLError_NoPermission", (module.NVMLError,), {})
    module.NVML_MEMORY_ERROR_TYPE_CORRECTED, module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    module.NVML_VOLATILE_ECC, module.NVML_PERF_POLICY_THERMAL = 0, 1
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: {UUID: "device"}[uuid]
    module.nvmlDeviceGetTotalEccErrors = lambda device, kind, since: {(0, 0): 21, (1, 0): 1}[kind, since]
    module.nvmlDeviceGetRemappedRows = lambda device: (2, 1, 0, 0)
    module.nvmlDeviceGetViolationStatus = lambda device, policy: SimpleNamespace(
        referenceTime=0, violationTime={1: 90_500_000_000}[policy]
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(faults, "_uuid", {1: UUID}.__getitem__)
    yield module
    faults._nvml.cache_clear()


def test_every_kind_is_counted(nvml):
    assert faults.count(1) == {
        "memory errors, corrected": 21,
        "memory errors, not corrected": 1,
        "rows of memory replaced": 3,
        "seconds slowed down by heat": 90,
    }


def test_what_a_device_does_not_count_is_left_out(nvml):
    def not_supported(*_):
        raise nvml.NVMLError_NotSupported

    nvml.nvmlDeviceGetTotalEccErrors = nvml.nvmlDeviceGetRemappedRows = not_supported
    assert faults.count(1) == {"seconds slowed down by heat": 90}


def test_the_host_has_none_here(nvml):
    assert faults.count(None) == {}


def test_a_driver_that_is_gone_is_an_error(nvml):
    def lost(*_):
        raise nvml.NVMLError("GPU is lost")

    nvml.nvmlDeviceGetTotalEccErrors = lost
    with pytest.raises(nvml.NVMLError, match="GPU is lost"):
        faults.count(1)


def test_without_the_package_the_error_says_which(monkeypatch):
    faults._nvml.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError, match=r"pip install ds-ext-cuda\[faults\]"):
        faults.count(0)
