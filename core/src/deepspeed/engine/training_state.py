"""Convert the state of training to plain values for a checkpoint, and back. Called by `saving.py`.

`check_module_state` compares saved weights with the module before they are loaded: `load_state_dict` overwrites what
fits, and complains only afterwards.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed._version import __version__
from deepspeed.checkpoint import LoadedCheckpoint
from deepspeed.checkpoint.model_ranks import DIVISION, Division
from deepspeed.checkpoint.saved_states import PARAM_NAMES
from deepspeed.checkpoint.stores import map_tensors
from deepspeed.checkpoint.tensors import StoredTensor
from deepspeed.engine.training import Training
from deepspeed.errors import CheckpointError, counted
from deepspeed.log import warn_once
from deepspeed.optim.saved_state import (
    check_each_state,
    check_needed,
    check_numbers,
    check_options,
    check_saved_state,
    check_schedule,
    check_state,
)
from deepspeed.zero import named_states
from deepspeed.zero import state_dict as sharded_states
from deepspeed.zero.param_unit import shape_of, unit_of
from deepspeed.zero.redistribute import IS_OURS, as_it_is, saved_part
from deepspeed.zero.sharding import Sharding

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class SavedPart(Protocol):
    """A part of training with a state of its own, which is the same on all ranks that share a part of the model."""

    def state_dict(self) -> dict[str, Any] | None: ...

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a state that `load_state_dict` could not take."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of a module and of its training. Built by `build.py`.

    Args:
        config: as the user wrote it, without its secrets; saved.
        sparse_tensor_module_names: weights of embeddings, whose gradients may be sparse.
        parts: other parts that have a state, by key of the model file.
    """

    module: torch.nn.Module
    training: Training
    config: Mapping[str, Any]
    sparse_tensor_module_names: set[str]
    parts: Mapping[str, SavedPart] = field(default_factory=dict)

    @property
    def sharding(self) -> Sharding:
        return self.training.sharding

    @property
    def has_optimizer(self) -> bool:
        return self.training.basic_optimizer is not None

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer's own state dict is the engine's, with master weights."""
        return self.training.optimizer is not self.training.basic_optimizer

    def for_model_file(
        self, *, mp_world_size: int, division: Division | None, only_experts: bool, exclude_frozen: bool
    ) -> dict[str, Any]:
        """Return the content of `mp_rank_XX_model_states.pt`, with the keys of `checkpoint.MODEL_STATE_KEYS`.

        Args:
            only_experts: save no weights but those of experts that this rank is the first to hold; the first rank saves
                the others.
        """
        module, sharding, progress = self.module, self.sharding, self.training.progress
        lr_scheduler = self.training.lr_scheduler
        named = list(module.named_parameters())
        untrained = self._untrained(exclude_frozen=exclude_frozen)
        names = {id(param): name for name, param in named}
        with as_it_is():
            weights = module_state_dict(module, exclude_frozen=exclude_frozen)
        optimizer = self._whole_optimizer_state(names) if sharding.stage == 0 else None
        if only_experts and division is not None:
            firsts = [each for each in division.experts.values() if each.holders[0] == sharding.rank]
            own = {name for each in firsts for name in each.names}
            weights = {name: value for name, value in weights.items() if name in own}
            optimizer = _states_of(own, optimizer)
        return {
            "module": weights,
            "buffer_names": [name for name, _ in module.named_buffers()],
            "optimizer": optimizer,
            "param_shapes": [
                {names[id(param)]: shape_of(param) for param in params} for params in sharding.units.saved_parameters()
            ],
            "frozen_param_shapes": {name: shape_of(param) for name, param in untrained.items()},
            "frozen_param_fragments": {},  # filled by `frozen_parts`
            "shared_params": {
                name: names[id(param)]
                for name, param in module.named_parameters(remove_duplicate=False)
                if names.get(id(param), name) != name
            },
            "lr_scheduler": lr_scheduler.state_dict() if lr_scheduler is not None else None,
            "data_sampler": None,
            "random_ltd": None,
            **{name: part.state_dict() for name, part in self.parts.items()},
            "sparse_tensor_module_names": self.sparse_tensor_module_names,
            "skipped_steps": progress.skipped_steps,
            "global_steps": progress.global_steps,
            "global_samples": progress.global_samples,
            "dp_world_size": sharding.world_size,
            "mp_world_size": mp_world_size,
            **({} if division is None else {DIVISION: division.to_state()}),
            "ds_config": self.config,
            "ds_version": __version__,
        }

    def _whole_optimizer_state(self, names: Mapping[int, str]) -> dict[str, Any] | None:
        """Return the optimizer's own state dict. Torch's identifies parameters by number, and another run may order
        them differently, so the parameter names are added."""
        optimizer, basic = self.training.optimizer, self.training.basic_optimizer
        if optimizer is None or basic is None:
            return None
        state = optimizer.state_dict()
        if not self.has_masters:
            state[PARAM_NAMES] = [[names[id(param)] for param in group["params"]] for group in basic.param_groups]
        return state

    def frozen_parts(self, *, exclude_frozen: bool) -> dict[str, torch.Tensor]:
        """Return this rank's part of each parameter that no optimizer trains, to be saved. A collective in stage 3."""
        untrained = self._untrained(exclude_frozen=exclude_frozen)
        return {name: saved_part(param) for name, param in untrained.items()}

    def _untrained(self, *, exclude_frozen: bool) -> dict[str, torch.nn.Parameter]:
        """Return frozen parameters; in stage 3 also others that the optimizer lacks, since no shard holds them."""
        trained = {param for params in self.sharding.units.saved_parameters() for param in params}
        return {
            name: param
            for name, param in self.module.named_parameters()
            if not (param.requires_grad or exclude_frozen)
            or (self.sharding.stage == 3 and param.requires_grad and param not in trained)
        }

    def for_shard_file(self, *, is_pending: bool) -> dict[str, Any] | None:
        """Return the content of this rank's `*_optim_states.pt`; None if the model file has it all (no sharding).

        Args:
            is_pending: use `PendingTensor`s for tensors in host memory.
        """
        if self.sharding.stage == 0 or (not self.has_optimizer and self.sharding.stage < 3):
            return None
        precision = self.training.precision
        scaler = precision.loss_scaler
        optimizer_state = {
            **sharded_states.collect(self.sharding, is_pending=is_pending),
            "loss_scaler": scaler.state_dict(),
            "dynamic_loss_scale": scaler.is_dynamic,
            "overflow": scaler.overflow,
            "clip_grad": precision.clip_norm,
            "ds_version": __version__,
        }
        return {
            "optimizer_state_dict": optimizer_state,
            "ds_config": self.config,
            "ds_version": __version__,
        }

    def rounding(self) -> dict[str, Any] | None:
        """Return the rounding errors that this rank has yet to send; None if nothing is rounded."""
        return self.sharding.options.stage.rounding(self.sharding.units)

    def restore_rounding(self, loaded: LoadedCheckpoint | None) -> None:
        """Restore the rounding errors of this rank, if the save had as many ranks; None: begin without errors."""
        saved = None
        if loaded is not None and loaded.model_state.get("dp_world_size") == self.sharding.world_size:
            saved = loaded.rounding
        self.sharding.options.stage.restore_rounding(self.sharding.units, saved)

    @property
    def loadable_stages(self) -> tuple[int, ...]:
        """Stages whose shards this run can load; stages 1 and 2 hold the same."""
        return (1, 2) if self.sharding.stage in (1, 2) else (self.sharding.stage,)

    def trained_names(self) -> list[list[str]]:
        """Return the names of the parameters that the optimizer trains, by group, in the order of a checkpoint."""
        by_id = {id(param): name for name, param in self.module.named_parameters()}
        return [[by_id.get(id(param), "") for param in group] for group in self.sharding.units.saved_parameters()]

    def check_optimizer(self, loaded: LoadedCheckpoint, *, with_states: bool, strict: bool) -> None:
        """Refuse an optimizer state that this run cannot take, before anything is changed.

        Args:
            strict: as `load_module_strict`, for weights that are stored in the optimizer's shards, as in stage 3.

        Raises:
            CheckpointError: says what was found and how this run differs.
        """
        scaler = self.training.precision.loss_scaler
        if loaded.by_name is not None:
            named_states.check(self.sharding, loaded.by_name.states, with_states=with_states, strict=strict)
            if with_states and isinstance(loaded.by_name.loss_scaler, dict):
                scaler.check_state_dict(loaded.by_name.loss_scaler)
            return
        if loaded.shard_state is not None:
            saved = loaded.shard_state["optimizer_state_dict"]
            sharded_states.check(self.sharding, saved, with_states=with_states)
            if with_states and isinstance(saved.get("loss_scaler"), dict):
                scaler.check_state_dict(saved["loss_scaler"])
            return
        self._check_torch_state(loaded.model_state["optimizer"], loaded.path)

    def _check_torch_state(self, saved: Mapping[str, Any], path: str) -> None:
        optimizer = self.training.basic_optimizer
        assert optimizer is not None
        check_saved_state(optimizer, saved["state"].values(), saved["param_groups"])
        check_each_state(optimizer, saved["state"].values())
        found = [len(group["params"]) for group in saved["param_groups"]]
        wanted = [len(group["params"]) for group in optimizer.param_groups]
        if found != wanted:
            raise CheckpointError(
                f"load {path}: found an optimizer state of groups of {found} parameters, this run has {wanted}; "
                "build the optimizer with the same groups, or load_optimizer_states=False"
            )
        check_options(optimizer, saved["param_groups"])
        check_numbers(saved["param_groups"])
        for there, here in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            for number, param in zip(there["params"], here["params"], strict=True):
                state = saved["state"].get(number, {})
                check_state(state, f"parameter {number}", numel=param.numel(), dtype=param.dtype)
                check_needed(optimizer, there, [state])

    def restore_optimizer(self, loaded: LoadedCheckpoint, *, with_states: bool) -> None:
        """Restore master weights and, with `with_states`, optimizer state and loss scale, after `check_optimizer`."""
        if loaded.by_name is not None:
            named_states.restore(self.sharding, loaded.by_name.states, with_states=with_states)
            self._restore_loss_scaler(loaded.by_name.loss_scaler, with_states=with_states)
            return
        if loaded.shard_state is None:
            assert self.training.optimizer is not None
            # torch's optimizer keeps what it gets
            own = map_tensors(loaded.model_state["optimizer"], torch.Tensor.clone)
            for group in own["param_groups"]:
                group.pop(PARAM_NAMES, None)  # this run's stay
            self.training.optimizer.load_state_dict(own)
            return
        saved = loaded.shard_state["optimizer_state_dict"]
        sharded_states.restore(self.sharding, saved, load_optimizer_states=with_states)
        self._restore_loss_scaler(saved.get("loss_scaler"), with_states=with_states)

    def _restore_loss_scaler(self, saved: Any, *, with_states: bool) -> None:
        if with_states and isinstance(saved, dict):
            self.training.precision.loss_scaler.load_state_dict(saved)

    def check_progress(self, loaded: LoadedCheckpoint, *, with_scheduler: bool) -> None:
        """Refuse a file that `restore_progress` could not load: counters are missing, or the state of the learning rate
        schedule, or of another part, does not fit."""
        state, scheduler = loaded.model_state, self.training.lr_scheduler
        if missing := [name for name in _COUNTERS if name not in state]:
            raise CheckpointError(
                f"{loaded.path} is damaged, or was not saved as a checkpoint: found no {', no '.join(missing)} in it, "
                "which training goes on from; nothing was loaded. Load another tag, or the weights alone with "
                "load_module_only=True."
            )
        if with_scheduler and scheduler is not None and state.get("lr_scheduler") is not None:
            check_schedule(scheduler, state["lr_scheduler"])
        for name, part in self.parts.items():
            if state.get(name) is not None:
                part.check_state_dict(state[name])

    def restore_progress(self, state: Mapping[str, Any], *, with_scheduler: bool) -> None:
        """Restore counters and, with `with_scheduler`, the learning rate schedule."""
        training = self.training
        for name in _COUNTERS:
            setattr(training.progress, name, int(state[name]))
        training.schedule.micro_steps = training.progress.global_steps * training.schedule.num_steps
        if with_scheduler and training.lr_scheduler is not None and state.get("lr_scheduler") is not None:
            training.lr_scheduler.load_state_dict(state["lr_scheduler"])
        for name, part in self.parts.items():
            if state.get(name) is not None:
                part.load_state_dict(state[name])
            else:
                warn_once(
                    f"load_checkpoint: found no {name} in the checkpoint, which this run's configuration asks for; it "
                    "goes on as it is"
                )


def _states_of(names: Collection[str], optimizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a torch optimizer state dict with the states of the named parameters only; another form unchanged."""
    if optimizer is None or PARAM_NAMES not in optimizer:
        return optimizer
    by_group = zip(optimizer["param_groups"], optimizer[PARAM_NAMES], strict=True)
    kept = {
        number for group, its in by_group for number, name in zip(group["params"], its, strict=True) if name in names
    }
    return {**optimizer, "state": {number: state for number, state in optimizer["state"].items() if number in kept}}


_SHOWN = 6  # names in one message
_FILLED = "num_batches_tracked"  # torch's batch norms fill it in where it is older than their counter
_VERSION_WITH_COUNTER = 2
_EXTRA = "_extra_state"  # torch's key of what a module's `get_extra_state` gives


def check_module_state(module: torch.nn.Module, saved: Mapping[str, Any], *, strict: bool, source: str) -> None:
    """Refuse weights that `module.load_state_dict(saved, strict)` would refuse. Called before it, on each rank.

    Args:
        strict: names must match too; otherwise only the shapes under common names must.
        source: name of the weights in the message: a path, or the call that got them.

    `load_state_dict` itself checks names that a hook after the load may forgive, and everything below a module that
    translates older weights (a hook before the load, or a `_load_from_state_dict` of its own).

    Raises:
        CheckpointError: says which names and shapes; nothing was changed.
    """
    if getattr(module.load_state_dict, "__func__", None) is not torch.nn.Module.load_state_dict:
        return
    children = [(f"{name}." if name else "", child) for name, child in module.named_modules(remove_duplicate=False)]
    translated = tuple(prefix for prefix, child in children if _translates(child))
    own = {prefix + name: value for prefix, child in children for name, value in _held(child)}
    own = {name: value for name, value in own.items() if not name.startswith(translated)}
    theirs = {name: value for name, value in saved.items() if not name.startswith(translated)}
    misfits = [
        f"{name} is {_shape(theirs[name])} there and {_shape(value)} in the model"
        for name, value in own.items()
        if name in theirs and not _fits(theirs[name], value)
    ]
    faults = list(misfits)
    missing: list[str] = []
    if strict and not any(child._load_state_dict_post_hooks for _, child in children):
        versions = getattr(saved, "_metadata", None) or {}
        filled = {prefix + _FILLED for prefix, child in children if _fills(child, versions.get(prefix[:-1], {}))}
        missing = [name for name in own if name not in theirs and name not in filled]
        faults += [f"{name} is missing there" for name in missing]
        faults += [f"{name} is not in the model" for name in theirs if name not in own]
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        if len(faults) == len(missing) and all(_is_frozen(own[name]) for name in missing):
            raise CheckpointError(
                f"{source}: the frozen parameters {', '.join(missing[:_SHOWN])}{more} are missing there, as after a "
                "save with exclude_frozen_parameters=True. Nothing was loaded; say strict=False (load_module_strict) "
                "to keep their values in the model"
            )
        advice = "" if misfits else ", or say strict=False (load_module_strict) to leave out what only one side has"
        raise CheckpointError(
            f"{source}: the weights are of another model: {'; '.join(faults[:_SHOWN])}{more}. Nothing was loaded; "
            f"build the model of the save{advice}"
        )


def fill_module(
    module: torch.nn.Module, saved: Mapping[str, Any], *, strict: bool, custom_load_fn: Callable[..., Any] | None
) -> None:
    """Load checked weights with `load_state_dict` or the user's `custom_load_fn(src=, dst=)`."""
    stacked = {name: value for name, value in saved.items() if isinstance(value, StoredTensor)}
    with as_it_is():
        if custom_load_fn is not None:
            custom_load_fn(src={**saved, **{name: value.whole() for name, value in stacked.items()}}, dst=module)
            return
        if stacked:
            saved = copy.copy(saved)  # keeps `_metadata`
        own = module.state_dict(keep_vars=True) if stacked else {}
        for name, value in stacked.items():
            if name in own:
                own[name].detach().view(-1).copy_(value.whole().view(-1))
                saved[name] = own[name].detach()  # type: ignore[index]
        module.load_state_dict(saved, strict=strict)


def changed_since(module: torch.nn.Module, saved: Mapping[str, Any]) -> list[tuple[torch.nn.Parameter, Tensor]]:
    """Return the parameters to which a `custom_load_fn` gave other values than the saved ones, with the new values.
    Sharded parameters are left out, with a warning: the function did not get their values."""
    changed, sharded = [], []
    for name, param in module.named_parameters():
        unit = unit_of(param)
        if unit is not None and unit.is_sharded:
            sharded.append(name)
            continue
        value = saved.get(name)
        value = value.whole() if isinstance(value, StoredTensor) else value
        if value is None or value.shape != param.shape or not torch.equal(param.detach(), value.to(param)):
            changed.append((param, param.detach().clone()))
    if sharded:
        warn_once(
            f"load_checkpoint: custom_load_fn got no values of {counted(len(sharded), 'sharded parameter')}, such as "
            f"{sharded[0]}: at stage 3 each rank has a part of them, which was loaded as it was saved. Change them "
            "after the load, in deepspeed.zero.GatheredParameters(..., modifier_rank=0)"
        )
    return changed


def _held(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of each entry of this module itself that `load_state_dict` fills; None for extra state."""
    yield from ((name, param) for name, param in module._parameters.items() if param is not None)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if type(module).set_extra_state is not torch.nn.Module.set_extra_state:
        yield _EXTRA, None


def _is_frozen(value: Tensor | None) -> bool:
    return isinstance(value, torch.nn.Parameter) and not value.requires_grad


def _translates(module: torch.nn.Module) -> bool:
    hooks = [hook for hook in module._load_state_dict_pre_hooks.values() if not hasattr(hook, IS_OURS)]
    return bool(hooks) or not _definer(module).__module__.startswith("torch.nn.modules.")


def _fills(module: torch.nn.Module, saved: Mapping[str, Any]) -> bool:
    """Whether torch fills in the counter of a batch norm that was saved by a version without counters."""
    return _definer(module) is not torch.nn.Module and (saved.get("version") or 0) < _VERSION_WITH_COUNTER


def _definer(module: torch.nn.Module) -> type:
    """Return the class that defines the module's `_load_from_state_dict`."""
    return next(cls for cls in type(module).__mro__ if "_load_from_state_dict" in vars(cls))


def _fits(saved: Any, own: Tensor | None) -> bool:
    if own is None:
        return True
    if not isinstance(saved, Tensor | StoredTensor) or _form(saved):
        return False
    return saved.shape == own.shape or (own.dim() == 0 and saved.dim() == 1)  # torch takes the first element


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor | StoredTensor):
        return f"a {type(value).__name__}"
    return f"{form} {tuple(value.shape)}" if (form := _form(value)) else str(tuple(value.shape))


def _form(value: Tensor | StoredTensor) -> str:
    """Name the kind of a tensor whose values a parameter cannot take; return "" for other tensors."""
    if isinstance(value, StoredTensor):
        return ""
    if value.is_meta or value.is_nested or value.is_quantized:
        return "a meta tensor" if value.is_meta else "a nested tensor" if value.is_nested else "a quantized tensor"
    return "" if value.layout == torch.strided else "a sparse tensor"


def module_state_dict(
    module: torch.nn.Module,
    destination: dict[str, Any] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
    *,
    exclude_frozen: bool = False,
) -> dict[str, Any]:
    """Return the module's state dict, on request without frozen parameters."""
    state: dict[str, Any] = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)  # type: ignore[arg-type,type-var]
    if exclude_frozen:
        for name, param in module.named_parameters():
            if not param.requires_grad:
                state.pop(prefix + name, None)
    return state


def load_module(module: torch.nn.Module, weights: dict[str, Any], *, strict: bool, custom_load_fn: Any = None) -> None:
    """Load weights into the module.

    Raises:
        CheckpointError: for weights of another model; nothing was changed.
    """
    if custom_load_fn is None:
        check_module_state(module, weights, strict=strict, source="load_module_state_dict")
    fill_module(module, weights, strict=strict, custom_load_fn=custom_load_fn)
