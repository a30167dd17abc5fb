"""Ranks that have ended: a rank that waits for one of them in the job's store raises, and says so.

A rank notes its own end as the interpreter exits, and the `deepspeed` launcher notes the end of each process that it
started (`launcher/node_agent.py`), which also sees one that ends without Python. Nobody waits here. Where ranks wait in
a library, or read each other's memory, a connection or the process itself is gone, and the notes say whose.
"""

import atexit
import os
from collections.abc import Iterable
from weakref import WeakSet

import torch.distributed as torch_dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from deepspeed.errors import first_line
from deepspeed.log import logger

#: whose end is noted as the interpreter exits
_worlds: WeakSet[ProcessGroup] = WeakSet()


def note_end(store: Store, rank: int) -> None:
    """Note that a rank has ended. Called by itself or by the launcher; a second note of it does no harm."""
    try:
        _base(store).append(_key(), f"{rank} ")  # type: ignore[attr-defined]  # torch's stub lacks it
    except (RuntimeError, ValueError) as error:  # the store is gone: who had it was to end last
        logger.debug("the end of rank %d cannot be noted: %s", rank, first_line(error))


def note_own_end_at_exit() -> None:
    """Called when the world group was made, here or by the script. Once is enough."""
    world = torch_dist.group.WORLD
    if world is None or world in _worlds:
        return
    _worlds.add(world)
    store, rank, process = torch_dist.distributed_c10d._get_default_store(), torch_dist.get_rank(), os.getpid()

    def note() -> None:
        if os.getpid() == process:  # else a fork ends
            note_end(store, rank)

    atexit.register(note)


def ended_of(ranks: Iterable[int]) -> list[int]:
    """Return those of `ranks` that have ended, as the job counts them."""
    ended = _ended()
    return [rank for rank in ranks if rank in ended]


def ended_clause(group: ProcessGroup) -> str:
    """ "rank 1 has ended", for messages; empty where no rank of `group` has."""
    return clause_of(ended_of(torch_dist.get_process_group_ranks(group)))


def clause_of(ranks: Iterable[int]) -> str:
    """ "rank 1 has ended", or "rank 1, 2 have ended"; empty for none."""
    named = list(ranks)
    verb = "has" if len(named) == 1 else "have"
    return f"rank {', '.join(map(str, named))} {verb} ended" if named else ""


def _ended() -> frozenset[int]:
    try:
        store = _base(torch_dist.distributed_c10d._get_default_store())
        noted = store.get(_key()).decode() if store.check([_key()]) else ""
    except (RuntimeError, ValueError) as error:
        logger.debug("the store of the job does not answer: %s", first_line(error))
        return frozenset()
    return frozenset(map(int, noted.split()))


def _key() -> str:
    """Ranks that torchrun starts again have the same store."""
    return f"deepspeed/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _base(store: Store) -> Store:
    """The store that the launcher has, too: torch and its agents put prefixes before the keys of a world."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
