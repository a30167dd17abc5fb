"""`save_checkpoint` and `load_checkpoint`: the engine's state as values for the checkpointer, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed._version import __version__
from deepspeed.checkpoint import Checkpointer, LoadedCheckpoint, check_new_tag, create_store, validate_tag
from deepspeed.comm.values import all_gather_values
from deepspeed.config import DeepSpeedConfig, redacted
from deepspeed.engine.accumulation import Accumulation
from deepspeed.engine.events import tell
from deepspeed.engine.export import Export
from deepspeed.engine.module_state import check_module_state
from deepspeed.errors import CheckpointError
from deepspeed.optim.saved_state import check_saved_state
from deepspeed.precision import Precision
from deepspeed.zero.param_unit import saved_part, shape_of


class Saving(Export):
    """Mixed into `DeepSpeedEngine`, whose attributes it names here."""

    schedule: Accumulation
    precision: Precision
    basic_optimizer: Optimizer | None
    optimizer: Optimizer | None
    lr_scheduler: Any
    config: dict[str, Any]
    sparse_tensor_module_names: set[str]
    global_steps: int
    global_samples: int
    skipped_steps: int
    _config: DeepSpeedConfig

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save weights, optimizer, schedule and counters under `<save_dir>/<tag>`; every rank calls it.

        Args:
            tag: default `global_step<N>`.
            client_state: the user's own values, returned by `load_checkpoint`.
            save_latest: let the file `latest` name this checkpoint.
            exclude_frozen_parameters: leave parameters without gradient out.

        Returns:
            True. Failures raise CheckpointError on every rank, and the former checkpoint stays.
        """
        writes_model = self.checkpointer.writes_model

        def collect() -> tuple[str, dict[str, Any] | None, dict[str, Any] | None]:
            return (
                check_new_tag(f"global_step{self.global_steps}" if tag is None else tag),
                _model_state(self, exclude_frozen_parameters) if writes_model else None,
                _shard_state(self),
            )

        name, model_state, shard_state = self.checkpointer.together(collect, f"save a checkpoint in {save_dir}")
        validate_tag(name, self._config.checkpoint.tag_validation, _gather)
        self.checkpointer.save(
            save_dir,
            name,
            model_state=model_state,
            shard_state=shard_state,
            client_state=client_state,
            save_latest=save_latest,
        )
        tell("ds_checkpoint_saved", directory=save_dir, tag=name)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved; every rank calls it.

        Args:
            tag: default: the one that `latest` names.
            load_module_strict: the module's names must match exactly; shapes under common names must in any case.
            load_optimizer_states: False leaves the optimizer's state as it is; fp32 master weights start from the
                loaded weights.
            load_lr_scheduler_states: False leaves the schedule.
            load_module_only: weights only; counters stay too.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` instead of `load_state_dict`.

        Returns:
            The model file's path and the client state; (None, None), with a warning, if `tag` is None and there is no
            file `latest`.

        Raises:
            CheckpointError: on every rank, for a checkpoint that is missing or does not fit; nothing was changed.
            Exception: what the module, the scheduler or `custom_load_fn` raises while it takes its state; on the other
                ranks a CheckpointError with that reason. The model may then be loaded in part.
        """
        with_states = load_optimizer_states and not load_module_only and self.basic_optimizer is not None
        with_optimizer = with_states or self.sharding.stage == 3  # there the weights are in the optimizer's shards
        loaded = self.checkpointer.load(
            load_dir, tag, load_shard=with_optimizer and self.sharding.stage > 0, zero_stages=self._loadable_stages()
        )
        if loaded is None:
            return None, None
        state = loaded.model_state

        def check() -> None:
            if custom_load_fn is None:
                check_module_state(self.module, state["module"], strict=load_module_strict, source=loaded.path)
            if with_optimizer:
                _check_optimizer(self, loaded)

        def restore() -> None:
            self.sharding.before_load()
            self.sharding.zero_grad()  # those of micro-batches that were not stepped belong to other weights
            if custom_load_fn is not None:
                custom_load_fn(src=state["module"], dst=self.module)
            else:
                self.module.load_state_dict(state["module"], strict=load_module_strict)
            self.sharding.load_frozen(state.get("frozen_param_fragments") or {})
            if with_optimizer:
                _restore_optimizer(self, loaded, with_states=with_states)
            else:
                self.sharding.masters_from_weights()
            if not load_module_only:
                _restore_progress(self, state, load_lr_scheduler_states)

        for step in (check, restore):
            self.checkpointer.together(step, f"load {loaded.path}")
        if with_optimizer and loaded.shard_state is not None:
            self.sharding.publish_all()  # a collective: only after every rank has restored its shard
        return loaded.path, loaded.client_state

    def _loadable_stages(self) -> tuple[int, ...]:
        """Stages whose shards this run can take: 1 and 2 hold the same."""
        return (1, 2) if self.sharding.stage in (1, 2) else (self.sharding.stage,)


def create_checkpointer(engine: "Saving") -> Checkpointer:
    """The checkpointer of an engine; called when it is built."""
    sharding = engine.sharding
    store = engine._config.checkpoint.store
    return Checkpointer(
        gather=_gather,
        store=create_store(store.type, store.params),
        prefix="bf16_" if engine.precision.model_dtype == torch.bfloat16 else "",
        dp_rank=sharding.rank,
        dp_world_size=sharding.world_size,
        partitioned_model=sharding.stage == 3,
    )


def _model_state(engine: "Saving", exclude_frozen: bool) -> dict[str, Any]:
    """The content of `mp_rank_00_model_states.pt`."""
    module, sharding = engine.module, engine.sharding
    sharding.before_load()  # what is gathered would be saved whole
    named = list(module.named_parameters())
    frozen = {} if exclude_frozen else {name: param for name, param in named if not param.requires_grad}
    names = {id(param): name for name, param in named}
    return {
        "module": engine.module_state_dict(exclude_frozen_parameters=exclude_frozen),
        "buffer_names": [name for name, _ in module.named_buffers()],
        "optimizer": engine.optimizer.state_dict() if engine.optimizer is not None and sharding.stage == 0 else None,
        "param_shapes": [
            {names[id(param)]: shape_of(param) for param in params} for params in sharding.saved_parameters()
        ],
        "frozen_param_shapes": {name: shape_of(param) for name, param in frozen.items()},
        "frozen_param_fragments": {name: saved_part(param) for name, param in frozen.items()},
        "shared_params": {
            name: names[id(param)]
            for name, param in module.named_parameters(remove_duplicate=False)
            if names.get(id(param), name) != name
        },
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": engine.sparse_tensor_module_names,
        "skipped_steps": engine.skipped_steps,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "dp_world_size": sharding.world_size,
        "mp_world_size": 1,
        "ds_config": redacted(engine.config),
        "ds_version": __version__,
    }


def _shard_state(engine: "Saving") -> dict[str, Any] | None:
    """The content of this rank's `*_optim_states.pt`; None without sharding, where the model file has it all."""
    if engine.sharding.stage == 0 or (engine.basic_optimizer is None and engine.sharding.stage < 3):
        return None
    scaler = engine.precision.loss_scaler
    optimizer_state = {
        **engine.sharding.state_dict(),
        "loss_scaler": scaler.state_dict(),
        "dynamic_loss_scale": scaler.is_dynamic,
        "overflow": scaler.overflow,
        "clip_grad": engine.precision.clip_norm,
        "ds_version": __version__,
    }
    return {"optimizer_state_dict": optimizer_state, "ds_config": redacted(engine.config), "ds_version": __version__}


def _check_optimizer(engine: "Saving", loaded: LoadedCheckpoint) -> None:
    """Refuse an optimizer state that this run cannot take, before anything is changed."""
    if loaded.shard_state is not None:
        engine.sharding.check_state(loaded.shard_state["optimizer_state_dict"])
        return
    saved = loaded.model_state.get("optimizer")
    if not saved:
        raise CheckpointError(
            f"load {loaded.path}: found no optimizer state in it, so it was saved with ZeRO (stage 1 or above) and "
            "this run has stage 0; use the same stage, or load_optimizer_states=False"
        )
    has_masters, wants_masters = (
        "single_partition_of_fp32_groups" in saved,
        engine.optimizer is not engine.basic_optimizer,
    )
    if has_masters != wants_masters:
        raise CheckpointError(
            f"load {loaded.path}: found an optimizer state {'with' if has_masters else 'without'} fp32 masters, and "
            f"this run {'has' if wants_masters else 'has no'} masters; use the same precision, or "
            "load_optimizer_states=False"
        )
    if wants_masters:
        engine.sharding.check_state(saved)
        return
    assert engine.basic_optimizer is not None
    check_saved_state(engine.basic_optimizer, saved["state"].values(), saved["param_groups"])
    found = [len(group["params"]) for group in saved["param_groups"]]
    wanted = [len(group["params"]) for group in engine.basic_optimizer.param_groups]
    if found != wanted:
        raise CheckpointError(
            f"load {loaded.path}: found an optimizer state of groups of {found} parameters, this run has {wanted}; "
            "build the optimizer with the same groups, or load_optimizer_states=False"
        )


def _restore_optimizer(engine: "Saving", loaded: LoadedCheckpoint, *, with_states: bool = True) -> None:
    if loaded.shard_state is None:
        assert engine.optimizer is not None
        engine.optimizer.load_state_dict(loaded.model_state["optimizer"])
        return
    saved = loaded.shard_state["optimizer_state_dict"]
    engine.sharding.restore_state(saved, load_optimizer_states=with_states)
    if with_states and isinstance(saved.get("loss_scaler"), dict):
        engine.precision.loss_scaler.load_state_dict(saved["loss_scaler"])


def _restore_progress(engine: "Saving", state: Mapping[str, Any], with_scheduler: bool) -> None:
    """Counters and, with `with_scheduler`, the learning rate schedule."""
    engine.global_steps = int(state["global_steps"])
    engine.global_samples = int(state["global_samples"])
    engine.skipped_steps = int(state["skipped_steps"])
    engine.schedule.micro_steps = engine.global_steps * engine.schedule.num_steps
    if with_scheduler and engine.lr_scheduler is not None and state.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])


def _gather(value: Any) -> list[Any]:
    """Every rank's text, in rank order."""
    return all_gather_values(value) if comm.get_world_size() > 1 else [value]
