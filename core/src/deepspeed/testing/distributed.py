"""Run a function of a test file on 1, 2 or 4 ranks, in processes that stay warm for the whole session.

    def broadcast_rank(value):                      # a module-level function of the test file
        return deepspeed.comm.get_rank() + value

    def test_ranks():
        assert run_ranks(2, broadcast_rank, 10) == [10, 11]

A rank is a separate process (`rank_worker.py`), but never a fork of this one: torch's threads do not survive a fork. On
Linux the rank is forked from a process that has imported torch and run nothing (`forked.py`); elsewhere it is a fresh
interpreter. It gets jobs and returns results over a private pipe, and ends when the pipe closes, at the latest with
this process. A job names its function by file and qualified name, because pytest's importlib mode gives test files
names that cannot be imported.
A rank starts with random seeds of 0. After a job, and before it answers, the worker restores the seeds, the environment
variables, the default dtype and this package's globals. So leftovers of a job can crash a rank only inside that job.

A failed job ends its pool, and the next call starts a new one. If a rank is found dead between two jobs, the call
raises `RankError`, which names the job before, the exit code and the last output; the call after that gets new
ranks.
"""

import atexit
import operator
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from deepspeed.errors import DeepSpeedError
from deepspeed.testing import forked

# After one rank has failed, the others get this long to end by themselves, so that their errors can be shown too.
_GRACE_S = 2.0
_START_TIMEOUT_S = 120.0
_LOG_TAIL_CHARS = 8000

_pools: dict[tuple[int, tuple[tuple[str, str], ...]], "RankPool"] = {}
_lock = threading.Lock()


class RankError(DeepSpeedError, RuntimeError):
    """A rank failed, hung or died. `__cause__` is the rank's exception, if it can be pickled."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks over gloo, one thread each, and return the results by rank.

    `deepspeed.comm` is initialized inside. Arguments and results are pickled: plain objects, tensors, and classes of
    the test file. If a rank fails, the call raises the type of the first failing rank's exception, if it can be built
    from a message, else `RankError`, with the rank's traceback in the text. A failure or a hang (`timeout_s`) ends the
    processes; the next call starts new ones. Each `environment` has its own ranks; `DS_ACCELERATOR` in it selects that
    accelerator's communication library.
    """
    key = (world_size, tuple(sorted((environment or {}).items())))
    with _lock:
        pool = _pools.get(key)
        if pool is None or not pool.is_usable:
            pool = _pools[key] = RankPool(world_size, environment)
        return pool.run(fn, args, timeout_s)


def shut_down() -> None:
    """End all warm ranks; runs at exit, and may be called to free their memory."""
    with _lock:
        for pool in _pools.values():
            pool.kill()
        _pools.clear()


atexit.register(shut_down)


class RankPool:
    """`world_size` warm processes in one process group. `run_ranks` owns them."""

    def __init__(self, world_size: int, environment: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self._environment = dict(environment or {})
        # Python and torch read their variables at the start; our own, except one, are read when they are needed.
        self._early = {k: v for k, v in self._environment.items() if not k.startswith("DS_") or k == "DS_LOG_LEVEL"}
        self.is_usable = True
        self._last_job = "start"
        # A file store in a separate directory needs no port, which another test run could take.
        self._directory = Path(tempfile.mkdtemp(prefix="ds_ranks_"))
        self._processes: list[forked.Process] = []
        self._pipes: list[Connection] = []
        forked.prepare(world_size, self._environment_of(0), self._early)
        try:
            for rank in range(world_size):
                self._start(rank)
            self._collect(_START_TIMEOUT_S, "start")
        except BaseException:
            self.kill()
            raise

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """Run one job on every rank, and return the results by rank."""
        job = pickle.dumps((*_address(fn), pickle.dumps(args)))
        try:
            self._send(job, fn.__qualname__)
            answers = self._collect(timeout_s, fn.__qualname__)
        except BaseException:  # also Ctrl-C or a limit of the test runner: the ranks may be in the middle of a job
            self.kill()
            raise
        self._last_job = fn.__qualname__
        return answers

    def _send(self, job: bytes, what: str) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(job)
            except OSError as error:
                self._processes[rank].wait()  # its end of the pipe is closed, so it ends or has ended
                raise RankError(self._describe_dead(what)) from error

    def _describe_dead(self, what: str) -> str:
        """Describe the ranks that ended between the last job and the job `what`."""
        return "\n".join(
            f"[rank {rank} of {self.world_size}] ended before the job {what}; the job before it, {self._last_job}, had "
            f"ended well. The process {_end(code)}; its last output:\n{self._log_tail(rank)}"
            for rank, process in enumerate(self._processes)
            if (code := process.poll()) is not None
        )

    def kill(self) -> None:
        """End the processes at once."""
        self.is_usable = False
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _environment_of(self, rank: int) -> dict[str, str]:
        # LOCAL_RANK and others like torchrun; launcher variables of the test process are dropped.
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI_", "MV2_", "SLURM_", "MASTER_"))}
        env.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.world_size), LOCAL_WORLD_SIZE=str(self.world_size)
        )
        env.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        env.update(self._environment)
        return env

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        command = ["-m", "deepspeed.testing.rank_worker", str(self._directory / "store")]
        with self._log(rank).open("wb") as log, theirs:
            environment = self._environment_of(rank)
            process = forked.start(rank, command, environment, theirs.fileno(), log.fileno(), self._early)
        self._processes.append(process)
        self._pipes.append(ours)

    def _collect(self, timeout_s: float, what: str) -> list[Any]:
        """Return the answers of all ranks in order. A failure ends the pool, and is raised."""
        answers: dict[int, Any] = {}
        failures: dict[int, tuple[BaseException | None, str]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) + len(failures) < self.world_size:
            waiting = [self._pipes[r] for r in range(self.world_size) if r not in answers and r not in failures]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                ok, value = self._receive(rank)
                if ok:
                    answers[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(answers) == self.world_size:
            return [answers[rank] for rank in range(self.world_size)]
        raise self._failure(what, timeout_s, answers, failures)

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            ok, payload = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            return False, (None, f"the process {_end(self._processes[rank].wait())}")
        if ok:
            return True, pickle.loads(payload)
        pickled, text = payload
        return False, (None if pickled is None else pickle.loads(pickled), text)

    def _failure(
        self,
        what: str,
        timeout_s: float,
        answers: dict[int, Any],
        failures: dict[int, tuple[BaseException | None, str]],
    ) -> BaseException:
        """End the pool, and build the error: which ranks failed, and where the silent ones were."""
        # Sort killed ranks first: they cause the broken connections that others may report earlier.
        failures = dict(sorted(failures.items(), key=lambda item: item[1][0] is not None))
        silent = [r for r in range(self.world_size) if r not in answers and r not in failures]
        if silent:
            self._dump_stacks(silent)
        lines = []
        for rank, (_, text) in failures.items():
            lines.append(f"[rank {rank} of {self.world_size}] {what} failed:\n{text.rstrip()}")
        if not failures:
            lines.append(f"{what} did not end within {timeout_s:g} s on rank {', '.join(map(str, silent))}")
        for rank in [*silent, *(r for r, (e, _) in failures.items() if e is None)]:
            lines.append(f"[rank {rank}] last output:\n{self._log_tail(rank)}")
        self.kill()
        text = "\n".join(lines)
        first = next((e for e, _ in failures.values()), None)
        error = _with_text(first, text)
        error.__cause__ = first
        return error

    def _dump_stacks(self, ranks: list[int]) -> None:
        """Signal the ranks to write all their threads' stacks into their logs (faulthandler), and wait until the logs
        have grown, and stop growing."""
        signal_number = getattr(signal, "SIGUSR1", None)
        if signal_number is None:
            return
        before = [self._log(rank).stat().st_size for rank in ranks]
        for rank in ranks:
            if self._processes[rank].poll() is None:
                self._processes[rank].send_signal(signal_number)
        deadline = time.monotonic() + 2.0
        sizes, former = before, list[int]()
        while time.monotonic() < deadline and (sizes != former or any(map(operator.eq, sizes, before))):
            time.sleep(0.02)
            sizes, former = [self._log(rank).stat().st_size for rank in ranks], sizes

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.log"

    def _log_tail(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")[-_LOG_TAIL_CHARS:].rstrip() or "(none)"


def _address(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """Return file, module name and qualified name, with which the worker finds the function."""
    qualname = fn.__qualname__
    if "<" in qualname:
        raise TypeError(
            f"run_ranks needs a module-level function, got {qualname}; move it out of the function it is in"
        )
    path = getattr(getattr(fn, "__code__", None), "co_filename", "")
    if not Path(path).is_file():
        raise TypeError(f"run_ranks cannot find the file of {fn!r}; pass a plain function of a Python file")
    return str(Path(path).resolve()), fn.__module__, qualname


def _end(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (the kernel sends it when memory runs out)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _with_text(first: BaseException | None, text: str) -> BaseException:
    """Return an exception of the rank's type with the full text, so that `pytest.raises(ConfigError)` works."""
    # SystemExit or KeyboardInterrupt would end the test run here.
    if first is None or isinstance(first, SystemExit | KeyboardInterrupt):
        return RankError(text)
    try:
        return type(first)(text)
    except TypeError:  # a class that takes more than a message
        return RankError(text)
