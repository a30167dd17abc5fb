"""`aio_handle(...)`: a handle of the op `async_io`."""

from typing import Any

from deepspeed.ops import registry


def aio_handle(
    block_size: int = 1_048_576,
    queue_depth: int = 8,
    single_submit: bool = False,
    overlap_events: bool = False,
    intra_op_parallelism: int = 1,
) -> Any:
    """A handle for asynchronous reads and writes between host tensors and files, with DeepSpeed's methods.

    `read`, `write`, `pread`, `pwrite`, `sync_pread`, `sync_pwrite`, `async_pread`, `async_pwrite`, `wait`,
    `new_cpu_locked_tensor`, `free_cpu_locked_tensor` and the getters of the arguments.

    Args:
        block_size: bytes of one request.
        queue_depth: requests in flight per worker.
        single_submit: submit requests one by one instead of in batches.
        overlap_events: a finished request makes room for the next one at once; otherwise each batch of `queue_depth`
            requests is finished before the next.
        intra_op_parallelism: workers, which share the requests of each operation.

    Raises:
        OpUnavailable: no extension serves the op `async_io` here; the message gives every reason.
        ValueError: an argument is out of its range.
    """
    return registry.require("async_io").aio_handle(
        block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
    )
