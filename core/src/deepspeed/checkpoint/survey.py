"""The tags in a directory with what their indexes say, oldest first: for pruning, for `ds_ckpt`, and to offer a tag.

`last_good_tag` is the offer after a load found damage: all ranks look together which other tag is whole.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.index import Index, read_index
from deepspeed.checkpoint.tensor_index import fault_in_table
from deepspeed.checkpoint.verify import check_content, check_size
from deepspeed.errors import CheckpointError

if TYPE_CHECKING:  # it imports torch, and the writer process lists tags too
    from deepspeed.checkpoint.agreement import Gather


@dataclass(frozen=True)
class SavedTag:
    """One tag, as far as its folder and its index say without reading the files."""

    name: str
    folder: Path
    """Where its whole version lies; see `layout.whole_folder`."""
    index: Index | None
    """Without the lists of tensors. None for a checkpoint that has none, or has one that cannot be read (`trouble`)."""
    trouble: str
    """Why the index cannot be read; else empty."""

    @property
    def num_bytes(self) -> int:
        """Of the checkpoint's files as they are now."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if layout.is_own_file(path.name))

    @cached_property
    def saved_at(self) -> datetime:
        """When it was saved; without an index, when its folder was last changed."""
        if self.index is not None and self.index.saved.get("at"):
            return datetime.fromisoformat(self.index.saved["at"]).astimezone()
        return datetime.fromtimestamp(self.folder.stat().st_mtime).astimezone()

    def faults(self, *, content: bool, advance: Callable[[int], object] | None = None) -> dict[str, str]:
        """What is wrong with the files, by the name of each that is missing or damaged. Without an index: its trouble.

        Args:
            content: read the files and compare their checksums, and read the lists of tensors; else only sizes are
                compared.
            advance: as for `checksums_of`.
        """
        if self.index is None:
            return {layout.INDEX_FILE: self.trouble} if self.trouble else {}
        found = {entry.name: self.fault_in(entry.name, content=content, advance=advance) for entry in self.index.files}
        if content:
            found[layout.INDEX_FILE] = self.fault_in_table
        return {name: fault for name, fault in found.items() if fault}

    @cached_property
    def fault_in_table(self) -> str:
        """What is wrong with the lists of tensors in the index, which are read for this; empty when nothing is."""
        try:
            index = read_index(self.folder)
        except CheckpointError as error:
            return str(error)
        fault = fault_in_table(index) if index is not None else ""
        return f"{self.folder / layout.INDEX_FILE}: {fault}. Load another tag." if fault else ""

    def fault_in(self, name: str, *, content: bool, advance: Callable[[int], object] | None = None) -> str:
        """What is wrong with one file of the index; empty when nothing is."""
        assert self.index is not None
        entry = self.index.entry(name)
        assert entry is not None
        try:
            if content:
                check_content(self.folder / name, entry, self.index, advance)
            else:
                check_size(self.folder / name, entry)
        except CheckpointError as error:
            return str(error)
        return ""


def saved_tags(directory: Path, wanted: Collection[str] | None = None) -> list[SavedTag]:
    """The tags in `directory`, oldest first; `wanted`: only these, the others are not looked at."""
    names = [name for name in layout.tags_in(directory, layout.is_own_file) if wanted is None or name in wanted]
    found = [tag for name in names if (tag := _look(directory, name))]
    return sorted(found, key=lambda tag: tag.saved_at)  # stable: tags of one moment stay in the order of their numbers


def _look(directory: Path, name: str) -> SavedTag | None:
    """None for a folder that another job has just removed, and for one with a foreign `index.json` only."""
    folder = layout.whole_folder(directory / name)
    if folder is None:
        return None
    try:
        return SavedTag(name, folder, read_index(folder, with_tensors=False), "")
    except CheckpointError as error:
        has_states = any(layout.is_checkpoint_file(path.name) for path in folder.iterdir())
        return SavedTag(name, folder, None, str(error)) if has_states else None


def last_good_tag(
    gather: "Gather", directory: Path, damaged: str, *, lists: bool, share: tuple[int, int]
) -> str | None:
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
