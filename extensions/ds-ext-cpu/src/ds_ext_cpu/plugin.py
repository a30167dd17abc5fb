"""Hook implementations, the only entry point of this extension. Importing this module does not import torch."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepspeed.errors import counted
from deepspeed.plugins import Offer, hookimpl

from ds_ext_cpu import faults
from ds_ext_cpu.numa import usable_nodes

if TYPE_CHECKING:
    from deepspeed.comm import GroupBackend
    from torch.distributed import ProcessGroup

    from ds_ext_cpu.accelerator import CPU_Accelerator

DS_PLUGIN_API = ">=1.3,<2"

# Any real device wins over the host.
_PRIORITY = 0


@hookimpl
def ds_probe() -> Offer:
    """Offer the CPU, which is always available."""
    nodes = len(usable_nodes())
    return Offer("cpu", _PRIORITY, reason=f"{counted(_num_cores(), 'core')} on {counted(nodes, 'NUMA node')}")


@hookimpl
def ds_accelerator() -> "CPU_Accelerator":
    """Build the accelerator. This imports torch."""
    from ds_ext_cpu.accelerator import CPU_Accelerator

    return CPU_Accelerator()


@hookimpl
def ds_op_builders() -> Mapping[str, type]:
    """Return the builders of the host kernels, which serve tensors in host memory with any accelerator."""
    from ds_ext_cpu.op_builder import builders

    return builders()


@hookimpl
def ds_comm_backend(name: str, group: "ProcessGroup | None") -> "GroupBackend | None":
    """Provide the collectives for gloo groups, where ranks of one machine read each other's memory, and for `ccl`
    groups. Without a group, register `ccl` with torch if `name` contains it."""
    if group is None:
        if "ccl" in (entry.rpartition(":")[2] for entry in name.split(",")):
            from ds_ext_cpu.comm.ccl import register

            register()
        return None
    if name == "gloo":
        from ds_ext_cpu.comm import ReadingGroup

        return ReadingGroup(group)
    if name == "ccl":
        from ds_ext_cpu.comm.ccl_group import CCLGroup, is_served

        return CCLGroup(group) if is_served(group) else None
    return None


@hookimpl
def ds_device_faults() -> Mapping[str, int]:
    """Count the faults of the host, whatever the device index: the host is the device of this extension."""
    return faults.count()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
