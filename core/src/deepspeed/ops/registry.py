"""The op registry: finds the kernel of an op in the first source that has one, and why earlier sources have none.

    current accelerator  ->  host extension  ->  feature plugins  ->  None: the torch reference

An optimizer calls `kernel("fused_adam")` and runs its torch reference if the result is None. It caches the result while
`holds` returns True. Nothing is bound at import: after `set_accelerator(X)` every op name refers to the ops of X.
`ds_report` shows the same information through `resolve`.

`DS_OPS_DISABLE=cpu_adam,quantizer`, or `all`, makes ops use their references; it can be set at any time. Read next:
`documented.py` (the table of ops), `implementations.py` (who has a builder), `op_builder/builder.py` (what it does).
"""

import difflib
import importlib
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed.accelerator import DeepSpeedAccelerator, current, get_accelerator
from deepspeed.errors import ConfigError, OpUnavailable, stated
from deepspeed.log import log_dist, warn_once
from deepspeed.ops.documented import OPS
from deepspeed.ops.implementations import (
    Source,
    builder_names,
    call_quietly,
    construct,
    describe_error,
    implementations,
    implemented,
    incompatible,
    lacks_host_extension,
)

VARIABLE = "DS_OPS_DISABLE"


@dataclass(frozen=True)
class Resolution:
    """`Resolution` says where an op comes from.

    Fields:
        op: the short name of the op.
        builder: an instance of the selected builder; None for the torch reference.
        source: "device", "host", "plugin" (a feature plugin) or "reference".
        rejected: (where, reason) of every source before it that does not provide the op.
        broken: True if a rejected source has a builder that does not work here.
        failed: the entries of `rejected` that could not be read, so that it is unknown whether they have a builder.
    """

    op: str
    builder: Any | None
    source: Source
    rejected: tuple[tuple[str, str], ...]
    broken: bool = False
    failed: tuple[tuple[str, str], ...] = ()

    def why(self) -> str:
        """Return the rejected sources and their reasons in one line; "" if the first source provides the op."""
        return _joined(self.rejected)


class _Found(NamedTuple):
    kernel: Any | None
    resolution: Resolution


class _Table(NamedTuple):
    """The ops loaded for one accelerator and one value of `DS_OPS_DISABLE`."""

    accelerator: DeepSpeedAccelerator | None
    disabled: str
    found: dict[str, _Found]


table = _Table(None, "", {})
_lock = threading.RLock()  # re-entrant: loading one op may load another


def resolve(op: str) -> Resolution:
    """Return where `op` comes from, without compiling or loading it.

    After `kernel(op)` the reasons include failures to load. `ds_report` and the engine call this.

    Args:
        op: a short name of `OPS`, the name of a builder class, or the NAME of a vendor's own builder.

    Raises:
        ConfigError: the op is unknown.

    >>> from deepspeed.ops import registry
    >>> registry.resolve("sparse_attn").source
    'reference'
    """
    now = table
    found = now.found.get(op) if _is_current(now) else None
    return (found or _best(op, load=False)).resolution


def kernel(op: str) -> Any | None:
    """Return the loaded op, or None if the caller must use its torch reference.

    The first call for an accelerator finds, compiles (if necessary) and loads the op. If no source provides it, the
    call logs one line on rank 0. Later calls are a lookup. May be called from any thread.

    Args:
        op: see `resolve`.

    Raises:
        ConfigError: the op is unknown.

    >>> from deepspeed.ops import registry
    >>> registry.kernel("sparse_attn") is None
    True
    """
    now = table
    found = now.found.get(op) if _is_current(now) else None
    return (found or _load(op)).kernel


def holds(answers: object) -> bool:
    """Return whether results of `kernel` from the time when `table` was `answers` are still valid: the accelerator and
    the disabled ops did not change. Optimizers, which cache a result, call this in every step."""
    return answers is table and _is_current(table)


def loaded(op: str) -> Resolution:
    """Load `op` as `kernel` does, and return where it comes from: `builder` is None for the torch reference.

    Args:
        op: see `resolve`.

    Raises:
        ConfigError: the op is unknown.
    """
    now = table
    found = now.found.get(op) if _is_current(now) else None
    return (found or _load(op)).resolution


def require(op: str) -> Any:
    """Return the loaded op, for a user who requested it by name.

    Args:
        op: see `resolve`.

    Raises:
        OpUnavailable: no source provides the op; the message gives every reason.
        ConfigError: the op is unknown.
    """
    found = _load(op)
    if found.kernel is None:
        raise OpUnavailable(f"op {op!r} has no kernel here: {found.resolution.why()}")
    return found.kernel


def reset() -> None:
    """Forget all loaded ops, so that the next `kernel` searches again; for tests, and after a package is installed."""
    global table
    with _lock:
        table = _Table(None, "", {})


# ----- names and builders --------------------------------------------------------------------------------------------


def builder_name(op: str) -> str:
    """Return the class name of the builders of `op`.

    Args:
        op: see `resolve`.

    Raises:
        ConfigError: the op is unknown.

    >>> from deepspeed.ops import registry
    >>> registry.builder_name("cpu_adam")
    'CPUAdamBuilder'
    """
    if op in OPS:
        return OPS[op].builder
    names = builder_names()
    if op in names:
        return op
    for name in names:
        if any(getattr(found.builder_class, "NAME", None) == op for found in implemented(name)):
            return name
    close = difflib.get_close_matches(op, [*OPS, *names], n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(OPS)}"
    raise ConfigError(f"op {op!r} is not known; {hint}")


def op_names() -> list[str]:
    """Return the short names of all documented ops, and of ops that only a vendor has, for reports."""
    documented = {op.builder for op in OPS.values()}
    own = [(name, implemented(name)) for name in builder_names() if name not in documented]
    return [*OPS, *(op_of(found[0].builder_class, name) if found else name for name, found in own)]


def op_of(builder: Any, class_name: str) -> str:
    """Return the short name of a builder's op: the documented name for `class_name`, else the builder's own NAME."""
    documented = next((op for op, entry in OPS.items() if entry.builder == class_name), None)
    return documented or str(getattr(builder, "NAME", None) or getattr(builder, "name", None) or class_name)


def create_builder(class_name: str, *args: Any, **kwargs: Any) -> Any:
    """Return an instance of the first builder `class_name` whose op works on this machine, else of the first one.

    A call of `deepspeed.ops.op_builder.<X>Builder` does this; `args` and `kwargs` go to the builder class.

    Raises:
        OpUnavailable: no source has such a builder; the message gives every reason.
    """
    builders: list[Any] = []
    reasons: list[tuple[str, str | None]] = []
    for found in implementations(class_name):
        builder: Any = None
        reason: str | None = found.reason
        if found.builder_class is not None:
            builder, reason = construct(found.builder_class, *args, **kwargs)
        if builder is None:
            reasons.append((found.where, reason))
        elif incompatible(builder) is None:
            return builder
        else:
            builders.append(builder)
    if not builders:
        raise OpUnavailable(f"no {class_name} for the current accelerator: {_joined(reasons)}")
    return builders[0]


def all_ops() -> dict[str, Any]:
    """Return op name -> an instance of its builder, even if the builder is not compatible. Compiles nothing.

    Reading `deepspeed.ops.op_builder.ALL_OPS` calls this.
    """
    found = {}
    for class_name in builder_names():
        try:
            builder = create_builder(class_name)
        except OpUnavailable:  # no builder: the op is not among "all ops" of this accelerator
            continue
        found[op_of(builder, class_name)] = builder
    return found


def compatible_ops() -> dict[str, bool]:
    """Return op name -> whether it has a kernel for the current accelerator on this machine.

    Reading `deepspeed.ops.__compatible_ops__` calls this. Every documented op is a key, so
    `__compatible_ops__["sparse_attn"]` is False if no source has a builder.
    """
    answers = dict.fromkeys(OPS, False)
    answers.update({op: incompatible(builder) is None for op, builder in all_ops().items()})
    return answers


# ----- inside --------------------------------------------------------------------------------------------------------


def _is_current(table: _Table) -> bool:
    return table.accelerator is current.installed and table.disabled == os.environ.get(VARIABLE, "")


def _load(op: str) -> _Found:
    global table
    accelerator = get_accelerator()  # choose it before taking the lock: a plugin that is being built may load an op
    with _lock:
        if not _is_current(table):
            table = _Table(accelerator, os.environ.get(VARIABLE, ""), {})
        if op not in table.found:
            table.found[op] = _best(op, load=True)
            _log_outcome(table.found[op])
        return table.found[op]


def _best(op: str, load: bool) -> _Found:
    """Find the first source whose builder works here and, if `load` is True, whose op loads."""
    class_name = builder_name(op)
    if _is_disabled(op):
        disabled = ("environment", f"disabled by {stated(VARIABLE)}")
        return _Found(None, Resolution(op, None, "reference", (disabled,)))
    rejected: list[tuple[str, str]] = []
    failed: list[tuple[str, str]] = []
    broken = False
    for found in implementations(class_name):
        reason: str | None = found.reason
        if found.builder_class is not None:
            builder, loaded, reason = _try(op, found.builder_class, load)
            if reason is None:
                return _Found(loaded, Resolution(op, builder, found.source, tuple(rejected), broken, tuple(failed)))
            broken = True
        rejected.append((found.where, str(reason)))
        if found.failed:
            failed.append(rejected[-1])
    return _Found(None, Resolution(op, None, "reference", tuple(rejected), broken, tuple(failed)))


def _try(op: str, builder_class: Any, load: bool) -> tuple[Any, Any, str | None]:
    """Return (builder, loaded op, None), or (builder or None, None, reason)."""
    builder, reason = construct(builder_class)
    reason = incompatible(builder) if builder is not None else reason
    if builder is None or reason is not None or not load:
        return builder, None, reason
    try:
        loaded = call_quietly(builder.load)
    except Exception as error:  # noqa: BLE001 - a vendor's builder, whatever it raises
        return None, None, f"load failed: {describe_error(error)}"
    if loaded is None:
        return None, None, f"load failed: {builder_class.__name__}.load() returned None"
    entry = OPS.get(op)
    missing = [name for name in (entry.operators if entry else ()) if not hasattr(loaded, name)]
    if entry and missing and entry.adapter:
        loaded = importlib.import_module(f"deepspeed.ops.{entry.adapter}").adapt(loaded)
        missing = missing if loaded is None else []
    if missing:
        named = ", ".join(missing)
        return None, None, f"{builder_class.__name__} gives no {named}, which is called here; it has other callers"
    return builder, loaded, None


def _is_disabled(op: str) -> bool:
    named = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")}
    return "all" in named or op in named


def _joined(rejected: Iterable[tuple[str, str | None]]) -> str:
    return "; ".join(f"{where}: {reason}" for where, reason in rejected)


_logged: set[str] = set()


def _log_outcome(found: _Found) -> None:
    """Log on rank 0 a warning per source that failed, and one line per op and process that runs on its reference.

    The line is a warning if a source has a kernel that does not work, or if the op needs the host extension and it is
    not installed. Otherwise the line has level INFO.
    """
    resolution = found.resolution
    for where, reason in resolution.failed:
        warn_once(f"{where}: {reason}; none of its op builders is used (`ds_report` shows which ops that concerns)")
    op = resolution.op
    if found.kernel is None and op not in _logged:
        _logged.add(op)
        lacks_host = op in OPS and OPS[op].on_host and lacks_host_extension(get_accelerator())
        level = logging.WARNING if resolution.broken or lacks_host else logging.INFO
        log_dist(f"op {op!r} runs on its torch reference ({resolution.why()})", level=level)
