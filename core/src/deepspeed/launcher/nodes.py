"""The rendezvous of a job's nodes, and their messages about failures through the job's store.

Node 0 hosts the store. `NodeRendezvous` is the rendezvous of torch's elastic agent. With several nodes, `NodePeers`
reports a failure of one node to all others within a second, whatever started the nodes, and keeps node 0 alive until
the others have ended. No call blocks in a library for long, so that signals are handled at once.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from deepspeed.errors import ConfigError, counted, first_line
from deepspeed.launcher.plan import NodeFailure
from deepspeed.log import logger

MEETING_TIMEOUT_S = 900.0
_CONNECT_S = 5.0
_RETRY_S = 0.2
_SHOW_MISSING_S = 30.0  # after this time a warning names the missing nodes
_LEAVE_S = 10.0  # how long node 0 waits after a failure for the others to end
_REQUESTS_PER_S = 2000  # to the store, from all waiting nodes together


class NodeRendezvous(RendezvousHandler):
    """Brings the agents of all nodes together in one store on node 0.

    Args:
        master_addr: address of node 0, where the store listens.
        master_port: port of the store.
        find_free_port: returns another port if `master_port` is taken; None if the port is fixed.
        node_rank: rank of this node.
        num_nodes: number of nodes in the job.
        run_id: id of the job; nodes of different jobs do not meet.
    """

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        find_free_port: Callable[[], int] | None,
        node_rank: int = 0,
        num_nodes: int = 1,
        run_id: str = "deepspeed",
    ) -> None:
        self.master_addr = master_addr
        self.master_port = master_port
        self._find_free_port = find_free_port
        self._node_rank = node_rank
        self._num_nodes = num_nodes
        self._run_id = run_id
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = self._listen() if self._node_rank == 0 else self._connect()
        store = PrefixStore(self._run_id, self._store)
        if self._num_nodes > 1:
            self._meet(store)
        address = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(store, self._node_rank, self._num_nodes, address)

    def _listen(self) -> TCPStore:
        try:
            return self._open(is_master=True)
        except DistNetworkError as error:
            if self._find_free_port is None:
                remedy = ", or omit --master_port to get a free one" if self._num_nodes == 1 else ""
                raise ConfigError(
                    f"--master_addr {self.master_addr} --master_port {self.master_port}: cannot listen there "
                    f"({first_line(error)}); give another port{remedy}"
                ) from error
            self.master_port = self._find_free_port()
            return self._open(is_master=True)

    def _connect(self) -> TCPStore:
        """Join node 0's store, which may start later than this node."""
        deadline = time.monotonic() + MEETING_TIMEOUT_S
        while True:
            try:
                socket.create_connection((self.master_addr, self.master_port), _CONNECT_S).close()
                return self._open(is_master=False)
            except (OSError, DistNetworkError) as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"node {self._node_rank} of {self._num_nodes}: nobody answers at {self.master_addr}:"
                        f"{self.master_port} ({first_line(error)}); check that node 0 runs there, --master_addr and "
                        "--master_port, and that the port is open to this host"
                    ) from error
            time.sleep(_RETRY_S)

    def _open(self, is_master: bool) -> TCPStore:
        return TCPStore(
            self.master_addr,
            self.master_port,
            self._num_nodes,
            is_master,
            timedelta(seconds=MEETING_TIMEOUT_S),
            wait_for_workers=False,
            multi_tenant=True,
        )

    def _meet(self, store: Store) -> None:
        """Wait until every node has joined; check that the nodes agree on their number.

        Raises:
            ConfigError: the nodes contradict each other, or some did not join.
        """
        said = store.compare_set("nodes/count", "", str(self._num_nodes)).decode()
        if said != str(self._num_nodes):
            raise ConfigError(
                f"node {self._node_rank}: was told of {counted(self._num_nodes, 'node')}, another one of {said}; start "
                "all with the same hostfile or --num_nodes"
            )
        if store.add(f"nodes/{self._node_rank}/came", 1) > 1:
            raise ConfigError(
                f"--node_rank {self._node_rank}: another node of this job has this rank; give each node its own"
            )
        began = time.monotonic()
        store.add("nodes/here", 1)
        is_shown = False
        while store.add("nodes/here", 0) < self._num_nodes:
            waited_s = time.monotonic() - began
            if waited_s > MEETING_TIMEOUT_S:
                raise ConfigError(f"node {self._node_rank}: {self._missing(store)} did not come; start every node")
            if waited_s > _SHOW_MISSING_S and not is_shown:
                is_shown = True
                logger.warning(f"node {self._node_rank} waits for {self._missing(store)}")
            time.sleep(_interval_s(self._num_nodes))

    def _missing(self, store: Store) -> str:
        missing = [node for node in range(self._num_nodes) if not store.check([f"nodes/{node}/came"])]
        return f"node {', '.join(map(str, missing))} of {self._num_nodes}"

    def get_backend(self) -> str:
        return "deepspeed"

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: the nodes of a job are fixed, so no further node can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class NodePeers:
    """The connection from one node to the others. Order of calls: `watch`, then any other method, `leave` last.

    Args:
        store: store of the job, which all nodes share.
        node_rank: rank of this node.
        num_nodes: number of nodes in the job.
    """

    def __init__(self, store: Store, node_rank: int, num_nodes: int) -> None:
        self._store = store
        self._node_rank = node_rank
        self._num_nodes = num_nodes
        self._lost: NodeFailure | None = None  # set once the store does not answer
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, notify: Callable[[], None]) -> None:
        """Call `notify`, once, in a thread, as soon as another node has failed."""

        def run() -> None:
            while not self._stop.wait(_interval_s(self._num_nodes)):
                if self.failures():
                    notify()
                    return

        self._thread = threading.Thread(target=run, name="node-peers", daemon=True)
        self._thread.start()

    def post(self, failure: NodeFailure) -> None:
        """Report to the other nodes why this node ends."""
        self._ask(lambda store: store.set(f"nodes/{self._node_rank}/failure", json.dumps(failure._asdict())))
        self._ask(lambda store: store.append("nodes/failed", f"{self._node_rank} "))  # type: ignore[attr-defined]

    def failures(self) -> list[NodeFailure]:
        """Return the failures of other nodes in the order in which they were posted, or the loss of node 0."""
        noted = self._get("nodes/failed") or b""
        nodes = [node for node in map(int, noted.split()) if node != self._node_rank]
        texts = [self._get(f"nodes/{node}/failure") for node in nodes]
        found = [NodeFailure(**json.loads(text)) for text in texts if text is not None]
        return found or ([] if self._lost is None else [self._lost])

    def cause(self) -> NodeFailure | None:
        """Return the first failure of another node that is no consequence, else the first; None if there is none."""
        failures = self.failures()
        own = [failure for failure in failures if not failure.is_consequence]
        return next(iter(own or failures), None)

    def wait_for_others(self) -> None:
        """Wait until every other node has left, or one has failed. Called on node 0, which hosts the store."""
        while not self._all_left() and not self.failures():
            time.sleep(_interval_s(self._num_nodes))

    def leave(self, failed: bool) -> None:
        """Note that this node has ended. After a failure node 0 waits up to 10 s, so that the others can read it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._ask(lambda store: store.add("nodes/left", 1))
        deadline = time.monotonic() + _LEAVE_S
        while failed and self._node_rank == 0 and not self._all_left(here=1) and time.monotonic() < deadline:
            time.sleep(_interval_s(self._num_nodes))

    def _all_left(self, here: int = 0) -> bool:
        """Return whether the other nodes have left; `here` is 1 once this node has left."""
        left = self._ask(lambda store: store.add("nodes/left", 0))
        return left is None or left >= self._num_nodes - 1 + here

    def _get(self, key: str) -> Any:
        """Return the value of a key; None if the key is not set."""
        return self._ask(lambda store: store.get(key) if store.check([key]) else None)

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        """Return the store's answer; None once the store does not answer, because node 0 is gone."""
        if self._lost is not None:
            return None
        try:
            return question(self._store)
        except RuntimeError as error:  # torch's errors of networks and stores
            words = f"its store does not answer ({first_line(error)})"
            self._lost = NodeFailure(0, None, 1, True, words)
            return None


def _interval_s(num_nodes: int) -> float:
    """Return how many seconds a waiting node pauses between requests, so that one store serves all nodes."""
    return max(0.1, num_nodes / _REQUESTS_PER_S)
