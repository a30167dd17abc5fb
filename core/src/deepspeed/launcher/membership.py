"""The coordinator of an elastic job: nodes join and are lost, and each round restarts the ranks on the present nodes.

The coordinator runs in the process that started the nodes (`multinode/start.py`), or else on node 0. Each node's agent
(`elastic.py`) has a connection to the coordinator; when the connection ends, the node is lost. Messages are lines of
JSON, each an object with `kind`:

    from a node    hello, ready (its ranks are stopped), store (from the round's first node), failed, done
    to a node      round (its place), store, reform (stop the ranks), end, refused

`Membership` holds the rules; `Coordinator` applies them in a thread. Neither loads torch.
"""

import json
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from deepspeed.errors import ConfigError, counted
from deepspeed.launcher.plan import NodeFailure

MEETING_TIMEOUT_S = 900.0
LAST_CALL_S = 30.0  # once the minimum is there, the first round waits this long for more nodes
_LEAVE_S = 10.0  # wait after the end message until all nodes close their connections
_CHUNK_BYTES = 65536
_KEEPALIVE_S = 5  # a host that is silent for four times this long is lost

Message = dict[str, Any]


class _Member:
    """One node."""

    def __init__(self, hello: Message) -> None:
        self.name = str(hello["name"])
        self.node_rank = int(hello["node_rank"])
        self.num_ranks = int(hello["num_ranks"])
        self.is_ready = False
        self.is_done = False


class JobEnd(NamedTuple):
    """A `JobEnd` says how the job ended; `failure` is None if the job succeeded or a signal ended it."""

    exit_code: int
    failure: NodeFailure | None


class Membership:
    """`Membership` decides which nodes take part. The caller identifies each node by a number.

    Args:
        min_nodes: with fewer nodes the job waits.
        max_nodes: further nodes are spares.
        max_restarts: how many restarts after a failed rank are allowed; restarts for joined or lost nodes do not
            count.
        num_expected: number of nodes that the first round waits for.
        send: sends a message to a node.
        say: prints a line for the user.
    """

    def __init__(
        self,
        min_nodes: int,
        max_nodes: int,
        max_restarts: int,
        num_expected: int,
        send: Callable[[int, Message], None],
        say: Callable[[str], None],
    ) -> None:
        self._min_nodes = min_nodes
        self._max_nodes = max_nodes
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._num_expected = num_expected
        self._send = send
        self._say = say
        self._members: dict[int, _Member] = {}
        self._placed: list[int] = []  # the nodes of the round, in rank order
        self._round = -1
        self._is_forming = True
        self._causes: list[tuple[int, NodeFailure, bool]] = []  # node, failure, whether a restart cannot help
        self._is_smaller = False  # a node of the round was lost, which explains consequent failures
        self._since = time.monotonic()  # when the wait for this round began
        self.verdict: JobEnd | None = None

    def join(self, node: int, hello: Message) -> None:
        """Add a node that has connected."""
        self._members[node] = _Member(hello)

    def take(self, node: int, message: Message) -> None:
        """Process a message from a node."""
        member, kind = self._members[node], message["kind"]
        is_current = message.get("round") == self._round and node in self._placed
        if self.verdict is not None:
            return
        if kind == "ready" and (is_current or node not in self._placed):
            self._ready(node, member)
        elif kind == "store" and is_current:
            for other in self._placed[1:]:
                self._send(other, message)
        elif kind == "failed" and is_current:
            self._causes.append((node, NodeFailure(**message["failure"]), bool(message["is_final"])))
            self._reform(node)
        elif kind == "done" and is_current:
            member.is_done = True
            if not self._is_forming and all(self._members[each].is_done for each in self._placed):
                self._end(0, None)

    def lose(self, node: int) -> None:
        """Remove a node that was lost, and restart the round if the node took part in it."""
        member = self._members.pop(node)
        if self.verdict is not None or node not in self._placed:
            return
        self._placed.remove(node)
        self._is_smaller = True
        self._say(f"{member.name} is lost; the ranks of {counted(len(self._placed), 'other node')} form again")
        self._reform(node)

    def expect(self, num_nodes: int) -> None:
        """Lower the number of nodes that the first round waits for to `num_nodes`."""
        self._num_expected = min(self._num_expected, num_nodes)
        self._form_if_complete()

    def stop(self) -> None:
        """Note that the nodes were told to end: no further round starts."""
        if self.verdict is None:
            self.verdict = JobEnd(1, None)

    def give_up(self, failure: NodeFailure) -> None:
        """End the job because the coordinator's process ends; `failure` says why."""
        if self.verdict is None:
            self._end(failure.exit_code, failure)

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until `pass_time` has something to do; None if no round is forming."""
        if self.verdict is not None or not self._is_forming:
            return None
        limit = LAST_CALL_S if self._round < 0 and self._num_ready() >= self._min_nodes else MEETING_TIMEOUT_S
        return min(limit, max(0.0, self._since + limit - now_s))  # a sum of floats may be rounded up

    def pass_time(self, now_s: float) -> None:
        """After the time limit, start the round with the nodes that are ready, or end the job if there are too few."""
        if self.wait_s(now_s) != 0.0:
            return
        if self._num_ready() >= self._min_nodes:
            self._form()
            return
        words = (
            f"{counted(self._num_ready(), 'node')} came within {MEETING_TIMEOUT_S:g} s, and --min_elastic_nodes is "
            f"{self._min_nodes}"
        )
        self._end(1, NodeFailure(0, None, 1, False, words))

    def _ready(self, node: int, member: _Member) -> None:
        member.is_ready = True
        if self._is_forming:
            self._form_if_complete()
        elif len(self._placed) < self._max_nodes:
            self._say(f"{member.name} has come; the ranks form again with it")
            self._reform(node)
        else:
            self._say(f"{member.name} has come and is kept as a spare: --max_elastic_nodes is {self._max_nodes}")

    def _reform(self, because_of: int) -> None:
        """Tell the nodes of the round to stop their ranks."""
        if not self._is_forming:
            self._is_forming, self._since = True, time.monotonic()
            for node in self._placed:
                if node != because_of:
                    self._send(node, {"kind": "reform"})
        self._form_if_complete()

    def _num_ready(self) -> int:
        return sum(member.is_ready for member in self._members.values())

    def _form_if_complete(self) -> None:
        if not self._is_forming or self.verdict is not None:
            return
        if not all(self._members[node].is_ready for node in self._placed):
            return  # some nodes are still stopping their ranks
        own = self._own_causes()
        if own and (self._num_restarts == self._max_restarts or any(is_final for *_, is_final in own)):
            node, failure, _ = next((cause for cause in own if cause[2]), own[0])
            self._end(failure.exit_code, failure, node)
            return
        awaited = min(self._num_expected, self._max_nodes) if self._round < 0 else self._min_nodes
        if self._num_ready() >= max(awaited, self._min_nodes):
            self._form()

    def _own_causes(self) -> list[tuple[int, NodeFailure, bool]]:
        """Return the failures that are no consequences; else all failures, or none if a lost node explains them."""
        own = [cause for cause in self._causes if not cause[1].is_consequence]
        return own or ([] if self._is_smaller else self._causes)

    def _form(self) -> None:
        """Start a round with the nodes that are ready."""
        ready = [node for node, member in self._members.items() if member.is_ready]
        before = {node: place for place, node in enumerate(self._placed)}
        ready.sort(key=lambda node: (before.get(node, len(before)), self._members[node].node_rank, node))
        self._placed = ready[: self._max_nodes]
        counts = [self._members[node].num_ranks for node in self._placed]
        is_restart = bool(self._own_causes())
        self._num_restarts += is_restart
        self._round += 1
        if self._round > 0:
            restart = f"; restart {self._num_restarts} of {self._max_restarts}" if is_restart else ""
            self._say(f"{counted(sum(counts), 'rank')} on {counted(len(counts), 'node')} go on{restart}")
        self._causes, self._is_smaller, self._is_forming = [], False, False
        for place, node in enumerate(self._placed):
            member = self._members[node]
            member.is_ready = member.is_done = False
            self._send(node, {"kind": "round", "round": self._round, "place": place, "counts": counts})

    def _end(self, exit_code: int, failure: NodeFailure | None, blamed: int | None = None) -> None:
        self.verdict = JobEnd(exit_code, failure)
        told = None if failure is None else failure._asdict()
        for node in self._members:
            self._send(node, {"kind": "end", "exit_code": exit_code, "failure": told, "is_blamed": node == blamed})


class Coordinator:
    """Applies the rules of `Membership` to the nodes that connect to a port of this machine.

    Args:
        port: port to listen on; 0 takes any free port, which the attribute `port` names.
        run_id: id of the job; nodes of other jobs are refused.
        min_nodes, max_nodes, max_restarts, num_expected, say: see `Membership`.

    Raises:
        ConfigError: the port is not available.
    """

    def __init__(
        self,
        port: int,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        max_restarts: int,
        num_expected: int,
        say: Callable[[str], None],
    ) -> None:
        try:
            self._listener = socket.create_server(("", port))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ConfigError(f"--master_port {port}: cannot listen there ({reason}); give another") from error
        self.port = int(self._listener.getsockname()[1])
        self._listener.setblocking(False)
        self._run_id = run_id
        self._membership = Membership(min_nodes, max_nodes, max_restarts, num_expected, self._send, say)
        self._connections: dict[int, socket.socket] = {}
        self._unfinished: dict[int, bytes] = {}
        self._joined: set[int] = set()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._leave_by_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    @property
    def verdict(self) -> JobEnd | None:
        """The end of the job; None while the job runs."""
        return self._membership.verdict

    def start(self) -> None:
        """Start the thread that serves the nodes. Called once."""
        self._thread.start()

    def expect(self, num_nodes: int) -> None:
        """See `Membership.expect`."""
        self._order(lambda: self._membership.expect(num_nodes))

    def stop(self) -> None:
        """See `Membership.stop`."""
        self._order(self._membership.stop)

    def give_up(self, failure: NodeFailure) -> None:
        """See `Membership.give_up`."""
        self._order(lambda: self._membership.give_up(failure))

    def finish(self) -> None:
        """End the job, wait until the nodes disconnect, and close the port."""

        def leave() -> None:
            words = "it keeps the list of nodes, and has ended"
            self._membership.give_up(NodeFailure(0, None, 1, False, words))
            self._leave_by_s = time.monotonic() + _LEAVE_S

        self._order(leave)
        self._thread.join()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        self._wake_write.send(b"x")

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._turn()
        finally:  # also after an error: closed connections inform the nodes
            for each in (self._listener, self._wake_read, self._wake_write, *self._connections.values()):
                each.close()
            self._selector.close()

    def _turn(self) -> None:
        """Wait for one event, and process it."""
        ready = self._selector.select(self._wait_s())
        if any(key.fileobj is self._wake_read for key, _ in ready):
            self._wake_read.recv(_CHUNK_BYTES)  # before the orders are read: a later order wakes the next turn
        while not self._orders.empty():  # orders first: a node may have disconnected because of an order
            self._orders.get()()
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is not self._wake_read:
                self._read(key.data)
        self._membership.pass_time(time.monotonic())

    def _is_over(self) -> bool:
        if self._leave_by_s is None:
            return False
        return not self._connections or time.monotonic() >= self._leave_by_s

    def _wait_s(self) -> float | None:
        now_s = time.monotonic()
        waits = [self._membership.wait_s(now_s)]
        if self._leave_by_s is not None:
            waits.append(max(0.0, self._leave_by_s - now_s))
        return min((wait for wait in waits if wait is not None), default=None)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            keep_alive(connection)
        except OSError:  # the peer has disconnected already
            return
        connection.setblocking(False)
        node = connection.fileno()
        self._connections[node], self._unfinished[node] = connection, b""
        self._selector.register(connection, selectors.EVENT_READ, node)

    def _read(self, node: int) -> None:
        connection = self._connections.get(node)
        if connection is None:  # a message of another node in this turn closed it
            return
        try:
            data = connection.recv(_CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            self._drop(node)
            return
        *lines, self._unfinished[node] = (self._unfinished[node] + data).split(b"\n")
        for line in lines:
            if node in self._connections:
                self._take(node, line)

    def _take(self, node: int, line: bytes) -> None:
        try:
            message = json.loads(line)
            kind = message["kind"]
        except (ValueError, TypeError, KeyError):  # another program connected to the port
            self._drop(node)
            return
        if node in self._joined:
            self._membership.take(node, message)
        elif kind != "hello" or message.get("run_id") != self._run_id:
            self._send(node, {"kind": "refused", "words": f"the job here is {self._run_id}"})
            self._drop(node)
        else:
            self._joined.add(node)
            self._membership.join(node, message)

    def _send(self, node: int, message: Message) -> None:
        try:
            self._connections[node].sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the end of the connection is read next
            return

    def _drop(self, node: int) -> None:
        connection = self._connections.pop(node)
        self._selector.unregister(connection)
        connection.close()
        del self._unfinished[node]
        if node in self._joined:
            self._joined.remove(node)
            self._membership.lose(node)


def keep_alive(connection: socket.socket) -> None:
    """Enable TCP keepalive, so that a dead host is noticed without traffic."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _KEEPALIVE_S), ("TCP_KEEPINTVL", _KEEPALIVE_S), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
