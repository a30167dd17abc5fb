"""`Persistence` copies complete tags from the directory of the saves to a farther tier.

`nebula.persistent_storage_path` asks for it, and the writer process of one rank does it. A copy is compared with its
checksums on the way, and appears whole or not at all, as a save does.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.durable import ChecksumWriter, write_file
from deepspeed.checkpoint.index import FileEntry, Index, check_checksums, check_size, seal_of
from deepspeed.checkpoint.layout import is_remote, location, store_failures
from deepspeed.checkpoint.store import FolderStore, IndexedStore, prune
from deepspeed.checkpoint.tags import read_latest, saved_tags, write_latest, write_script
from deepspeed.errors import CheckpointError
from deepspeed.log import logger

_READ_BYTES = 4 * 2**20  # of a file that is copied


class _CompleteTag(NamedTuple):
    """A tag that is complete in the nearer tier."""

    folder: Path
    save_latest: bool


class Persistence:
    """`Persistence` copies whole tags from the directory of the saves to a farther tier: another folder, or a URL
    (`nebula.persistent_storage_path`).

    The newest tag is copied when `interval_s` have passed since the last copy began, so some tags are never copied. A
    thread copies, so that the next save does not wait. A failed copy is a warning; the newest tag is copied after
    another interval, and by `finish`.

    Args:
        directory: the farther tier.
        keep_last: number of tags that stay there.
        may_prune: whether old tags may be removed there now.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        directory: str,
        interval_s: float,
        keep_last: int,
        *,
        may_prune: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = location(directory)
        self._interval_s = interval_s
        self._keep_last = keep_last
        self._may_prune = may_prune
        self._clock = clock
        self._threads = ThreadPoolExecutor(1, "ds-persist")
        self._newest: _CompleteTag | None = None  # not copied yet
        self._running: tuple[_CompleteTag, Future[None]] | None = None
        self._began: float | None = None  # when the last copy began

    def offer(self, folder: Path, *, save_latest: bool) -> None:
        """Take a tag that is complete now, in place of an earlier one that is not copied yet.

        Args:
            save_latest: let `latest` of the farther tier name the copy.
        """
        is_there = not is_remote(self._directory) and os.path.realpath(folder.parent) == os.path.realpath(
            self._directory
        )
        if not is_there:
            self._newest = _CompleteTag(folder, save_latest)
        self.look()

    def look(self) -> None:
        """Begin the copy that is due; warn of the one that has failed. Wait for nothing."""
        self._end_of_copy()
        is_due = self._began is None or self._clock() - self._began >= self._interval_s
        if is_due and self._newest is not None and self._running is None:
            self._begin()

    def finish(self) -> None:
        """Return when the newest tag is copied.

        Raises:
            CheckpointError: it cannot be copied.
        """
        if self._running is not None:
            wait([self._running[1]])
            self._end_of_copy()
        if self._newest is None:
            return
        folder = self._begin()
        assert self._running is not None
        (_, copy), self._running = self._running, None
        if (error := copy.exception()) is not None:
            raise CheckpointError(f"cannot copy {folder} to {self._directory}: {error_text(error)}") from error

    @property
    def copied(self) -> Sequence[str]:
        """The tags that are being copied, which must stay in the nearer tier."""
        return [] if self._running is None or self._running[1].done() else [self._running[0].folder.name]

    def _begin(self) -> Path:
        assert self._newest is not None
        tag, self._newest = self._newest, None
        self._began = self._clock()
        logger.info("copying %s to %s", tag.folder, self._directory)
        self._running = tag, self._threads.submit(self._copy, tag)
        return tag.folder

    def _copy(self, tag: _CompleteTag) -> None:
        """Copy one tag; runs in the thread."""
        keep_last = self._keep_last if self._may_prune() else None
        copy_tag(tag.folder, self._directory, save_latest=tag.save_latest, keep_last=keep_last)

    def _end_of_copy(self) -> None:
        """Forget the copy that has ended; one that failed is made again, unless a newer tag is there."""
        if self._running is None or not self._running[1].done():
            return
        (tag, copy), self._running = self._running, None
        if (error := copy.exception()) is not None:
            self._newest = self._newest or tag
            logger.warning(
                "cannot copy %s to %s: %s. It is tried again after %g seconds; earlier copies are untouched",
                *(tag.folder, self._directory, error_text(error).rstrip("."), self._interval_s),
            )


def copy_tag(folder: Path, directory: Path, *, save_latest: bool, keep_last: int | None) -> None:
    """Copy the whole tag in `folder` into `directory`, so that a kill at any moment leaves the copy whole or not there.

    Each file is compared with the checksums of the index, which is copied as it is; a damaged tag is not copied.

    Args:
        save_latest: let `latest` there name the copy, unless it names a tag that was saved later.
        keep_last: number of tags that stay there; None removes nothing.

    Raises:
        CheckpointError: a file is damaged or missing, or the disk or the store refuses.
    """
    with store_failures(directory):
        if is_remote(directory):
            from deepspeed.checkpoint.stores import ObjectStore  # late: it imports torch

            store: IndexedStore | FolderStore = ObjectStore()
        else:
            store = FolderStore()
        source = layout.whole_folder(folder)
        if source is None:
            raise CheckpointError(f"{folder} is not there any more")
        content = (source / layout.INDEX_FILE).read_bytes()
        index = Index.from_bytes(content, source / layout.INDEX_FILE, with_tensors=False)
        copy = directory / folder.name
        if seal_of(copy) != seal_of(source):
            _copy_files(store, source, copy, index, content)
        if save_latest and not _names_later(directory, copy):
            write_latest(directory, folder.name)
        if keep_last is not None:
            prune(directory, keep_last, store, newest=folder.name)


def _copy_files(store: IndexedStore | FolderStore, source: Path, copy: Path, index: Index, content: bytes) -> None:
    try:
        store.create(copy)
        place = copy if is_remote(copy) else layout.staging_folder(copy)
        sizes = {entry.name: _copy_file(source / entry.name, place / entry.name, entry, index) for entry in index.files}
        write_script(copy)
        store.write_index(copy, content)
        store.commit(copy, sizes)
    finally:
        store.discard(copy)


def _copy_file(source: Path, target: Path, entry: FileEntry, index: Index) -> int:
    """Copy one file, and return its bytes."""
    check_size(source, entry)
    sums: list[str] = []
    with source.open("rb") as opened:

        def write(file: Any) -> None:
            writer = ChecksumWriter(file)
            shutil.copyfileobj(opened, writer, _READ_BYTES)
            sums.extend(writer.checksums())

        num_bytes = write_file(target, write)
    if entry.checksums is not None:
        check_checksums(source, entry, index, sums)
    return num_bytes


def _names_later(directory: Path, copy: Path) -> bool:
    """Whether `latest` names a tag that was saved after the one in `copy`, which another run has copied."""
    latest = read_latest(directory)
    found = {tag.name: tag.saved_at for tag in saved_tags(directory, [copy.name, *filter(None, [latest])])}
    return latest in found and copy.name in found and found[latest] > found[copy.name]


def error_text(error: BaseException) -> str:
    """Return the text of an error, for a message or for another process."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
