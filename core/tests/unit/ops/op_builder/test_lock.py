"""The lock: held by one, dropped by the system, and done without where a file system has none."""

import errno
import fcntl
import os

import pytest
from deepspeed.ops.op_builder.cache import locked


class Stop(Exception):
    pass


def stop(holder, waited_s):
    raise Stop(holder)


def test_one_holder_at_a_time(tmp_path):
    path = tmp_path / "x.lock"
    with locked(path, stop), pytest.raises(Stop, match=f"process {os.getpid()} on "), locked(path, stop):
        pytest.fail("two held it")
    with locked(path, stop):
        pass
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_holder_that_dies_leaves_nothing(tmp_path):
    path = tmp_path / "x.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(Stop, match="another process"), locked(path, stop):
        pass
    os.close(descriptor)  # what the system does for a process that was killed
    with locked(path, stop):
        assert path.read_text().startswith("process ")


def test_it_is_dropped_though_a_fork_has_the_descriptor(tmp_path):
    path = tmp_path / "x.lock"
    with locked(path, stop):
        (descriptor,) = [int(name) for name in os.listdir("/proc/self/fd") if _is(name, path)]
        copy = os.dup(descriptor)
    with locked(path, stop):
        pass
    os.close(copy)


def _is(descriptor, path):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except OSError:
        return False


def test_waiting_ends_when_the_holder_does(tmp_path):
    path = tmp_path / "x.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    asked = []

    def release(holder, waited_s):
        asked.append(waited_s)
        if len(asked) == 3:
            os.close(descriptor)

    with locked(path, release):
        pass
    assert len(asked) == 3
    assert sorted(asked) == asked


@pytest.mark.parametrize(("number", "runs"), [(errno.ENOLCK, True), (errno.EOPNOTSUPP, True), (errno.EIO, False)])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number, runs):
    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    ran = []
    if runs:
        with locked(tmp_path / "x.lock", stop):
            ran.append(True)
    else:
        with pytest.raises(OSError, match=os.strerror(number)), locked(tmp_path / "x.lock", stop):
            ran.append(True)
    assert bool(ran) == runs
