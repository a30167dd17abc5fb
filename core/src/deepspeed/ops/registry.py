"""The op registry: for an op's name, the kernel of the best place that has one, and why not of a better one.

    accelerator in force  ->  host extension  ->  feature plugins  ->  None: the torch reference beside the front

A front asks `kernel("fused_adam")` at each use and takes its torch reference when the answer is None. Nothing is bound
at import: after `set_accelerator(X)` every name means X's. `ds_report` shows the same by `resolve`.

`DS_OPS_DISABLE=cpu_adam,quantizer`, or `all`, sends ops to their references; it can be set at any time.
"""

import importlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.errors import OpUnavailable
from deepspeed.log import log_dist, warn_once
from deepspeed.ops.builders import builder_name, construct, incompatible, joined, places, quietly, told_by
from deepspeed.ops.documented import OPS
from deepspeed.ops.providers import Source, lacks_host_extension

VARIABLE = "DS_OPS_DISABLE"


@dataclass(frozen=True)
class Resolution:
    """Where an op comes from.

    Fields:
        op: its short name.
        builder: an instance of the builder that serves it; None for the torch reference.
        source: "device", "host", "plugin" (a feature plugin) or "reference".
        rejected: (where, reason) of every better place that does not serve it.
        broken: one of them has a builder, and it does not work here.
        failed: those of `rejected` that could not be asked at all, so that nobody knows whether they have a builder.
    """

    op: str
    builder: Any | None
    source: Source
    rejected: tuple[tuple[str, str], ...]
    broken: bool = False
    failed: tuple[tuple[str, str], ...] = ()

    def why(self) -> str:
        """The rejected places and their reasons, in one line; "" when the best place serves the op."""
        return joined(self.rejected)


class _Found(NamedTuple):
    """What an op came to, for one accelerator and one value of `DS_OPS_DISABLE`."""

    kernel: Any | None
    resolution: Resolution


class _Table:
    """The ops that were loaded for one accelerator; thrown away when another is in force."""

    def __init__(self, accelerator: DeepSpeedAccelerator | None, disabled: str) -> None:
        self.accelerator = accelerator
        self.disabled = disabled
        self.kernels: dict[str, Any] = {}
        self.resolutions: dict[str, Resolution] = {}


_table = _Table(None, "")
_lock = threading.RLock()  # re-entrant: loading one op may ask for another


def resolve(op: str) -> Resolution:
    """Where `op` would come from now, without compiling or loading it.

    After `kernel(op)` it also tells what failed to load. Called by `ds_report` and by fronts that choose an algorithm.

    Args:
        op: a short name of `OPS`, the name of a builder class, or the NAME of a vendor's own builder.

    Raises:
        ConfigError: nobody knows an op of that name.
    """
    table = _table
    if _is_current(table) and op in table.resolutions:
        return table.resolutions[op]
    return _best(op, load=False).resolution


def kernel(op: str) -> Any | None:
    """The loaded op, or None: then the caller uses its torch reference.

    The first call for an accelerator finds, compiles if need be and loads it, and logs one line on rank 0 when that
    ends at the reference; later calls are a lookup. May be called from any thread.

    Args:
        op: as `resolve` takes it.

    Raises:
        ConfigError: nobody knows an op of that name.
    """
    table = _table
    if _is_current(table):
        try:
            return table.kernels[op]
        except KeyError:
            pass
    return _load(op).kernel


def require(op: str) -> Any:
    """The loaded op, for a user who asked for it by name.

    Raises:
        OpUnavailable: no place serves it; the message gives every reason.
        ConfigError: nobody knows an op of that name.
    """
    found = _load(op)
    if found.kernel is None:
        raise OpUnavailable(f"op {op!r} has no kernel here: {found.resolution.why()}")
    return found.kernel


def reset() -> None:
    """Forget what was loaded, so that the next `kernel` asks anew; for tests, and after a package was installed."""
    global _table
    with _lock:
        _table = _Table(None, "")


# ----- inside --------------------------------------------------------------------------------------------------------


def _is_current(table: _Table) -> bool:
    return table.accelerator is get_accelerator() and table.disabled == os.environ.get(VARIABLE, "")


def _load(op: str) -> _Found:
    global _table
    get_accelerator()  # chosen before the lock is taken: a plugin that is being built may ask for an op
    with _lock:
        if not _is_current(_table):
            _table = _Table(get_accelerator(), os.environ.get(VARIABLE, ""))
        table = _table
        if op not in table.kernels:
            found = _best(op, load=True)
            table.resolutions[op] = found.resolution
            table.kernels[op] = found.kernel
            _warn_of_failed(found.resolution)
            if found.kernel is None:
                _tell_reference(found.resolution)
        return _Found(table.kernels[op], table.resolutions[op])


def _best(op: str, load: bool) -> _Found:
    """The first place whose builder works here, and loads if `load` says so."""
    class_name = builder_name(op)
    if _is_disabled(op):
        disabled = ("environment", f"disabled by {VARIABLE}={os.environ.get(VARIABLE, '')}")
        return _Found(None, Resolution(op, None, "reference", (disabled,)))
    rejected: list[tuple[str, str]] = []
    failed: list[tuple[str, str]] = []
    broken = False
    for provider, kind, reason, has_failed in places(class_name):
        if kind is not None:
            builder, loaded, reason = _try(op, kind, load)
            if reason is None:
                resolution = Resolution(op, builder, provider.source, tuple(rejected), broken, tuple(failed))
                return _Found(loaded, resolution)
            broken = True
        rejected.append((provider.where, str(reason)))
        if has_failed:
            failed.append(rejected[-1])
    return _Found(None, Resolution(op, None, "reference", tuple(rejected), broken, tuple(failed)))


def _try(op: str, kind: Any, load: bool) -> tuple[Any, Any, str | None]:
    """(builder, loaded op, None), or (None, None, why not)."""
    builder, reason = construct(kind)
    reason = incompatible(builder) if builder is not None else reason
    if builder is None or reason is not None or not load:
        return builder, None, reason
    try:
        loaded = quietly(builder.load)
    except Exception as error:  # noqa: BLE001 - a vendor's builder, whatever it raises
        return None, None, f"load failed: {told_by(error)}"
    if loaded is None:
        return None, None, f"load failed: {kind.__name__}.load() returned None"
    missing = [name for name in (OPS[op].operators if op in OPS else ()) if not hasattr(loaded, name)]
    if missing:
        adapted = _adapted(loaded, OPS[op].adapter)
        if adapted is not None:
            return builder, adapted, None
        return None, None, f"{kind.__name__} gives no {', '.join(missing)}, which is called here; it has other callers"
    return builder, loaded, None


def _adapted(loaded: Any, adapter: str) -> Any | None:
    return importlib.import_module(f"deepspeed.ops.{adapter}").adapt(loaded) if adapter else None


def _is_disabled(op: str) -> bool:
    named = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")}
    return "all" in named or op in named


def _warn_of_failed(resolution: Resolution) -> None:
    """One warning per place and cause, from rank 0: every op of that place goes elsewhere, whichever was asked for."""
    for where, reason in resolution.failed:
        warn_once(f"{where}: {reason}; none of its op builders is used (`ds_report` shows which ops that concerns)")


_told: set[str] = set()


def _tell_reference(resolution: Resolution) -> None:
    """One line per op and process, from rank 0.

    Seen by default when somebody has a kernel and it cannot be used, and when the host extension was not installed.
    """
    op = resolution.op
    if op not in _told:
        _told.add(op)
        lacks_host = op in OPS and OPS[op].on_host and lacks_host_extension(get_accelerator())
        level = logging.WARNING if resolution.broken or lacks_host else logging.INFO
        log_dist(f"op {op!r} runs on its torch reference ({resolution.why()})", level=level)
