"""`NodeAgent` is torch's elastic agent for one node, with our way of starting, watching and ending the ranks.

The agent (`SimpleElasticAgent`) owns the rendezvous, the store, the numbering of ranks and the loop; it calls the four
methods below, in this order: `_start_workers` once, `_monitor_workers` until it reports an end, `_stop_workers` after a
failure, `_shutdown` always. What is our own, and why:

- `_monitor_workers` sleeps until a process ends instead of polling ten times a second, so the order in which ranks fail
  is known even if they follow each other within milliseconds. A rank that failed because a peer did may end before that
  peer, which has to tear down first: `_find_cause` then waits for the peer;
- peers get `FAILURE_GRACE_S` instead of 30 s, so that a failed job ends in seconds;
- ranks that still run are told that one has ended (`comm/failure.py`), for which they would wait;
- with several nodes a failure on one ends the ranks of all (`nodes.py`);
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
CAUSE_GRACE_S = 5.0  # how long a rank whose failure is another's may be ahead of that other's end
# What ranks get when the launcher itself is told to end: (signal, seconds to wait after it), and SIGKILL at the end.
# Ctrl-C: a rank that waits in a collective cannot see SIGINT, so SIGTERM follows soon. SIGTERM: schedulers announce
# preemption with it, and a rank may want to save, for which it has --grace_period.
INTERRUPT_STEPS = ((signal.SIGINT, 3.0), (signal.SIGTERM, 3.0))
STACKS_GRACE_S = 2.0  # how long ranks have to say where they are before they are stopped
_STACKS_INTERVAL_S = 0.05
_REPORT_INTERVAL_S = 0.1  # how often a look is taken for a report, which comes before its rank ends
_MONITOR_INTERVAL_S = 0.001  # the agent insists on a sleep between two calls; the waiting is done in _monitor_workers
ELSEWHERE = -1  # among the local ranks that ended: another node failed
_TOLD_TO_END = -2  # among them: this process has had a signal
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RankCommand(NamedTuple):
    """A `RankCommand` holds the arguments, own environment variables and cores (`None`: any) of one local rank."""

    arguments: Sequence[str]
    environment: dict[str, str]
    cores: Sequence[int] | None


class NodeAgent(SimpleElasticAgent):
    """Runs the ranks of this node.

    After a run that failed, `cause` is the end of the rank to blame, or `cause_elsewhere` the failure of another node.
    `is_watched`: stdin is not for the ranks, and whoever ends this node ends the others. `max_restarts`: how often
    torch forms the ranks again. `grace_s`: the seconds that ranks have to end after a SIGTERM to this process.
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
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # local ranks in the order in which they ended
        self._running: set[int] = set()
        self._signal = 0  # by which this process was told to end

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
        """From now on hear of the failures of other nodes."""
        num_nodes = worker_group.group_world_size
        assert worker_group.store is not None
        assert num_nodes is not None
        if num_nodes > 1:
            self._peers = NodePeers(worker_group.store, self._node_rank, num_nodes)
            self._peers.watch(lambda: self._ended.put(ELSEWHERE))

    def told_to_end(self, number: int) -> None:
        """Note a signal to this process, whose handler raises `SignalException` too. Called by that handler.

        Python ignores an exception in some places, as in its hooks after a fork; then `_wait_for_end` raises it.
        """
        self._signal = number
        self._ended.put(_TOLD_TO_END)

    def _wait_for_end(self, timeout: float | None = None) -> int:
        """The next local rank to end, or `ELSEWHERE`. Raises queue.Empty, and SignalException where a signal came."""
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
        """The local rank to blame: `first`, which failed, unless its failure may be a peer's.

        Then it is the next one with a reason of its own, that ends within `CAUSE_GRACE_S` or has reported an uncaught
        exception, or `ELSEWHERE` if another node tells of such a one; `first` if there is none.
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
        """Whether another node tells of a failure that blames nobody else."""
        return self._peers is not None and any(not failure.is_consequence for failure in self._peers.failures())

    def _tell(self, failure: NodeFailure) -> None:
        """Tell the other nodes why this one ends its ranks."""
        if self._peers is not None:
            self._peers.post(failure)

    def _next_end(self, seconds: float) -> list[int]:
        """The next local rank to end; none if none does in time."""
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
        found = found if self._peers is None else self._peers.cause()  # a better one may have come
        self.cause_elsewhere = found or NodeFailure(0, None, 1, True, "the process that watches the nodes ended them")
        return RunResult(state=WorkerState.FAILED)

    def end_elsewhere(self) -> bool:
        """End the ranks because another node has failed; False if none runs. Called in any thread."""
        is_running = bool(self._processes) and self._worker_group.state != WorkerState.SUCCEEDED
        if is_running:
            self._ended.put(ELSEWHERE)
        return is_running

    def _exit_barrier(self) -> None:
        """Wait on node 0 for the other nodes. torch's own barrier waits for five minutes, also for nodes that fail."""
        if self._peers is not None and self._node_rank == 0:
            self._peers.wait_for_others()
            self.cause_elsewhere = self._peers.cause()

    def leave(self) -> None:
        """Take leave of the other nodes; after the run, however it ended."""
        if self._peers is not None:
            self._peers.leave(failed=self._worker_group.state != WorkerState.SUCCEEDED or bool(self.cause_elsewhere))

    def _blame(self, local_rank: int) -> None:
        """Stop the job because of this rank."""
        stopped = local_rank in self._running
        end = self._end_of(local_rank)
        failure = (exit_code_of(end.return_code) or 1, may_be_a_consequence(end), end.last_words)
        self._tell(NodeFailure(self._node_rank, end.rank, *failure))
        if may_be_a_consequence(end):  # of a rank that did not come, as far as is known
            self._ask_where_ranks_are()
        self._end_ranks(((signal.SIGTERM, FAILURE_GRACE_S),))
        end = self._end_of(local_rank)
        # our SIGTERM in its teardown is not how an uncaught exception ends a process
        self.cause = end._replace(return_code=1) if stopped and end.return_code < 0 else end

    def _end_of(self, local_rank: int) -> RankEnd:
        """Return how a rank ended, as far as is known by now; the return code of a rank that still runs is 0."""
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
        """Have the ranks that still run write their stacks, and read these: until nothing more comes."""
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
        """Return how each rank ended. Called after the run."""
        return [self._end_of(local_rank) for local_rank in self._processes]

    def pass_on(self, number: int) -> None:
        """Send a signal to each rank that runs, not to what it started. Called by a signal handler."""
        for process in self._processes.values():
            _signal_alone(process, number)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._end_ranks(((signal.SIGTERM, FAILURE_GRACE_S),))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        """torch passes timeouts that differ between its versions; ours are the steps above."""
        if self._running and not self._is_watched:
            self._tell(NodeFailure(self._node_rank, None, 128 + death_sig, False, "", int(death_sig)))
        self._end_ranks(self._steps_after(death_sig), is_asked=death_sig == signal.SIGTERM)

    def _steps_after(self, number: int) -> tuple[tuple[signal.Signals, float], ...]:
        """Return the steps by which the ranks are ended when the launcher gets this signal."""
        return INTERRUPT_STEPS if number == signal.SIGINT else ((signal.SIGTERM, self._grace_s),)

    def _end_ranks(self, steps: Sequence[tuple[signal.Signals, float]], is_asked: bool = False) -> None:
        """End every rank that still runs, and the process groups of all that did not end well. Idempotent.

        Args:
            steps: signals, and seconds to wait after each.
            is_asked: a rank may save before it ends, and needs the processes that it started (of a data loader) for
                that: if it is a Python script, the signals are for it alone.
        """
        send = _signal_alone if is_asked and self._are_scripts else _signal_group
        try:
            for number, wait_s in steps:
                for local_rank in self._running:
                    send(self._processes[local_rank], number)
                self._wait_for_ends(wait_s)
        except SignalException:  # asked a second time: no more patience
            pass
        for process in self._processes.values():
            if process.returncode is None:  # not reaped: a group with this number is surely ours
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
    """Body of one thread per rank: report its end. The process stays unreaped, so that its group's number stays
    taken."""
    if hasattr(os, "waitid"):
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # `_end_ranks` killed and reaped it meanwhile; nobody waits for this report
            return
    else:
        process.wait()
    ended.put(local_rank)


def rank_environment(group: WorkerGroup, worker: Any) -> dict[str, str]:
    """Return the variables that torchrun gives a rank, and those that DeepSpeed's launcher adds."""
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
    """Return what a rank runs between fork and exec: it asks to die with the launcher (Linux), and binds to `cores`."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    launcher_pid = os.getpid()

    def set_up() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != launcher_pid:  # it died before the call above
                os._exit(1)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return set_up


def _peek(process: "subprocess.Popen[bytes]") -> int:
    """The return code of an ended process, as in `subprocess`, without reaping it where the system allows that."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.wait()
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert info is not None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _signal_alone(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Signal a rank, and not what it started."""
    if process.returncode is None:  # not reaped, so the number is still its own
        os.kill(process.pid, number)


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Signal a rank and everything it started; each rank leads a session of its own."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # all of them are gone already
        return
