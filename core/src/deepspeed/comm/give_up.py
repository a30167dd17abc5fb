"""`give_up`: a rank that fails in a step leaves all of its groups together.

A step runs collectives in several groups: those of ZeRO, and the model's own (of experts, divided tensors and divided
sequences), messages between stages of a pipeline, sums between hosts. Peers may wait for the rank that failed in any of
them, and in others a while later. So it leaves all groups of the process that the core makes collectives in, and peers
which meet one that it has left do the same. Then each has left each group once, and a next step, also of another
engine, works on all ranks.

So one failure is told once per rank, however many parts of an engine see its exception pass, and whatever is done while
it is handled, such as `destroy()`: the exception is marked. A mark is void when an engine is used again, as by a retry
inside the `except`. Those who fail because of a peer do the same, once per step: [Note: one epoch per failed step] in
`failure.py`.
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

#: attribute of an exception that peers know of: the number of uses at that time
_MARK = "_deepspeed_told_peers"
_num_uses = 0


class Party(Protocol):
    """Something else in which peers may wait for this rank."""

    def abandon(self) -> None:
        """This rank failed: peers that wait for it raise. Waits for nobody."""


_parties: WeakSet[Party] = WeakSet()


def join(party: Party) -> None:
    """`party` is left, too, as long as it lives."""
    _parties.add(party)


def begin_use() -> None:
    """An engine is called to compute: an exception from now on is another failure than those before."""
    global _num_uses
    _num_uses += 1


def makes_collectives_besides(backends: Sequence[GroupBackend]) -> bool:
    """Whether the core makes collectives among ranks other than those of `backends`, as models do."""
    own = [plain(backend) for backend in backends]
    others = [each for each in known_backends() if each not in own and makes_collectives(each)]
    return any(backend.world_size > 1 for backend in others)


def give_up(works: Sequence[tuple[GroupBackend, Work]] = ()) -> None:
    """This rank has failed; called while the exception is handled. Peers that wait for it raise, and name it. Waits for
    nobody.

    Args:
        works: what the caller leaves unfinished, and the group of each.
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
    """`end` makes engines fail whose outputs are in the graph of these tensors."""
    _ends_of_graphs.add(end)


def give_up_after(tensors: Iterable[torch.Tensor]) -> None:
    """`give_up` where a script computes with an engine's outputs, between its calls; called while the exception is
    handled. No call of the engine sees it, so the engine in the graph of `tensors` is made to fail here: else this rank
    would hear of a peer's failure twice, and lose a step that the peer makes."""
    for end in _ends_of_graphs:
        end(tensors)
    give_up()


@runtime_checkable
class HasEpochs(Protocol):
    """A backend that begins an epoch when it is left after a failure; collectives work where all ranks are in one."""

    def epoch(self) -> tuple[str, int]:
        """A name for its epochs, the same on all ranks of the group, and the present one."""

    def join_epoch(self, epoch: int) -> None:
        """Leave what is in flight, and begin this later epoch. Waits for nobody."""


def _with_epochs() -> list[HasEpochs]:
    backends = [plain(backend) for backend in known_backends() if backend.world_size > 1]
    return [backend for backend in backends if isinstance(backend, HasEpochs)]


def standing() -> Mapping[str, Any]:
    """Return after how many failures this rank has left its groups, and in which epoch of each group it is."""
    return {"failures": failure.num_told, "epochs": dict(backend.epoch() for backend in _with_epochs())}


def follow(standings: Sequence[Mapping[str, Any]]) -> None:
    """Go where the rank is that has left its groups most often: this one may have heard nothing of it, as when an
    update failed there. Then the next call works on all ranks.

    Args:
        standings: of all ranks, which make this call together.
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
    """Whether peers know of the exception that is being handled; from now on they do."""
    errors = list(handled_errors())
    is_told = any(getattr(error, _MARK, -1) == _num_uses for error in errors)
    for error in errors[:1]:
        setattr(error, _MARK, _num_uses)
    return is_told
