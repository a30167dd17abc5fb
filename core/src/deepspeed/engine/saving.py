"""`save_checkpoint` and `load_checkpoint`: the order in which values go from training to the checkpointer, and back.

With `checkpoint.on_sigterm` a job that is told to end saves first, on all ranks after the same step. Schedulers send
SIGTERM before a job ends, some to every process, some to one. A rank that receives the signal writes the number of the
next step to the job's store, which all ranks read after each step. No rank can finish a step without the others, so all
of them know the number by the end of that step.
"""

import itertools
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, Store

from deepspeed.checkpoint import Checkpointer, check_new_tag, create_store, validate_tag
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.layout import is_remote, location
from deepspeed.checkpoint.load import as_damage
from deepspeed.checkpoint.model_ranks import Division, SavedExperts
from deepspeed.checkpoint.saved_states import module_files
from deepspeed.comm.failure import held
from deepspeed.comm.give_up import begin_use, follow, standing
from deepspeed.comm.parted import RanksParted
from deepspeed.comm.values import Arrivals, all_gather_values, name_of
from deepspeed.config.checkpoint import CheckpointConfig, NebulaConfig
from deepspeed.engine.adapting import (
    as_deepspeeds_model,
    as_deepspeeds_shard,
    fit_module_state,
    frozen_parts,
    with_own_parts,
    with_own_states,
    with_own_weights,
)
from deepspeed.engine.training_state import TrainingState, changed_since, check_module_state, fill_module
from deepspeed.errors import CheckpointError, ConfigError, StateError, counted, first_line
from deepspeed.log import announce, warn_once
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import division_is_known, expert_groups, expert_sizes, parts_held, whole_names
from deepspeed.pipe.module import PipelineModule
from deepspeed.plugins import plugin_manager
from deepspeed.precision import FP16
from deepspeed.zero.fragments import safe_set_full_fp32_param
from deepspeed.zero.managed import manager_of

EXIT_CODE = 128 + signal.SIGTERM
_numbers = itertools.count()  # of engines, which ranks create in the same order


class SigtermWatch:
    """`SigtermWatch` notes SIGTERM instead of ending, until `close`. Every rank creates it in the main thread.

    Args:
        store: the job's store; None with one rank.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._key = f"deepspeed/sigterm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_numbers)}"
        self._was_told = False
        self._former: Any = None
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._former = signal.signal(signal.SIGTERM, self._note)
        else:
            warn_once("checkpoint.on_sigterm: initialize was not called in the main thread, which alone hears signals")

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM. A second signal changes nothing: launchers and schedulers both send one."""
        self._was_told = True
        if callable(self._former):
            self._former(number, frame)

    def is_due(self, step: int) -> bool:
        """Whether the job must end now. Every rank calls it after each step, with the number of steps made."""
        if self._store is None:
            return self._was_told
        if self._was_told:
            self._store.compare_set(self._key, "", str(step + 1))  # the first rank that writes decides
        return self._store.check([self._key]) and int(self._store.get(self._key)) <= step

    def close(self) -> None:
        """Restore the former SIGTERM handler, unless the script has set another one meanwhile."""
        if self._is_installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._former)
        self._is_installed = False


def watch_sigterm() -> SigtermWatch:
    """Create the watch for an engine that is being built."""
    alone = not torch_dist.is_initialized() or torch_dist.get_world_size() == 1
    return SigtermWatch(None if alone else torch_dist.distributed_c10d._get_default_store())


class Saving:
    """`Saving` saves and loads the state of training. `create_saving` builds it; the engine's methods call it.

    Args:
        state: the state to save.
        checkpointer: writes and reads this rank's files; it knows the rank's position in the job.
        gather: the checkpointer's collective: takes this rank's value, returns every rank's.
        tag_validation: "Ignore", "Warn" or "Fail": what to do if ranks save under different tags.
        deepspeed_sub_group_size: write DeepSpeed's form, with sub-groups of so many elements; None: ours.
        meet: waits until every rank makes the call of this name, and raises if one does not; None with one rank.
        load_dirs: from the argument of a load to the directories to look in, the nearest first.
        sigterm: the watch of `checkpoint.on_sigterm`.
    """

    def __init__(
        self,
        state: TrainingState,
        checkpointer: Checkpointer,
        *,
        gather: Callable[[Any], list[Any]],
        tag_validation: str,
        deepspeed_sub_group_size: int | None = None,
        meet: Callable[[str], object] | None = None,
        load_dirs: Callable[[str], list[str]] = lambda load_dir: [load_dir],
        sigterm: SigtermWatch | None = None,
    ) -> None:
        self.sigterm = sigterm
        self.last_dir: str | None = None  # of the last save or load
        self._state = state
        self.checkpointer = checkpointer
        self._gather = gather
        self._tag_validation = tag_validation
        self._sub_group_size = deepspeed_sub_group_size
        self._meet = meet
        self._load_dirs = load_dirs
        self._running = ""  # the call that is going on
        self._lock = threading.Lock()

    @contextmanager
    def one_at_a_time(self, call: str) -> Iterator[None]:
        """Refuse other calls of this object inside the context, and hold off signals that would part this rank from its
        peers.

        Raises:
            StateError: another call is running.
        """
        if not self._lock.acquire(blocking=False):
            raise StateError(
                f"{call}: found {self._running} going on; call it from one thread, after the other has returned, and "
                "not in a signal handler (set a flag there, and save after the step)"
            )
        self._running = call
        begin_use()
        try:
            with held():
                yield
        finally:
            self._lock.release()

    def save(
        self,
        save_dir: str,
        tag: str | None,
        *,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        exclude_frozen: bool,
    ) -> None:
        """See `DeepSpeedEngine.save_checkpoint`."""
        self.last_dir = save_dir
        state, checkpointer = self._state, self.checkpointer
        self._refuse_unknown_experts("save_checkpoint")
        self._refuse_to_save_borrowed()
        self._begin("save_checkpoint", exclude_frozen_parameters=exclude_frozen)
        checkpointer.wait_for_save()  # before the states are collected, which takes memory

        def collect() -> tuple[str, dict[str, Any] | None]:
            name = check_new_tag(f"global_step{state.training.progress.global_steps}" if tag is None else tag)
            if not checkpointer.writes_model:
                return name, None
            return name, state.for_model_file(
                mp_world_size=checkpointer.position.mp_world_size,
                division=checkpointer.position.division,
                only_experts=checkpointer.writes_experts and checkpointer.position.dp_rank > 0,
                exclude_frozen=exclude_frozen,
            )

        # in three calls: shards are collected by collectives of all ranks, so no rank may have failed before
        what = f"save a checkpoint in {save_dir}"
        checkpointer.together(state.sharding.release_gathered, what)  # gathered parameters would be saved whole
        name, model_state = checkpointer.together(collect, what)
        is_pending = checkpointer.copies_later and self._sub_group_size is None
        among = state.sharding.among_peers
        shard_state = checkpointer.together(lambda: state.for_shard_file(is_pending=is_pending), what, among=among)
        frozen = checkpointer.together(lambda: state.frozen_parts(exclude_frozen=exclude_frozen), what, among=among)
        if model_state is not None:
            model_state["frozen_param_fragments"] = frozen
        model_state, shard_state, rounding = checkpointer.together(
            lambda: (*self._in_form(model_state, shard_state), state.rounding()), what
        )
        validate_tag(name, self._tag_validation, self._gather)
        checkpointer.save(
            save_dir,
            name,
            model_state=model_state,
            shard_state=shard_state,
            rounding=rounding,
            client_state=client_state,
            save_latest=save_latest,
        )
        announce(f"checkpoint {os.path.join(save_dir, name)} is {'being written' if is_pending else 'saved'}")
        plugin_manager().notify("ds_checkpoint_saved", directory=save_dir, tag=name)

    def wait(self) -> None:
        """See `DeepSpeedEngine.wait_for_checkpoint`."""
        self._begin("wait_for_checkpoint")
        self.checkpointer.wait_for_save()

    def _begin(self, call: str, **arguments: Any) -> None:
        """Wait for the other ranks, and refuse different `arguments`: ranks would then wait in different
        collectives."""
        if self._meet is None:
            return
        try:
            self._meet(call)
        except RanksParted:  # the others fail in a step, or in another call
            self._state.sharding.gradients.abandon()
            raise
        follow(self._gather(standing()))  # a rank may not know of another's failure, such as one during an update
        given = self._gather(repr(arguments)) if arguments else []
        if len(set(given)) > 1:
            raise CheckpointError(
                f"{call}: the ranks were given different arguments: "
                f"{', '.join(f'rank {rank}: {each}' for rank, each in enumerate(given))}. Pass the same on every rank."
            )

    def _refuse_to_save_borrowed(self) -> None:
        """Refuse an engine without optimizer whose weights another engine shards: the checkpoint would have them in a
        form that no run has."""
        borrowed = self._state.sharding.borrowed_names()
        if borrowed and not self._state.has_optimizer:
            raise StateError(
                f"save_checkpoint: found {counted(len(borrowed), 'parameter')}, such as {borrowed[0]!r}, that another "
                "engine trains or has sharded at zero_optimization.stage 3; call save_checkpoint on that engine, or "
                "destroy() it and build this one again"
            )

    def _refuse_unknown_experts(self, asked: str) -> None:
        division = self.checkpointer.position.division
        if division is None or not division.experts:
            self._state.sharding.units.ranks.refuse_divided_experts(asked)

    def _names_elsewhere(self) -> frozenset[str]:
        """Return the names, in the undivided model, of the weights and buffers that other ranks of this run have.
        A collective."""
        own = whole_names(self._state.module)
        return frozenset(name for each in self._gather(json.dumps(own)) for name in json.loads(each)) - set(own)

    def _in_form(
        self, model_state: dict[str, Any] | None, shard_state: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the contents of the files in the form that `checkpoint.format` asks for."""
        sharding, size = self._state.sharding, self._sub_group_size
        if size is None:
            return model_state, shard_state
        return (
            None if model_state is None else as_deepspeeds_model(model_state, sharding, size),
            None if shard_state is None else as_deepspeeds_shard(shard_state, sharding, size),
        )

    def load(
        self,
        load_dir: str,
        tag: str | None,
        *,
        strict: bool,
        with_optimizer: bool,
        with_scheduler: bool,
        module_only: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See `DeepSpeedEngine.load_checkpoint`."""
        load_dirs = self._load_dirs(load_dir)
        self.last_dir = load_dir if load_dir in load_dirs else load_dirs[0]
        state, sharding = self._state, self._state.sharding
        self._refuse_unknown_experts("load_checkpoint")
        self._begin("load_checkpoint", load_optimizer_states=with_optimizer, load_module_only=module_only)
        with_states = with_optimizer and not module_only and state.has_optimizer
        found = self.checkpointer.load_nearest(
            load_dirs,
            tag,
            load_shard=with_states or sharding.stage == 3,
            needs_states=with_states,
            zero_stages=state.loadable_stages if with_states else (),  # weights are found by name
            names=state.trained_names(),
        )
        if found is None:
            return None, None
        loaded = found
        elsewhere = self._names_elsewhere() if found.model_ranks else frozenset()
        weights: dict[str, Any] = {}
        changed: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

        def check() -> None:
            with as_damage(found.path):
                check_all()

        def check_all() -> None:
            nonlocal loaded, weights
            loaded = with_own_parts(loaded, state, elsewhere)
            loaded = with_own_weights(loaded, state, with_states=with_states)
            weights = fit_module_state(state.module, loaded.model_state, compares_shapes=loaded.stored is None)
            if custom_load_fn is None:
                check_module_state(state.module, weights, strict=strict, source=loaded.path)
            loaded = with_own_states(loaded, state, with_states=with_states)
            if with_states or loaded.has_masters:
                state.check_optimizer(loaded, with_states=with_states, strict=strict)
            if not module_only:
                state.check_progress(loaded, with_scheduler=with_scheduler)

        def restore() -> None:
            nonlocal changed
            sharding.gradients.zero_grad()  # gradients of micro-batches without a step belong to other weights
            fill_module(state.module, weights, strict=strict, custom_load_fn=custom_load_fn)
            if custom_load_fn is not None:
                changed = changed_since(state.module, weights)

        def restore_shards() -> None:
            sharding.load_frozen(frozen_parts(state.module, loaded.model_state))
            if with_states or loaded.has_masters:
                state.restore_optimizer(loaded, with_states=with_states)
            else:
                sharding.masters_from_weights()
            state.restore_rounding(loaded if with_states else None)

        def restore_progress() -> None:
            if not module_only:
                state.restore_progress(loaded.model_state, with_scheduler=with_scheduler)

        def restore_weights() -> None:
            if loaded.has_masters:
                sharding.weights_from_masters()  # only after every rank has restored its shard
            if state.training.moq is not None:
                state.training.moq.round_again()
            for param, value in changed:  # the saved master weights have other values
                if manager_of(param) is sharding:
                    safe_set_full_fp32_param(param, value)

        what = f"load {loaded.path}"
        for step in (sharding.release_gathered, sharding.release_borrowed, check):
            self.checkpointer.together(step, what)
        try:
            self.checkpointer.together(restore, what)
            self.checkpointer.together(restore_shards, what, among=sharding.among_peers)
            self.checkpointer.together(restore_progress, what)
            self.checkpointer.together(restore_weights, what, among=sharding.among_peers)
        except BaseException as error:
            sharding.states.broken_by = f"load_checkpoint failed before all was restored ({first_line(error)})"
            sharding.accept_load()  # else a later context would take the load for a change by the script
            raise
        if with_states or not state.has_optimizer:
            sharding.states.restored()
        parts = "weights and optimizer" if with_states else "weights"
        after = "" if module_only else f", after step {state.training.progress.global_steps}"
        announce(f"loaded {parts} from {os.path.dirname(loaded.path)}{after}")
        if not module_only:
            self._say_batch_size(loaded.model_state)
        return loaded.path, loaded.client_state

    def _say_batch_size(self, saved: Mapping[str, Any]) -> None:
        """Log a message if the run that saved the model file used another number of samples per step."""
        size = self._state.training.train_batch_size
        former = _batch_size(saved.get("ds_config"), saved.get("dp_world_size"))
        if former in (None, size):
            return
        if saved.get("global_samples") != former * saved.get("global_steps", 0):
            return  # the run's batches differed from its configuration, since ranks may have shared samples
        announce(
            f"train_batch_size is {size}, and was {former} when the checkpoint was saved: schedules count steps, which "
            "have other numbers of samples now"
        )


def _batch_size(config: Any, world_size: Any) -> int | None:
    """Return the number of samples per step that a configuration asks for; None if it does not say."""
    if not isinstance(config, Mapping):
        return None
    size = config.get("train_batch_size")
    if size is None:
        factors = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps", 1), world_size
        size = math.prod(factors) if all(isinstance(factor, int) for factor in factors) else None
    return size if isinstance(size, int) else None


def create_saving(
    section: CheckpointConfig, nebula: NebulaConfig, state: TrainingState, mesh: Mesh, *, sub_group_numel: int
) -> Saving:
    """Create the part of the engine that saves and loads. `build.py` calls it once.

    Args:
        sub_group_numel: `zero_optimization.sub_group_size`, by which DeepSpeed's files are divided.
    """
    gather = partial(_gather, group=mesh.norm_group)
    sharding = state.sharding
    pipeline = state.module if isinstance(state.module, PipelineModule) else None
    checkpointer = Checkpointer(
        gather=gather,
        store=create_store(section.store.type, section.store.params),
        prefix="bf16_" if state.training.precision.model_dtype == torch.bfloat16 else "",
        dp_rank=sharding.rank,
        dp_world_size=sharding.world_size,
        mp_rank=mesh.model_rank,
        mp_world_size=mesh.model_size,
        division=_division(state.module, mesh),
        partitioned_model=sharding.stage >= 3,
        module_files=module_files(state.module, mesh, sharding.stage),
        layers=pipeline.layer_prefixes() if pipeline else None,
        held_layers=pipeline.saved_layers() if pipeline else (),
        verify=section.verify,
        keep_last=nebula.keep_last if section.keep_last is None else section.keep_last,
        background=_background(section, nebula),
    )
    if checkpointer.copies_later:
        sharding.states.wait_for_copy = checkpointer.wait_for_copy
    meet = None
    if len(ranks := torch_dist.get_process_group_ranks(mesh.norm_group)) > 1:
        meet = Arrivals(ranks, f"saves of ranks {name_of(ranks)}", section.wait_s).wait_for_all
    return Saving(
        state,
        checkpointer,
        gather=gather,
        tag_validation=section.tag_validation,
        deepspeed_sub_group_size=_deepspeed_sub_group_size(section, state, sub_group_numel),
        meet=meet,
        load_dirs=nebula.load_dirs,
        sigterm=watch_sigterm() if section.on_sigterm else None,
    )


def _background(section: CheckpointConfig, nebula: NebulaConfig) -> BackgroundWriter | None:
    """Create this rank's side of asynchronous saves; None: saves are synchronous."""
    if not (section.async_save or nebula.enabled):
        return None
    persistent = None
    if (directory := nebula.persistent_dir) is not None:
        place = location(directory)  # a URL that cannot be used is refused here
        persistent = {
            "directory": directory if is_remote(place) else str(place.absolute()),
            "interval_s": nebula.persistent_time_interval,
            "keep_last": nebula.num_of_version_in_retention,
        }
    return BackgroundWriter(section.wait_s, persistent)


def _division(module: torch.nn.Module, mesh: Mesh) -> Division | None:
    """Return the division of the model for checkpoints; None if the caller divided the model without marking parts."""
    axes, parts = {axis: mesh.size(axis) for axis in ("pp", "tp")}, parts_held(module)
    if axes["pp"] > 1 and not getattr(module, "names_are_global", False):
        return None
    if axes["tp"] > 1 and not division_is_known(module):
        return None
    experts, group_of = {}, expert_groups(module)
    for group_name, ep_size in expert_sizes(module).items():
        names = [name for name, found in group_of.items() if found == group_name]
        if ep_size > 1:
            places = mesh.ranks("dp", "sp")
            holders = [places.index(rank) for rank in mesh.experts(ep_size).ranks("edp")]
            experts[group_name] = SavedExperts(tuple(holders), tuple(names))
    if any(name not in parts for each in experts.values() for name in each.names):
        return None
    return Division(axes, parts, experts)


def _deepspeed_sub_group_size(section: CheckpointConfig, state: TrainingState, numel: int) -> int | None:
    stage = state.sharding.stage
    if section.format != "deepspeed":
        return None
    if stage == 3 and isinstance(state.training.precision, FP16):
        raise ConfigError(
            "checkpoint.format: found 'deepspeed' with fp16 and zero_optimization.stage 3, whose loss scale this "
            "version cannot write for DeepSpeed; use bf16 or stage 2, or omit the key"
        )
    if stage == 0:
        raise ConfigError(
            "checkpoint.format: found 'deepspeed' with zero_optimization.stage 0, whose files have the optimizer's "
            "state in another form; use stage 1, which loads in any stage here, or omit the key"
        )
    return numel


def _gather(value: Any, group: ProcessGroup) -> list[Any]:
    """Return the values of all ranks of `group`, which share a checkpoint, in rank order."""
    return all_gather_values(value, group) if group.size() > 1 else [value]
