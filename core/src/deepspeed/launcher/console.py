"""Writing to the launcher's console, which may be slow, shared with others, or gone."""

import os
import select


def write_console(fd: int, data: bytes) -> bool:
    """Write all of `data`, waiting where `fd` is full, also one that does not block; False if nobody reads it."""
    try:
        write_all(fd, data)
    except OSError:  # it went away (`| head`): the ranks run on, and their pipes are still emptied
        return False
    return True


def write_all(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # shared with a program that set it so; full for the moment
            room = select.poll()
            room.register(fd, select.POLLOUT)
            room.poll()
