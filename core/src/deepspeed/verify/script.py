"""Run a user's script with other engines. `ds_verify` starts this module on each rank.

    python -m deepspeed.verify.script ROLE FOLDER STEPS FORM SCRIPT [arguments]

The script runs like `python SCRIPT`, or like `python -m SCRIPT` if FORM is "module". Inside, `deepspeed.initialize`
returns an engine that records (`recorded`), or an engine of the second run (`compared`): plain torch, or the same
engine with another configuration. Each rank starts with its own fixed seeds, so that a script without seeds draws the
same numbers in both runs.
"""

import inspect
import json
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.optim import Optimizer

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.base import AUTO
from deepspeed.config.read import naming_file, redacted
from deepspeed.engine.accessors import read_answers
from deepspeed.engine.build import config_source, initialize, initialize_as
from deepspeed.errors import ConfigError
from deepspeed.verify.other import OtherEngine
from deepspeed.verify.plain import SAFE_CALLS, PlainEngine, of_plain
from deepspeed.verify.recording import RecordedEngine, Runs, VerifiedEngine, hooks_of
from deepspeed.verify.verdict import OtherConfig, read_other
from deepspeed.zero.construct import Init, MiCS_Init
from deepspeed.zero.fetcher import ParamFetcher
from deepspeed.zero.module_hooks import ModuleHooks
from deepspeed.zero.module_units import ModuleUnits, Stage3Options

#: keys that have no meaning for plain torch, and keys whose output only the recorded run should write
_TAKEN_AWAY = {
    *("zero_optimization", "communication_data_type", "seq_parallel_communication_data_type", "sparse_gradients"),
    *("prescale_gradients", "gradient_predivide_factor", "zero_force_ds_cpu_optimizer", "aio", "compile"),
    *("checkpoint", "nebula", "watch", "comms_logger", "flops_profiler", "autotuning", "wall_clock_breakdown"),
    *("memory_breakdown", "tensorboard", "wandb", "comet", "csv_monitor", "monitor_plugins"),
}
_KNOWN_OPTIMIZERS = ("torch", "deepspeed")
_ADAMS = ("adam", "adamw")
_DEFAULTS_OF_ADAM = {"weight_decay": 0.0}  # the configuration's default, which differs from torch's AdamW
_KEYS_OF_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode")


def plain_config(source: Any) -> dict[str, Any]:
    """Return a configuration without keys that plain torch does not support: ZeRO, offload, communication dtypes.

    Precision, batch sizes, the optimizer and the schedule stay; Adam becomes torch's Adam.
    """
    written = DeepSpeedConfig(source, batch_required=False).raw
    config = {name: value for name, value in written.items() if name not in _TAKEN_AWAY}
    if isinstance(types := config.get("data_types"), Mapping):
        config["data_types"] = {name: value for name, value in types.items() if name != "grad_accum_dtype"}
    optimizer = config.get("optimizer")
    if isinstance(optimizer, Mapping) and str(optimizer.get("type")).lower() in _ADAMS:
        params = {**_DEFAULTS_OF_ADAM, **(optimizer.get("params") or {})}
        is_torchs = params.get("torch_adam") is True  # with torch's defaults
        if not is_torchs and params.pop("bias_correction", True) is True:  # torch's always corrects
            of_torch = {name: value for name, value in params.items() if name in _KEYS_OF_ADAM}
            config["optimizer"] = {**optimizer, "params": {**of_torch, "torch_adam": True}}
    return config


# ---- replacements for scripts -------------------------------------------------------------------------------------


@contextmanager
def initialized_by(start: Callable[..., Any], **others: Mapping[str, Any]) -> Iterator[None]:
    """Replace `deepspeed.initialize` inside the block with `start`, which gets all arguments by name.

    Args:
        others: name of a module in `deepspeed` -> replacements inside the block, by name.
    """
    signature = inspect.signature(initialize)

    def replaced(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        return start(**bound.arguments)

    changes: list[tuple[Any, str, Any]] = [(deepspeed, "initialize", replaced)]
    for module, values in others.items():
        changes += [(getattr(deepspeed, module), name, value) for name, value in values.items()]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def recorded(folder: str | Path, num_steps: int) -> Any:
    """Return a context in which engines of scripts are recorded. The script ends after `num_steps` steps."""
    runs = Runs(folder, num_steps)
    start = partial(initialize_as, partial(RecordedEngine, runs=runs))
    return initialized_by(runs.noting_failures(partial(_recorded, start)))


def compared(folder: str | Path, num_steps: int) -> Any:
    """Return a context in which engines of scripts compare their steps with the record in `folder`.

    The engines use plain torch, or the configuration that `OtherConfig.write` has written there.
    """
    runs, other = Runs(folder, num_steps), read_other(Path(folder))
    if other is None:
        start = partial(initialize_plain, runs)
        inits = {"Init": _leaving_whole(Init), "MiCS_Init": _leaving_whole(MiCS_Init)}
        return initialized_by(
            runs.failing_as_noted(start), zero=inits, utils={name: partial(of_plain, name) for name in SAFE_CALLS}
        )
    start = partial(_verified, partial(initialize_other, runs, other))
    inits = {"Init": _configured(Init, other), "MiCS_Init": _configured(MiCS_Init, other)}
    return initialized_by(runs.failing_as_noted(start), zero=inits)


def _recorded(start: Callable[..., Any], **arguments: Any) -> Any:
    """Start an engine, and write its accelerator, configuration, hooks and optimizer beside its record."""
    brings = _brought(arguments["model"], arguments["optimizer"])  # before the engine adds hooks of its own
    made = _verified(start, **arguments)
    engine: RecordedEngine = made[0]
    if engine.is_watched:
        config = json.loads(json.dumps(redacted(engine.config), default=str))
        engine.note_setting({"accelerator": get_accelerator().device_name(), "config": config, **brings})
    return made


def _brought(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the script's own parts that run in both runs, whose errors a comparison misses: hooks and optimizer."""
    hooked = hooks_of(model) if isinstance(model, torch.nn.Module) else []
    kind = type(optimizer)
    is_own = isinstance(optimizer, torch.optim.Optimizer) and kind.__module__.split(".")[0] not in _KNOWN_OPTIMIZERS
    return {"hooks": hooked, "optimizer": kind.__qualname__ if is_own else None}


def _verified(start: Callable[..., Any], **arguments: Any) -> Any:
    """Start an engine; raise ConfigError if it is of a kind that is not compared."""
    made = start(**arguments)
    if not isinstance(made[0], VerifiedEngine):
        raise ConfigError(
            f"ds_verify: found a {type(made[0]).__name__}, whose steps are not compared; verify the script without "
            "pipelines and hybrid_engine"
        )
    return made


def initialize_plain(runs: Runs, **arguments: Any) -> tuple[Any, Optimizer | None, Any, Any]:
    """Replace `initialize` by one that returns a `PlainEngine`.

    Args:
        runs: the recorded run to follow.
        arguments: all arguments of `initialize`, by name.
    """
    source = config_source(arguments["args"], arguments["config"], arguments["config_params"])
    engine, _, loader, scheduler = _initialized(partial(PlainEngine, runs=runs), plain_config(source), arguments)
    engine._answers = read_answers(DeepSpeedConfig(source, batch_required=False))  # of the script's configuration
    cast(PlainEngine, engine).take_over()
    _show_whole(engine, source)
    return engine, engine.optimizer, loader, scheduler


def initialize_other(runs: Runs, other: OtherConfig, **arguments: Any) -> tuple[Any, Optimizer | None, Any, Any]:
    """Replace `initialize` by one that returns an `OtherEngine`. Engines without optimizer keep their configuration.

    Args:
        runs: the recorded run to follow.
        other: the configuration to use.
        arguments: all arguments of `initialize`, by name.
    """
    source = config_source(arguments["args"], arguments["config"], arguments["config_params"])
    written = DeepSpeedConfig(source, batch_required=False).raw
    engine = partial(OtherEngine, runs=runs, name=other.name)
    if arguments["optimizer"] is None and not written.get("optimizer"):
        return initialize_as(engine, **arguments)
    with naming_file(other.name):
        made = _initialized(engine, filled(other.config, written), arguments)
    _show_whole(made[0], source)
    return made


def _show_whole(engine: Any, source: Any) -> None:
    """If the script requests stage 3, give the whole parameters the attributes that libraries look up at stage 3.

    All parameters are marked like parameters that stage 3 keeps whole, and `optimizer.parameter_offload` gets the hooks
    of a model without sharded parameters.
    """
    is_asked = DeepSpeedConfig(source, batch_required=False).zero_optimization.stage == 3
    if not is_asked or engine.sharding.stage == 3:
        return
    options = Stage3Options(persistence_numel=sys.maxsize)
    units = ModuleUnits(engine.module, engine.sharding.units.ranks, options, device=None, dtype=None)
    units.create_rest(())
    if engine.basic_optimizer is not None:
        fetcher = ParamFetcher(units.all, prefetch_numel=0, max_live_numel=0, max_reuse_numel=0)
        engine.basic_optimizer.parameter_offload = ModuleHooks(engine.module, fetcher, units)


def _initialized(engine: Callable[..., Any], config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Initialize with `config` instead of the script's configuration, which may be in any of three arguments."""
    args = arguments["args"]
    hidden = {name: None for name in ("deepspeed_config", "deepscale_config") if getattr(args, name, None) is not None}
    with _changed(args, hidden):
        return initialize_as(engine, **{**arguments, "config": config, "config_params": None})


@contextmanager
def _changed(target: Any, values: Mapping[str, Any]) -> Iterator[None]:
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def filled(config: Mapping[str, Any], of_script: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with the script's values in place of "auto"; drop the keys for which the script has no value."""
    result: dict[str, Any] = {}
    for name, value in config.items():
        its = of_script.get(name)
        if isinstance(value, Mapping):
            result[name] = filled(value, its if isinstance(its, Mapping) else {})
        elif value != AUTO:
            result[name] = value
        elif its is not None:
            result[name] = its
    return result


def _leaving_whole(context: type[Init]) -> type[Init]:
    """Return a `zero.Init` that leaves parameters whole, even with `enabled=True`."""

    class WholeInit(context):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{**named, "enabled": False})

    return WholeInit


def _configured(context: type[Init], other: OtherConfig) -> type[Init]:
    """Return a `zero.Init` that uses another configuration: it shards only if that has stage 3."""
    signature = inspect.signature(context)

    class OtherInit(context):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            bound = signature.bind(*arguments, **named)
            given = bound.arguments
            settings = DeepSpeedConfig(filled(other.config, {}), batch_required=False)
            its = given.get("config_dict_or_path", given.get("config"))
            if its is not None:
                written = DeepSpeedConfig(its, batch_required=False).raw
                given |= {"config_dict_or_path": filled(other.config, written), "config": None}
            if settings.zero_optimization.stage != 3:
                given["enabled"] = False
            super().__init__(*bound.args, **bound.kwargs)

    return OtherInit


# ---- the rank -----------------------------------------------------------------------------------------------------

_ROLES = {"record": recorded, "compare": compared}


def main() -> None:
    """Run the script; its exit and its errors pass through."""
    words = sys.argv[1:]
    of_launcher = [words.pop(0)] if words[0].startswith("--local_rank") else []  # the flag is for the script
    role, folder, num_steps, form, script, *arguments = words
    sys.argv = [script, *of_launcher, *arguments]
    seed = int(os.environ.get("RANK", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    with _ROLES[role](folder, int(num_steps)):
        if form == "module":
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
