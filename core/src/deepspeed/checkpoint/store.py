"""`Store`: where a checkpoint's bytes go. What another kind of storage, or another way of writing, implements."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from deepspeed.checkpoint.index import Index


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
