"""Messages between two ranks of one machine: the receiver reads the tensor in the sender's memory.

`ReadingGroup.messages` creates one `DirectMessages` per group for `deepspeed.comm.point_to_point`.

    sender                                      receiver
    slot n of the lane = address of the tensor
                                                sees it, reads the tensor, taken = n
    sees it: the tensor may be written again

A *lane* holds the messages from one rank to another with one tag. Messages are numbered from 1, and received in the
order in which they were sent. A rank writes the messages that it sends, and the number that it has taken, into its
`Lanes`, and its peers read them. A message moves only while the receiver waits, for this message or something else.
"""

import ctypes
from collections import deque

import torch
import torch.distributed as torch_dist
from deepspeed.comm import parted
from deepspeed.comm.backend import timeout_of
from deepspeed.comm.failure import FailureRecord, PeerFailed
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import CommError
from torch.distributed import ProcessGroup

from ds_ext_cpu.comm.boards import Peer, PeerGone, What, what
from ds_ext_cpu.comm.waiting import lock, queues, wait_until

#: number of tags, from 0; maximum number of messages of a lane that wait for the receiver
NUM_TAGS, _NUM_SLOTS = 8, 32
#: 64-bit words, each entry with a check: left; taken; slot (number, address, digest and address of the text)
_LEFT_WORDS, _TAKEN_WORDS, _SLOT_WORDS = 2, 2, 5

#: Lanes, and tensors that this rank was sending when it left, outlive their groups: peers may still read them.
_kept: list[object] = []


class Lanes:
    """The messages and counts that this rank shows its peers. A check after each entry shows that the entry is
    complete."""

    def __init__(self, world_size: int) -> None:
        self._words = (ctypes.c_int64 * lane_word(world_size, 0))()
        self._words[0:_LEFT_WORDS] = [0, ~0]
        for rank in range(world_size):
            for tag in range(NUM_TAGS):
                self.set_taken(rank, tag, 0)
        _kept.append(self)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    def leave(self) -> None:
        """Record that this rank left its messages unfinished."""
        self._words[0:_LEFT_WORDS] = [1, ~1]

    def set_taken(self, source: int, tag: int, number: int) -> None:
        """Record that this rank has read the messages up to `number`."""
        at = lane_word(source, tag)
        self._words[at : at + _TAKEN_WORDS] = [number, ~number]

    def announce(self, to: int, tag: int, number: int, address: int, is_: What) -> None:
        """Announce that a message can be read at `address`."""
        at = slot_word(to, tag, number)
        check = number ^ address ^ is_.digest ^ is_.address
        self._words[at : at + _SLOT_WORDS] = [number, address, is_.digest, is_.address, check]


def lane_word(rank: int, tag: int) -> int:
    """Return the index of the first word of the lane to or from `rank`."""
    return _LEFT_WORDS + (rank * NUM_TAGS + tag) * (_TAKEN_WORDS + _SLOT_WORDS * _NUM_SLOTS)


def slot_word(rank: int, tag: int, number: int) -> int:
    """Return the index of the first word of the slot of a message."""
    return lane_word(rank, tag) + _TAKEN_WORDS + _SLOT_WORDS * (number % _NUM_SLOTS)


class DirectMessages:
    """The messages of this rank in one group.

    After a failure, every call raises it: announcements are final. `PointToPoint.connect` then creates a new object.

    Args:
        group: a process group that includes this process.
        peers: the peers by rank in the group.
    """

    def __init__(self, group: ProcessGroup, peers: dict[int, Peer]) -> None:
        self._peers = peers
        self._rank = torch_dist.get_rank(group)
        self._lanes = Lanes(torch_dist.get_world_size(group))
        self._theirs: list[int] = all_gather_values(self._lanes.address, group)
        self._timeout_s = timeout_of(group).total_seconds()
        self._failures = FailureRecord(group)
        self._failure: CommError | None = None
        self._outgoing: dict[tuple[int, int], _Outgoing] = {}
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        with lock:
            queues.add(self)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> "DirectMessage":
        """Announce a contiguous tensor to the rank `peer` of the group. Does not block."""
        with lock:
            self._refuse_failed()
            lane = self._outgoing.setdefault((peer, tag), _Outgoing())
            lane.num_sent += 1
            message = DirectMessage(self, "send to", peer, tag, lane.num_sent, tensor)
            lane.unannounced.append(message)
            lane.open.append(message)
            self._announce(lane)
        return message

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> "DirectMessage":
        """Start to receive into a contiguous tensor, with the numel and dtype of the sent one. Does not block."""
        with lock:
            self._refuse_failed()
            lane = self._incoming.setdefault((peer, tag), _Incoming())
            lane.num_posted += 1
            message = DirectMessage(self, "receive from", peer, tag, lane.num_posted, tensor)
            lane.open.append(message)
        return message

    def abandon(self) -> None:
        """Report that this rank failed: peers that wait for its messages raise and name this rank. Does not block."""
        self._failures.record(0)
        with lock:
            self._lanes.leave()
            _kept.extend(message.tensor for lane in self._outgoing.values() for message in lane.open)
            self._outgoing.clear()
            self._incoming.clear()
            self._failure = CommError(
                f"rank {torch_dist.get_rank()} left messages of this group unfinished after a failure; their tensors "
                "hold nothing"
            )

    def go_on(self) -> None:
        """Advance while a thread waits in another queue. A failure is kept for the callers of this object."""
        if self._failure is None:
            try:
                self._advance()
            except CommError as error:
                self._failure = error

    def is_over(self, message: "DirectMessage") -> bool:
        """Advance all lanes, and return whether the message was received or taken. Called under the lock.

        Raises:
            CommError: the peer left or ended before that, or sends a tensor of another numel or dtype.
        """
        self._refuse_failed()
        try:
            self._advance()
            if not message.is_over:
                self._refuse_left(message)
        except CommError as error:
            self._failure = error
            raise
        return message.is_over

    def wait_for(self, message: "DirectMessage") -> None:
        peer = self.rank_of(message.peer)
        wait_until(
            self,
            lambda: self.is_over(message),
            self._timeout_s,
            lambda: self._late(message),
            lambda: parted.find([peer], str(message), lambda rank, _: True),
            parted.Wait(message, "", 0, [peer]),
        )

    def _advance(self) -> None:
        for arriving in self._incoming.values():
            while arriving.open and self._take(arriving.open[0]):
                arriving.open.popleft()
        for lane in self._outgoing.values():
            while lane.open and self._is_taken(lane, lane.open[0].number):
                lane.open.popleft().finish()
            self._announce(lane)

    def _announce(self, lane: "_Outgoing") -> None:
        while lane.unannounced:
            message = lane.unannounced[0]
            if not self._is_taken(lane, message.number - _NUM_SLOTS):
                return
            lane.unannounced.popleft()
            address = message.tensor.data_ptr()
            self._lanes.announce(message.peer, message.tag, message.number, address, message.what)

    def _is_taken(self, lane: "_Outgoing", number: int) -> bool:
        """Return whether the peer has taken a message or has ended. If it ended, the next receive from it raises."""
        if lane.num_taken < number:
            message = lane.open[0]
            at = self._theirs[message.peer] + 8 * lane_word(self._rank, message.tag)
            try:
                taken, check = self._peers[message.peer].words(at, _TAKEN_WORDS)
            except PeerGone:
                taken, check = lane.num_sent, ~lane.num_sent
            if check == ~taken:
                lane.num_taken = taken
        return lane.num_taken >= number

    def _take(self, message: "DirectMessage") -> bool:
        """Read the message if it is announced. Returns whether it was read."""
        peer = self._peers[message.peer]
        at = self._theirs[message.peer] + 8 * slot_word(self._rank, message.tag, message.number)
        number, address, digest, text, check = peer.words(at, _SLOT_WORDS)
        if number != message.number or check != number ^ address ^ digest ^ text:
            return False
        if digest != message.what.digest:
            raise CommError(
                f"rank {torch_dist.get_rank()} expects {message.what.text} from rank {peer.rank}, which sends "
                f"{peer.text(text)}; both must know its shape and dtype"
            )
        peer.read(address, message.tensor)
        self._lanes.set_taken(message.peer, message.tag, message.number)
        message.finish()
        return True

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _refuse_left(self, message: "DirectMessage") -> None:
        peer = self._peers[message.peer]
        left, check = peer.words(self._theirs[message.peer], _LEFT_WORDS)
        if left == 1 and check == ~1:
            cause = self._failures.first(0) or f"rank {peer.rank} left its messages unfinished"
            raise PeerFailed(
                f"rank {torch_dist.get_rank()} cannot finish {message}: {cause}. The output of the rank that failed "
                "first says why",
                cause,
            )

    def _late(self, message: "DirectMessage") -> CommError:
        self._failure = CommError(
            f"rank {torch_dist.get_rank()} waited {self._timeout_s:g} s, the group's timeout, in {message}. See what "
            "that rank is doing; if it is only slow, give init_distributed a longer timeout"
        )
        return self._failure

    def rank_of(self, peer: int) -> int:
        """Return the global rank of a rank of the group."""
        return self._peers[peer].rank


class _Outgoing:
    """A lane to a peer. `open`: messages that the peer has not taken. `unannounced`: those that wait for a slot."""

    def __init__(self) -> None:
        self.num_sent = self.num_taken = 0
        self.open: deque[DirectMessage] = deque()
        self.unannounced: deque[DirectMessage] = deque()


class _Incoming:
    """A lane from a peer."""

    def __init__(self) -> None:
        self.num_posted = 0
        self.open: deque[DirectMessage] = deque()


class DirectMessage:
    """A send or a receive in flight."""

    __slots__ = ("_kind", "_messages", "is_over", "number", "peer", "tag", "tensor", "what")

    def __init__(
        self, messages: DirectMessages, kind: str, peer: int, tag: int, number: int, tensor: torch.Tensor
    ) -> None:
        self._messages, self._kind = messages, kind
        self.peer, self.tag, self.number = peer, tag, number
        self.tensor = tensor
        self.what = what("a message", tensor.numel(), tensor.dtype)
        self.is_over = False

    def __str__(self) -> str:
        return f"a {self._kind} rank {self._messages.rank_of(self.peer)} ({self.what.text})"

    def finish(self) -> None:
        """Mark the message as over: its owner may use the tensor again."""
        self.is_over = True

    def poll(self) -> bool:
        """Return whether the message is over; only `wait` raises errors."""
        if not self.is_over:
            with lock:
                self._messages.go_on()
        return self.is_over

    def wait(self) -> None:
        """Wait until the peer has taken the send, or the receive has arrived."""
        if not self.is_over:
            self._messages.wait_for(self)
