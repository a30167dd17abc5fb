"""Files are written past the page cache or through it, and what the disk refuses is raised."""

import errno
import fcntl
import mmap
import os

import pytest
import torch
from deepspeed.checkpoint import durable
from deepspeed.checkpoint.durable import SequentialFile
from deepspeed.errors import CheckpointError

BLOCK = 4 * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(durable, "_BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(durable, "_FLUSH_BYTES", 2 * BLOCK)


def takes_the_flag_only(monkeypatch):
    """A file system that opens files with O_DIRECT, and refuses writes then."""
    real = os.pwrite

    def pwrite(descriptor, data, offset):
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def refuses_the_flag(monkeypatch):
    real = os.open

    def open_(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_)


FILE_SYSTEMS = {
    "direct": lambda monkeypatch: None,
    "refuses the flag": refuses_the_flag,
    "takes the flag only": takes_the_flag_only,
    "has no such flag": lambda monkeypatch: monkeypatch.setattr(durable, "_DIRECT", 0),
}


@pytest.fixture(params=FILE_SYSTEMS)
def file_system(request, monkeypatch):
    FILE_SYSTEMS[request.param](monkeypatch)


def content_of(num_bytes):
    return torch.arange(num_bytes, dtype=torch.int32).to(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK, 9 * BLOCK + 4097])
@pytest.mark.usefixtures("file_system")
def test_a_file_has_what_was_written(tmp_path, num_bytes):
    content = content_of(num_bytes)
    (tmp_path / "f").write_bytes(b"former" * 1000)
    with SequentialFile(tmp_path / "f") as file:
        for first in range(0, num_bytes, 5000):
            assert file.write(content[first : first + 5000]) == len(content[first : first + 5000])
        assert file.sync() == num_bytes
    assert (tmp_path / "f").read_bytes() == content


@pytest.mark.parametrize("num_bytes", [0, BLOCK - 1, 3 * BLOCK, 5 * BLOCK + 17])
@pytest.mark.usefixtures("file_system")
def test_lasting_memory_is_written_without_a_copy(tmp_path, num_bytes):
    memory = memoryview(mmap.mmap(-1, 8 * BLOCK))[:num_bytes]
    memory[:] = content_of(num_bytes)
    with SequentialFile(tmp_path / "f") as file:
        file.write_lasting(memory)
        assert file.sync() == num_bytes
    assert (tmp_path / "f").read_bytes() == memory


def test_blocks_go_past_the_page_cache(tmp_path, monkeypatch):
    """Where the file system of the test allows that: all of them but the last."""
    written, real = [], os.pwrite

    def pwrite(descriptor, data, offset):
        written.append((offset, len(data), is_direct(descriptor)))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with SequentialFile(tmp_path / "f") as file:
        has_direct = is_direct(file._descriptor)
        file.write(content_of(3 * BLOCK + 10))
        file.sync()
    assert written == [*((n * BLOCK, BLOCK, has_direct) for n in range(3)), (3 * BLOCK, 10, False)]


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_what_the_disk_refuses_in_the_thread_is_an_error(tmp_path, monkeypatch, call):
    """The system reports it once: not to the last fsync again."""

    def refuse(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(durable, "_DIRECT", 0)
    monkeypatch.setattr(*{"pwrite": (os, "pwrite"), "fdatasync": (durable, "_fdatasync")}[call], refuse)
    with pytest.raises(CheckpointError, match="cannot write .*f: Input/output error"):
        durable.write_file(tmp_path / "f", lambda file: file.write(content_of(5 * BLOCK)))
    assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_the_write(tmp_path):
    def interrupted(file):
        file.write(content_of(2 * BLOCK))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        durable.write_file(tmp_path / "f", interrupted)
    assert [path.name for path in tmp_path.iterdir()] == [".f.tmp"]  # the next save overwrites it
