"""The commands that reach the hosts, side by side: their output, their end, and the signals for them.

Called by `start.py` in the process without torch that the user's shell knows. Each command runs the per-node process
(`launch.py`) on its host, which takes orders from stdin and ends when that does; so no host is left behind when this
process is killed. One loop does it all; no threads, no polling.
"""

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.errors import ConfigError
from deepspeed.launcher.membership import Coordinator
from deepspeed.launcher.output import write_console
from deepspeed.launcher.plan import DEFAULT_GRACE_S, ReportReader

_CHUNK_BYTES = 65536
_STOP_AFTER_S = 15.0  # a node that failed blames another: how long that one may take to end by itself
_KILL_AFTER_S = 15.0  # a node that was told to end has ended so long after its ranks' time, or is out of reach
_LOST_BY_PDSH = re.compile(rb"^pdsh@\S+: (\S+): ssh exited with exit code 255\s*$")
_SSH_FAILED = 255


class _Host:
    """One command that runs. `prefix` stands before each line that it prints."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], prefix: bytes) -> None:
        self.name = name
        self.prefix = prefix
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,  # a terminal's Ctrl-C is for us, who pass it on
            )
        except OSError as error:
            raise ConfigError(
                f"{command[0]}: cannot be started ({error.strerror}); install it, or check PATH"
            ) from error
        self.unfinished: dict[int, bytes] = {}  # by pipe

    def order(self, text: str) -> None:
        """Write a line to the node."""
        assert self.process.stdin is not None
        try:
            os.write(self.process.stdin.fileno(), f"{text}\n".encode())
        except (BrokenPipeError, ValueError):  # it has ended, and its end is noticed next
            return


class Watcher:
    """Runs commands to their end.

    Args:
        commands: host -> command; or one command for all hosts, under any name.
        environment: of the commands.
        is_one_for_all: whether that one command puts the host before each line, as pdsh does, and passes on no stdin.
        coordinator: of an elastic job, which goes on when hosts end.
        grace_s: that a node gives its ranks to end.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        is_one_for_all: bool,
        coordinator: Coordinator | None = None,
        grace_s: float = DEFAULT_GRACE_S,
    ) -> None:
        self._kill_after_s = grace_s + _KILL_AFTER_S
        self._coordinator = coordinator
        self._commands = commands
        self._environment = environment
        self._is_one_for_all = is_one_for_all
        self._reader = ReportReader()
        self._selector = selectors.DefaultSelector()
        self._running: list[_Host] = []
        self._failed: list[tuple[str, int]] = []  # host and exit code, in the order in which they ended
        self._signals: list[int] = []
        self._deadline: float | None = None  # what happens then: `_next_step`
        self._is_stopped = False

    def run(self) -> int:
        """The exit code for the shell, once every command has ended; why one failed is printed last."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        self._selector.register(wake_read, selectors.EVENT_READ, None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._take_signals()
        if self._coordinator is not None:
            self._coordinator.start()
        try:
            for name, command in self._commands.items():
                self._start(name, command)
            while self._running:
                self._turn(wake_read)
        finally:
            signal.set_wakeup_fd(-1)
            for host in self._running:
                host.process.kill()
        if self._coordinator is not None:
            verdict = self._coordinator.verdict  # before the end, which is one, too
            self._coordinator.finish()
            if verdict is not None and verdict.exit_code == 0:
                return 0
        return self._last_words()

    def _start(self, name: str, command: Sequence[str]) -> None:
        host = _Host(name, command, self._environment, b"" if self._is_one_for_all else f"{name}: ".encode())
        self._running.append(host)
        for pipe, console_fd in ((host.process.stdout, 1), (host.process.stderr, 2)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (host, console_fd))

    def _take_signals(self) -> None:
        """From now on a signal wakes the loop."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
        for number in passed_on:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(number, lambda number, frame: self._signals.append(number))

    def _turn(self, wake_read: int) -> None:
        """Wait for something to happen, and deal with it."""
        wait_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                os.read(wake_read, _CHUNK_BYTES)
            else:
                self._read(key.fileobj, *key.data)
        while self._signals:
            self._pass_on(self._signals.pop(0))
        for host in list(self._running):
            if host.process.poll() is not None:
                self._end(host)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._next_step()

    def _read(self, pipe: Any, host: _Host, console_fd: int) -> bool:
        """Pass on what is there; False at its end, where the pipe is closed."""
        while True:
            try:
                data = os.read(pipe.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return True
            whole = host.unfinished.pop(console_fd, b"") + data
            *lines, rest = re.split(rb"(?<=[\n\r])", whole)  # a progress bar's lines end with \r
            if not data and rest:
                lines.append(rest + b"\n")
            for line in lines:
                self._pass_line(host, console_fd, line)
            if not data:
                self._selector.unregister(pipe)
                pipe.close()
                return False
            host.unfinished[console_fd] = rest

    def _pass_line(self, host: _Host, console_fd: int, line: bytes) -> None:
        if console_fd == 2 and self._reader.take(host.name, line):
            return
        write_console(console_fd, host.prefix + line)
        lost = _LOST_BY_PDSH.match(line) if self._is_one_for_all else None
        if lost is not None:
            self._failed.append((lost[1].decode(), _SSH_FAILED))
            host.process.terminate()  # the hosts that are left end with their stdin

    def _pass_on(self, number: int) -> None:
        ends = number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if ends:
            if self._coordinator is not None:
                self._coordinator.stop()
            self._failed.append(("", 128 + number))
            self._is_stopped = True
            self._deadline = time.monotonic() + self._kill_after_s
        for host in self._running:
            if not self._is_one_for_all:
                host.order(str(number))
            elif ends:
                host.process.terminate()

    def _end(self, host: _Host) -> None:
        """Take what an ended command left, and stop the others if it failed."""
        self._running.remove(host)
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data[0] is host and self._read(key.fileobj, *key.data):
                self._selector.unregister(key.fileobj)  # a child of ssh keeps it open
        code = host.process.returncode
        if code == 0:
            return
        self._failed.append((host.name, 128 - code if code < 0 else code))
        if self._is_stopped:
            return
        if self._coordinator is not None:
            self._coordinator.expect(len(self._running))
            if self._coordinator.verdict is None:
                return
        blames_another = any(name == host.name and report.is_consequence for name, report in self._reader.reports)
        if blames_another:
            self._deadline = self._deadline or time.monotonic() + _STOP_AFTER_S
        else:
            self._next_step()

    def _next_step(self) -> None:
        """Stop the hosts that still run; the next time, leave them."""
        if self._is_stopped:
            for host in self._running:
                text = f"deepspeed: {host.name} did not end within {self._kill_after_s:g} s and is left to itself\n"
                write_console(2, text.encode())
                host.process.kill()
        for host in self._running:
            host.order("stop")
        self._is_stopped = True
        self._deadline = time.monotonic() + self._kill_after_s

    def _last_words(self) -> int:
        if not self._failed:
            return 0
        host, code = self._failed[0]
        cause = self._reader.cause()
        if cause is not None and host:
            host, report = cause
            write_console(2, f"deepspeed: on {host}:\n{report.text}\n".encode(errors="replace"))
            return report.exit_code
        if code == _SSH_FAILED:
            text = f"deepspeed: {host}: the connection failed or was lost; the ranks on the other hosts were stopped\n"
            write_console(2, text.encode())
        elif host:
            text = f"deepspeed: the command for {host} ended with exit code {code}; see above for what it printed\n"
            write_console(2, text.encode())
        else:
            write_console(2, f"deepspeed: the run was ended by {signal.Signals(code - 128).name}\n".encode())
        return code
