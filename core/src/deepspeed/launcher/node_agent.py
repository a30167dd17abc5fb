"""`NodeAgent` is torch's elastic agent for one node, and starts, watches and ends the ranks in its own way.

The base class `SimpleElasticAgent` owns the rendezvous, the store, the numbering of ranks and the loop. It calls four
methods, in this order: `_start_workers` once, `_monitor_workers` until it reports an end, `_stop_workers` after a
failure, `_shutdown` always. The differences to torch, and the reasons:

- `_monitor_workers` sleeps until a process ends instead of polling ten times a second. So the order of failures is
  known even if ranks fail within milliseconds. A rank that failed because of a peer may end before that peer, which
  still tears down: `_find_cause` then waits for the peer;
- peers get `FAILURE_GRACE_S` instead of 30 s, so that a failed job ends in seconds;
- ranks that still run learn that a rank has ended (`comm/failure.py`), so that they do not wait for it;
- with several nodes, a failure on one node ends the ranks of all nodes (`nodes.py`);
- a rank's whole process group ends with it, and the kernel ends the ranks if this process is killed.
"""

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler

from deepspeed.comm.failure import note_end
from deepspeed.errors import ConfigError
from deepspeed.launcher.failure import RankEnd, exit_code_of, may_be_a_consequence
from deepspeed.launcher.nodes import NodePeers
from deepspeed.launcher.output import OutputReader, RankPipes
from deepspeed.launcher.plan import DEFAULT_GRACE_S, NodeFailure
from deepspeed.uncaught import PIPE_VARIABLE, STACK_SIGNAL

FAILURE_GRACE_S = 5.0  # SIGTERM, this long, SIGKILL: for the peers of a rank that failed
CAUSE_GRACE_S = 5.0  # how long `_find_cause` waits for the end of the rank that caused a consequent failure
# Signals for ranks when the launcher itself must end: (signal, seconds to wait after it); SIGKILL follows the last one.
# Ctrl-C: a rank that waits in a collective cannot see SIGINT, so SIGTERM follows soon. SIGTERM: schedulers announce
# preemption with it, and a rank may want to save within --grace_period.
INTERRUPT_STEPS = ((signal.SIGINT, 3.0), (signal.SIGTERM, 3.0))
STACKS_GRACE_S = 2.0  # how long ranks have to write their stacks before they are stopped
_STACKS_INTERVAL_S = 0.05
_REPORT_INTERVAL_S = 0.1  # how often `_find_cause` looks for a report, which comes before its rank ends
_MONITOR_INTERVAL_S = 0.001  # torch sleeps this long between two calls; the real wait is in _monitor_workers
ELSEWHERE = -1  # in the queue of ended local ranks: another node failed
_TOLD_TO_END = -2  # in the queue of ended local ranks: this process got a signal
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RankCommand(NamedTuple):
    """A `RankCommand` holds the arguments, own environment variables and cores (`None`: any) of one local rank."""

    arguments: Sequence[str]
    environment: dict[str, str]
    cores: Sequence[int] | None


class NodeAgent(SimpleElasticAgent):
    """Runs the ranks of this node.

    After a failed run, `cause` is the end of the rank to blame, or `cause_elsewhere` is the failure of another node.
    `is_watched`: a watcher uses stdin, and ends the other nodes together with this one. `max_restarts`: how often
    torch restarts the ranks. `grace_s`: the seconds that ranks have to end after a SIGTERM to this process.
    """

    def __init__(
        self,
        commands: Sequence[RankCommand],
        rendezvous: RendezvousHandler,
        output: OutputReader,
        is_watched: bool = False,
        max_restarts: int = 0,
        grace_s: float = DEFAULT_GRACE_S,
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=len(commands),
            rdzv_handler=rendezvous,
            entrypoint=commands[0].arguments[0],
            max_restarts=max_restarts,
            monitor_interval=_MONITOR_INTERVAL_S,
        )
        super().__init__(spec)
        self.cause: RankEnd | None = None
        self.cause_elsewhere: NodeFailure | None = None
        self._peers: NodePeers | None = None
        self._node_rank = 0
        self._is_watched = is_watched
        self._grace_s = grace_s
        self._are_scripts = commands[0].arguments[0] == sys.executable
        self._commands = commands
        self._output = output
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # local ranks, in the order of their ends
        self._running: set[int] = set()
        self._signal = 0  # the signal that told this process to end

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for worker in worker_group.workers:
            command = self._commands[worker.local_rank]
            environment = {**os.environ, **self._rank_environment(worker_group, worker), **command.environment}
            pipes = self._output.open_rank(worker.global_rank)
            try:
                self._processes[worker.local_rank] = _start(
                    command, environment, pipes, subprocess.DEVNULL if self._is_watched else None
                )
            finally:
                pipes.close()
        self._running = set(self._processes)
        self._output.start()
        for local_rank, process in self._processes.items():
            threading.Thread(target=_watch, args=(local_rank, process, self._ended), daemon=True).start()
        assert worker_group.group_rank is not None
        self._node_rank = worker_group.group_rank
        self._meet_peers(worker_group)
        return {local_rank: process.pid for local_rank, process in self._processes.items()}

    def _rank_environment(self, worker_group: WorkerGroup, worker: Any) -> dict[str, str]:
        return rank_environment(worker_group, worker)

    def _meet_peers(self, worker_group: WorkerGroup) -> None:
        """Start to watch for failures of other nodes."""
        num_nodes = worker_group.group_world_size
        assert worker_group.store is not None
        assert num_nodes is not None
        if num_nodes > 1:
            self._peers = NodePeers(worker_group.store, self._node_rank, num_nodes)
            self._peers.watch(lambda: self._ended.put(ELSEWHERE))

    def told_to_end(self, number: int) -> None:
        """Note a signal to this process. The signal handler calls this method, and then raises `SignalException`.

        Python ignores an exception in some places, such as its fork hooks; then `_wait_for_end` raises it.
        """
        self._signal = number
        self._ended.put(_TOLD_TO_END)

    def _wait_for_end(self, timeout: float | None = None) -> int:
        """Wait for the next local rank to end, or `ELSEWHERE`. Raises queue.Empty, and SignalException on a signal."""
        local_rank = self._ended.get(timeout=timeout)
        if local_rank == _TOLD_TO_END:
            raise SignalException(f"signal {self._signal}", signal.Signals(self._signal))
        return local_rank

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        local_rank = self._wait_for_end()
        if local_rank == ELSEWHERE:
            return self._blame_elsewhere()
        self._running.discard(local_rank)
        process = self._processes[local_rank]
        if _peek(process) != 0:
            local_rank = self._find_cause(local_rank)
            if local_rank == ELSEWHERE:
                return self._blame_elsewhere()
            self._blame(local_rank)
            assert self.cause is not None
            failure = ProcessFailure(local_rank, self.cause.pid, self.cause.return_code, error_file="")
            return RunResult(state=WorkerState.FAILED, failures={self.cause.rank: failure})
        process.wait()
        if self._running:
            assert worker_group.store is not None
            note_end(worker_group.store, worker_group.workers[local_rank].global_rank)
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(state=WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in worker_group.workers})

    def _find_cause(self, first: int) -> int:
        """Return the local rank to blame: `first`, which failed, unless its failure may be the consequence of a peer's.

        In that case, wait up to `CAUSE_GRACE_S` for a rank that fails, or reports an uncaught exception, for a reason
        of its own, and return it; or `ELSEWHERE` if another node reports such a failure; or else `first`.
        """
        if not may_be_a_consequence(self._end_of(first)):
            return first
        deadline = time.monotonic() + CAUSE_GRACE_S
        while (self._running or self._peers is not None) and time.monotonic() < deadline:
            if self._has_cause_elsewhere():
                return ELSEWHERE
            for local_rank in [*self._running, *self._next_end(_REPORT_INTERVAL_S)]:
                end = self._end_of(local_rank)
                if (end.return_code != 0 or end.uncaught is not None) and not may_be_a_consequence(end):
                    return local_rank
        return first

    def _has_cause_elsewhere(self) -> bool:
        """Return whether another node reports a failure that is no consequence."""
        return self._peers is not None and any(not failure.is_consequence for failure in self._peers.failures())

    def _tell(self, failure: NodeFailure) -> None:
        """Report to the other nodes why this node ends its ranks."""
        if self._peers is not None:
            self._peers.post(failure)

    def _next_end(self, seconds: float) -> list[int]:
        """Return a list with the next local rank to end; [] if none ends in time."""
        try:
            local_rank = self._wait_for_end(seconds)
        except queue.Empty:
            return []
        if local_rank == ELSEWHERE:
            return []
        self._running.discard(local_rank)
        process = self._processes[local_rank]
        if _peek(process) == 0:
            process.wait()
        return [local_rank]

    def _blame_elsewhere(self) -> RunResult:
        """Stop the ranks of this node because another one failed."""
        found = self._peers.cause() if self._peers is not None else None
        stopped_by = 0 if found is None else found.stopped_by
        steps = self._steps_after(stopped_by) if stopped_by else ((signal.SIGTERM, FAILURE_GRACE_S),)
        if found is not None and found.is_consequence:
            self._ask_where_ranks_are()
        self._end_ranks(steps, is_asked=stopped_by == signal.SIGTERM)
        found = found if self._peers is None else self._peers.cause()  # a better cause may have arrived
        self.cause_elsewhere = found or NodeFailure(0, None, 1, True, "the process that watches the nodes ended them")
        return RunResult(state=WorkerState.FAILED)

    def end_elsewhere(self) -> bool:
        """End the ranks because another node has failed; return False if no rank runs. Called in any thread."""
        is_running = bool(self._processes) and self._worker_group.state != WorkerState.SUCCEEDED
        if is_running:
            self._ended.put(ELSEWHERE)
        return is_running

    def _exit_barrier(self) -> None:
        """Wait on node 0 for the other nodes. torch's own barrier waits up to five minutes, even for failed nodes."""
        if self._peers is not None and self._node_rank == 0:
            self._peers.wait_for_others()
            self.cause_elsewhere = self._peers.cause()

    def leave(self) -> None:
        """Report the end of this node to the other nodes. Called after the run, whatever its result."""
        if self._peers is not None:
            self._peers.leave(failed=self._worker_group.state != WorkerState.SUCCEEDED or bool(self.cause_elsewhere))

    def _blame(self, local_rank: int) -> None:
        """Stop the job because this rank failed."""
        stopped = local_rank in self._running
        end = self._end_of(local_rank)
        failure = (exit_code_of(end.return_code) or 1, may_be_a_consequence(end), end.last_words)
        self._tell(NodeFailure(self._node_rank, end.rank, *failure))
        if may_be_a_consequence(end):  # the cause is perhaps a rank that hangs
            self._ask_where_ranks_are()
        self._end_ranks(((signal.SIGTERM, FAILURE_GRACE_S),))
        end = self._end_of(local_rank)
        # our SIGTERM hit the teardown after an uncaught exception, which alone would have given exit code 1
        self.cause = end._replace(return_code=1) if stopped and end.return_code < 0 else end

    def _end_of(self, local_rank: int) -> RankEnd:
        """Return the end of a rank as known by now; the return code of a running rank is 0."""
        rank = self._worker_group.workers[local_rank].global_rank
        process = self._processes[local_rank]
        self._output.drain(rank)
        return RankEnd(
            rank,
            process.pid,
            0 if local_rank in self._running else _peek(process),
            self._output.uncaught(rank),
            self._output.stderr_tail(rank),
            self._output.was_shown(rank),
            self._output.stacks(rank),
        )

    def _ask_where_ranks_are(self) -> None:
        """Request the stacks of the ranks that still run, and read until no more lines arrive."""
        workers = self._worker_group.workers
        asked = [at for at in self._running if self._output.shows_stacks(workers[at].global_rank)]
        for local_rank in asked:
            _signal_alone(self._processes[local_rank], STACK_SIGNAL)
        deadline = time.monotonic() + STACKS_GRACE_S
        before: list[int] = []
        while asked and time.monotonic() < deadline:
            time.sleep(_STACKS_INTERVAL_S)
            for local_rank in asked:
                self._output.drain(workers[local_rank].global_rank)
            now = [len(self._output.stacks(workers[local_rank].global_rank)) for local_rank in asked]
            if now == before and 0 not in now:
                return
            before = now

    def ends(self) -> list[RankEnd]:
        """Return the end of each rank. Called after the run."""
        return [self._end_of(local_rank) for local_rank in self._processes]

    def pass_on(self, number: int) -> None:
        """Send a signal to each running rank, but not to its child processes. Called by a signal handler."""
        for process in self._processes.values():
            _signal_alone(process, number)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._end_ranks(((signal.SIGTERM, FAILURE_GRACE_S),))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        """End the ranks in the steps for `death_sig`; torch's own timeouts, which differ by version, are ignored."""
        if self._running and not self._is_watched:
            self._tell(NodeFailure(self._node_rank, None, 128 + death_sig, False, "", int(death_sig)))
        self._end_ranks(self._steps_after(death_sig), is_asked=death_sig == signal.SIGTERM)

    def _steps_after(self, number: int) -> tuple[tuple[signal.Signals, float], ...]:
        """Return the steps that end the ranks when the launcher gets this signal."""
        return INTERRUPT_STEPS if number == signal.SIGINT else ((signal.SIGTERM, self._grace_s),)

    def _end_ranks(self, steps: Sequence[tuple[signal.Signals, float]], is_asked: bool = False) -> None:
        """End every running rank, and the process groups of ranks that failed. Idempotent.

        Args:
            steps: signals, and seconds to wait after each.
            is_asked: a rank may save before it ends, and may need its child processes (of a data loader) to do so.
                Signals then go only to the rank, if it is a Python script.
        """
        send = _signal_alone if is_asked and self._are_scripts else _signal_group
        try:
            for number, wait_s in steps:
                for local_rank in self._running:
                    send(self._processes[local_rank], number)
                self._wait_for_ends(wait_s)
        except SignalException:  # a second signal: kill at once
            pass
        for process in self._processes.values():
            if process.returncode is None:  # not reaped, so the group with this number is ours
                _signal_group(process, signal.SIGKILL)
                process.wait()
        self._running.clear()

    def _wait_for_ends(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running and (left := deadline - time.monotonic()) > 0:
            try:
                self._running.discard(self._ended.get(timeout=left))
            except queue.Empty:
                return


def _watch(local_rank: int, process: "subprocess.Popen[bytes]", ended: "queue.SimpleQueue[int]") -> None:
    """Report the end of a rank; one thread per rank runs this. The process stays unreaped, so that the number of its
    group stays reserved."""
    if hasattr(os, "waitid"):
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # `_end_ranks` killed and reaped it meanwhile; nobody waits for this report
            return
    else:
        process.wait()
    ended.put(local_rank)


def rank_environment(group: WorkerGroup, worker: Any) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and those that DeepSpeed's launcher adds."""
    spec = group.spec
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "LOCAL_SIZE": str(spec.local_world_size),
        "CROSS_RANK": str(group.group_rank),
        "CROSS_SIZE": str(group.group_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "ROLE_NAME": spec.role,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),  # ranks join the agent's store
    }


def _start(
    command: RankCommand, environment: dict[str, str], pipes: RankPipes, stdin: int | None
) -> "subprocess.Popen[bytes]":
    if pipes.uncaught is not None:
        environment = {**environment, PIPE_VARIABLE: f"{pipes.uncaught}:{os.fstat(pipes.uncaught).st_ino}"}
    try:
        return subprocess.Popen(
            list(command.arguments),
            env=environment,
            stdin=stdin,
            stdout=pipes.stdout,
            stderr=pipes.stderr,
            pass_fds=() if pipes.uncaught is None else (pipes.uncaught,),
            start_new_session=True,
            preexec_fn=_child_setup(command.cores),  # noqa: PLW1509 - before any thread of ours, kernel calls only
        )
    except OSError as error:
        raise ConfigError(
            f"{command.arguments[0]}: cannot be started ({error.strerror}); check the path and that it is executable"
        ) from error


def _child_setup(cores: Sequence[int] | None) -> Callable[[], None]:
    """Return what a rank runs between fork and exec: die with the launcher (Linux), and bind to `cores`."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    launcher_pid = os.getpid()

    def set_up() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != launcher_pid:  # the launcher died before the call above
                os._exit(1)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return set_up


def _peek(process: "subprocess.Popen[bytes]") -> int:
    """Return the return code of an ended process, as in `subprocess`, without reaping it if the system allows that."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.wait()
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert info is not None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _signal_alone(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Signal a rank, but not its child processes."""
    if process.returncode is None:  # not reaped, so the number is still its own
        os.kill(process.pid, number)


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Signal a rank and its child processes; each rank leads its own session."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # all of them are gone already
        return
