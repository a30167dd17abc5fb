"""The hooks, in four groups: what a plugin can say to the core. This file is the reference page.

A plugin writes only the hooks it needs, with as many of the named arguments as it uses:

    from deepspeed.plugins import Offer, hookimpl

    DS_PLUGIN_API = ">=1,<2"        # optional: the plugin API versions that this plugin was made for

    @hookimpl
    def ds_probe():
        return Offer("xyz", priority=100, reason="2 devices")

Order of calls: `ds_probe` -> `ds_accelerator` -> `ds_op_builders`, `ds_check_config` -> the hooks by name, while the
engine is built -> the events and the readings. No hook is called per parameter or per bucket.

`Offer` is what an accelerator plugin answers when it is asked whether its device is here. Whether there is a device is
half of the answer, whether the installed torch can use it is the other. `torch_build` finds which torch this process
has or would import, and what it was built for, without importing it, which would take a second."""

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
    """Return what `torch.version` states, as text or None: `{"__version__": "2.13.0+cpu", "git_version": ...}`.

    Read the torch in memory if it is there whole, else its `version.py`. Return {} when torch is not installed, and
    `{"__version__": None}` when that file cannot be read.
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
    """That torch as reasons name it: `torch 2.13.0+cpu`, or `torch is not installed`."""
    return f"torch {build['__version__'] or 'of an unknown version'}" if build else "torch is not installed"


@dataclass(frozen=True, slots=True)
class Offer:
    """One plugin's answer to `ds_probe`. Made by the plugin, compared by `accelerator.current`, shown by `ds_report`.

    Fields:
        name: the device as `DS_ACCELERATOR` and torch call it, for example `"cpu"`. The entry point has the same name.
        priority: among available offers the highest wins; a tie is an error. The host CPU offers 0, a device 100;
            a vendor who means to win over another vendor for the same device goes above that.
        available: a device was found and this process can use it.
        reason: why, in one line: what was found, or what is missing and how to get it.
        impersonates: torch's device type where it is not `name`: that of the device as which this one poses. Two
            available offers for one device of torch are an error, whatever their priorities. New in plugin API 1.2.
    """

    name: str
    priority: int = 0
    available: bool = True
    reason: str = ""
    impersonates: str = ""

    @property
    def device(self) -> str:
        """Torch's device type that it claims."""
        return self.impersonates or self.name

    def check_types(self) -> None:
        """Refuse a field of another type, which would fail later, where offers are compared. Asked after each probe.

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
# Grows by a minor step when a hook or an argument is added, by a major one when an old plugin would break. The
# tests keep a plugin of each version, which has to train (`unit/plugins/test_installed.py`).
PLUGIN_API = "1.3"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# ---------------------------------------------------------------------------------------------------------------------
# Start: which device, with what, under which configuration
# ---------------------------------------------------------------------------------------------------------------------


@hookspec
def ds_probe() -> Offer:  # type: ignore[empty-body]
    """Say whether this plugin's device can be used in this process.

    Called at most once per process, on the first `get_accelerator()` or by `ds_report`, and not at all when
    `set_accelerator` came first. Must be cheap (milliseconds), import no torch, and create no device context: look at
    `/dev`, `/sys` or the driver library. An exception counts as "not available", with its text as the reason; so does
    no answer within 10 seconds (`DS_PROBE_TIMEOUT`). It runs in a thread of its own, as the import of the plugin does:
    do not ask there for the accelerator or the plugin manager, which wait for the answer.

    Returns:
        An `Offer` whose `name` is the entry point's name. Where torch calls the device otherwise, as that of a device
        which poses as another, `impersonates` is torch's name for it.
    """


@hookspec
def ds_accelerator() -> "DeepSpeedAccelerator":  # type: ignore[empty-body]
    """Build the accelerator. Called once, for the chosen plugin only, after its API range was checked.

    Import torch and the vendor's package here, not at the top of the plugin module. Do not call `get_accelerator()`:
    it is waiting for this answer.

    Returns:
        An instance of `DeepSpeedAccelerator`.

    Raises:
        Anything: it becomes a `PluginError` that names this plugin.
    """


@hookspec
def ds_op_builders() -> "Mapping[str, type]":  # type: ignore[empty-body]
    """Name the op builders of this plugin. Called when an op is resolved: in the chosen device's plugin, then in `cpu`,
    the host extension, whichever device was chosen, then in the feature plugins.

    The builders of a feature plugin say by `is_compatible` for which accelerators they are.

    Returns:
        Builder name -> class deriving from `OpBuilder`, for example `{"FusedAdamBuilder": FusedAdamBuilder}`.
        Naming is cheap; compiling happens in `OpBuilder.load`.
    """


@hookspec
def ds_check_config(config: "DeepSpeedConfig") -> None:
    """Refuse or remark on a configuration. Called once per engine, before anything is built, in every active plugin.

    Args:
        config: the parsed configuration; read it, never write it.

    Raises:
        ConfigError: naming the key, what was found and what this plugin can do.
    """


# ---------------------------------------------------------------------------------------------------------------------
# By name: the first plugin that knows the name wins. Answer None for a name that is not yours.
# ---------------------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def ds_comm_backend(name: str, group: "ProcessGroup | None") -> "Any | None":
    """Give the collectives of the communication library called `name`. Called on every rank.

    With a group: once per process group, when an engine first needs its collectives, and by
    `init_deepspeed_backend(name)`; the answer serves that group and replaces what the core makes of torch's
    collectives. Without: for a name that torch does not have, called by `init_distributed`, before there is a process
    group: the plugin registers a library of that name with torch (`torch.distributed.Backend.register_backend`) if it
    has one. The host extension is asked last, whichever accelerator was chosen.

    Args:
        name: what the user or `communication_backend_name()` asked for, for example `"gloo"`.
        group: the process group to serve; None: there is none yet.

    Returns:
        With a group an object with the methods of `deepspeed.comm.backend.GroupBackend`, or None; without, None.
    """


@hookspec(firstresult=True)
def ds_optimizer(
    name: str, params: "list[dict[str, Any]]", arguments: "Mapping[str, Any]"
) -> "torch.optim.Optimizer | None":
    """Give the optimizer that the configuration calls `name`. Called once per engine, before the built-in names.

    Args:
        name: `optimizer.type` of the configuration, as written.
        params: torch parameter groups.
        arguments: `optimizer.params` of the configuration.

    Returns:
        A torch optimizer over `params`, or None.
    """


@hookspec(firstresult=True)
def ds_sharding(name: str) -> "Callable[..., Any] | None":
    """Give the way in which states, gradients and parameters are sharded. Called once per engine, but below stage 3 not
    for an engine without optimizer.

    Args:
        name: `zero_optimization.stage` as text, `"0"` to `"3"`: a plugin may replace a stage.

    Returns:
        A class with the contract of `deepspeed.zero.sharding.Sharding`, or None; its `options.stage` says what is
        divided among the ranks.
    """


@hookspec(firstresult=True)
def ds_checkpoint_store(name: str, arguments: "Mapping[str, Any]") -> "Any | None":
    """Give the store that writes and reads checkpoint files. Called once per engine, on every rank, before the built-in
    store `torch` is made: a plugin may replace it.

    Args:
        name: `checkpoint.store.type` of the configuration, as written; `"torch"` when nothing is.
        arguments: `checkpoint.store.params` of the configuration.

    Returns:
        An object with the methods of `deepspeed.checkpoint.store.Store`, or None.
    """


@hookspec(firstresult=True)
def ds_monitor(name: str, arguments: "Mapping[str, Any]") -> "Any | None":
    """Give a monitor that metrics are written to. Called on rank 0, once per engine and monitor that is switched on.

    Switched on are the sections `tensorboard`, `wandb`, `comet` and `csv_monitor` with `enabled: true`, for which
    plugins are asked before the built-in monitor is made, and each entry of `monitor_plugins` without `enabled: false`:
    `{"monitor_plugins": {"mine": {"path": "x"}}}` asks for `ds_monitor("mine", {"path": "x"})`. A name that no plugin
    knows, and a hook or a monitor that raises, is warned about once; training goes on.

    Args:
        name: the section, or the key below `monitor_plugins`, for example `"tensorboard"`.
        arguments: what stands there.

    Returns:
        An object with `write_events(list of (name, value, step))`, and `close()` if it has to end; or None.
    """


@hookspec(firstresult=True)
def ds_launcher(name: str) -> "Any | None":
    """Give a way to start ranks on many hosts. Called by the `deepspeed` command when `--launcher` is given, in feature
    plugins only (no accelerator is chosen there), and in a process without torch: do not import it.

    Args:
        name: the value of `--launcher`, lower case.

    Returns:
        A class with the methods of `deepspeed.launcher.multinode.MultiNodeRunner`, or None.
    """


# ---------------------------------------------------------------------------------------------------------------------
# Events: every plugin hears them, also when one fails; nothing they return is read, and they cannot change the step.
# ---------------------------------------------------------------------------------------------------------------------


@hookspec
def ds_engine_ready(engine: "DeepSpeedEngine") -> None:
    """The engine is built. Called once per engine, at the end of `deepspeed.initialize`, on every rank."""


@hookspec
def ds_step_end(stats: "Any") -> None:
    """An optimizer step ended. Called on every rank, once per step (not per micro batch), after the update.

    Args:
        stats: a `deepspeed.engine.observers.StepStats`: `global_step` (steps before this one), `applied` (False:
            skipped because of an overflow), `grad_norm` (before clipping; reading it makes the host wait for the
            device), `loss_scale`.
    """


@hookspec
def ds_checkpoint_saved(directory: str, tag: str) -> None:
    """A checkpoint is complete on disk. Called on every rank, after the closing barrier.

    Args:
        directory: the `save_dir` the user gave.
        tag: the folder below it.
    """


# ---------------------------------------------------------------------------------------------------------------------
# Readings: every plugin is asked, also when one fails.
# ---------------------------------------------------------------------------------------------------------------------


@hookspec
def ds_device_faults(index: int | None) -> "Mapping[str, int]":  # type: ignore[empty-body]
    """Count what has gone wrong with a device, since its driver started or in all. New in plugin API 1.3.

    Called every `watch.device_faults_every` steps, on every rank for its own device, and by `ds_report`. Answer within
    milliseconds, from files or from the driver's library, and do not wait for the device.

    Args:
        index: of the device among those that this process sees; None: the host.

    Returns:
        A count per kind of fault, in words that a log can show, in the plural: `{"memory errors, corrected": 0}`. One
        that is higher than before is a new fault. What cannot be counted here is left out; nothing to count is `{}`.
    """


# Title -> (what the group is, its hooks in the order of their calls). The reference page is written from this table.
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
