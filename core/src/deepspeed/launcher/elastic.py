"""One node of an elastic job: torch's elastic agent, which restarts its ranks when `membership.py` starts a round.

`NodeLink` is the connection to the coordinator, the process that keeps the list of nodes. `ElasticRendezvous` gives the
agent its node rank in each round, and a store. The round's first node opens this store, so no round depends on a lost
node. `ElasticAgent` is `NodeAgent` for several rounds: a failure on any node ends the ranks, and torch's loop requests
the next round. Each round has its own output reader.
"""

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from deepspeed.errors import ConfigError, first_line
from deepspeed.launcher.failure import describe_job
from deepspeed.launcher.membership import MEETING_TIMEOUT_S, Message, keep_alive
from deepspeed.launcher.node_agent import ELSEWHERE, FAILURE_GRACE_S, NodeAgent, RankCommand, rank_environment
from deepspeed.launcher.output import OutputReader
from deepspeed.launcher.plan import NodeFailure

_CONNECT_S = 5.0
_RETRY_S = 0.2
_STORE_TIMEOUT_S = 60.0
_ANY_NUMBER = 1_000_000  # restarts that torch allows; `membership.py` applies the real limit
_CHUNK_BYTES = 65536
_TOLD_TO_END = 128 + signal.SIGTERM  # exit code of ranks that saved because one node got SIGTERM; other nodes go on
_GONE = {"kind": "end", "exit_code": 1, "failure": None, "is_blamed": False}


class NodeLink:
    """The connection from this node to the coordinator.

    Args:
        address, port: address of the coordinator.
        hello: the first message: run_id, name, node_rank, num_ranks.

    Raises:
        ConfigError: no connection was possible for 15 minutes.
    """

    def __init__(self, address: str, port: int, hello: Message) -> None:
        self._address, self._port = address, port
        self._socket = self._connect()
        self.own_address = str(self._socket.getsockname()[0])  # other nodes reach this node at this address
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.end: Message | None = None  # the message that says how the job ended; None before it arrives
        self.notify: Callable[[], None] = lambda: None  # called in the reader thread for each message
        self.send({"kind": "hello", **hello})
        self._thread = threading.Thread(target=self._run, name="node-link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message. A lost connection is ignored here, because the reader thread puts an end into the inbox."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def close(self) -> None:
        """Close the connection and join the reader thread."""
        with suppress(OSError):  # the coordinator closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + MEETING_TIMEOUT_S
        while True:
            try:
                connection = socket.create_connection((self._address, self._port), _CONNECT_S)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"nobody answers at {self._address}:{self._port} ({first_line(error)}); check that the job "
                        "runs, --master_addr and --master_port, and that the port is open to this host"
                    ) from error
                time.sleep(_RETRY_S)
                continue
            connection.settimeout(None)
            keep_alive(connection)
            return connection

    def _run(self) -> None:
        unfinished = b""
        while data := self._receive():
            *lines, unfinished = (unfinished + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        if self.end is None:
            self._take(_GONE)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_CHUNK_BYTES)
        except OSError:
            return b""

    def _take(self, message: Message) -> None:
        if message["kind"] == "end":
            self.end = message
        self.inbox.put(message)
        self.notify()


class ElasticRendezvous(RendezvousHandler):
    """Gives torch's agent the rank of this node in each round, until the job has ended.

    Args:
        link: connection to the coordinator.
        run_id: id of the job.
    """

    def __init__(self, link: NodeLink, run_id: str) -> None:
        self.round = -1
        self.counts: list[int] = []  # number of ranks per node, in node order
        self._link = link
        self._run_id = run_id
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the coordinator assigns this node a place in the next round.

        Raises:
            RendezvousGracefulExitError: the job has ended.
        """
        self._store = None
        while True:
            self._link.send({"kind": "ready", "round": self.round})
            message = self._link.inbox.get()
            if message["kind"] == "round":
                self.round, self.counts = message["round"], message["counts"]
                address = self._open(message) if message["place"] == 0 else self._connect(message)
                if address is not None:
                    assert self._store is not None
                    store = PrefixStore(self._run_id, self._store)
                    where = RendezvousStoreInfo(*address)
                    return RendezvousInfo(store, message["place"], len(self.counts), where)
            elif message["kind"] == "refused":
                raise ConfigError(f"--master_addr: {message['words']}; check --master_port")
            elif message["kind"] == "end":
                raise RendezvousGracefulExitError("the job has ended")

    def _open(self, message: Message) -> tuple[str, int]:
        """Open the store of the round, and send its address to the other nodes."""
        self._store = TCPStore(self._link.own_address, 0, None, True, timedelta(seconds=_STORE_TIMEOUT_S), False)
        address = (self._link.own_address, int(self._store.port))
        self._link.send({"kind": "store", "round": message["round"], "address": address})
        return address

    def _connect(self, message: Message) -> tuple[str, int] | None:
        """Connect to the store of the round's first node. Return None if the round ends first."""
        told = self._link.inbox.get()
        if told["kind"] != "store" or told["round"] != message["round"]:
            if told["kind"] == "end":
                self._link.inbox.put(told)
            return None
        address, port = told["address"]
        try:
            self._store = TCPStore(address, port, None, False, timedelta(seconds=_STORE_TIMEOUT_S), False)
        except (DistNetworkError, RuntimeError) as error:
            words = f"the store at {address}:{port} does not answer ({first_line(error)})"
            failure = NodeFailure(message["place"], None, 1, True, words)
            self._link.send(_failed(message["round"], failure, is_final=False))
            return None
        return address, port

    def get_backend(self) -> str:
        return "deepspeed-elastic"

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._link.end is not None

    def set_closed(self) -> None:
        """Do nothing: only the coordinator ends the job."""

    def num_nodes_waiting(self) -> int:
        return 0  # for a waiting node the coordinator ends the round with a message

    def shutdown(self) -> bool:
        self._store = None
        return True


class ElasticAgent(NodeAgent):
    """Runs the ranks of this node, round after round.

    Args:
        commands: one command per local rank.
        rendezvous: rendezvous of this node.
        link: the link that `rendezvous` uses.
        make_output: makes the output reader of a round. The argument is True for later rounds: they append to the logs.
        say: prints a text for the user.
        max_restarts: value for the ranks' environment.
        is_watched, grace_s: see `NodeAgent`.

    `on_signal` is called when this node gets a signal to end. The node that runs the coordinator sets it.
    """

    on_signal: Callable[[NodeFailure], None] | None = None

    def __init__(
        self,
        commands: Sequence[RankCommand],
        rendezvous: ElasticRendezvous,
        link: NodeLink,
        make_output: Callable[[bool], OutputReader],
        say: Callable[[str], None],
        max_restarts: int,
        is_watched: bool,
        grace_s: float,
    ) -> None:
        super().__init__(commands, rendezvous, make_output(False), is_watched, _ANY_NUMBER, grace_s)
        self._rendezvous_handler = rendezvous
        self._link = link
        self._make_output = make_output
        self._say = say
        self._max_restarts = max_restarts

    def finish_output(self) -> None:
        """Read the rest of the output of the last round's ranks."""
        self._output.finish()

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the workers by the round's counts. torch's own method uses the store and may wait for a lost node."""
        counts = self._rendezvous_handler.counts
        first, total = sum(counts[:group_rank]), sum(counts)
        return [
            Worker(
                local_rank=each,
                global_rank=first + each,
                role_rank=first + each,
                world_size=total,
                role_world_size=total,
            )
            for each in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._processes:
            self._output.finish()
            if self.cause is not None and self.cause.return_code != _TOLD_TO_END:
                self._say(self.describe())
            self._output = self._make_output(True)
            self._processes, self.cause = {}, None
        self._ended = queue.SimpleQueue()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self._rendezvous_handler.round)  # also for `note_end`
        return super()._start_workers(worker_group)

    def describe(self) -> str:
        """Return the report on the rank that failed."""
        assert self.cause is not None
        return describe_job(self.cause, [end for end in self.ends() if end.rank != self.cause.rank])

    def _rank_environment(self, worker_group: WorkerGroup, worker: Any) -> dict[str, str]:
        return {
            **rank_environment(worker_group, worker),
            "TORCHELASTIC_RESTART_COUNT": str(self._rendezvous_handler.round),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
        }

    def _meet_peers(self, worker_group: WorkerGroup) -> None:
        ended = self._ended
        self._link.notify = lambda: ended.put(ELSEWHERE)
        if not self._link.inbox.empty():  # a message arrived before `notify` was set
            ended.put(ELSEWHERE)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state != WorkerState.SUCCEEDED:
            return result
        self._link.send({"kind": "done", "round": self._rendezvous_handler.round})
        while self._link.inbox.empty():
            self._wait_for_end()
        # either the job succeeded, or other nodes need this node, or its checkpoint, for another round
        succeeded = self._link.end is not None and self._link.end["exit_code"] == 0
        return result if succeeded else RunResult(state=WorkerState.UNHEALTHY)

    def _has_cause_elsewhere(self) -> bool:
        return not self._link.inbox.empty()

    def _blame_elsewhere(self) -> RunResult:
        if self._link.inbox.empty():
            return RunResult(state=WorkerState.HEALTHY)
        failure = None if self._link.end is None else self._link.end["failure"]
        stopped_by = 0 if failure is None else failure["stopped_by"]
        steps = self._steps_after(stopped_by) if stopped_by else ((signal.SIGTERM, FAILURE_GRACE_S),)
        self._end_ranks(steps, is_asked=stopped_by == signal.SIGTERM)
        return RunResult(state=WorkerState.UNHEALTHY)

    def _tell(self, failure: NodeFailure) -> None:
        if failure.stopped_by:
            if self.on_signal is not None:
                self.on_signal(failure)
            return  # without a coordinator here, this node leaves alone: its connection ends
        if failure.exit_code == _TOLD_TO_END:
            failure = failure._replace(is_consequence=True)
        uncaught = None if failure.rank is None else self._output.uncaught(failure.rank)
        is_final = uncaught is not None and uncaught.is_config_error
        self._link.send(_failed(self._rendezvous_handler.round, failure, is_final))

    def _exit_barrier(self) -> None:
        """Do nothing: `_monitor_workers` has already waited for the other nodes."""

    def leave(self) -> None:
        """Close the link to the coordinator. Called after the run, whatever its result."""
        self._link.notify = lambda: None
        self._link.close()


def _failed(number: int, failure: NodeFailure, is_final: bool) -> Message:
    return {"kind": "failed", "round": number, "failure": failure._asdict(), "is_final": is_final}
