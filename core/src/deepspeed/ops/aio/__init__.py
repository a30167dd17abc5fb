"""Asynchronous file I/O: DeepSpeed's `aio_handle`, and a check of a folder before offload writes to it.

    from deepspeed.ops.aio import aio_handle
    handle = aio_handle(block_size=1048576, queue_depth=8)
    handle.async_pwrite(tensor, "/local_nvme/tensor.bin")
    handle.wait()

May import `ops.registry` and below. The op `async_io` of the host extension provides the handle; there is no torch
reference. Read next: `folder.py`.
"""

from deepspeed.ops.aio.folder import FolderReport, aio_handle, preflight
from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder", "FolderReport", "aio_handle", "preflight"]
