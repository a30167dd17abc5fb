"""The hooks that a plugin can implement, in four groups. The reference page is generated from this file.

A plugin implements only the hooks it needs. A hook may omit arguments that it does not use:

    from deepspeed.plugins import Offer, hookimpl

    DS_PLUGIN_API = ">=1,<2"        # optional: the plugin API versions that this plugin was made for

    @hookimpl
    def ds_probe():
        return Offer("xyz", priority=100, reason="2 devices")

Order of calls: `ds_probe` -> `ds_accelerator` -> `ds_op_builders`, `ds_check_config` -> the hooks by name, while the
engine is built -> the events and the readings. No hook is called per parameter or per bucket.

An accelerator plugin returns an `Offer` from `ds_probe`. A device is available if it exists and the installed torch
supports it. `torch_build` finds the version and build of the torch that this process has imported or would import.
`torch_build` does not import torch, because the import takes a second."""

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from deepspeed.errors import PluginError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
    from deepspeed.config.root import DeepSpeedConfig
    from deepspeed.engine.engine import DeepSpeedEngine

_LINE = re.compile(r"^(\w+)\b[^=\n]*=\s*(?:'([^'\n]*)'|\"([^\"\n]*)\"|None)", re.MULTILINE)


def torch_build() -> dict[str, str | None]:
    """Return the names in `torch.version`, as text or None: `{"__version__": "2.13.0+cpu", "git_version": ...}`.

    The source is the imported torch if its import is complete, else the file `version.py`. The result is {} when torch
    is not installed, and `{"__version__": None}` when the file cannot be read.
    """
    version = getattr(sys.modules.get("torch"), "version", None)
    if hasattr(version, "__version__"):  # not while another thread is in the middle of importing torch
        return {name: None if value is None else str(value) for name, value in vars(version).items()}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    except OSError:
        return {"__version__": None}
    return {match[1]: match[2] or match[3] for match in _LINE.finditer(text)}


def torch_name(build: dict[str, str | None]) -> str:
    """Format a `torch_build` for an offer's reason: `torch 2.13.0+cpu`, or `torch is not installed`."""
    return f"torch {build['__version__'] or 'of an unknown version'}" if build else "torch is not installed"


@dataclass(frozen=True, slots=True)
class Offer:
    """A plugin's answer to `ds_probe`. `accelerator.current` compares the offers, and `ds_report` shows them.

    Fields:
        name: the device name in `DS_ACCELERATOR` and in torch, for example `"cpu"`. The entry point has the same name.
        priority: the highest available offer wins; a tie is an error. The host CPU offers 0, a device 100. A vendor
            whose package must win over another vendor's device offers more.
        available: a device was found and this process can use it.
        reason: one line that states what was found, or what is missing and how to get it.
        impersonates: torch's device type if it differs from `name`, because the device poses as another one. Two
            available offers for one torch device are an error, whatever their priorities. New in plugin API 1.2.
    """

    name: str
    priority: int = 0
    available: bool = True
    reason: str = ""
    impersonates: str = ""

    @property
    def device(self) -> str:
        """The torch device type that this offer claims."""
        return self.impersonates or self.name

    def check_types(self) -> None:
        """Refuse a field of a wrong type, which would fail later, when offers are compared. Called after each probe.

        Raises:
            PluginError: the message names the field, its value and what is expected.
        """
        kinds = {"name": str, "priority": int, "available": bool, "reason": str, "impersonates": str}
        for field, kind in kinds.items():
            value = getattr(self, field)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                wanted = f"{'an' if kind is int else 'a'} {kind.__name__}"
                raise PluginError(
                    f"ds_probe offers {field} {value!r}, found {type(value).__name__}; {wanted} is expected"
                )
        if self.impersonates == self.name:
            raise PluginError(f"ds_probe offers impersonates {self.name!r}, its own name; leave it empty")


PROJECT = "deepspeed"
# A new hook or argument raises the minor version. A change that breaks old plugins raises the major version. The
# tests keep a plugin of each version and train with it (`unit/plugins/test_installed.py`).
PLUGIN_API = "1.3"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# ---------------------------------------------------------------------------------------------------------------------
# Start: device selection, op builders, configuration
# ---------------------------------------------------------------------------------------------------------------------


@hookspec
def ds_probe() -> Offer:  # type: ignore[empty-body]
    """Say whether this plugin's device can be used in this process.

    Called at most once per process, on the first `get_accelerator()` or by `ds_report`. Not called if the program calls
    `set_accelerator` first. The hook must take milliseconds, must not import torch, and must not create a device
    context: look at `/dev`, `/sys` or the driver library. If the hook raises, or gives no answer within 10 seconds
    (`DS_PROBE_TIMEOUT`), the device is not available, with the error as the reason. The hook and the import of the
    plugin run in a separate thread. Do not use the accelerator or the plugin manager there: both wait for the answer.

    Returns:
        An `Offer` whose `name` is the entry point's name. If torch has another name for the device, because the device
        poses as another one, `impersonates` is torch's name.
    """


@hookspec
def ds_accelerator() -> "DeepSpeedAccelerator":  # type: ignore[empty-body]
    """Build the accelerator. Called once, for the chosen plugin only, after the check of its API range.

    Import torch and the vendor's package here, not at the top of the plugin module. Do not call `get_accelerator()`:
    `get_accelerator()` waits for this hook.

    Returns:
        An instance of `DeepSpeedAccelerator`.

    Raises:
        Anything: the core converts it to a `PluginError` that names this plugin.
    """


@hookspec
def ds_op_builders() -> "Mapping[str, type]":  # type: ignore[empty-body]
    """Return the op builders of this plugin. Called when an op is resolved: first in the chosen device's plugin, then
    in the host extension `cpu`, whatever device is chosen, then in the feature plugins.

    `is_compatible` of a feature plugin's builder says whether it supports the current accelerator.

    Returns:
        Builder name -> class that derives from `OpBuilder`, for example `{"FusedAdamBuilder": FusedAdamBuilder}`.
        Compile nothing here: `OpBuilder.load` compiles.
    """


@hookspec
def ds_check_config(config: "DeepSpeedConfig") -> None:
    """Refuse a configuration or warn about it. Called in every active plugin, once per engine, before it is built.

    Args:
        config: the parsed configuration. Do not modify it.

    Raises:
        ConfigError: states the key, the value found and the values that this plugin supports.
    """


# ---------------------------------------------------------------------------------------------------------------------
# By name: the first plugin that knows the name wins. Return None for an unknown name.
# ---------------------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def ds_comm_backend(name: str, group: "ProcessGroup | None") -> "Any | None":
    """Provide the collectives of the communication library `name`. Called on every rank.

    With a group, called once per process group, when an engine first needs its collectives, and by
    `init_deepspeed_backend(name)`. The returned backend serves this group and replaces the core's own backend over
    torch's collectives. Without a group, called by `init_distributed` for a name that torch does not have: if the
    plugin has a library of this name, it registers the library (`torch.distributed.Backend.register_backend`). The
    host extension is asked last, whatever accelerator is chosen.

    Args:
        name: the backend that the user or `communication_backend_name()` requested, for example `"gloo"`.
        group: the process group; None before there is one.

    Returns:
        With a group, an object with the methods of `deepspeed.comm.backend.GroupBackend`, or None; without, None.
    """


@hookspec(firstresult=True)
def ds_optimizer(
    name: str, params: "list[dict[str, Any]]", arguments: "Mapping[str, Any]"
) -> "torch.optim.Optimizer | None":
    """Provide the optimizer that the configuration calls `name`. Called once per engine, before the built-in names.

    Args:
        name: `optimizer.type` of the configuration, as written.
        params: torch parameter groups.
        arguments: `optimizer.params` of the configuration.

    Returns:
        A torch optimizer over `params`, or None.
    """


@hookspec(firstresult=True)
def ds_sharding(name: str) -> "Callable[..., Any] | None":
    """Provide the sharding of optimizer states, gradients and parameters. Called once per engine, but not for an engine
    without optimizer below stage 3.

    Args:
        name: `zero_optimization.stage` as text, `"0"` to `"3"`. A plugin may replace a stage.

    Returns:
        A class with the contract of `deepspeed.zero.sharding.Sharding`, or None. Its `options.stage` says what is
        sharded across the ranks.
    """


@hookspec(firstresult=True)
def ds_checkpoint_store(name: str, arguments: "Mapping[str, Any]") -> "Any | None":
    """Provide the store that writes and reads checkpoint files. Called once per engine, on every rank, before the core
    creates the built-in store `torch`, so a plugin may replace `torch`.

    Args:
        name: `checkpoint.store.type` of the configuration, as written; the default is `"torch"`.
        arguments: `checkpoint.store.params` of the configuration.

    Returns:
        An object with the methods of `deepspeed.checkpoint.store.Store`, or None.
    """


@hookspec(firstresult=True)
def ds_monitor(name: str, arguments: "Mapping[str, Any]") -> "Any | None":
    """Provide a monitor that records metrics. Called on rank 0, once per engine and enabled monitor.

    The sections `tensorboard`, `wandb`, `comet` and `csv_monitor` need `enabled: true`; plugins are asked before the
    core creates the built-in monitor. Entries of `monitor_plugins` are enabled unless they have `enabled: false`:
    `{"monitor_plugins": {"mine": {"path": "x"}}}` calls `ds_monitor("mine", {"path": "x"})`. The core warns once about
    a name that no plugin knows, and about a hook or monitor that raises. Training continues.

    Args:
        name: the section, or the key below `monitor_plugins`, for example `"tensorboard"`.
        arguments: the content of the section or entry.

    Returns:
        An object with `write_events(list of (name, value, step))` and optionally `close()`, or None.
    """


@hookspec(firstresult=True)
def ds_launcher(name: str) -> "Any | None":
    """Provide a launcher that starts ranks on many hosts. Called by the `deepspeed` command when `--launcher` is given,
    in feature plugins only (no accelerator is chosen there). The process has no torch: do not import torch.

    Args:
        name: the value of `--launcher`, lower case.

    Returns:
        A class with the methods of `deepspeed.launcher.multinode.MultiNodeRunner`, or None.
    """


# ---------------------------------------------------------------------------------------------------------------------
# Events: called in every plugin, even if one fails. Return values are ignored, and hooks cannot change the step.
# ---------------------------------------------------------------------------------------------------------------------


@hookspec
def ds_engine_ready(engine: "DeepSpeedEngine") -> None:
    """React to a new engine. Called once per engine, at the end of `deepspeed.initialize`, on every rank."""


@hookspec
def ds_step_end(stats: "Any") -> None:
    """React to the end of an optimizer step. Called on every rank, once per step (not per micro batch).

    Args:
        stats: a `deepspeed.engine.observers.StepStats`: `global_step` (number of steps before this one), `applied`
            (False if an overflow skipped the step), `grad_norm` (before clipping; reading it synchronizes the host with
            the device), `loss_scale`.
    """


@hookspec
def ds_checkpoint_saved(directory: str, tag: str) -> None:
    """React to a checkpoint that is complete on disk. Called on every rank, after the last barrier of the save.

    Args:
        directory: the user's `save_dir`.
        tag: the folder below `directory`.
    """


# ---------------------------------------------------------------------------------------------------------------------
# Readings: called in every plugin, even if one fails.
# ---------------------------------------------------------------------------------------------------------------------


@hookspec
def ds_device_faults(index: int | None) -> "Mapping[str, int]":  # type: ignore[empty-body]
    """Count the faults of a device, since its driver started or in total. New in plugin API 1.3.

    Called every `watch.device_faults_every` steps, on every rank for its own device, and by `ds_report`. The hook must
    take milliseconds: read files or the driver's library, and do not wait for the device.

    Args:
        index: the device's index among the devices that this process sees; None means the host.

    Returns:
        Kind of fault, as a plural for the log -> count: `{"memory errors, corrected": 0}`. A count that increased is a
        new fault. Omit kinds that cannot be counted here; return `{}` if there is none.
    """


# Title -> (description, hooks in the order of their calls). The reference page is generated from this table.
GROUPS: dict[str, tuple[str, tuple[Callable[..., Any], ...]]] = {
    "Start": (
        "Which device, with what, under which configuration.",
        (ds_probe, ds_accelerator, ds_op_builders, ds_check_config),
    ),
    "By name": (
        "The first plugin that knows the name wins: feature plugins are asked by their names, then the accelerator's. "
        "Answer None for a name that is not yours.",
        (ds_comm_backend, ds_optimizer, ds_sharding, ds_checkpoint_store, ds_monitor, ds_launcher),
    ),
    "Events": (
        "Every plugin hears them; nothing they return is read, and they cannot change the step. One that fails is "
        "named in a warning, and training goes on.",
        (ds_engine_ready, ds_step_end, ds_checkpoint_saved),
    ),
    "Readings": (
        "Every plugin is asked. One that fails is named in a warning, and training goes on.",
        (ds_device_faults,),
    ),
}
