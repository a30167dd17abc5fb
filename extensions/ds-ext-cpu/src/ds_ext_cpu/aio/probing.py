"""Choose the I/O engine: io_uring if the kernel permits it, else threads. `DS_AIO_ENGINE` overrides the choice."""

import ctypes
import errno
import os
import tempfile

from deepspeed.errors import ConfigError

VARIABLE = "DS_AIO_ENGINE"
ENGINES = ("io_uring", "threads")

# System call numbers and constants; the same on every architecture.
_SETUP, _ENTER, _REGISTER = 425, 426, 427
_PARAMS_BYTES = 120
_REGISTER_PROBE = 8
_NUM_PROBED = 64
_READ, _WRITE = 22, 23
_SUPPORTED = 1


def choose_engine() -> str:
    """Return the engine for a new handle, "io_uring" or "threads". Called when a handle is first used.

    Raises:
        ConfigError: `DS_AIO_ENGINE` is not an engine, or is io_uring and io_uring cannot be used.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", *ENGINES):
        raise ConfigError(f"{VARIABLE} is {chosen!r}; it must be one of {', '.join(ENGINES)}, or not set")
    if chosen == "threads":
        return "threads"
    obstacle = io_uring_obstacle()
    if obstacle and chosen:
        raise ConfigError(f"{VARIABLE} is io_uring, which cannot be used here: {obstacle}; unset it to use threads")
    return "threads" if obstacle else "io_uring"


def describe_engine() -> str:
    """Describe the engine, and whether O_DIRECT works in the folder of temporary files, for `ds_report`."""
    try:
        engine = choose_engine()
    except ConfigError as error:
        return str(error)
    if engine == "threads" and not os.environ.get(VARIABLE):
        engine = f"threads ({io_uring_obstacle()})"
    folder = tempfile.gettempdir()
    return f"{engine}, O_DIRECT" if _takes_direct(folder) else f"{engine}, no O_DIRECT in {folder}"


def io_uring_obstacle() -> str:
    """Return why io_uring cannot be used in this process; "" if it can. Creates a small ring and closes it."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_SETUP, 1, ctypes.create_string_buffer(_PARAMS_BYTES))
    if fd < 0:
        return f"io_uring_setup: {_errno_text()}"
    try:
        if libc.syscall(_ENTER, fd, 0, 0, 0, None, 0) < 0:
            return f"io_uring_enter: {_errno_text()}"
        # struct io_uring_probe: a header of 16 bytes, then 8 bytes per operation, with the flags in bytes 2 and 3
        probe = ctypes.create_string_buffer(16 + 8 * _NUM_PROBED)
        if libc.syscall(_REGISTER, fd, _REGISTER_PROBE, probe, _NUM_PROBED) < 0:
            return "the kernel is older than 5.6"
        if not all(probe.raw[16 + 8 * code + 2] & _SUPPORTED for code in (_READ, _WRITE)):
            return "the kernel does not read and write files by io_uring"
        return ""
    finally:
        os.close(fd)


def _errno_text() -> str:
    code = ctypes.get_errno()
    return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"


def _takes_direct(folder: str) -> bool:
    try:
        fd, path = tempfile.mkstemp(prefix=".ds_aio_", dir=folder)
    except OSError:
        return False
    try:
        os.close(fd)
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    finally:
        os.unlink(path)
    return True
