"""The vendor's builders: the device itself is the only thing it compiles."""

from ds_ext_sim.op_builder.device import SimDeviceBuilder, sim_kernel_include, sim_kernel_path

__all__ = ["SimDeviceBuilder", "sim_kernel_include", "sim_kernel_path"]
