"""Swap folders and files: private, swept after a crash only, preallocated; errors that say what to do."""

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.config.training import AioConfig
from deepspeed.errors import ConfigError
from deepspeed.ops import registry
from deepspeed.zero.offload import swap_file
from deepspeed.zero.offload.buffers import HostMemory
from deepspeed.zero.offload.swap_file import ALIGNMENT, SwapFile, SwapFolder, SwapQueue, sweep

needs_aio = pytest.mark.skipif(registry.resolve("async_io").builder is None, reason="no extension serves async_io here")

OWNER = """
import sys
from deepspeed.zero.offload.swap_file import SwapFolder
folder = SwapFolder(sys.argv[1], rank=3, key="nvme_path")
(folder.path / "data").write_bytes(b"x")
print(folder.path, flush=True)
sys.stdin.read()
"""


WITH_WORKER = """
import os, sys
from deepspeed.zero.offload.swap_file import SwapFolder
folder = SwapFolder(sys.argv[1], rank=3, key="nvme_path")
if os.fork() == 0:
    print(folder.path, flush=True)
sys.stdin.read()
"""

CUT_OFF = """
import os, signal, sys
from deepspeed.zero.offload.swap_file import SwapFolder
open_file = os.open
def stop(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
def stop_at_lock(path, *arguments):
    return stop() if str(path).endswith("owner.lock") else open_file(path, *arguments)
name, stop_at = {"open": ("open", stop_at_lock), "rename": ("rename", stop)}[sys.argv[2]]
setattr(os, name, stop_at)
SwapFolder(sys.argv[1], rank=3, key="nvme_path")
"""

PAUSED = """
import os, sys
from deepspeed.zero.offload.swap_file import SwapFolder
rename = os.rename
def pause(*names):
    print("is making it", flush=True)
    sys.stdin.readline()
    rename(*names)
os.rename = pause
folder = SwapFolder(sys.argv[1], rank=3, key="nvme_path")
print(folder.path, flush=True)
sys.stdin.read()
"""


def start_owner(parent, program=OWNER):
    process = subprocess.Popen(
        [sys.executable, "-c", program, parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def end(process):
    process.stdin.close()
    process.wait()
    process.stdout.close()


@contextmanager
def open_folder(path):
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def file(tmp_path):
    folder = SwapFolder(tmp_path, rank=0, key="nvme_path")
    yield SwapFile(folder.path / "optimizer.swap")
    folder.remove()


def test_a_folder_is_private_and_goes_with_its_owner(tmp_path):
    folder = SwapFolder(tmp_path, rank=0, key="nvme_path")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert f"rank0_pid{os.getpid()}" in folder.path.name
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_what_dead_processes_left_is_swept(tmp_path):
    own = SwapFolder(tmp_path, rank=0, key="nvme_path")
    killed, left = start_owner(tmp_path)
    living, kept = start_owner(tmp_path)
    assert os.path.exists(left), "a living process keeps its folder"
    killed.send_signal(signal.SIGKILL)
    end(killed)
    assert os.path.exists(left)
    assert [str(path) for path in sweep(tmp_path)] == [left]
    assert own.path.exists()
    end(living)
    assert not os.path.exists(kept), "a normal exit removes it"
    own.remove()


def test_a_forked_worker_keeps_nothing_of_a_killed_process(tmp_path):
    killed, left = start_owner(tmp_path, WITH_WORKER)
    assert sweep(tmp_path) == []
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert [str(path) for path in sweep(tmp_path)] == [left]  # its worker lives until its stdin is closed
    end(killed)


@pytest.mark.parametrize("call", ["open", "rename"])
def test_what_a_process_left_that_was_killed_as_it_made_a_folder_is_swept(tmp_path, call):
    assert subprocess.run([sys.executable, "-c", CUT_OFF, tmp_path, call], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".ds_new_swap_")
    folder = SwapFolder(tmp_path, rank=0, key="nvme_path")
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.remove()


def test_a_folder_that_is_being_made_is_not_swept(tmp_path):
    maker, words = start_owner(tmp_path, PAUSED)
    assert words == "is making it"
    with open_folder(tmp_path) as descriptor, pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # by which others wait
    maker.stdin.write("\n")
    maker.stdin.flush()
    assert maker.stdout.readline().strip() in map(str, tmp_path.iterdir())
    folder = SwapFolder(tmp_path, rank=0, key="nvme_path")
    folder.remove()
    end(maker)
    assert list(tmp_path.iterdir()) == []


def test_another_host_s_folders_are_left(tmp_path):
    other = tmp_path / "ds_swap_another-host_run_rank0_pid1_x"
    other.mkdir()
    (other / "owner.lock").touch()
    SwapFolder(tmp_path, rank=0, key="nvme_path").remove()
    assert other.exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    for name, reason in (("x" * 300, "File name too long"), ("file/below", "Not a directory"), ("a\0b", "null byte")):
        (tmp_path / "file").touch()
        with pytest.raises(
            ConfigError, match=rf"^section.nvme_path: no folder can be made in .*: .*{reason}; check its"
        ):
            SwapFolder(tmp_path / name, rank=0, key="section.nvme_path")
    with pytest.raises(ConfigError, match=r"^section.nvme_path: .*file is not a folder; name a folder"):
        SwapFolder(tmp_path / "file", rank=0, key="section.nvme_path")


def test_a_missing_folder_is_made_for_this_user_alone_and_stays(tmp_path):
    parent = tmp_path / "disk" / "swap"
    SwapFolder(parent, rank=0, key="nvme_path").remove()
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (parent, parent.parent)] == [0o700, 0o700]
    assert list(parent.iterdir()) == []


def test_regions_are_aligned_and_have_space_on_the_disk(file):
    first, second = file.allocate(5), file.allocate(ALIGNMENT + 1)
    assert (first.offset, second.offset) == (0, ALIGNMENT)
    found = os.stat(file.path)
    assert found.st_size == 3 * ALIGNMENT
    assert found.st_blocks * 512 >= found.st_size


def test_a_full_disk_is_found_when_space_is_given_out(file, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(swap_file.os, "posix_fallocate", full)
    with pytest.raises(
        OSError, match=r"No space left .*allocation of 4096 bytes at offset 0 .ENOSPC.; free space"
    ) as info:
        file.allocate(10)
    assert info.value.errno == errno.ENOSPC
    assert info.value.filename == str(file.path)


@needs_aio
def test_tensors_come_back(file):
    queue = SwapQueue(AioConfig(block_size=4096, queue_depth=2, thread_count=2))
    one, other = torch.randn(10_000), torch.arange(77, dtype=torch.bfloat16)
    regions = [file.allocate(tensor.nbytes) for tensor in (one, other)]
    works = [queue.write(region, tensor) for region, tensor in zip(regions, (one, other), strict=True)]
    works[0].wait()
    assert works[1].poll()
    found = HostMemory(get_accelerator(), pins=False).aligned(one.nbytes).view(torch.float32)
    assert found.data_ptr() % ALIGNMENT == 0
    part = torch.empty(7, dtype=torch.bfloat16)
    works = [queue.read(regions[0], found), queue.read(regions[1], part, start=20)]
    for work in works:
        work.wait()
    assert torch.equal(found, one)
    assert torch.equal(part, other[10:17])


DAMAGES = {
    "removed": (os.unlink, FileNotFoundError, "ENOENT"),
    "cut off": (lambda path: os.truncate(path, 100), OSError, "was cut off: 100 of 8192 bytes are left"),
    "replaced": (lambda path: (os.rename(path, f"{path}.old"), path.write_bytes(bytes(8192))), OSError, "another file"),
}


@needs_aio
@pytest.mark.parametrize("action", ["read", "write"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_never_used(file, damage, action):
    region = file.allocate(8192)
    queue = SwapQueue()
    spoil, kind, text = DAMAGES[damage]
    spoil(file.path)
    with pytest.raises(kind, match=text) as info:
        getattr(queue, action)(region, torch.zeros(1024))
    assert f"{action} of 4096 bytes at offset 0" in str(info.value)
    assert "load the last checkpoint" in str(info.value)
    assert info.value.filename == str(file.path)


@needs_aio
def test_an_error_in_flight_is_raised_by_every_work_of_its_queue(file):
    region = file.allocate(8192)
    queue = SwapQueue()
    work = queue.read(region, torch.zeros(2048))

    def fails():
        raise OSError(errno.EIO, "Input/output error: read of 8192 bytes at offset 0", str(file.path))

    queue._handle.wait, wait = fails, queue._handle.wait
    for _ in range(2):
        with pytest.raises(
            OSError, match=r"swap file: Input/output error: read of 8192 .*\(EIO\); what was swapped out"
        ):
            work.wait()
    wait()


def test_an_interrupted_wait_leaves_what_is_in_flight_in_flight(file, monkeypatch):
    queue = SwapQueue()
    written = torch.arange(1 << 16, dtype=torch.float32)
    work = queue.write(file.allocate(written.nbytes), written)

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(queue._handle, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    assert not work.is_done
    waited = []
    wait = queue._handle.wait
    monkeypatch.setattr(queue._handle, "wait", lambda: waited.append(wait()))
    work.wait()
    assert work.is_done
    assert len(waited) == 1


def test_a_folder_that_cannot_be_removed_is_named(tmp_path, monkeypatch, caplog):
    folder = SwapFolder(tmp_path, rank=0, key="nvme_path")
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    folder.remove()
    assert f"cannot remove the swap folder {folder.path}" in caplog.text
