"""`--save_pid`: the file that programs look for, whatever stands in its place."""

import os
import signal
import subprocess
import sys

import pytest
from deepspeed.errors import ConfigError
from deepspeed.launcher import launch
from deepspeed.launcher.launch import pid_file
from deepspeed.launcher.plan import NODE_PROCESS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "PID_FOLDER", tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_file_is_there_inside_and_gone_after(folder):
    stale = folder / f"{os.getpid()}.ds"
    target = folder / "precious"
    target.write_text("kept")
    stale.symlink_to(target)
    with pid_file() as path:
        assert path == stale
        assert path.read_text() == str(os.getpid())
        assert not path.is_symlink()
    assert list(folder.iterdir()) == [target]
    assert target.read_text() == "kept"


def test_another_file_of_that_name_is_not_removed(folder):
    with pid_file() as path:
        (folder / "other").write_text("other")
        (folder / "other").rename(path)
    assert path.read_text() == "other"
    path.unlink()
    with pid_file() as path:
        path.unlink()


def test_a_place_that_cannot_be_written_is_a_config_error(folder, monkeypatch):
    (folder / f"{os.getpid()}.ds").mkdir()
    with pytest.raises(ConfigError, match=r"--save_pid: .*\.ds cannot be written"), pid_file():
        pass
    monkeypatch.setattr(launch, "PID_FOLDER", folder / "nosuch")
    with pytest.raises(ConfigError, match="--save_pid: .* cannot be written"), pid_file():
        pass


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_the_node_process_looks_for_modules_where_the_user_said_only(tmp_path, safe_path):
    program = NODE_PROCESS.replace("from deepspeed.launcher.launch import start; start()", "print(*sys.path[:2])")
    environment = {**os.environ, "PYTHONPATH": "first", "PYTHONSAFEPATH": safe_path}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0].endswith("first")
