"""Start a rank as a fork of a process that has imported torch. Used by `distributed`, and by tests that run scripts.

There are two such processes (`rank_server`) per set of variables, for even and for odd ranks. So the ranks of a job
differ like fresh interpreters: in the seed of string hashes and in addresses. A process per rank would take 3 s of a
core each. torch's libraries survive a fork only on Linux; on other systems a rank is a fresh interpreter.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import TypeAlias

_START_TIMEOUT_S = 240.0  # enough for a busy machine
_NUM_SERVERS = 2  # per set of variables
_IS_SUPPORTED = hasattr(os, "pidfd_open")

Variables: TypeAlias = Mapping[str, str]


class ForkedRank:
    """A `ForkedRank` represents a child of a server, with the methods of `subprocess.Popen` that callers use."""

    def __init__(self, pid: int, report: Connection) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._report = report  # brings the exit code

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self.wait(0.0) if self.returncode is None and self._report.poll() else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        if self.returncode is None:
            if not self._report.poll(timeout):
                raise subprocess.TimeoutExpired(f"rank of pid {self.pid}", timeout or 0.0)
            try:
                self.returncode = int(self._report.recv())
            except EOFError:  # the server was killed
                self.returncode = -signal.SIGKILL
            self._report.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # its end is about to be reported
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process, if it runs."""
        self.send_signal(signal.SIGKILL)


Process: TypeAlias = "subprocess.Popen[bytes] | ForkedRank"


def start(
    rank: int,
    command: Sequence[str],
    environment: Variables,
    stdin: int,
    output: int,
    early: Variables | None = None,
    *,
    errors: int | None = None,
) -> Process:
    """Start `python *command` as a rank; `shut_down` ends it if it still runs.

    Args:
        rank: even ones are forks of one process, odd ones of another.
        command: a script and its arguments, or `-m`, a module and its arguments.
        environment: all of its variables.
        stdin: descriptor of its standard input.
        output: descriptor of its standard output, and of its standard error without `errors`.
        early: the variables that must be set before torch is imported, or when Python starts.
        errors: descriptor of its standard error.

    Raises:
        ConnectionError: the server process has ended; its standard error says why.
        TimeoutError: the server process did not start in time.
        EOFError: the server process has just ended.
    """
    errors = output if errors is None else errors
    if not _IS_SUPPORTED:
        return subprocess.Popen([sys.executable, *command], env=environment, stdin=stdin, stdout=output, stderr=errors)
    return _server(rank, environment, early).fork(command, environment, (stdin, output, errors))


def prepare(num_ranks: int, environment: Variables, early: Variables | None = None) -> None:
    """Start the server processes for these ranks ahead, so that ranks that wait for each other start together.

    Raises:
        ConnectionError, TimeoutError: as `start`.
    """
    if _IS_SUPPORTED:
        ranks = range(min(num_ranks, _NUM_SERVERS))
        servers = [_server(rank, environment, early) for rank in ranks]  # their imports overlap
        for server in servers:
            server.await_imports()


def wait_for_end(pids: Iterable[int], limit_s: float) -> None:
    """Wait until these processes have ended. They need not be children of this one.

    Raises:
        AssertionError: one of them still runs after `limit_s` seconds.
    """
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([descriptor], [], [], limit_s)
        os.close(descriptor)
        assert ready, f"process {pid} still runs"


class _Server:
    """A process that forks ranks."""

    def __init__(self, environment: Variables) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "deepspeed.testing.rank_server", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._socket = ours
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def await_imports(self) -> None:
        if not self._is_ready:
            self._socket.settimeout(_START_TIMEOUT_S)
            try:
                self._is_ready = self._socket.recv(1) != b""
            except TimeoutError as error:
                self._process.kill()
                raise TimeoutError(f"no process that forks ranks after {_START_TIMEOUT_S:g} s") from error
        if not self._is_ready:
            raise ConnectionError(f"the process that forks ranks ended with exit code {self._process.wait()}")

    def fork(self, command: Sequence[str], environment: Variables, streams: tuple[int, int, int]) -> ForkedRank:
        self.await_imports()
        ours, theirs = Pipe(duplex=False)
        request = {"command": list(command), "environment": dict(environment), "directory": os.getcwd()}
        with theirs:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [*streams, theirs.fileno()])
        return ForkedRank(int(ours.recv()), ours)

    def close(self) -> None:
        """End the process, and its ranks with it."""
        self._socket.close()
        self._process.wait()


_servers: dict[tuple[int, tuple[tuple[str, str], ...]], _Server] = {}


def _server(rank: int, environment: Variables, early: Variables | None) -> _Server:
    key = (rank % _NUM_SERVERS, tuple(sorted((early or {}).items())))
    if key in _servers and not _servers[key].is_alive:
        _servers.pop(key).close()
    if key not in _servers:
        _servers[key] = _Server({**environment, "OMP_NUM_THREADS": "1"})  # a second thread would not survive the fork
    return _servers[key]


def shut_down() -> None:
    """End the processes that fork, and their ranks; runs at exit."""
    for server in _servers.values():
        server.close()
    _servers.clear()


atexit.register(shut_down)
