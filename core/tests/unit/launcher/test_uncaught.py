"""An uncaught exception on its way from a rank to the launcher, and where it goes when there is no way."""

import faulthandler
import os
import signal
import sys

import pytest
from deepspeed import uncaught
from deepspeed.errors import ConfigError
from deepspeed.launcher import output
from deepspeed.launcher.output import UncaughtReports
from deepspeed.uncaught import PIPE_VARIABLE, SHOWS_STACKS, STACK_SIGNAL, Uncaught, report_to_launcher


@pytest.fixture
def pipe(monkeypatch):
    """Read and write end, the latter as the launcher gives it to a rank; and what reached the previous hook."""
    read_fd, write_fd = os.pipe()
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, frames: seen.append(error))
    monkeypatch.setenv(PIPE_VARIABLE, f"{write_fd}:{os.fstat(write_fd).st_ino}")
    report_to_launcher()
    yield read_fd, write_fd, seen
    faulthandler.unregister(STACK_SIGNAL)
    for fd in (read_fd, write_fd):
        try:
            os.close(fd)
        except OSError:
            continue


def fail(error):
    try:
        raise error
    except BaseException:  # noqa: BLE001 - as the interpreter does it
        sys.excepthook(*sys.exc_info())


def test_an_exception_arrives_whole(pipe):
    read_fd, _, seen = pipe
    assert PIPE_VARIABLE not in os.environ
    fail(ConfigError("stage: ü\nfound 9"))
    ready, line = os.read(read_fd, 65536).splitlines()
    assert ready + b"\n" == SHOWS_STACKS
    arrived = Uncaught.decode(line)
    assert arrived.exception == "deepspeed.errors.ConfigError: stage: ü\nfound 9"
    assert (arrived.message, arrived.is_config_error) == ("stage: ü\nfound 9", True)
    assert arrived.traceback.startswith("Traceback (most recent call last):\n")
    assert arrived.traceback.endswith("found 9\n")
    assert seen == []


def test_the_stacks_of_all_threads_arrive_when_the_launcher_asks(pipe):
    read_fd = pipe[0]
    assert os.read(read_fd, 65536) == SHOWS_STACKS
    signal.raise_signal(STACK_SIGNAL)
    lines = os.read(read_fd, 65536).decode().splitlines()
    assert any(line.startswith("Current thread 0x") for line in lines)
    assert any(line.endswith("in test_the_stacks_of_all_threads_arrive_when_the_launcher_asks") for line in lines)


def test_without_a_reader_or_for_ctrl_c_the_previous_hook_is_asked(pipe):
    read_fd, write_fd, seen = pipe
    interrupt, lost, late = KeyboardInterrupt(), ValueError("nobody reads"), ValueError("closed")
    fail(interrupt)
    os.close(read_fd)
    fail(lost)
    os.close(write_fd)
    fail(late)
    assert seen == [interrupt, lost, late]


@pytest.mark.parametrize("address", ["", "x", "7", "-1:5", "0:1", "99999:1", f"{2**70}:1", "9" * 5000 + ":1"])
def test_an_address_that_is_no_pipe_of_ours_is_left_alone(monkeypatch, address):
    monkeypatch.setenv(PIPE_VARIABLE, address)

    def previous(kind, error, frames):
        raise AssertionError("the script's own hook, not called here")

    monkeypatch.setattr(sys, "excepthook", previous)
    report_to_launcher()
    assert sys.excepthook is previous


@pytest.mark.parametrize(
    ("level", "error", "printed"),
    [
        ("", ConfigError("stage: found 9"), "deepspeed: error: stage: found 9\n"),
        ("debug", ConfigError("stage: found 9"), "Traceback (most"),
        ("", ValueError("boom"), "Traceback (most"),
    ],
)
def test_without_a_launcher_a_config_error_is_one_line(monkeypatch, capsys, level, error, printed):
    monkeypatch.delenv(PIPE_VARIABLE, raising=False)
    monkeypatch.setenv("DS_LOG_LEVEL", level)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    report_to_launcher()
    fail(error)
    text = capsys.readouterr().err
    assert text.startswith(printed)
    assert text.count("\n") == 1 or not printed.endswith("\n")


@pytest.mark.parametrize("line", [b"", b"x", b"{}", b'["a", "b", "c", "d"]', b'["a"]', b"\xff"])
def test_what_is_no_report_is_refused(line):
    with pytest.raises(ValueError):
        Uncaught.decode(line)


def test_the_exception_of_a_rank_that_runs_on_is_printed_once(monkeypatch, capfd):
    monkeypatch.setattr(output, "PATIENCE_S", 10.0)
    monkeypatch.setattr(output.time, "monotonic", lambda: 100.0)
    logged = []
    reports = UncaughtReports(-1, 3, logged.append)
    data = uncaught.Uncaught("ValueError: boom", "boom", False, "Traceback ...\nValueError: boom\n").encode()
    reports.take(data[:5])
    assert reports.print_if_due(1000.0) is None
    reports.take(data[5:])
    assert logged == [b"Traceback ...\nValueError: boom\n"]
    assert reports.print_if_due(104.0) == 6.0
    assert reports.print_if_due(110.0) is None
    assert reports.print_if_due(111.0) is None
    printed = capfd.readouterr().err
    assert printed.count("ValueError: boom") == 1
    assert "rank 3 still runs" in printed
