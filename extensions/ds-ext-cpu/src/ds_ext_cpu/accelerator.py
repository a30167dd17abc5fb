"""`CPU_Accelerator` makes the host a device.

It extends the core's `PlainAccelerator` (memory of the process and the machine, the host's generator, streams and
events that do nothing) with NUMA nodes and the choice of the communication library.
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
    """The CPU, with one device per NUMA node: one rank per node makes the best use of the node's memory."""

    def natural_device_count(self) -> int:
        """Return the number of NUMA nodes with cores that this process may use, at least 1. See `device_count`."""
        return len(usable_nodes())

    def communication_backend_name(self) -> str:
        """Return `"ccl"` if the oneCCL bindings are installed (does not import them), else `"gloo"`."""
        return "ccl" if _has_ccl() else self._communication_backend_name

    def communication_backend_version(self) -> Any:
        """Return the version of the oneCCL bindings; None for gloo, which is part of torch."""
        return importlib.metadata.version(_CCL_DISTRIBUTION) if _has_ccl() else None

    def prepare_dtype(self, dtype: torch.dtype) -> None:
        """Multiply matrices of bf16 or fp16 in fp32 if the processor has no instructions for `dtype`; process-wide."""
        half_matmul.prepare(dtype)

    def return_freed_memory(self, min_bytes: int | None = 2**20) -> None:
        """Let glibc's malloc return freed blocks of `min_bytes` or more to the system; with None, keep them again."""
        if min_bytes is None:
            keep_freed_blocks()
        else:
            return_large_blocks(min_bytes)

    def export_envs(self) -> list[str]:
        """Return the prefixes of thread and oneCCL settings, which all hosts must share."""
        return ["OMP", "KMP", "CCL"]


def _has_ccl() -> bool:
    return importlib.util.find_spec(_CCL_MODULE) is not None
