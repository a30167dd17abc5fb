"""Whether the files of a tag are what was saved, by their sizes and checksums in its index."""

from collections.abc import Callable
from pathlib import Path

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.checksum import BLOCK_BYTES, checksums_of
from deepspeed.checkpoint.index import DamagedCheckpoint, FileEntry, Index, check_regular
from deepspeed.errors import CheckpointError, counted

_ADVICE = "Copy the file again from where it came, or load another tag."


def check_size(path: Path, entry: FileEntry) -> None:
    """Raise `DamagedCheckpoint` if the file is missing or has not as many bytes as were saved."""
    check_regular(path)
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{path} is missing: {path.parent} is incomplete, its {layout.INDEX_FILE} lists the file with "
            f"{entry.num_bytes} bytes. {_ADVICE}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. Correct its permissions.") from error
    if entry.num_bytes not in (None, num_bytes):
        how = "cut short" if num_bytes < (entry.num_bytes or 0) else "too long"
        raise DamagedCheckpoint(
            f"{path} is damaged: it has {counted(num_bytes, 'byte')}, and was saved with {entry.num_bytes} ({how}). "
            f"{_ADVICE}"
        )


def check_content(path: Path, entry: FileEntry, index: Index, advance: Callable[[int], object] | None = None) -> None:
    """Read the file and raise `DamagedCheckpoint` if a block of it has not the checksum with which it was saved.

    Args:
        index: where `entry` is from: a file with the content of another one is said to be that.
        advance: as for `checksums_of`.
    """
    check_size(path, entry)
    if entry.checksums is None:
        return
    try:
        found = checksums_of(path, advance)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. {_ADVICE}") from error
    check_checksums(path, entry, index, found)


def check_checksums(path: Path, entry: FileEntry, index: Index, found: list[str]) -> None:
    """Raise `DamagedCheckpoint` if `found`, of the file `path`, are not the checksums with which it was saved."""
    assert entry.checksums is not None
    if found == list(entry.checksums):
        return
    others = [other.name for other in index.files if list(other.checksums or ()) == found]
    if others:
        raise DamagedCheckpoint(
            f"{path} has the content that was saved as {others[0]}: the files were renamed or swapped. Give each its "
            "name back, or load another tag."
        )
    if len(found) != len(entry.checksums):  # where the store did not know the number of bytes
        raise DamagedCheckpoint(
            f"{path} is damaged: it has {counted(len(found), 'block')} of {BLOCK_BYTES} bytes, and was saved with "
            f"{len(entry.checksums)}. {_ADVICE}"
        )
    block = next(i for i, (one, other) in enumerate(zip(found, entry.checksums, strict=True)) if one != other)
    first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, path.stat().st_size) - 1
    raise DamagedCheckpoint(
        f"{path} is damaged: its bytes {first} to {last} have the CRC-32 {found[block]}, and were saved with "
        f"{entry.checksums[block]}. {_ADVICE}"
    )
