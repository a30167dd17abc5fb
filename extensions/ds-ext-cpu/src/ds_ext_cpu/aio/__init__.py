"""Asynchronous file I/O: the handle behind `deepspeed.ops.aio`, over the C++ engine in `csrc/aio`.

May import `deepspeed.ops.op_builder` and torch. Read next: `handle.py` (what users call), `probing.py` (io_uring or
threads), `files.py` (how a file is opened), then `csrc/aio/operation.h` and `engine.cpp`.
"""
