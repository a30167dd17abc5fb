"""`Store`: where the bytes of a checkpoint go; other kinds of storage, or other ways of writing, implement it.
`FolderStore`: keeps each version of a folder whole or not there.
`Claim`: this process is saving one tag now. Imports no torch: the writer process needs none.

[Note: how a folder is replaced] The new version is written into a staging folder beside the old one, each of its files
is fsynced, and renames put it in place. If there is a former version of the same tag, two renames are needed:

    global_step5  -> .global_step5.former       the former version, whole
    .global_step5.staging -> global_step5       the new version, whole
    delete .global_step5.former

A process killed before the first rename leaves the former version in its place. Killed between the two, it leaves the
former version under its second name, where loading finds it (`layout.whole_folder`). After the second rename the new
version is in place. The next `create` in the same directory puts everything in order, except for saves that another job
may still be making. So at every moment one whole version can be loaded.

Through claims, jobs that share a directory leave each other's saves alone. A claim is a file `.<tag>.lock` beside the
tag's folder, locked with `flock`, that names its holder. The system drops the lock when the holder dies, however it
dies. A holder whose death cannot be seen (a lock of another machine, or of a file system without locks) counts as alive
for a day.

A tag that is removed (`remove`) is renamed to `.global_step5.pruned` and then deleted. If a kill interrupts that, the
next `create` deletes the rest.

A tag that is a symbolic link (`best -> global_step10`) is replaced by a folder; what it pointed to is left alone.

`put_in_place` takes the last steps of a save, on one rank, when every file is there: the checkpoint takes its place,
and `latest` names it. `prune` then removes old tags (`checkpoint.keep_last`; `ds_ckpt prune` does it by hand).
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import disk_error, make_folder, sync_folder, write_file
from deepspeed.checkpoint.index import DamagedCheckpoint, FileEntry, Index, check_content, check_size, read_index
from deepspeed.checkpoint.tags import plan_prune, write_latest, write_script
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


_IDLE_S = 24 * 3600.0  # a save that has touched no file for so long has ended
_TIDIES = ", removing what an earlier save left"  # in the lock file of a job that does so
_BRIEF_S = 0.02  # between two looks at a lock file
_MAX_LOOKS = 250  # at a lock file that is locked for a moment


class Claim:
    """`Claim` is held from `FolderStore.create` to the end of the save; `take` and `abandoned` create claims."""

    def __init__(self, path: Path, descriptor: int, has_lock: bool) -> None:
        self.path = path
        self._descriptor = descriptor
        self._has_lock = has_lock
        self._text = b""

    @classmethod
    def take(cls, folder: Path) -> "Claim":
        """Claim `folder`.

        Raises:
            CheckpointError: a living process is saving this folder; the message names it.
            OSError: the lock file cannot be created.
        """
        path = layout.lock_file(folder)
        num_looks = 0
        while (claim := _open(path)) is None:
            num_looks += 1
            if num_looks < _MAX_LOOKS and _is_brief(path):
                continue
            raise CheckpointError(
                f"cannot save {folder}: {_holder(path)} is saving it now. Let each job save into a directory of its "
                "own, or under tags of its own."
            )
        try:
            claim._sign()
        except OSError:
            claim.release()
            raise
        return claim

    def check(self) -> None:
        """Raise CheckpointError if another job has claimed the folder since; possible where `flock` does not work."""
        if self._read() != self._text:
            raise CheckpointError(
                f"{_holder(self.path)} began to save the same tag (see {self.path}), so this save is given up. Let "
                "each job save into a directory of its own, or under tags of its own."
            )

    def release(self, removes_file: bool = True) -> None:
        """End the claim and remove its file."""
        if removes_file and _is_open_file(self._descriptor, self.path):
            self.path.unlink(missing_ok=True)
        if self._has_lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough if a fork has the descriptor too
        os.close(self._descriptor)

    def is_of_this_machine(self) -> bool:
        """Whether the last holder ran on this machine, so that a free lock proves that its save has ended."""
        return self._has_lock and os.pread(self._descriptor, 200, 0).split(b"\n")[0] == machine().encode()

    def _sign(self, purpose: str = "") -> None:
        holder = f"process {os.getpid()} on {os.uname().nodename}{purpose}"
        self._text = f"{machine()}\n{holder}\n{secrets.token_hex(8)}\n".encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self._text, 0)

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""


@contextmanager
def abandoned(folder: Path) -> Iterator[bool]:
    """Yield whether the save that left files of `folder` behind has ended; if so, it is claimed inside the context."""
    idle_s = _idle_s(folder)
    claim = _open(layout.lock_file(folder))
    if claim is None:
        yield False
        return
    is_over = claim.is_of_this_machine() or idle_s > _IDLE_S
    try:
        if is_over:
            claim._sign(_TIDIES)
        yield is_over
    finally:
        claim.release(removes_file=is_over)


def _open(path: Path) -> Claim | None:
    """Open and lock the file at `path`, which is created if need be; return None if a living process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # a file system without locks
            return Claim(path, descriptor, has_lock=False)
        if _is_open_file(descriptor, path):
            return Claim(path, descriptor, has_lock=True)
        os.close(descriptor)  # its former holder has just removed the file


def _is_brief(path: Path) -> bool:
    """Whether the job that locks `path`, if any, only removes what an earlier save left. Wait a little: such a job may
    not have written its name yet, or is about to be done."""
    before = _text(path)
    time.sleep(_BRIEF_S)
    return _text(path) != before or not before or f"{_TIDIES}\n" in before


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _is_open_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        return path.read_text(errors="replace").splitlines()[1]
    return "another process"


def machine() -> str:
    """Return the id of one running system: containers on it share its locks; its next boot has another id."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename


def _idle_s(folder: Path) -> float:
    """Return the seconds since a file of an unfinished save was touched; files that are being renamed do not count."""
    staging = layout.staging_folder(folder)
    paths = [staging, layout.former_folder(folder), layout.lock_file(folder), layout.draft_file(folder)]
    paths += [layout.pruned_folder(folder), layout.writers_folder(folder)]
    with contextlib.suppress(FileNotFoundError):
        paths += staging.iterdir() if staging.is_dir() else ()
    touched = [0.0]
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            touched.append(path.lstat().st_mtime)
    return time.time() - max(touched)


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


def prune(
    directory: Path,
    keep_last: int,
    store: IndexedStore | FolderStore,
    newest: str | None = None,
    needed: Collection[str] = (),
) -> None:
    """Remove old tags after a save of the tag `newest`. A failed removal is a warning: the save has succeeded."""
    try:
        plan = plan_prune(directory, keep_last, newest, needed)
    except (CheckpointError, OSError) as error:
        warn_once(f"checkpoint.keep_last: nothing was removed from {directory}: {error}", (-1,))
        return
    for tag in plan.removed:
        try:
            store.remove(tag.folder)
            logger.info("checkpoint.keep_last: %d: removed %s", keep_last, tag.folder)
        except CheckpointError as error:
            warn_once(f"checkpoint.keep_last: {error}", (-1,))


def remove_reports(place: Path) -> None:
    """Delete a folder of reports, unless a living process has a report in it."""
    with contextlib.suppress(FileNotFoundError):
        reports = list(place.iterdir())
        if not any(map(is_held, reports)):
            for path in reports:
                path.unlink(missing_ok=True)
            place.rmdir()


def is_held(path: Path) -> bool:
    """Whether a living process holds the report; True if that cannot be known."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
