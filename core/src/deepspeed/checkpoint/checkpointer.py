"""`Checkpointer`: saves and loads this rank's part of a checkpoint.

The steps that ranks take together are in `save.py`; the reads of one rank are in `reader.py`. If one rank cannot write,
all raise with its reason, nothing is committed and `latest` does not change. `Ranks` gathers failures after each step,
so that no rank waits in a collective for one that has already failed."""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.index import DamagedCheckpoint, seal_of
from deepspeed.checkpoint.layout import is_dcp_folder, is_remote, location, store_failures
from deepspeed.checkpoint.load import LoadedCheckpoint, Position, why_no_latest
from deepspeed.checkpoint.model_ranks import Division
from deepspeed.checkpoint.reader import Reader
from deepspeed.checkpoint.save import (
    Save,
    describe_save,
    make_loadable,
    merge_client_state,
    save_here,
    save_in_background,
)
from deepspeed.checkpoint.saved_states import ModuleFiles
from deepspeed.checkpoint.store import IndexedStore, Store
from deepspeed.checkpoint.stores import ObjectStore, TorchStore, with_placeholders
from deepspeed.checkpoint.tags import (
    check_new_tag,
    check_same_tags,
    check_tag,
    last_good_tag,
    newest_first,
    read_latest,
)
from deepspeed.comm.failure import PeerFailed, held, let_through
from deepspeed.errors import CheckpointError, CommError, ConfigError, DeepSpeedError
from deepspeed.log import logger
from deepspeed.zero.redistribute import PendingTensor

T = TypeVar("T")
Gather = Callable[[str | None], list[str | None]]


def alone(value: str | None) -> list[str | None]:
    """Gather the value of the only rank."""
    return [value]


@dataclass(frozen=True)
class Ranks:
    """`Ranks` is this rank among those that share a checkpoint."""

    position: Position
    commits: bool
    """Whether this rank makes, commits and names checkpoints; exactly one does."""
    gather: Gather
    """A collective: takes this rank's text or None, returns every rank's, in rank order."""

    def together(
        self, step: Callable[[], T], what: str, *, among: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> T:
        """Run `step` on every rank; raise on every rank if it failed on one.

        An interrupt (Ctrl-C, SystemExit) is a failure, too. It is raised in a step, or after it; see `comm/failure.py`.

        The failing rank raises its own error, the others a `CheckpointError` with that error's text: whichever
        traceback is the last on the screen says what is wrong.

        Args:
            what: completes "cannot ...".
            among: context around a step that is a collective (`Sharding.among_peers`). If this rank fails, peers that
                wait in the collective raise `PeerFailed`, which is a consequence, not a cause. The context sees the
                error on all ranks, even if the collective had ended.
        """
        with held():
            result, consequence = None, None
            try:
                with among(), let_through():
                    result = step()
            except PeerFailed as error:
                consequence = error
            except BaseException as error:
                self.gather(_reason(error))
                raise
            failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(self.gather(None)) if reason is not None]
            if failed:
                with among():
                    raise CheckpointError(f"cannot {what}: {'; '.join(dict.fromkeys(failed))}") from (
                        consequence or PeerFailed(failed[0], failed[0])
                    )
            if consequence is not None:
                raise consequence
            return cast(T, result)


def _reason(error: BaseException) -> str:
    """Return an error as one line for the other ranks. Ours are sentences; others say little without their type."""
    if isinstance(error, DeepSpeedError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


#: by directory (`_identity`), the object that began the last asynchronous save into it
_last_in_background: "WeakValueDictionary[str, Checkpointer]" = WeakValueDictionary()


class Checkpointer:
    """`Checkpointer` saves and loads this rank's part of a checkpoint. Every rank's engine creates one.

    Args:
        gather: a collective over all ranks that share a checkpoint: takes this rank's text or None, returns every
            rank's, in rank order. It is the only communication here. Default: one rank.
        store: where bytes go; default `TorchStore`.
        prefix: prefix of the shard files: `"bf16_"` if the model trains in bf16, else empty.
        division: how the run divides its model over the model parallel ranks; None if the run does not know: then its
            saves load only on as many such ranks.
        partitioned_model: every data parallel rank has a model file of its own (ZeRO stage 3).
        module_files: which weights of the module have files of their own; None: none.
        layers, held_layers: as in `Position`.
        commits: whether this rank makes, commits and names checkpoints; default: the first rank. Exactly one does.
        verify: compare the checksums of the files that this rank loads with those in the checkpoint's index. Sizes are
            compared in any case.
        keep_last: after a save, remove the older tags of the directory so that this many stay; see `tags.plan_prune`.
            None removes nothing.
        background: makes saves asynchronous: `save` returns when this rank's states are copied, and a process writes
            them. It replaces `store` for saving.
    """

    def __init__(
        self,
        *,
        gather: Gather = alone,
        store: Store | None = None,
        prefix: str = "",
        dp_rank: int = 0,
        dp_world_size: int = 1,
        mp_rank: int = 0,
        mp_world_size: int = 1,
        division: Division | None = None,
        partitioned_model: bool = False,
        module_files: ModuleFiles | None = None,
        layers: Mapping[int, str] | None = None,
        held_layers: Collection[int] = (),
        commits: bool | None = None,
        verify: bool = True,
        keep_last: int | None = None,
        background: BackgroundWriter | None = None,
    ) -> None:
        self.position = Position(dp_rank, dp_world_size, mp_rank, mp_world_size, division, layers, held_layers)
        self.commits = (dp_rank == 0 and mp_rank == 0) if commits is None else commits
        self._ranks = Ranks(self.position, self.commits, gather)
        self.store: Store = TorchStore() if store is None else store
        self._objects = ObjectStore()
        self.prefix = prefix
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
        self.copies_later = background is not None  #: whether `save` takes `PendingTensor`s
        self._may_be_saving = False  # the same on all ranks
        self._partitioned_model = partitioned_model
        self.writes_experts = not partitioned_model and division is not None and division.is_first_holder(dp_rank)
        self._model_file = layout.model_file(mp_rank, dp_rank if partitioned_model else None)
        self._module_files = module_files
        if self.writes_experts and dp_rank > 0:
            assert module_files is not None
            assert module_files.expp_file is not None
            self._model_file = module_files.expp_file
        self._shard_file = layout.shard_file(dp_rank, mp_rank, prefix)
        self._rounding_file = layout.rounding_file(dp_rank, mp_rank)

    def store_of(self, path: Path) -> Store:
        """Return the store that keeps `path`: the store of this object, or for a URL the store of object stores."""
        return self._objects if is_remote(path) else self.store

    @property
    def writes_model(self) -> bool:
        """Whether `save` takes a `model_state` from this rank: on the first data parallel rank, on all in stage 3, and
        on the first of the ranks with the same experts."""
        return self.position.dp_rank == 0 or self._partitioned_model or self.writes_experts

    def save(
        self,
        save_dir: str | Path,
        tag: str,
        *,
        model_state: Mapping[str, Any] | None,
        shard_state: Mapping[str, Any] | None,
        rounding: Mapping[str, Any] | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> Path:
        """Save one checkpoint; every rank calls it. Returns the folder `<save_dir>/<tag>`.

        Args:
            model_state: content of the model file, keys of `layout.MODEL_STATE_KEYS`; None unless `writes_model`.
            shard_state: content of this rank's `*_optim_states.pt`; None if there is none (stage 0).
                With `background`, tensors may be `PendingTensor`s if the caller does not change them until
                `wait_for_copy` returns: a thread copies them after this method has returned.
            rounding: rounding errors that this rank has yet to send; None if nothing is rounded.
            client_state: the user's dict, which is stored beside the checkpoint's own keys in the model file.
            save_latest: let `latest` name this tag.

        Order: checks; an empty staging folder; every rank writes and fsyncs its files; one rank checks that all of
        them are there, puts the folder in its place and last of all updates `latest`. A tag that exists is replaced,
        and stays whole until then. After a failure the staging folder is removed.
        Errors: on every rank. The failing rank raises `ConfigError` for values that cannot be saved, `CheckpointError`
        for the disk; the others a `CheckpointError` that names the rank and its reason.

        With `background`, an earlier save is waited for first, and may raise. So is a save of another engine into the
        same directory, or `latest` would name whichever ends last. A failure after this method has returned is raised
        by `wait_for_save`, `raise_failure` or `close`, with the tag.
        """
        self.wait_for_save()
        what = f"save {os.path.join(str(save_dir), str(tag))}"

        def prepare() -> tuple[Path, str, dict[str, Any]]:
            folder, files = location(save_dir) / check_new_tag(tag), {}
            if model_state is not None:
                files.update(self._divided(merge_client_state(model_state, client_state or {})))
            if shard_state is not None:
                files[self._shard_file] = make_loadable(dict(shard_state), "the optimizer shard")
            if rounding is not None:
                files[self._rounding_file] = make_loadable(dict(rounding), "what is left to send")
            if self._background is None:
                files = {name: with_placeholders(state, PendingTensor.joined) for name, state in files.items()}
            return folder, _identity(folder.parent), files

        folder, directory, files = self.together(prepare, what)
        check_same_tags([str(each) for each in self._ranks.gather(folder.name)])
        if (other := _last_in_background.get(directory)) is not None:
            other.wait_for_save()
        ranks = {"dp_world_size": self.position.dp_world_size, "mp_world_size": self.position.mp_world_size}
        facts = {**describe_save(str(tag), model_state, shard_state), **ranks}
        save = Save(folder, files, facts, save_latest, self._keep_last, what)
        if self._background is None:
            with store_failures(save_dir):
                save_here(save, self._ranks, self.store_of(folder))
            return folder
        if is_remote(folder):
            raise ConfigError(
                f"checkpoint.async_save: found true for a save to {folder}, and asynchronous saves go to a folder "
                "only. Set async_save to false, or save to a folder and copy it."
            )
        self._may_be_saving = True  # set first: an interrupt may come after the order to write
        _last_in_background[directory] = self
        save_in_background(save, self._ranks, self._background)
        return folder

    def _divided(self, model_state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the content of each file that has a part of `model_state`, by the name of the file."""
        if self._module_files is None:
            return {self._model_file: model_state}
        return self._module_files.divide(model_state, self._model_file, self.position.dp_rank)

    def wait_for_save(self) -> None:
        """Wait until the save in flight is complete on all ranks; every rank calls it. Nothing if there is none.

        Raises:
            CheckpointError: on every rank: the save has failed, and some rank has not raised this before. A rank that
                has raised it in `raise_failure` raises it again with the others.
        """
        if self._background is not None and self._may_be_saving:
            self.together(self._background.finish, "complete the asynchronous save")
            self._may_be_saving = False

    def wait_for_copy(self) -> None:
        """Return when the `PendingTensor`s of this rank's save in flight are copied; not a collective. Raise nothing: a
        failed copy is a failed save."""
        if self._background is not None:
            self._background.wait_for_copy()

    def raise_failure(self) -> None:
        """Raise the error of the save in flight, if it has failed; neither wait nor communicate."""
        if self._background is not None:
            self._background.raise_failure()

    def close(self) -> None:
        """Wait for the save in flight of this rank, and end its writer process. Raises as `raise_failure` does."""
        self._may_be_saving = False
        if self._background is not None:
            self._background.close()

    def load_nearest(
        self, directories: Sequence[str], tag: str | None = None, **options: Any
    ) -> LoadedCheckpoint | None:
        """Load the newest tag that is whole in any of `directories`, from the nearest one that has it. Every rank calls
        it.

        A damaged tag is passed over with a warning, and so is a directory that cannot be read, if another one has a
        tag. Tags that were saved after the one that `latest` of their directory names are not looked at.

        Args:
            directories: the nearest first. With one, this is `load`.
            tag: look for this tag only.
            options: as for `load`.

        Raises:
            DamagedCheckpoint: on every rank: no directory has a tag that is whole.
        """
        if len(directories) == 1:
            return self.load(directories[0], tag, **options)
        self.wait_for_save()
        what = f"find {'a checkpoint' if tag is None else tag} in {' or '.join(directories)}"
        places = self.together(lambda: newest_first(directories, tag) if self.commits else None, what)
        listed = self._ranks.gather(json.dumps(places) if places is not None else None)
        damage = []
        for number, name in json.loads(next(filter(None, listed))):
            try:
                return self.load(directories[number], name, offers=False, **options)
            except DamagedCheckpoint as error:
                damage.append(str(error))
                if self.commits:
                    logger.warning("%s", error)
        if damage:
            raise DamagedCheckpoint(f"cannot {what}: no tag there is whole. {damage[0]}")
        return self.load(directories[0], tag, **options)

    def load(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        offers: bool = True,
        load_shard: bool = True,
        needs_states: bool = False,
        zero_stages: Collection[int] | None = None,
        names: Sequence[Sequence[str]] | None = None,
        map_location: Any = "cpu",
    ) -> LoadedCheckpoint | None:
        """Read one checkpoint; every rank calls it. Return None, with a warning, without a tag and without `latest`.

        Args:
            tag: default: the tag that `<load_dir>/latest` names.
            offers: after damage, name another tag that is whole.
            load_shard: read the optimizer's state too. The shards of stage 3 have the weights, so they are always read.
            needs_states: the optimizer's state must be there.
            zero_stages: stages whose shards the caller can load as they are, for example `(1, 2)`; None: any. Shards of
                another stage, or of another number of data-parallel ranks, are in `LoadedCheckpoint.parts`.
            names: names of the parameters in the caller's shards, by group, in their order. Shards with other names, or
                in another order, are in `LoadedCheckpoint.parts`, too; None: any.
            map_location: as for `torch.load`.

        Raises `CheckpointError` on every rank if a rank finds a file missing, damaged, refused or of a job of another
        shape; then nothing of the caller was changed.
        """
        self.wait_for_save()
        try:
            with store_failures(load_dir):
                name = self._agreed_tag(load_dir, tag)
        except DamagedCheckpoint as error:  # of this rank alone; the one raised below is raised on every rank
            raise CheckpointError(str(error)) from error
        directory = location(load_dir)
        if name is None:
            logger.warning(
                "no checkpoint was loaded, everything is as it was: there is no file %s. %s",
                directory / layout.LATEST_FILE,
                why_no_latest(directory),
            )
            return None
        reader = Reader(
            store=self.store_of(directory),
            position=self.position,
            checks_sizes=self.commits,
            verify=self._verify,
            partitioned_model=self._partitioned_model,
            load_shard=load_shard,
            needs_states=needs_states,
            zero_stages=zero_stages,
            names=names,
            map_location=map_location,
        )

        def read() -> LoadedCheckpoint:
            try:
                return reader.read(directory, name)
            except CommError as error:  # of this rank alone
                raise CheckpointError(str(error)) from error

        try:
            with store_failures(load_dir):
                return self.together(read, f"load {directory / name}")
        except CommError:  # there is nobody to agree with
            raise
        except BaseException as error:  # raised on every rank, by `together`
            is_damage = any(self._ranks.gather("damaged" if isinstance(error, DamagedCheckpoint) else None))
            offer = f" {self._offer(directory, name)}" if is_damage and offers else ""
            if is_damage and isinstance(error, Exception):
                raise DamagedCheckpoint(f"{error}{offer}") from error
            raise

    def _offer(self, directory: Path, damaged: str) -> str:
        """Name another tag that is whole, after a load found damage. A collective of all ranks."""
        share = (self.position.rank, self.position.world_size)
        tag = last_good_tag(self._ranks.gather, directory, damaged, lists=self.commits, share=share)
        return f"The last good tag there is {tag!r}: its files were verified now." if tag else "No other tag is whole."

    def _agreed_tag(self, load_dir: str | Path, tag: str | None) -> str | None:
        """Return the tag to load, the same on all ranks: `tag`, or the one in `latest`; None without `latest`."""

        def find() -> tuple[str | None, str | None]:
            directory = location(load_dir)
            if tag is not None:
                name: str | None = check_tag(tag)
            else:
                name = "." if is_dcp_folder(directory) else read_latest(directory)
            folder = None if name is None else layout.whole_folder(directory / name)
            return name, None if folder is None else seal_of(folder)

        name, seal = self.together(
            find, f"load {os.path.join(str(load_dir), layout.LATEST_FILE if tag is None else str(tag))}"
        )
        names, path = self._ranks.gather(name), location(load_dir) / layout.LATEST_FILE
        if len(set(names)) > 1:
            found = ", ".join(f"rank {rank}: {each or 'no such file'}" for rank, each in enumerate(names))
            raise CheckpointError(
                f"the ranks do not see the same file {path}, or were given different tags ({found}). "
                "Load one tag from a directory that all ranks share."
            )
        seals = {each: rank for rank, each in enumerate(self._ranks.gather(seal)) if each is not None}
        if len(seals) > 1:
            raise CheckpointError(
                f"{location(load_dir) / str(name)}: ranks {' and '.join(map(str, sorted(seals.values())))} found "
                f"different saves there (their {layout.INDEX_FILE} differ). Load one tag from a directory that all "
                "ranks share, while no job saves it."
            )
        return name

    def together(
        self, step: Callable[[], T], what: str, *, among: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> T:
        """Run `step` on every rank; raise on every rank if it failed on one. See `Ranks.together`."""
        return self._ranks.together(step, what, among=among)


def _identity(directory: Path) -> str:
    """Return the same text for each way to write a directory: relative, absolute, with links. URLs stay as they are."""
    return str(directory) if is_remote(directory) else os.path.realpath(directory)
