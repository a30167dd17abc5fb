"""Asynchronous file I/O: DeepSpeed's `aio_handle`, and the check of a folder before offload writes there.

    from deepspeed.ops.aio import aio_handle
    handle = aio_handle(block_size=1048576, queue_depth=8)
    handle.async_pwrite(tensor, "/local_nvme/tensor.bin")
    handle.wait()

May import `ops.registry` and below. The handle itself comes with the op `async_io` of the host's extension; there is no
torch reference for it. Read next: `folder.py`.
"""

from deepspeed.ops.aio.folder import FolderReport, aio_handle, preflight
from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder", "FolderReport", "aio_handle", "preflight"]
