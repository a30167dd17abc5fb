"""`Store`: where the bytes of a checkpoint go; other kinds of storage, or other ways of writing, implement it.
`FolderStore`: keeps each version of a folder whole or not there. Imports no torch: the writer process needs none.

[Note: how a folder is replaced] The new version is written into a staging folder beside the old one, each of its files
is fsynced, and renames put it in place. If there is a former version of the same tag, two renames are needed:

    global_step5  -> .global_step5.former       the former version, whole
    .global_step5.staging -> global_step5       the new version, whole
    delete .global_step5.former

A process killed before the first rename leaves the former version in its place. Killed between the two, it leaves the
former version under its second name, where loading finds it (`layout.whole_folder`). After the second rename the new
version is in place. The next `create` in the same directory puts everything in order, except for saves that another job
may still be making (`locks.py`). So at every moment one whole version can be loaded.

A tag that is removed (`remove`) is renamed to `.global_step5.pruned` and then deleted. If a kill interrupts that, the
next `create` deletes the rest.

A tag that is a symbolic link (`best -> global_step10`) is replaced by a folder; what it pointed to is left alone.

`put_in_place` takes the last steps of a save, on one rank, when every file is there: the checkpoint takes its place,
and `latest` names it. `prune` then removes old tags (`checkpoint.keep_last`; `ds_ckpt prune` does it by hand).

`zero_to_fp32.py`, which a save puts beside the tags, is one program, joined from several files of this folder.
"""

import ast
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import disk_error, make_folder, sync_folder, write_file
from deepspeed.checkpoint.index import DamagedCheckpoint, FileEntry, Index, check_content, check_size, read_index
from deepspeed.checkpoint.layout import is_remote
from deepspeed.checkpoint.locks import Claim, abandoned, remove_reports
from deepspeed.checkpoint.tags import SavedTag, read_latest, saved_tags, write_latest
from deepspeed.checkpoint.tensor_index import index_of
from deepspeed.errors import CheckpointError
from deepspeed.log import logger, warn_once


class Store(Protocol):
    """`Store` keeps the files of one checkpoint folder. `Checkpointer` calls it in this order.

    Saving, where "one" is the committing rank and "all" is every rank that has something to write:

    1. `create(folder)`             one: an empty place for a new version of `folder`; a former version stays whole
    2. `save(state, folder, name)`  all: one file of the new version; returns its bytes, None if not known yet
    3. `wait()`                     all: everything this process saved is durable now
    4. `commit(folder, sizes)`      one: the new version takes the former one's place, if it holds every file of every
                                    rank (`sizes`: name -> what `save` returned there); else `CheckpointError`
    5. `discard(folder)`            one, only after a failure, in place of the remaining steps: remove the new version;
                                    the former one stays. Must not raise: users must see the failure itself

    Between the steps the ranks agree that all of them succeeded; after a failure `commit` is not called. `save` may
    take a snapshot and return before it is written: `wait` must finish the write. Errors are
    `CheckpointError`s that name the file.

    Loading: `load(path)` for each file, by any rank.

    The store does not decide where folders are, what files are called, and what `latest` names: after `commit` every
    rank must see the directory `folder` with one entry per saved name. The store alone decides what is in an entry;
    only files that `torch.load` reads can be consolidated by `zero_to_fp32.py`.
    """

    def create(self, folder: Path) -> None: ...

    def save(self, state: Any, folder: Path, name: str) -> int | None: ...

    def wait(self) -> None: ...

    def commit(self, folder: Path, sizes: Mapping[str, int | None]) -> None: ...

    def discard(self, folder: Path) -> None: ...

    def load(self, path: Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
        """Return the object in `path`, read without running any code that may be in the file.

        With `mmap` the tensors stay in the file until they are touched; for values that are copied elsewhere at once.
        """
        ...


@runtime_checkable
class IndexedStore(Store, Protocol):
    """A store that also keeps an index of sizes and checksums beside the files, verifies them, and removes tags.

    Optional: a checkpoint of a store without these methods has no index, is not verified, and is not pruned.

    Saving: after `wait`, `checksums(folder, name)` returns, on the saving rank, the CRC-32 of each block of a file that
    it saved, or None; it is called once. Before `commit`, `write_index(folder, content)` puts `index.json` into the new
    version, on one rank.

    Loading: `read_index(folder)` returns None if there is no index. `verify(path, index, content=)` is called for each
    file before its `load`. It raises `DamagedCheckpoint` if the file is missing or has another size than was saved, or,
    with `content`, if a block has another checksum.
    """

    def checksums(self, folder: Path, name: str) -> list[str] | None: ...

    def write_index(self, folder: Path, content: bytes) -> None: ...

    def read_index(self, folder: Path) -> Index | None: ...

    def verify(self, path: Path, index: Index, *, content: bool) -> None: ...

    def remove(self, folder: Path) -> None:
        """Delete the version in `folder`, so that a crash leaves it whole or not there."""
        ...


class FolderStore:
    """Versions of folders in a directory that all ranks share. The store does not know what is in their files."""

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
                self._release(removes_file=False)  # the lock file shows whose the rest is
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
                if os.path.lexists(pruned):  # left by a kill, before the tag was saved again
                    _remove(pruned)
                os.rename(folder, pruned)
                sync_folder(folder.parent)
                _remove(pruned)
            finally:
                claim.release(removes_file=not os.path.lexists(pruned))  # the lock file shows whose the rest is
        except OSError as error:
            raise CheckpointError(
                f"cannot remove {folder}: {error.strerror}. Correct its permissions, or remove it by hand."
            ) from error

    def finish_removals(self, directory: Path) -> None:
        """Delete what killed removals left in `directory`; a save does that too."""
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
    """Refuse to commit a version if the committing rank does not see every rank's file as it was written."""
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
    except OSError as error:  # not of this save: perhaps of another user, or another job is removing it
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
    """Delete a replaced version. Files that somebody else had put into it move to the new version."""
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


def put_in_place(
    store: Store | FolderStore,
    folder: Path,
    entries: Sequence[FileEntry],
    facts: Mapping[str, Any],
    *,
    save_latest: bool,
) -> None:
    """Put the staged files of all ranks in the place of `folder`.

    Args:
        entries: the files of all ranks.
        facts: `Index.saved`.
    """
    write_script(folder)
    if isinstance(store, IndexedStore | FolderStore):
        store.write_index(folder, index_of(entries, facts))
    store.commit(folder, {entry.name: entry.num_bytes for entry in entries})
    if save_latest:
        write_latest(folder.parent, folder.name)


def write_script(folder: Path) -> None:
    """Put `zero_to_fp32.py` beside the tag's `folder`: a program that runs without this package."""
    source = script()
    target = folder.with_name(layout.SCRIPT_FILE)
    if target.is_file() and target.read_bytes() == source:
        return
    write_file(target, lambda file: file.write(source), layout.draft_file(folder))
    if is_remote(target):
        return
    try:
        target.chmod(0o755)
    except OSError as error:
        raise disk_error("make executable", target, error) from error


@dataclass(frozen=True)
class PrunePlan:
    """`PrunePlan` lists the tags to remove and the tags to keep, those of the fewest steps first."""

    removed: list[SavedTag]
    kept: dict[str, str]
    """Every other tag -> why it stays."""


def plan_prune(directory: Path, keep_last: int, newest: str | None = None) -> PrunePlan:
    """Find the tags of `directory` to remove, so that the `keep_last` last complete ones stay. Changes nothing.

    Tags are in the order of their global steps, since clocks may be set back; tags of equal or unknown steps are in the
    order in which they were saved. A tag is complete if every file of its index is there with its size, and, for
    tags that stay, if the lists of tensors in the index fit. Never removed: the tag that `latest` names, folders that a
    symbolic link in the directory leads to, links, folders without a readable index (other programs' and older
    checkpoints), and folders that hold other files too.

    Args:
        newest: a tag that was saved just now; it stays, whatever the steps of others are.

    Raises `CheckpointError` if `latest` cannot be read.
    """
    assert keep_last >= 1
    latest, linked = read_latest(directory), _linked_in(directory)
    removed: list[SavedTag] = []
    kept: dict[str, str] = {}
    num_complete = 0
    for tag in sorted(saved_tags(directory), key=lambda tag: _place(tag, newest), reverse=True):
        is_recent = num_complete < keep_last
        if is_recent and tag.index is not None and not tag.faults(content=False):
            num_complete += tag.name == newest or not tag.fault_in_table
        why = _why_never(tag, directory)
        if not why and tag.name == latest:
            why = "named by latest"
        elif not why and is_recent:
            why = f"one of the last {keep_last}"
        elif not why and tag.folder.resolve() in linked:
            why = "a link leads to it"
        if why:
            kept[tag.name] = why
        else:
            removed.append(tag)
    return PrunePlan(removed[::-1], dict(reversed(kept.items())))


def prune(directory: Path, keep_last: int, store: IndexedStore | FolderStore, newest: str | None = None) -> None:
    """Remove old tags after a save of the tag `newest`. A failed removal is a warning: the save has succeeded."""
    try:
        plan = plan_prune(directory, keep_last, newest)
    except (CheckpointError, OSError) as error:
        warn_once(f"checkpoint.keep_last: nothing was removed from {directory}: {error}", (-1,))
        return
    for tag in plan.removed:
        try:
            store.remove(tag.folder)
            logger.info("checkpoint.keep_last: %d: removed %s", keep_last, tag.folder)
        except CheckpointError as error:
            warn_once(f"checkpoint.keep_last: {error}", (-1,))


def _place(tag: SavedTag, newest: str | None) -> tuple[bool, int, datetime]:
    steps = tag.index.saved.get("global_steps") if tag.index is not None else None
    return tag.name == newest, -1 if steps is None else steps, tag.saved_at


def _why_never(tag: SavedTag, directory: Path) -> str:
    if tag.folder != directory / tag.name or tag.folder.is_symlink():
        return "a link, or a save that is not finished"
    if tag.index is None:
        return tag.trouble or f"it has no {layout.INDEX_FILE}"
    listed = {entry.name for entry in tag.index.files}
    names = [path.name for path in tag.folder.iterdir()]
    foreign = [name for name in names if name not in listed and not layout.is_own_file(name)]
    return f"it holds other files: {', '.join(sorted(foreign))}" if foreign else ""


def _linked_in(directory: Path) -> set[Path]:
    """Return the paths that the symbolic links in `directory` lead to."""
    return {path.resolve() for path in directory.iterdir() if path.is_symlink()}


#: in the order in which the program has them; the docstring of the last one becomes the program's
_FILES = ("consolidate_files.py", "consolidate_join.py", "consolidate.py")
_OWN = "deepspeed.checkpoint.consolidate"


def script() -> bytes:
    """Return the program, which needs torch and the standard library: the files without imports of each other."""
    folder = Path(__file__).parent
    texts = [(folder / name).read_text(encoding="utf-8") for name in _FILES]
    about = ast.get_docstring(ast.parse(texts[-1]), clean=False)
    return "\n\n".join([f'#!/usr/bin/env python3\n"""{about}"""\n', *map(_without_imports, texts)]).encode()


def _without_imports(text: str) -> str:
    """Return a file without its imports of the others."""
    lines = text.split("\n")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OWN):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines)
