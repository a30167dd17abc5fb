"""After a load found damage: which other tag of the directory is whole. A step that all ranks take together."""

import json
from pathlib import Path

from deepspeed.checkpoint.agreement import Gather
from deepspeed.checkpoint.survey import saved_tags


def last_good_tag(gather: Gather, directory: Path, damaged: str, *, lists: bool, share: tuple[int, int]) -> str | None:
    """The newest tag of `directory`, except `damaged`, whose files are all as they were saved; None if there is none.

    Each file is read by one rank. Every rank calls it.

    Args:
        gather: as for `Checkpointer`.
        lists: whether this rank lists the tags; exactly one does.
        share: this rank and the number of ranks.
    """
    listed = gather(json.dumps(_newest_first(directory)) if lists else None)
    for name in json.loads(next(filter(None, listed))):
        if name != damaged and not any(gather(_fault_in_share(directory, name, share))):
            return str(name)
    return None


def _newest_first(directory: Path) -> list[str]:
    try:
        return [tag.name for tag in reversed(saved_tags(directory)) if tag.index is not None]
    except OSError:  # what made the load fail is the error to raise
        return []


def _fault_in_share(directory: Path, name: str, share: tuple[int, int]) -> str | None:
    """What this rank finds wrong with its share of a tag's files; None when nothing is."""
    rank, world_size = share
    try:
        tag = next(iter(saved_tags(directory, [name])), None)
    except OSError as error:
        return str(error)
    if tag is None or tag.index is None:
        return "it is not there any more"
    faults = (tag.fault_in(entry.name, content=True) for entry in tag.index.files[rank::world_size])
    return next(filter(None, faults), None)
