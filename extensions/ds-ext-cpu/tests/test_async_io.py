"""`async_io` against plain file I/O: both engines, any address, size and offset; and what it says when it cannot."""

import gc
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.ops import op_builder
from deepspeed.testing.tiers import swept
from ds_ext_cpu.aio import handle as handle_module
from ds_ext_cpu.aio import locked_memory, probing
from ds_ext_cpu.op_builder import AsyncIOBuilder

PAGE = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
not_sanitized = pytest.mark.skipif(
    os.environ.get("DS_CPU_SANITIZE") == "1", reason="the sanitizer has to be preloaded first, and does not lock memory"
)
ENGINES = [
    "threads",
    pytest.param("io_uring", marks=pytest.mark.skipif(bool(probing.io_uring_obstacle()), reason="no io_uring here")),
]


@pytest.fixture(scope="module")
def io():
    return AsyncIOBuilder().load()


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    monkeypatch.setenv("DS_AIO_ENGINE", request.param)
    return request.param


def tensor_of(data, dtype=torch.uint8, shift=0):
    """A tensor of `data` that begins `shift` bytes behind a page."""
    memory = torch.empty(len(data) + 2 * PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE + shift
    found = memory[start : start + len(data)]
    found.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else None
    return found.view(dtype)


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def random_case(rng):
    dtype = rng.choice(DTYPES)
    numel = rng.choice([0, 1, 7, 1024, rng.randrange(1, 30_000)])
    offset = rng.choice([0, 1, PAGE, PAGE - 1, rng.randrange(50_000)])
    shift = rng.choice([0, 512, dtype.itemsize, dtype.itemsize * rng.randrange(200)])
    return dtype, numel, offset, shift


@pytest.mark.parametrize(
    ("block_size", "queue_depth", "workers", "single_submit", "overlap_events"),
    swept(
        [
            (4096, 4, 2, False, False),
            (1 << 20, 8, 1, True, True),
            (100, 1, 1, True, False),
            (5000, 3, 3, False, True),
        ],
        lambda block_size, *others: block_size in (4096, 1 << 20),
    ),
)
def test_any_range_is_the_bytes_of_plain_file_io(
    io, engine, tmp_path, block_size, queue_depth, workers, single_submit, overlap_events
):
    handle = io.aio_handle(block_size, queue_depth, single_submit, overlap_events, workers)
    rng = random.Random(0)
    path = tmp_path / "file"
    for case in range(40):
        dtype, numel, offset, shift = random_case(rng)
        before = rng.randbytes(rng.choice([0, 100, PAGE, 60_000]))
        written = rng.randbytes(numel * dtype.itemsize)
        path.write_bytes(before)
        assert handle.sync_pwrite(tensor_of(written, dtype, shift), str(path), offset) == 1
        wanted = bytearray(before.ljust(offset, b"\0") if written else before)
        wanted[offset : offset + len(written)] = written or wanted[offset:offset]
        assert path.read_bytes() == bytes(wanted), (case, dtype, numel, offset, shift)
        if written:
            found = tensor_of(bytes(len(written)), dtype, rng.randrange(64) * dtype.itemsize)
            assert handle.sync_pread(found, str(path), offset) == 1
            assert bytes_of(found) == written, (case, dtype, numel, offset, shift)


def test_neighbors_in_one_file_are_written_at_once_without_harm(io, engine, tmp_path):
    rng = random.Random(1)
    path = str(tmp_path / "file")
    pieces = [rng.randbytes(rng.randrange(1, 3 * PAGE)) for _ in range(300)]
    handles = [io.aio_handle(4096, 4, False, True, 2) for _ in range(2)]
    offset = 0
    for at, piece in enumerate(pieces):
        assert handles[at % 2].async_pwrite(tensor_of(piece), path, offset) == 0
        offset += len(piece)
    assert [handle.wait() for handle in handles] == [150, 150]
    with open(path, "rb") as file:
        assert file.read() == b"".join(pieces)
    found = [torch.empty(len(piece), dtype=torch.uint8) for piece in pieces]
    offset = 0
    for tensor in found:
        handles[0].async_pread(tensor, path, offset)
        offset += tensor.numel()
    assert handles[0].wait() == 300
    assert [bytes_of(tensor) for tensor in found] == pieces
    assert handles[0].wait() == 0


def test_the_documented_calls_and_what_they_return(io, tmp_path):
    handle = io.aio_handle(
        block_size=8192, queue_depth=2, single_submit=True, overlap_events=True, intra_op_parallelism=3
    )
    assert isinstance(handle, op_builder.AsyncIOBuilder().load().aio_handle)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (8192, 2, 3)
    assert handle.get_single_submit() is handle.get_overlap_events() is True
    path, wanted, found = str(tmp_path / "file"), torch.randn(5000), torch.empty(5000)
    assert handle.write(wanted, path) == 1
    assert handle.pwrite(wanted, path, True, False) == 1
    assert handle.pwrite(wanted, path, False, True, 4) == 0
    assert handle.async_pwrite(wanted, path, 0) == 0
    assert handle.wait() == 2
    assert handle.async_pread(found, path) == 0
    assert handle.read(found, path) == 1  # waits for itself only
    assert handle.wait() == 1
    assert handle.pread(found, path, True, True, file_offset=0) == 0
    assert handle.wait() == 1
    locked = handle.new_cpu_locked_tensor(1000, wanted)
    assert (locked.shape, locked.dtype, locked.data_ptr() % PAGE) == ((1000,), torch.float32, 0)
    assert handle.free_cpu_locked_tensor(locked) is True
    assert handle.free_cpu_locked_tensor(locked) is handle.free_cpu_locked_tensor(wanted) is False
    assert handle.new_cpu_locked_tensor(0, wanted).numel() == 0


def test_validate_finds_a_file_that_differs(io, tmp_path, monkeypatch):
    path, data = tmp_path / "file", torch.arange(5000, dtype=torch.int32)
    handle = io.aio_handle()
    finish = handle._io.wait

    def damage(*arguments):
        ended = finish(*arguments)
        with path.open("r+b") as file:
            file.seek(1001)
            file.write(b"x")
        return ended

    monkeypatch.setattr(handle._io, "wait", damage)
    with pytest.raises(OSError, match=r"differ from byte 1001 of the file on: '.*file'"):
        handle.pwrite(data, str(path), True, False)


# ----- errors --------------------------------------------------------------------------------------------------------


def test_errors_name_file_offset_length_and_errno(io, engine, tmp_path):
    handle, buffer = io.aio_handle(), torch.empty(PAGE, dtype=torch.uint8)
    missing = str(tmp_path / "no" / "file")
    for call in (handle.sync_pread, handle.async_pread, handle.sync_pwrite, handle.read, handle.write):
        with pytest.raises(
            FileNotFoundError, match=r"No such file or directory: \w+ of 4096 bytes at offset 64: '.*/no/"
        ):
            call(buffer, missing, 64)
    short = tmp_path / "short"
    short.write_bytes(bytes(5000))
    with pytest.raises(OSError, match=r"the file ends before, it has 5000 bytes: read of 4096 bytes at offset 1000"):
        handle.sync_pread(buffer, str(short), 1000)
    with pytest.raises(IsADirectoryError):
        handle.sync_pwrite(buffer, str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file: read of 4096"):
        handle.sync_pread(buffer, str(tmp_path / "pipe"))
    assert handle.wait() == 0
    assert handle.sync_pread(buffer, str(short)) == 1


def test_tensors_and_arguments_are_refused_with_the_reason(io, tmp_path):
    handle, path = io.aio_handle(), str(tmp_path / "file")
    for wrong, match in (
        (torch.empty(8, 8).t(), "not contiguous"),
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.empty(3, device="meta"), "on meta; it must be in host memory"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "not contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            handle.sync_pwrite(wrong, path)
    with pytest.raises(TypeError, match="buffer is a list"):
        handle.sync_pwrite([1.0], path)
    with pytest.raises(ValueError, match="file_offset is -1"):
        handle.sync_pwrite(torch.zeros(1), path, -1)
    assert not os.path.exists(path)
    for arguments, match in (
        ({"block_size": 0}, "block_size is 0"),
        ({"queue_depth": 1 << 20}, "queue_depth is 1048576"),
    ):
        with pytest.raises(ValueError, match=match):
            io.aio_handle(**arguments)


def test_wait_raises_the_first_error_and_counts_the_others(io, engine, tmp_path):
    handle = io.aio_handle(4096, 2)
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PAGE))
    buffers = [torch.ones(3 * PAGE, dtype=torch.uint8) for _ in range(4)]
    for at, buffer in enumerate(buffers):
        handle.async_pread(buffer, str(path))
        if at:  # as a file that another program truncated after it was opened
            opened = os.open(path, os.O_RDONLY)
            place = (buffer.data_ptr(), 3 * PAGE, PAGE)
            operation = io.submit(handle._engine, {}, buffer, False, -1, opened, *place, 1, PAGE, False)
            handle._running[-1] = handle._running[-1]._replace(operation=operation, offset=PAGE)
    with pytest.raises(OSError, match=r"No data available: read of \d+ bytes at offset 12288; 2 more of 4 operations"):
        handle.wait()
    assert handle.wait() == 0
    assert handle.sync_pread(buffers[0], str(path)) == 1
    assert not buffers[0].any()


SHORT_CALLS = """
#include <dlfcn.h>
#include <errno.h>
#include <unistd.h>
static __thread int calls;
#define SHIM(name, pointer)                                                             \\
    extern "C" ssize_t name(int fd, pointer data, size_t size, off_t offset) {          \\
        static auto real = (ssize_t(*)(int, pointer, size_t, off_t))dlsym(RTLD_NEXT, #name); \\
        switch (calls++ % 4) {                                                          \\
            case 0: errno = EINTR; return -1;                                           \\
            case 1: errno = EAGAIN; return -1;                                          \\
            case 2: return real(fd, data, size > 1000 ? size / 2 + 3 : size, offset);   \\
        }                                                                               \\
        return real(fd, data, size, offset);                                            \\
    }
SHIM(pread, void*)
SHIM(pwrite, const void*)
"""
SHORT_PROGRAM = """
import os, sys, torch
from ds_ext_cpu.op_builder import AsyncIOBuilder
handle = AsyncIOBuilder().load().aio_handle(65536, 2)
wanted, found = torch.randint(0, 255, (300_001,), dtype=torch.uint8), torch.empty(300_001, dtype=torch.uint8)
handle.sync_pwrite(wanted, sys.argv[1], 5)
handle.sync_pread(found, sys.argv[1], 5)
assert open(sys.argv[1], "rb").read() == bytes(5) + wanted.numpy().tobytes()
assert torch.equal(wanted, found)
"""


@not_sanitized
@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_short_and_interrupted_calls_are_completed(io, tmp_path):
    (tmp_path / "shim.cpp").write_text(SHORT_CALLS)
    shim = tmp_path / "shim.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", str(shim), str(tmp_path / "shim.cpp"), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(shim), "DS_AIO_ENGINE": "threads"}
    command = [sys.executable, "-c", SHORT_PROGRAM, str(tmp_path / "file")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def small_disk(folder, num_bytes):
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_the_handle_goes_on(io, engine, tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20):
        path, handle = str(tmp_path / "disk" / "file"), io.aio_handle()
        with pytest.raises(OSError, match=r"No space left on device: write of 2097152 bytes at offset 0: '.*/file'"):
            handle.sync_pwrite(torch.zeros(2 << 20, dtype=torch.uint8), path)
        wanted, found = torch.randn(1000), torch.empty(1000)
        handle.sync_pwrite(wanted, path)
        handle.sync_pread(found, path)
        assert torch.equal(wanted, found)


# ----- lifetimes, threads, processes ---------------------------------------------------------------------------------


def test_a_tensor_lives_until_its_operation_is_done(io, engine, tmp_path):
    handle, path = io.aio_handle(4096, 1), str(tmp_path / "file")
    buffer = torch.full((1 << 20,), 7, dtype=torch.uint8)
    alive = weakref.ref(buffer)
    handle.async_pwrite(buffer, path)
    del buffer
    gc.collect()
    assert alive() is not None
    assert handle.wait() == 1
    assert alive() is None
    assert set((tmp_path / "file").read_bytes()) == {7}


def test_a_dropped_handle_finishes_what_is_in_flight(io, engine, tmp_path):
    handle = io.aio_handle(4096, 1)
    for at in range(20):
        handle.async_pwrite(torch.full((1 << 18,), at, dtype=torch.uint8), str(tmp_path / str(at)))
    del handle
    assert [set((tmp_path / str(at)).read_bytes()) for at in range(20)] == [{at} for at in range(20)]


def test_a_closed_handle_refuses(io, tmp_path):
    handle = io.aio_handle()
    handle.async_pwrite(torch.ones(10), str(tmp_path / "file"))
    handle.close()
    assert (tmp_path / "file").stat().st_size == 40
    for call in (handle.wait, handle.close, lambda: handle.sync_pread(torch.ones(1), str(tmp_path / "file"))):
        with pytest.raises(RuntimeError, match="this aio_handle is closed"):
            call()


def test_a_handle_that_was_not_used_starts_no_workers_to_close(io, monkeypatch):
    handle = io.aio_handle()
    monkeypatch.delattr(handle_module.AsyncIOHandle, "_start")
    handle.close()
    with pytest.raises(RuntimeError, match="this aio_handle is closed"):
        handle.get_engine()


def test_many_operations_hold_few_files_open(io, engine, tmp_path):
    handle = io.aio_handle(4096, 4)
    data = torch.arange(2 * PAGE, dtype=torch.int64)
    for at in range(600):
        handle.async_pwrite(data, str(tmp_path / str(at)))
        if at % 100 == 0:
            assert len(os.listdir("/proc/self/fd")) < 2 * handle_module._MAX_FILES + 100
    assert handle.wait() == 600
    assert all((tmp_path / str(at)).read_bytes() == bytes_of(data) for at in range(600))


def test_an_interrupted_operation_goes_on_and_keeps_its_tensor(io, engine, tmp_path, monkeypatch):
    handle = io.aio_handle(4096, 1)
    handle.async_pwrite(torch.full((1 << 20,), 3, dtype=torch.uint8), str(tmp_path / "async"))
    buffer = torch.full((1 << 20,), 5, dtype=torch.uint8)
    alive = weakref.ref(buffer)

    def interrupt(*arguments):  # as Ctrl-C does, which a process in the background may ignore
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(io, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.sync_pwrite(buffer, str(tmp_path / "sync"))
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    del buffer
    assert alive() is not None
    assert handle.wait() == 1
    handle.close()
    assert alive() is None
    assert set((tmp_path / "async").read_bytes()) == {3}
    assert set((tmp_path / "sync").read_bytes()) == {5}


def test_threads_share_a_handle(io, engine, tmp_path):
    handle, failures = io.aio_handle(4096, 4, False, True, 2), []

    def work(seed):
        try:
            wanted = torch.randn(3001, generator=torch.Generator().manual_seed(seed))
            for _ in range(20):
                found = torch.empty_like(wanted)
                handle.sync_pwrite(wanted, str(tmp_path / str(seed)))
                handle.sync_pread(found, str(tmp_path / str(seed)))
                assert torch.equal(wanted, found)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def in_child(function):
    """What `function` returned in a fork of this process, as text."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(str(function())))
    child.start()
    sender.close()  # so that a child that dies is noticed
    assert receiver.poll(60)
    told = receiver.recv()
    child.join()
    assert child.exitcode == 0
    return told


def error_of(call, *arguments):
    try:
        return call(*arguments)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_child_is_refused_the_handle_of_its_parent_and_may_make_one(io, engine, tmp_path):
    handle, path = io.aio_handle(), str(tmp_path / "file")
    handle.sync_pwrite(torch.ones(10), path)
    told = in_child(lambda: error_of(handle.sync_pread, torch.ones(10), path))
    assert told.startswith(f"RuntimeError: this aio_handle was made in process {os.getpid()} and is used in its child")
    assert in_child(lambda: io.aio_handle().sync_pread(torch.ones(10), path)) == "1"
    assert handle.sync_pread(torch.ones(10), path) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="a process that may write everywhere is to lose that")
def test_without_permission(io, engine, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    path.chmod(0o600)

    def read_as_nobody():
        os.setuid(65534)
        return error_of(io.aio_handle().sync_pread, torch.ones(10), str(path))

    assert "PermissionError: [Errno 13] Permission denied: read of 40 bytes at offset 0" in in_child(read_as_nobody)


# ----- memory and choice of the engine -------------------------------------------------------------------------------


@not_sanitized
@pytest.mark.skipif(os.getuid() != 0, reason="a process that may lock memory is to lose that")
def test_memory_over_the_limit_is_plain_and_warned_of_once(io, monkeypatch):
    warnings = []
    monkeypatch.setattr(locked_memory, "warn_once", warnings.append)

    def allocate_as_nobody():
        import resource

        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        os.setuid(65534)
        handle = io.aio_handle()
        small = handle.new_cpu_locked_tensor(1 << 10, torch.empty(0))
        large, larger = (handle.new_cpu_locked_tensor(size, torch.empty(0)) for size in (1 << 20, 1 << 21))
        return len(small), larger.data_ptr() % PAGE, float(large.fill_(2).sum()), len(set(warnings)), warnings[0]

    told = in_child(allocate_as_nobody)
    assert told.startswith("(1024, 0, 2097152.0, 1, 'new_cpu_locked_tensor: memory cannot be locked (")
    assert "ENOMEM; the limit of locked memory is 1024 KiB), so that it is plain aligned memory; set `ulimit" in told


def test_another_system_than_linux_is_refused(monkeypatch):
    builder = AsyncIOBuilder()
    assert builder.is_compatible()
    monkeypatch.setattr("ds_ext_cpu.op_builder.cpu_op_builder.sys.platform", "darwin")
    assert not builder.is_compatible()
    assert builder.reason == "it uses system calls of Linux, and this is darwin"


def test_the_engine_is_chosen_when_the_handle_is_used(io, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_AIO_ENGINE", "threads")
    handle = io.aio_handle()
    monkeypatch.setenv("DS_AIO_ENGINE", "libaio")
    with pytest.raises(ConfigError, match="DS_AIO_ENGINE is 'libaio'; it must be one of io_uring, threads"):
        handle.sync_pwrite(torch.ones(1), str(tmp_path / "file"))
    assert AsyncIOBuilder().remark().startswith("DS_AIO_ENGINE is 'libaio'")
    monkeypatch.delenv("DS_AIO_ENGINE")
    monkeypatch.setattr(probing, "io_uring_obstacle", lambda: "io_uring_setup: Operation not permitted (EPERM)")
    assert AsyncIOBuilder().remark().startswith("threads (io_uring_setup: Operation not permitted (EPERM))")
    handle.sync_pwrite(torch.ones(1), str(tmp_path / "file"))
    assert handle.get_engine() == "threads"
    monkeypatch.setenv("DS_AIO_ENGINE", "io_uring")
    with pytest.raises(ConfigError, match=r"cannot be used here: io_uring_setup: Operation not permitted"):
        io.aio_handle().get_engine()
