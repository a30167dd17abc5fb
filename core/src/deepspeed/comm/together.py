"""`together` makes a call that all ranks build something in succeed on all of them, or raise on all.

If one rank fails alone in `initialize`, or while it builds the layers of its stage, its peers would wait for it at the
next place where ranks agree, until the group's timeout. So the failed rank goes there too, and brings its failure
instead of a value (`values.py`). Then all ranks have made the same calls, and a program that catches the error can
continue. The failed rank first gives up other collectives that peers may be in, so that these peers go there as well.

At the begin of such a call, a rank waits for the others in the store (`values.py`). If a peer waits for this rank
elsewhere, in a step, both raise. But a rank that has destroyed or dropped an engine keeps waiting, and only the peer
raises: the peer is in a step of that engine, for example after a failure in the script's own code on this rank, and
comes to this call after it has raised.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import host_or_device, timeout_of
from deepspeed.comm.failure import ended_clause, unheard
from deepspeed.comm.give_up import begin_use, follow, give_up, standing
from deepspeed.comm.parted import RanksParted
from deepspeed.comm.values import Arrivals, HeardFailure, all_gather_values, all_gather_within, bring_failure, meet
from deepspeed.errors import CommError, first_line
from deepspeed.log import logger

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
