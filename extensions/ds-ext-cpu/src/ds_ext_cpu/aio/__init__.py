"""Asynchronous file I/O: `aio_handle` of `deepspeed.ops.aio`, implemented over the C++ engine in `csrc/aio`.

May import `deepspeed.ops.op_builder` and torch. Read next: `handle.py` (the user API), `probing.py` (io_uring or
threads), `files.py` (how a file is opened), then `csrc/aio/operation.h` and `engine.cpp`.
"""
