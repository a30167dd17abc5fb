"""The simulated device as a library of torch operators and registrations."""

from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.spec import make_kernel_path

sim_kernel_path, sim_kernel_include = make_kernel_path("ds_ext_sim")

_SOURCES = ("device", "autocast")  # `device.cpp` includes the others


class SimDeviceBuilder(OpBuilder):
    """Loading it makes PrivateUse1 a device; torch's full headers make a first build take half a minute."""

    BUILD_VAR = "DS_BUILD_SIM_DEVICE"
    NAME = "sim_device"
    op_namespace = "ds_sim"
    min_torch = "2.9"  # torch's interface for the allocator of a device

    def __init__(self):
        super().__init__(self.NAME)

    def absolute_name(self):
        return "ds_ext_sim.op_builder.sim_device_op"

    def sources(self):
        return [sim_kernel_path(f"csrc/{name}.cpp") for name in _SOURCES]

    def include_paths(self):
        return [sim_kernel_include("csrc")]

    def cxx_args(self):
        return ["-O1", "-std=c++20"]
