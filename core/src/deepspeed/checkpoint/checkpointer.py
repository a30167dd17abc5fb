"""`Checkpointer`: the order in which ranks save and load one checkpoint together.

After each step of a save the ranks gather what failed. When one cannot write, all raise with its reason, nothing is
committed and `latest` stays where it was; no rank waits in a collective for one that has already failed.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.commit import put_in_place
from deepspeed.checkpoint.dcp_file import is_dcp_folder
from deepspeed.checkpoint.dcp_load import load_dcp
from deepspeed.checkpoint.deepspeed_files import as_own_shard, is_deepspeeds
from deepspeed.checkpoint.folder_store import FolderStore
from deepspeed.checkpoint.index import DamagedCheckpoint, FileEntry
from deepspeed.checkpoint.load import (
    LoadedCheckpoint,
    Position,
    SavedParts,
    check_has_states,
    check_model_state,
    check_one_model_rank,
    check_shard,
    find_folder,
    find_models,
    find_shards,
    split_client_state,
    tag_folder_hint,
)
from deepspeed.checkpoint.loadable import make_loadable
from deepspeed.checkpoint.location import is_remote, location
from deepspeed.checkpoint.object_store import ObjectStore
from deepspeed.checkpoint.offer import last_good_tag
from deepspeed.checkpoint.prune import prune
from deepspeed.checkpoint.reports import COMMITTER
from deepspeed.checkpoint.save import describe_save, merge_client_state
from deepspeed.checkpoint.store import IndexedStore, Store
from deepspeed.checkpoint.tags import check_new_tag, check_tag, read_latest
from deepspeed.checkpoint.tensor_index import file_entry
from deepspeed.checkpoint.torch_store import TorchStore
from deepspeed.checkpoint.universal import with_universal_states
from deepspeed.comm.failure import PeerFailed
from deepspeed.errors import CheckpointError, CommError, ConfigError, DeepSpeedError
from deepspeed.log import logger

T = TypeVar("T")


def _alone(value: str | None) -> list[str | None]:
    return [value]


class Checkpointer:
    """Saves and loads this rank's part of a checkpoint. Made once by the engine; every rank has one.

    Args:
        gather: a collective over all ranks that share a checkpoint: takes this rank's text or None, returns every
            rank's, in rank order. It is the only communication here. Default: one rank.
        store: where bytes go; default `TorchStore`.
        prefix: of the shard files: `"bf16_"` when the model trains in bf16, else empty.
        partitioned_model: every data parallel rank has a model file of its own (ZeRO stage 3).
        commits: whether this rank makes, commits and names checkpoints; default: the first rank. Exactly one does.
        verify: compare the checksums of the files that this rank loads with those in the checkpoint's index. Sizes are
            compared in any case.
        keep_last: after a save, remove the older tags of the directory so that this many stay; see `prune.plan_prune`.
            None removes nothing.
        background: makes saves asynchronous: `save` returns when this rank's states are copied, and a process writes
            them. Takes the place of `store` for saving.
    """

    def __init__(
        self,
        *,
        gather: Callable[[str | None], list[str | None]] = _alone,
        store: Store | None = None,
        prefix: str = "",
        dp_rank: int = 0,
        dp_world_size: int = 1,
        mp_rank: int = 0,
        mp_world_size: int = 1,
        partitioned_model: bool = False,
        commits: bool | None = None,
        verify: bool = True,
        keep_last: int | None = None,
        background: BackgroundWriter | None = None,
    ) -> None:
        self.position = Position(dp_rank, dp_world_size, mp_rank, mp_world_size)
        self.store: Store = TorchStore() if store is None else store
        self._objects = ObjectStore()
        self.prefix = prefix
        self.commits = (dp_rank == 0 and mp_rank == 0) if commits is None else commits
        if keep_last is not None and not isinstance(self.store, IndexedStore):
            raise ConfigError(
                f"checkpoint.keep_last: found {keep_last}, and the store {self.store!r} cannot remove tags (it has not "
                "the methods of deepspeed.checkpoint.store.IndexedStore). Omit the key, or remove old tags by hand."
            )
        if background is not None and type(self.store) is not TorchStore:
            raise ConfigError(
                f"checkpoint.async_save: found true with the store {self.store!r}, and only the built-in store 'torch' "
                "writes in a process of its own. Set async_save to false, or omit checkpoint.store."
            )
        self._verify = verify
        self._keep_last = keep_last
        self._background = background
        self._may_be_saving = False  # the same on all ranks
        self._gather = gather
        self._model_file = layout.model_file(mp_rank, dp_rank if partitioned_model else None)
        self._shard_file = layout.shard_file(dp_rank, mp_rank, prefix)

    def store_of(self, path: Path) -> Store:
        """What keeps `path`: the store of this object, or for a URL the one for object stores."""
        return self._objects if is_remote(path) else self.store

    @property
    def writes_model(self) -> bool:
        """Whether `save` takes a `model_state` from this rank: the first data parallel rank, or all in stage 3."""
        return self.position.dp_rank == 0 or layout.is_partitioned(self._model_file)

    def save(
        self,
        save_dir: str | Path,
        tag: str,
        *,
        model_state: Mapping[str, Any] | None,
        shard_state: Mapping[str, Any] | None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> Path:
        """Save one checkpoint; every rank calls it. Returns the folder `<save_dir>/<tag>`.

        Args:
            model_state: content of the model file, keys of `layout.MODEL_STATE_KEYS`; None unless `writes_model`.
            shard_state: content of this rank's `*_optim_states.pt`; None when there is none (stage 0).
            client_state: the user's dict, which lies beside the own keys in the model file.
            save_latest: let `latest` name this tag.

        Order: checks; an empty staging folder; every rank writes and fsyncs its files; one rank checks that all of
        them are there, puts the folder in its place and last of all updates `latest`. A tag that exists is replaced,
        and stays whole until then. After a failure the staging folder is removed.
        Errors: on every rank. The failing rank raises `ConfigError` for what cannot be saved, `CheckpointError` for the
        disk; the others a `CheckpointError` that names it and its reason.

        With `background`, an earlier save is waited for first, and may raise. What fails after this returns is raised
        by `wait_for_save`, `raise_failure` or `close`, with the tag.
        """
        self.wait_for_save()
        what = f"save {os.path.join(str(save_dir), str(tag))}"

        def prepare() -> tuple[Path, dict[str, Any]]:
            folder, files = location(save_dir) / check_new_tag(tag), {}
            if model_state is not None:
                files[self._model_file] = merge_client_state(model_state, client_state or {})
            if shard_state is not None:
                files[self._shard_file] = make_loadable(dict(shard_state), "the optimizer shard")
            return folder, files

        folder, files = self.together(prepare, what)
        if self._background is not None and is_remote(folder):
            raise ConfigError(
                f"checkpoint.async_save: found true for a save to {folder}, and asynchronous saves go to a folder "
                "only. Set async_save to false, or save to a folder and copy it."
            )
        ranks = {"dp_world_size": self.position.dp_world_size, "mp_world_size": self.position.mp_world_size}
        facts = {**describe_save(str(tag), model_state, shard_state), **ranks}
        if self._background is not None:
            self._save_in_background(self._background, folder, files, facts, what, save_latest)
            return folder
        try:
            self._write(folder, files, facts, what, save_latest)
        except Exception:
            if self.commits:
                self.store_of(folder).discard(folder)
            raise
        if self.commits and self._keep_last is not None:
            store = self.store_of(folder)
            assert isinstance(store, IndexedStore)
            prune(folder.parent, self._keep_last, store, newest=folder.name)
        return folder

    def _write(
        self, folder: Path, files: Mapping[str, Any], facts: Mapping[str, Any], what: str, save_latest: bool
    ) -> None:
        """The steps of a save that touch the disk."""
        store = self.store_of(folder)

        def create() -> None:
            if self.commits:
                store.create(folder)

        def write() -> list[FileEntry]:
            sizes = {name: store.save(state, folder, name) for name, state in files.items()}
            store.wait()
            return [self._entry(folder, name, size) for name, size in sizes.items()]

        def commit() -> None:
            if self.commits:
                others = [FileEntry.parse(each) for text in written if text for each in json.loads(text)]
                put_in_place(store, folder, [*own, *others], facts, save_latest=save_latest)

        self.together(create, what)
        own = self.together(write, what)
        written = self._gather(None if self.commits else json.dumps([entry.as_message() for entry in own]))
        self.together(commit, what)

    def _save_in_background(
        self,
        background: BackgroundWriter,
        folder: Path,
        files: Mapping[str, Any],
        facts: Mapping[str, Any],
        what: str,
        save_latest: bool,
    ) -> None:
        """Return when every rank has copied its states; the writer processes agree about the rest (`reports.py`)."""
        position = self.position
        ranks = map(str, range(position.world_size))
        others = [rank for rank in ranks if rank != str(position.rank)]
        commit = {"others": others, "facts": facts, "save_latest": save_latest, "keep_last": self._keep_last}

        def create() -> None:
            if self.commits:
                background.create(folder)

        def stage() -> list[dict[str, Any]]:
            return background.stage(folder, COMMITTER if self.commits else str(position.rank), files)

        try:
            self.together(create, what)
            staged = self.together(stage, what)
        except Exception:
            background.cancel()
            raise
        except BaseException:  # an interrupt
            background.kill()
            raise
        background.write(staged, commit if self.commits else None, f"save of {folder}")
        self._may_be_saving = True

    def wait_for_save(self) -> None:
        """Wait until the save in flight is complete on all ranks; every rank calls it. Nothing if there is none.

        Raises:
            CheckpointError: on every rank: it has failed, and this was not raised before.
        """
        if self._background is not None and self._may_be_saving:
            self._may_be_saving = False
            self.together(self._background.finish, "complete the asynchronous save")

    def raise_failure(self) -> None:
        """Raise what the save in flight has met, if it has failed; neither waits nor communicates."""
        if self._background is not None:
            self._background.raise_failure()

    def close(self) -> None:
        """Wait for the save in flight of this rank, and end its writer process. Raises as `raise_failure`."""
        if self._background is not None:
            self._background.close()

    def _entry(self, folder: Path, name: str, num_bytes: int | None) -> FileEntry:
        """What the index says of a file that this rank wrote."""
        store, path = self.store_of(folder), layout.staging_folder(folder) / name
        checksums = store.checksums(folder, name) if isinstance(store, IndexedStore) else None
        if not (isinstance(store, FolderStore) and path.is_file()):  # a remote one would be read from where it went
            return FileEntry(name, num_bytes, checksums)
        with path.open("rb") as file:
            return file_entry(name, num_bytes, checksums, file)

    def load(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        load_shard: bool = True,
        needs_states: bool = False,
        zero_stages: Collection[int] | None = None,
        map_location: Any = "cpu",
    ) -> LoadedCheckpoint | None:
        """Read one checkpoint; every rank calls it. None, with a warning, when no tag is given and none is in `latest`.

        Args:
            tag: default: what `<load_dir>/latest` names.
            load_shard: read the optimizer's state too. The weights of stage 3 are there, so its shards are always read.
            needs_states: the optimizer's state must be there.
            zero_stages: stages whose shards the caller can take as they are, for example `(1, 2)`; None takes any. What
                another stage, or another number of data-parallel ranks, saved is in `LoadedCheckpoint.parts`.
            map_location: as for `torch.load`.

        Raises `CheckpointError` on every rank when a rank finds a file missing, damaged, refused or of another shape of
        job; nothing of the caller was changed then.
        """
        self.wait_for_save()
        name = self._agreed_tag(load_dir, tag)
        directory = location(load_dir)
        if name is None:
            logger.warning(
                "no checkpoint was loaded, everything is as it was: there is no file %s. %s",
                directory / layout.LATEST_FILE,
                tag_folder_hint(directory) or "Pass a tag if there is a checkpoint without that file.",
            )
            return None

        def read() -> LoadedCheckpoint:
            return self._read(directory, name, load_shard, needs_states, zero_stages, map_location)

        try:
            return self.together(read, f"load {directory / name}")
        except CommError:
            raise
        except Exception as error:  # raised on every rank, by `together`
            if offer := self._offer(error, directory, name):
                raise CheckpointError(f"{error} {offer}") from error
            raise

    def _offer(self, error: Exception, directory: Path, damaged: str) -> str:
        """After a load failed on every rank: where a rank found damage, which other tag is whole; else empty."""
        if not any(self._gather("damaged" if isinstance(error, DamagedCheckpoint) else None)):
            return ""
        share = (self.position.rank, self.position.world_size)
        tag = last_good_tag(self._gather, directory, damaged, lists=self.commits, share=share)
        return f"The last good tag there is {tag!r}: its files were verified now." if tag else "No other tag is whole."

    def _read(
        self,
        directory: Path,
        name: str,
        load_shard: bool,
        needs_states: bool,
        zero_stages: Collection[int] | None,
        map_location: Any,
    ) -> LoadedCheckpoint:
        position = self.position
        folder = find_folder(directory, name)
        if is_dcp_folder(folder):
            check_one_model_rank(folder, position)
            return load_dcp(folder, name, needs_states=needs_states)
        models = find_models(folder, position.mp_rank)
        path = models[min(position.dp_rank, len(models) - 1)]
        verify = self._verifier(folder, load_shard)
        state = self._load_model(path, map_location, verify)
        own, client = split_client_state(state)
        was_divided = layout.is_partitioned(path.name)
        if layout.is_universal(folder):
            check_one_model_rank(folder, position)
            own = with_universal_states(own, folder, partial(self.store.load, map_location=map_location, mmap=True))
            states = [own] if len(models) == 1 else [self._load_model(each, map_location, verify) for each in models]
            return LoadedCheckpoint(str(path), name, own, None, client, SavedParts(states, []))
        if not (load_shard or was_divided):
            return LoadedCheckpoint(str(path), name, own, None, client)
        shards = find_shards(folder, position, own, len(models))
        if needs_states:
            check_has_states(folder, shards, own)
        is_alike = len(shards) in (0, position.dp_world_size) and was_divided == layout.is_partitioned(self._model_file)
        if is_alike:
            shard = self._load_shard(shards[position.dp_rank], map_location, verify) if shards else None
            saved = {"zero_stage": 0} if shard is None else shard["optimizer_state_dict"]
            if not is_deepspeeds(saved) and (zero_stages is None or int(saved["zero_stage"]) in zero_stages):
                return LoadedCheckpoint(str(path), name, own, shard, client)
        mine = {
            *models[position.dp_rank :: position.dp_world_size],
            *shards[position.dp_rank :: position.dp_world_size],
        }

        def verify_mine(path: Path) -> None:
            if path in mine:  # peers verify the others
                verify(path)

        parts = SavedParts(
            [own] if len(models) == 1 else [self._load_model(each, map_location, verify_mine) for each in models],
            [as_own_shard(self._load_shard(each, map_location, verify_mine), each) for each in shards],
        )
        return LoadedCheckpoint(str(path), name, own, None, client, parts)

    def _load_model(self, path: Path, map_location: Any, verify: Callable[[Path], None]) -> dict[str, Any]:
        verify(path)
        state = self.store_of(path).load(path, map_location, mmap=True)
        check_model_state(state, path, self.position)
        return cast(dict[str, Any], state)

    def _load_shard(self, path: Path, map_location: Any, verify: Callable[[Path], None]) -> dict[str, Any]:
        verify(path)
        state = self.store_of(path).load(path, map_location, mmap=True)
        check_shard(state, path)
        return cast(dict[str, Any], state)

    def _verifier(self, folder: Path, load_shard: bool) -> Callable[[Path], None]:
        """What to call with the path of each file that this rank is about to load; reads each file once. Checks the
        sizes of all files here, on the committing rank; without shards, of the model files."""
        store = self.store_of(folder)
        index = store.read_index(folder) if isinstance(store, IndexedStore) else None
        if index is None:
            return lambda path: None
        assert isinstance(store, IndexedStore)
        for entry in index.files if self.commits else ():
            if load_shard or layout.is_model_file(entry.name):
                store.verify(folder / entry.name, index, content=False)
        return cache(partial(store.verify, index=index, content=self._verify))

    def _agreed_tag(self, load_dir: str | Path, tag: str | None) -> str | None:
        """The tag to load, the same on all ranks: `tag`, or what `latest` names; None if there is no such file."""

        def find() -> str | None:
            directory = location(load_dir)
            if tag is not None:
                return check_tag(tag)
            return "." if is_dcp_folder(directory) else read_latest(directory)

        name = self.together(
            find, f"load {os.path.join(str(load_dir), layout.LATEST_FILE if tag is None else str(tag))}"
        )
        names, path = self._gather(name), location(load_dir) / layout.LATEST_FILE
        if len(set(names)) > 1:
            found = ", ".join(f"rank {rank}: {each or 'no such file'}" for rank, each in enumerate(names))
            raise CheckpointError(
                f"the ranks do not see the same file {path}, or were given different tags ({found}). "
                "Load one tag from a directory that all ranks share."
            )
        return name

    def together(self, step: Callable[[], T], what: str) -> T:
        """Run `step` on every rank; raise on every rank when it failed on one.

        A step that is a collective lets the peers know that this rank fails (`Sharding.among_peers`); they then raise
        `PeerFailed`, which is a consequence, not a cause.

        The rank that failed raises its own error, the others a `CheckpointError` with that error's text: whichever
        traceback is the last on the screen says what is wrong. `what` completes "cannot ...".
        """
        result, consequence = None, None
        try:
            result = step()
        except PeerFailed as error:
            consequence = error
        except Exception as error:
            self._gather(_reason(error))
            raise
        failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(self._gather(None)) if reason is not None]
        if failed:
            raise CheckpointError(f"cannot {what}: {'; '.join(dict.fromkeys(failed))}") from consequence
        if consequence is not None:
            raise consequence
        return cast(T, result)


def _reason(error: Exception) -> str:
    """An error in one line for the other ranks. Ours are sentences; others say little without their type."""
    return str(error) if isinstance(error, DeepSpeedError) else f"{type(error).__name__}: {error}"
