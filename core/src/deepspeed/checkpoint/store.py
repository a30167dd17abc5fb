"""`Store`: where a checkpoint's bytes go. What another kind of storage, or another way of writing, implements.
`FolderStore`: each version of a folder whole or not there. Imports no torch, for the writer process (`writer.py`).

[Note: how a folder is replaced] The new version is written into a staging folder beside the old one, every file of it
fsynced, and takes its place by renames. Where a former version of the same tag exists, two renames are needed:

    global_step5  -> .global_step5.former       the former version, whole
    .global_step5.staging -> global_step5       the new version, whole
    delete .global_step5.former

A process killed before the first rename leaves the former version in its place; between the two it leaves it under its
second name, where loading finds it (`layout.whole_folder`); after the second the new version is in place. The next
`create` in the same directory puts everything in order, except for saves that another job may still be making
(`locks.py`). So at every moment one whole version can be loaded.

A tag that is to go (`remove`) is renamed to `.global_step5.pruned` and then deleted. What a kill leaves of it, the next
`create` deletes.

A tag that is a symbolic link (`best -> global_step10`) is replaced by a folder; what it pointed to is left alone.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import disk_error, make_folder, sync_folder, write_file
from deepspeed.checkpoint.index import DamagedCheckpoint, Index, check_content, check_size, read_index
from deepspeed.checkpoint.locks import Claim, abandoned, remove_reports
from deepspeed.errors import CheckpointError
from deepspeed.log import warn_once


class Store(Protocol):
    """Keeps the files of one checkpoint folder. `Checkpointer` calls it in this order.

    Saving, where "one" is the committing rank and "all" is every rank that has something to write:

    1. `create(folder)`             one: an empty place for a new version of `folder`; a former version stays whole
    2. `save(state, folder, name)`  all: one file of the new version; returns its bytes, None if not known yet
    3. `wait()`                     all: everything this process saved is durable now
    4. `commit(folder, sizes)`      one: the new version takes the former one's place, if it holds every file of every
                                    rank (`sizes`: name -> what `save` returned there); else `CheckpointError`
    5. `discard(folder)`            one, only after a failure, in place of the remaining steps: remove the new version;
                                    the former one stays. Does not raise: the failure is what users must see

    Between the steps the ranks agree that all of them succeeded; after a failure `commit` is not called. `save` may
    take a snapshot and return before it is written: `wait` is where that must be finished. Errors are
    `CheckpointError`s that name the file.

    Loading: `load(path)` for each file, by any rank.

    Where folders are, what files are called and the file `latest` are not the store's: after `commit` every rank must
    see the directory `folder` with one entry per saved name. What is in an entry is the store's alone; only what
    `torch.load` reads can be consolidated by `zero_to_fp32.py`.
    """

    def create(self, folder: Path) -> None: ...

    def save(self, state: Any, folder: Path, name: str) -> int | None: ...

    def wait(self) -> None: ...

    def commit(self, folder: Path, sizes: Mapping[str, int | None]) -> None: ...

    def discard(self, folder: Path) -> None: ...

    def load(self, path: Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
        """The object in `path`, read without running any code that may lie in it.

        With `mmap` the tensors stay in the file until they are touched; for what is copied elsewhere at once.
        """
        ...


@runtime_checkable
class IndexedStore(Store, Protocol):
    """A store that also keeps an index of sizes and checksums beside the files, verifies them, and removes tags.

    Optional: a checkpoint of a store without these methods has no index, is not verified, and is not pruned.

    Saving: after `wait`, `checksums(folder, name)` gives on the saving rank the CRC-32 of each block of a file that it
    saved, or None; it is asked once. Before `commit`, `write_index(folder, content)` puts `index.json` into the new
    version, on one rank.

    Loading: `read_index(folder)`, None where there is none; then `verify(path, index, content=)` for each file before
    its `load`: `DamagedCheckpoint` when the file is missing or has another size than was saved, and, with `content`,
    when a block has another checksum.
    """

    def checksums(self, folder: Path, name: str) -> list[str] | None: ...

    def write_index(self, folder: Path, content: bytes) -> None: ...

    def read_index(self, folder: Path) -> Index | None: ...

    def verify(self, path: Path, index: Index, *, content: bool) -> None: ...

    def remove(self, folder: Path) -> None:
        """Delete the version in `folder`, such that a crash leaves it whole or not there."""
        ...


class FolderStore:
    """Versions of folders in a directory that all ranks share. What is in their files is not known here."""

    # here, so that subclasses need no super().__init__()
    _claim: Claim | None = None  # of the save that is going on

    def create(self, folder: Path) -> None:
        try:
            self._release()  # of a save that an interrupt ended
            if folder.is_file() and not folder.is_symlink():
                raise CheckpointError(f"cannot save {folder}: it is a file. Move it away, or use another tag.")
            make_folder(folder.parent)
            self._claim = Claim.take(folder)
            _tidy(folder)
            layout.staging_folder(folder).mkdir()
        except OSError as error:
            raise disk_error("prepare", folder, error) from error

    def write_index(self, folder: Path, content: bytes) -> None:
        write_file(layout.staging_folder(folder) / layout.INDEX_FILE, lambda file: file.write(content))

    def commit(self, folder: Path, sizes: Mapping[str, int | None]) -> None:
        """Move the staged version to `folder`; see [Note: how a folder is replaced]. `discard` ends the save."""
        staging, former = layout.staging_folder(folder), layout.former_folder(folder)
        assert self._claim is not None, "commit without create"
        self._claim.check()
        _check_complete(staging, sizes)
        try:
            sync_folder(staging)
            if os.path.lexists(folder):
                os.rename(folder, former)
            os.rename(staging, folder)
        except OSError as error:
            raise disk_error("replace", folder, error) from error
        try:
            sync_folder(folder.parent)
        except OSError as error:
            raise CheckpointError(
                f"{folder} is saved, but the disk could not make its name durable: {error.strerror}. Repair the disk, "
                "and save again."
            ) from error

    def discard(self, folder: Path) -> None:
        """End the save: remove what it has replaced or not completed, and the claim."""
        if self._claim is None:
            return  # `create` failed before it had made anything
        try:
            try:
                _settle(folder)
            except OSError:
                self._release(removes_file=False)  # it says whose the rest is
                raise
            self._release()
        except OSError as error:  # the save has succeeded, or its failure is the one to raise
            _warn(f"cannot remove what a save left of {folder}: {error}. The next save tries again.")

    def _release(self, removes_file: bool = True) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release(removes_file)

    def remove(self, folder: Path) -> None:
        try:
            claim, pruned = Claim.take(folder), layout.pruned_folder(folder)
            try:
                if os.path.lexists(pruned):  # a kill left it, before the tag was saved again
                    _remove(pruned)
                os.rename(folder, pruned)
                sync_folder(folder.parent)
                _remove(pruned)
            finally:
                claim.release(removes_file=not os.path.lexists(pruned))  # the lock says whose the rest is
        except OSError as error:
            raise CheckpointError(
                f"cannot remove {folder}: {error.strerror}. Correct its permissions, or remove it by hand."
            ) from error

    def finish_removals(self, directory: Path) -> None:
        """Delete what killed removals left in `directory`; a save does that, too."""
        for place in layout.unfinished_in(directory):
            if os.path.lexists(layout.pruned_folder(place)):
                _tidy_other(place)

    def read_index(self, folder: Path) -> Index | None:
        return read_index(folder)

    def verify(self, path: Path, index: Index, *, content: bool) -> None:
        entry = index.entry(path.name)
        if entry is None:
            raise DamagedCheckpoint(
                f"{path} is not listed in {layout.INDEX_FILE} beside it: it is of another save. Load another tag."
            )
        if content:
            check_content(path, entry, index)
        else:
            check_size(path, entry)


def _check_complete(staging: Path, sizes: Mapping[str, int | None]) -> None:
    """Refuse to commit a version in which the committing rank does not see every rank's file as it was written."""
    for name, size in sizes.items():
        path = staging / name
        found = path.stat().st_size if path.is_file() else None
        if found is None or size not in (None, found):
            seen = "it is missing" if found is None else f"it has {found} bytes"
            raise CheckpointError(
                f"{path} was written with {size} bytes, and {seen} where the save is completed. The former checkpoint "
                "is untouched. Save into a folder that every rank sees and that no other job saves into."
            )


def _tidy(folder: Path) -> None:
    """Put in order what ended saves left of `folder`, which this process has claimed, and beside it."""
    _settle(folder)
    for place in layout.unfinished_in(folder.parent):
        if place != folder:
            _tidy_other(place)


def _tidy_other(place: Path) -> None:
    try:
        with abandoned(place) as is_over:
            if is_over:
                _settle(place)
    except OSError as error:  # not this save's: perhaps of another user, or another job is removing it
        _warn(f"cannot remove what an earlier save left of {place}: {error}. Remove it by hand.")


def _warn(message: str) -> None:
    warn_once(message, (-1,))


def _settle(place: Path) -> None:
    """Finish or undo the renames of a save of `place` that has ended; delete its staging folder and what was pruned."""
    staging, former = layout.staging_folder(place), layout.former_folder(place)
    if os.path.lexists(former):
        if os.path.lexists(place):
            _retire(former, place)
        else:
            os.rename(former, place)
    for left in (staging, layout.pruned_folder(place), layout.draft_file(place)):
        if os.path.lexists(left):
            _remove(left)
    remove_reports(layout.writers_folder(place))


def _retire(former: Path, place: Path) -> None:
    """Delete a replaced version. What somebody else had put into it moves to the new version."""
    if former.is_dir() and not former.is_symlink():
        for path in former.iterdir():
            if not layout.is_own_file(path.name) and not os.path.lexists(place / path.name):
                os.rename(path, place / path.name)
    _remove(former)


def _remove(path: Path) -> None:
    """Delete a folder with its files, or a link without what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
