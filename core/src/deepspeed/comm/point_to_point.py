"""`PointToPoint` sends messages between two ranks of a group, such as neighboring pipeline stages.

Messages with one tag from one rank to another arrive in the order in which they were sent. Only `Work.wait` and
`connect` wait for a peer.
"""

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm import parted
from deepspeed.comm.backend import Messages, Work
from deepspeed.comm.give_up import join
from deepspeed.comm.record import counted
from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.watch import Collective, Watch


class PointToPoint:
    """`PointToPoint` sends host tensors with the backend's `messages()` if it has them; else with torch.distributed.

    Args:
        group: a process group that includes this process.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = torch_dist.get_rank(group)
        self._own = group
        self._host: Messages | None = None
        self._watch = Watch(group)
        self._is_connected = False
        self._started: Counter[str] = Counter()
        join(self)
        parted.count(self)

    @property
    def completes_on_host(self) -> bool:
        """Whether messages move while the host computes and `wait` blocks the host; else device streams do both."""
        return group_backend(self.group).capabilities.completes_on_host

    def connect(self) -> None:
        """Set up the connections; after a failure, set them up again. All ranks call it together."""
        if not self._is_connected:
            self._own = self._watch.connect()
            backend = group_backend(self.group)
            backend.connect()
            messages = getattr(backend, "messages", None)
            self._host = messages() if messages is not None else None
            self._is_connected = True

    def send(self, tensor: torch.Tensor, peer: int, *, tag: int = 0) -> Work:
        """Start to send a contiguous tensor, which must not be written or freed before `wait()`.

        Args:
            peer: rank within the group.
            tag: 0 to 7, equal to the tag of the receive.
        """
        return counted(self._start("a send to", tensor, peer, tag))

    def receive(self, tensor: torch.Tensor, peer: int, *, tag: int = 0) -> Work:
        """Start to receive into a contiguous tensor with the shape and dtype of the sent tensor."""
        return counted(self._start("a receive from", tensor, peer, tag))

    def abandon(self) -> None:
        """Abandon all messages because this rank failed: peers that wait for this rank raise and name it. Does not
        block. `give_up` calls it."""
        if self._host is not None:
            self._host.abandon()
        self._watch.abandon([], failed=True)
        self._own, self._host, self._is_connected = self.group, None, False
        self._started.clear()

    def _start(self, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        self.connect()
        if self._host is not None and tensor.device.type == "cpu":
            move = self._host.send if kind.startswith("a send") else self._host.receive
            return move(tensor, peer, tag)
        ranks = torch_dist.get_process_group_ranks(self.group)
        message = Collective(f"{kind} rank {ranks[peer]}", tensor.numel(), tensor.dtype, "")
        try:
            if kind.startswith("a send"):
                work = torch_dist.isend(tensor, group=self._own, tag=tag, group_dst=peer)
            else:
                work = torch_dist.irecv(tensor, group=self._own, tag=tag, group_src=peer)
        except RuntimeError as error:
            raise self._watch.explained(error, message) from error
        assert work is not None
        source, target = (self.rank, peer) if kind.startswith("a send") else (peer, self.rank)
        lane = f"{self._watch.issued.name}/{source} to {target}, tag {tag}: "
        own, other = ("sent", "received") if source == self.rank else ("received", "sent")
        self._started[lane + own] += 1
        return _Message(work, self._watch, message, ranks[peer], lane + other, self._started[lane + own])

    def num_started(self) -> Mapping[str, int]:
        """Return the number of messages started so far, by a name that both ends know, for `parted.py`."""
        return self._started


class _Message:
    """A send or a receive in flight. On the rank `peer` it is message `number` of those counted under `name`."""

    __slots__ = ("_message", "_name", "_number", "_peer", "_watch", "_work")

    def __init__(
        self, work: torch_dist.Work, watch: Watch, message: Collective, peer: int, name: str, number: int
    ) -> None:
        self._work: torch_dist.Work | None = work
        self._watch = watch
        self._message = message
        self._peer, self._name, self._number = peer, name, number

    def poll(self) -> bool:
        """Whether the message is complete. Only `wait` raises its error."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Wait. An error names the rank that failed first."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            wait = parted.Wait(self._message, self._name, self._number, [self._peer])
            with parted.looking(wait, self._watch.looker(self._message, self._never_comes)):
                work.wait()
        except RuntimeError as error:
            raise self._watch.explained(error, self._message) from error

    def _never_comes(self, rank: int, note: parted.Note) -> bool:
        return rank == self._peer and note.num_started.get(self._name, 0) < self._number
