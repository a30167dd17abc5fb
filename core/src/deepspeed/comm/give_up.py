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

`together` makes a call that all ranks build something in succeed on all of them, or raise on all. If one rank fails
alone in `initialize`, or while it builds the layers of its stage, its peers would wait for it at the next place where
ranks agree, until the group's timeout. So the failed rank goes there too, and brings its failure instead of a value
(`values.py`). Then all ranks have made the same calls, and a program that catches the error can continue. The failed
rank first gives up other collectives that peers may be in, so that these peers go there as well.

At the begin of such a call, a rank waits for the others in the store (`values.py`). If a peer waits for this rank
elsewhere, in a step, both raise. But a rank that has destroyed or dropped an engine keeps waiting, and only the peer
raises: the peer is in a step of that engine, for example after a failure in the script's own code on this rank, and
comes to this call after it has raised.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm import failure
from deepspeed.comm.backend import GroupBackend, Work, host_or_device, timeout_of
from deepspeed.comm.failure import PeerFailed, ended_clause, handled_errors, held, unheard
from deepspeed.comm.parted import RanksParted
from deepspeed.comm.record import plain, unrecorded
from deepspeed.comm.torch_group import known_backends, makes_collectives
from deepspeed.comm.values import Arrivals, HeardFailure, all_gather_values, all_gather_within, bring_failure, meet
from deepspeed.errors import CommError, first_line
from deepspeed.log import logger

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
    return [each for each in known_backends() if each.world_size > 1 and isinstance(each, HasEpochs)]


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
                if backend.world_size > 1 and backend not in with_epochs:
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


#: returns the error that ends a wait early, see `Arrivals`
Refusal: TypeAlias = Callable[[], CommError | None]
_LIMIT_S = 300.0  # for peers that are still busy with earlier work
_SHORT_LIMIT_S = 5.0  # for peers that are at the same place already
_MAX_STAYS = 3  # how often one call keeps waiting after the other ranks have raised
_arrivals: WeakKeyDictionary[ProcessGroup, dict[str, Arrivals]] = WeakKeyDictionary()
_is_engine_gone = False


@contextmanager
def together(call: str) -> Iterator[None]:
    """Enter and leave a call together with all ranks of the world. A collective; on one rank it does nothing.

    Args:
        call: the name of the call, for errors on the other ranks.

    Raises:
        HeardFailure: another rank failed, or made another call.
        RanksParted: another rank is in another call, in which it waits for this one.
    """
    begin_use()
    if _has_peers():
        assert torch_dist.group.WORLD is not None
        _arrive_or_stay(call, torch_dist.group.WORLD)
    try:
        if _has_peers():
            follow(all_gather_values(standing()))
        yield
        if _has_peers():
            meet(call)
    except HeardFailure:
        _level()
        raise
    except Exception as error:
        if _has_peers():
            _bring(call, error)
        raise


def note_engine_gone() -> None:
    """Note that an engine of this rank was destroyed or collected. The next call that builds then keeps waiting for
    peers that are still in a step of that engine; see `_arrive_or_stay`."""
    global _is_engine_gone
    _is_engine_gone = True


def _no_refusal() -> None:
    return None


def _arrive_or_stay(call: str, group: ProcessGroup, refusal: Refusal = _no_refusal) -> None:
    """Call `_wait_for_all` at the begin of a call that builds. If an engine of this rank is gone, peers that wait for
    this rank elsewhere raise alone, and this rank keeps waiting for them."""
    global _is_engine_gone
    num_stays = 0
    while True:
        try:
            _wait_for_all(call, group, refusal)
        except RanksParted as error:
            gc.collect()  # engines have cycles
            if not _is_engine_gone or num_stays == _MAX_STAYS:
                raise
            num_stays += 1
            begin_use()  # exceptions from now on count as new failures
            logger.warning("%s waits on for the other ranks, since an engine of this one is gone: %s", call, error)
        else:
            _is_engine_gone = False
            return


def arrive_in(group: ProcessGroup, call: str) -> None:
    """Wait until all ranks of `group` have come to the same call, which runs collectives. Uses only the store.

    Raises:
        CommError: a rank has ended without the call, or did not come within the group's timeout.
        RanksParted: another rank waits for this rank in another call; that rank raises, too.
    """
    if group.size() > 1:
        _wait_for_all(call, group)


def begin_in(group: ProcessGroup, call: str) -> None:
    """Wait until all ranks of `group` have come to the same call, which builds a model. Uses only the store.

    Raises:
        CommError: a rank has ended without the call, has failed before, or did not come within the group's timeout.
        RanksParted: see `arrive_in`.
    """
    if group.size() > 1:
        begin_use()
        _arrive_or_stay(call, group, unheard)


def _wait_for_all(call: str, group: ProcessGroup, refusal: Refusal = _no_refusal) -> None:
    of_group = _arrivals.setdefault(group, {})
    if call not in of_group:
        name = f"{call}/{torch_dist.distributed_c10d._get_process_group_name(group)}"
        ranks = torch_dist.get_process_group_ranks(group)
        of_group[call] = Arrivals(ranks, name, timeout_of(group).total_seconds(), refusal)
    try:
        of_group[call].wait_for_all(call)
    except RanksParted:  # the others fail in a step, or in another call
        give_up()
        raise


def _has_peers() -> bool:
    """Whether there are peers to meet over host memory. On a device, a collective would wait for others in flight."""
    if not (torch_dist.is_available() and torch_dist.is_initialized()) or torch_dist.get_world_size() == 1:
        return False
    world = torch_dist.group.WORLD
    return world is not None and host_or_device(world).type == "cpu" and not ended_clause(world)


def _bring(call: str, error: Exception) -> None:
    text = f"rank {torch_dist.get_rank()} failed in {call} with {type(error).__name__}: {first_line(error)}"
    is_consequence = isinstance(error, CommError)  # then the rank that failed first is at this place already
    try:
        bring_failure(text, give_up, _SHORT_LIMIT_S if is_consequence else _LIMIT_S)
    except RuntimeError as found:
        logger.warning("%s, and the other ranks did not come to hear of it: %s", text, first_line(found))
    else:
        _level()


def _level() -> None:
    """Let all ranks leave their groups if some did, after a failure that all ranks know of."""
    try:
        follow(all_gather_within(standing(), _SHORT_LIMIT_S))
    except RuntimeError as error:
        logger.warning("ranks that know of a failure did not meet: %s", first_line(error))
