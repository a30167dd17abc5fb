"""`give_up` lets a rank that fails in a step leave all of its groups together.

A step runs collectives in several groups: the groups of ZeRO and of the model (experts, divided tensors and divided
sequences), messages between pipeline stages, and sums between hosts. Peers may wait for the failed rank in any of these
groups, now or later. So the failed rank leaves all groups of the process in which the core runs collectives, and peers
that meet a group that it has left do the same. Then each rank has left each group once, and the next step works on all
ranks, also with another engine.

Each rank reports a failure once, however many parts of an engine see its exception pass, and whatever runs while the
exception is handled, such as `destroy()`. For this, the exception is marked. The mark expires when an engine is used
again, for example by a retry inside the `except`. Ranks that fail because of a peer do the same, once per step:
[Note: one epoch per failed step] in `failure.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
import torch.distributed as torch_dist

from deepspeed.comm import failure
from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.comm.failure import PeerFailed, handled_errors, held
from deepspeed.comm.record import plain, unrecorded
from deepspeed.comm.torch_group import known_backends, makes_collectives

#: attribute of an exception that this rank has reported: the value of `_num_uses` at that time
_MARK = "_deepspeed_told_peers"
_num_uses = 0


class Party(Protocol):
    """Something besides a `GroupBackend` in which peers may wait for this rank."""

    def abandon(self) -> None:
        """Report that this rank failed: peers that wait for this rank raise. Does not block."""


_parties: WeakSet[Party] = WeakSet()


def join(party: Party) -> None:
    """Let `give_up` abandon `party`, too, as long as `party` lives."""
    _parties.add(party)


def begin_use() -> None:
    """Begin a new use of an engine: exceptions from now on count as new failures."""
    global _num_uses
    _num_uses += 1


def makes_collectives_besides(backends: Sequence[GroupBackend]) -> bool:
    """Whether the core runs collectives, such as a model's, in groups of several ranks other than `backends`."""
    own = [plain(backend) for backend in backends]
    others = [each for each in known_backends() if each not in own and makes_collectives(each)]
    return any(backend.world_size > 1 for backend in others)


def give_up(works: Sequence[tuple[GroupBackend, Work]] = ()) -> None:
    """Leave all groups because this rank failed. Call it while the exception is handled. Peers that wait for this rank
    raise and name this rank. Does not block.

    Args:
        works: the works that the caller leaves unfinished, each with its group's backend.
    """
    with held():
        if not torch_dist.is_initialized() or _is_told():
            return
        failure.tell()
        for backend in known_backends():
            if backend.world_size > 1:
                left = [work for issuer, work in works if plain(issuer) is backend]
                backend.abandon(unrecorded(left), failed=True)
        for party in list(_parties):
            party.abandon()


_ends_of_graphs: set[Callable[[Iterable[torch.Tensor]], None]] = set()


def on_failure_after(end: Callable[[Iterable[torch.Tensor]], None]) -> None:
    """Register `end`, which takes tensors and makes each engine fail that has outputs in their graph."""
    _ends_of_graphs.add(end)


def give_up_after(tensors: Iterable[torch.Tensor]) -> None:
    """Call `give_up` after a failure in a script's own computation with an engine's outputs, while the exception is
    handled. No call of the engine sees this exception, so the engine in the graph of `tensors` fails here. Otherwise
    this rank would react to a peer's failure twice, and miss a step that the peer makes."""
    for end in _ends_of_graphs:
        end(tensors)
    give_up()


@runtime_checkable
class HasEpochs(Protocol):
    """A backend that begins a new epoch after a failure; its collectives work if all ranks are in the same epoch."""

    def epoch(self) -> tuple[str, int]:
        """Return a name for the group's epochs, equal on all its ranks, and the current epoch."""

    def join_epoch(self, epoch: int) -> None:
        """Abandon the works in flight, and begin the later epoch `epoch`. Does not block."""


def _with_epochs() -> list[HasEpochs]:
    backends = [plain(backend) for backend in known_backends() if backend.world_size > 1]
    return [backend for backend in backends if isinstance(backend, HasEpochs)]


def standing() -> Mapping[str, Any]:
    """Return the number of failures for which this rank has left its groups, and the rank's epoch in each group."""
    return {"failures": failure.num_told, "epochs": dict(backend.epoch() for backend in _with_epochs())}


def follow(standings: Sequence[Mapping[str, Any]]) -> None:
    """Move this rank to the state of the rank that has left its groups most often, so that the next call works on all
    ranks. This rank may have missed a failure, for example when an update failed on another rank.

    Args:
        standings: the `standing()` of all ranks, which call this together.
    """
    num_failures = max(each["failures"] for each in standings)
    is_behind = num_failures > failure.num_told
    failure.go_to(num_failures)
    with_epochs = _with_epochs()
    if is_behind:
        try:
            raise PeerFailed("another rank has failed, and this one had not heard of it")
        except PeerFailed:
            for backend in known_backends():
                if backend.world_size > 1 and plain(backend) not in with_epochs:
                    backend.abandon([], failed=True)
        for party in list(_parties):
            party.abandon()
    for each in with_epochs:
        name, own = each.epoch()
        latest = max(standing["epochs"].get(name, own) for standing in standings)
        if own < latest:
            each.join_epoch(latest)


def _is_told() -> bool:
    """Whether this rank has reported the exception that is being handled. Marks the exception as reported."""
    errors = list(handled_errors())
    is_told = any(getattr(error, _MARK, -1) == _num_uses for error in errors)
    for error in errors[:1]:
        setattr(error, _MARK, _num_uses)
    return is_told
