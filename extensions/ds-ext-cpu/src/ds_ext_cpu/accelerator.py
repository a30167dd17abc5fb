"""CPU_Accelerator: the host as a device, with what this machine can tell beyond torch.

It builds on the core's plain device (memory of the process and the machine, the host's generator, streams and events
that do nothing) and adds NUMA nodes and the choice of the communication library.
"""

import importlib.metadata
import importlib.util
from typing import Any

import torch
from deepspeed.accelerator.plain import PlainAccelerator

from ds_ext_cpu import half_matmul
from ds_ext_cpu.malloc import keep_freed_blocks, return_large_blocks
from ds_ext_cpu.numa import usable_nodes

# import name -> distribution of Intel's oneCCL bindings, whose backend is called "ccl"
_CCL_MODULE, _CCL_DISTRIBUTION = "oneccl_bindings_for_pytorch", "oneccl-bind-pt"


class CPU_Accelerator(PlainAccelerator):
    """The CPU: one device per NUMA node, as one rank per node uses its memory best."""

    def natural_device_count(self) -> int:
        """NUMA nodes with cores that this process may use, at least 1. `device_count` prefers the launcher's word."""
        return len(usable_nodes())

    def communication_backend_name(self) -> str:
        """`"ccl"` where the oneCCL bindings are installed (looked up, not imported), else `"gloo"`."""
        return "ccl" if _has_ccl() else self._communication_backend_name

    def communication_backend_version(self) -> Any:
        """The version of the oneCCL bindings; None for gloo, which is part of torch."""
        return importlib.metadata.version(_CCL_DISTRIBUTION) if _has_ccl() else None

    def prepare_dtype(self, dtype: torch.dtype) -> None:
        """bf16 and fp16 on a processor without instructions for them are multiplied in fp32, in the whole process."""
        half_matmul.prepare(dtype)

    def return_freed_memory(self, min_bytes: int | None = 2**20) -> None:
        """Blocks of `min_bytes` or more are not kept by glibc's malloc; None: they are kept again."""
        if min_bytes is None:
            keep_freed_blocks()
        else:
            return_large_blocks(min_bytes)

    def export_envs(self) -> list[str]:
        """The settings of threads and of oneCCL, which all hosts must share."""
        return ["OMP", "KMP", "CCL"]


def _has_ccl() -> bool:
    return importlib.util.find_spec(_CCL_MODULE) is not None
