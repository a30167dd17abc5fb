"""`deepspeed.ops.aio`: where its handle comes from, and what it says of a folder."""

import os
import subprocess
import sys

import pytest
from deepspeed.errors import ConfigError, OpUnavailable
from deepspeed.ops import aio, op_builder
from deepspeed.ops.aio import folder as folder_module


def test_the_handle_is_the_ops(monkeypatch):
    calls = []

    class Loaded:
        @staticmethod
        def aio_handle(*arguments):
            calls.append(arguments)
            return "a handle"

    monkeypatch.setattr("deepspeed.ops.registry.require", lambda op: {"async_io": Loaded}[op])
    assert aio.aio_handle(4096, overlap_events=True) == "a handle"
    assert calls == [(4096, 8, False, True, 1)]
    assert aio.AsyncIOBuilder is op_builder.AsyncIOBuilder


def test_without_the_op_the_reason_is_given(monkeypatch):
    monkeypatch.setenv("DS_OPS_DISABLE", "async_io")
    with pytest.raises(OpUnavailable, match="op 'async_io' has no kernel here: .*disabled by DS_OPS_DISABLE=async_io"):
        aio.aio_handle()


def test_importing_it_does_not_load_the_op():
    program = "import sys, deepspeed.ops.aio; print('ds_ext_cpu.aio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_good_folder(tmp_path):
    report = aio.preflight(tmp_path, 1 << 20)
    assert (report.folder, report.alignment) == (str(tmp_path), os.sysconf("SC_PAGE_SIZE"))
    assert report.free_bytes > 1 << 20
    assert report.file_system != "unknown"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no file system in memory")
def test_a_folder_in_memory_is_remarked():
    report = aio.preflight("/dev/shm", 1)
    assert report.file_system == "tmpfs"
    assert report.remarks[0].startswith("the folder is in memory (tmpfs)")


def test_too_small_a_limit_of_locked_memory_is_remarked(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module.resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    monkeypatch.setattr(folder_module, "_STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("Name: python\nCapEff:\t0000000000000000\n")
    assert aio.preflight(tmp_path, 1).memlock_bytes == 8 << 20
    (remark,) = [text for text in aio.preflight(tmp_path, 1, locked_bytes=1 << 30).remarks if "locked" in text]
    assert remark.startswith("1.00 GiB of memory are to be locked and the limit is 8.00 MiB")
    (tmp_path / "status").write_text("Name: python\nCapEff:\t000001ffffffffff\n")
    assert aio.preflight(tmp_path, 1, locked_bytes=1 << 30).memlock_bytes is None


def test_bad_folders_are_refused_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for folder, match in ((tmp_path / "none", "does not exist; create it"), (tmp_path / "file", "is not a folder")):
        with pytest.raises(ConfigError, match=match):
            aio.preflight(folder, 1)
    with pytest.raises(ConfigError, match=r"GiB free and \d+\.00 GiB are needed; free \d+\.\d+ GiB, or name a folder"):
        aio.preflight(tmp_path, 1 << 60)

    def refuse(*arguments, **keywords):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder_module.tempfile, "mkstemp", refuse)
    with pytest.raises(ConfigError, match=r"cannot be used: Permission denied \(EACCES\) while a file was written"):
        aio.preflight(tmp_path, 1)


def test_a_disk_that_loses_bytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module.os, "pwrite", lambda fd, data, offset: os.ftruncate(fd, len(data)))
    with pytest.raises(ConfigError, match="a file read from it differs from what was written; check the disk"):
        aio.preflight(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
