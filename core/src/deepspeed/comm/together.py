"""`together`: what all ranks build at the same place succeeds on all of them, or raises on all.

A rank that fails alone in `initialize`, or while it builds the layers of its stage, is one that its peers wait for at
the next place where ranks agree, until the group's time limit. So it comes there too, and brings its failure in place
of a value (`values.py`); then each rank has made the same calls, and a program that catches the error can go on. Other
collectives that peers may be in are given up first, so that they come there as well.

A rank that comes to the begin of such a call waits for the others in the store (`values.py`): where one of them waits
for it elsewhere, in a step, both raise. But a rank of which an engine was destroyed or dropped before waits on, and
only the other one raises: that is in a step of the engine which is gone here, as after a failure in the script's own
code, and comes when it has heard.
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

#: why a rank need not wait any longer, see `Arrivals`
Refusal: TypeAlias = Callable[[], CommError | None]
_LIMIT_S = 300.0  # for peers that are still busy with what comes before
_SHORT_LIMIT_S = 5.0  # for those who are at the same place already
_MAX_STAYS = 3  # in one call: each time the others have raised
_arrivals: WeakKeyDictionary[ProcessGroup, dict[str, Arrivals]] = WeakKeyDictionary()
_is_engine_gone = False


@contextmanager
def together(call: str) -> Iterator[None]:
    """Enter and leave a call together with all ranks of the world. A collective, and nothing on one rank.

    Args:
        call: names it, for errors on the other ranks.

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
    """An engine of this rank was destroyed or collected: the next step with the others is one of an engine that all
    ranks build together."""
    global _is_engine_gone
    _is_engine_gone = True


def _no_refusal() -> None:
    return None


def _arrive_or_stay(call: str, group: ProcessGroup, refusal: Refusal = _no_refusal) -> None:
    """`_wait_for_all` in a call that builds: where an engine of this rank is gone, the peers that wait for it elsewhere
    raise alone, and are waited for."""
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
            begin_use()  # what is raised from now on is another failure
            logger.warning("%s waits on for the other ranks, since an engine of this one is gone: %s", call, error)
        else:
            _is_engine_gone = False
            return


def arrive_in(group: ProcessGroup, call: str) -> None:
    """Return when all ranks of `group` have come to the same call, which has collectives. Asks no library.

    Raises:
        CommError: a rank has ended without it, or did not come within the time limit of the group.
        RanksParted: another rank is in another call, in which it waits for this one; it raises, too.
    """
    if group.size() > 1:
        _wait_for_all(call, group)


def begin_in(group: ProcessGroup, call: str) -> None:
    """Return when all ranks of `group` have come to the same call, which builds a model. Asks no library.

    Raises:
        CommError: a rank has ended without it, or failed before, or did not come within the time limit of the group.
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
    """Over host memory: where a device's library has other collectives under way, another one would wait for these."""
    if not (torch_dist.is_available() and torch_dist.is_initialized()) or torch_dist.get_world_size() == 1:
        return False
    world = torch_dist.group.WORLD
    return world is not None and host_or_device(world).type == "cpu" and not ended_clause(world)


def _bring(call: str, error: Exception) -> None:
    text = f"rank {torch_dist.get_rank()} failed in {call} with {type(error).__name__}: {first_line(error)}"
    is_consequence = isinstance(error, CommError)  # then the rank that failed is there
    try:
        bring_failure(text, give_up, _SHORT_LIMIT_S if is_consequence else _LIMIT_S)
    except RuntimeError as found:
        logger.warning("%s, and the other ranks did not come to hear of it: %s", text, first_line(found))
    else:
        _level()


def _level() -> None:
    """All ranks know of a failure, for which some have left their groups: then all do."""
    try:
        follow(all_gather_within(standing(), _SHORT_LIMIT_S))
    except RuntimeError as error:
        logger.warning("ranks that know of a failure did not meet: %s", first_line(error))
