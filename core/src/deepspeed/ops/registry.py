"""The op registry: for an op's name, the kernel of the best place that has one, and why not of a better one.

    accelerator in force  ->  host extension  ->  feature plugins  ->  None: the torch reference beside the front

A front asks `kernel("fused_adam")` at each use and takes its torch reference when the answer is None. Nothing is bound
at import: after `set_accelerator(X)` every name means X's. `ds_report` shows the same by `resolve`.

`DS_OPS_DISABLE=cpu_adam,quantizer`, or `all`, sends ops to their references; it can be set at any time.
"""

import difflib
import inspect
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from deepspeed.errors import ConfigError, DeepSpeedError, OpUnavailable
from deepspeed.log import log_dist
from deepspeed.ops.documented import OPS
from deepspeed.ops.providers import Provider, Source, is_host, providers

VARIABLE = "DS_OPS_DISABLE"
_INCOMPATIBLE = "not compatible"
_LOAD_FAILED = "load failed"


_ON_HOST = {op.builder for op in OPS.values() if op.on_host}


@dataclass(frozen=True)
class Resolution:
    """Where an op comes from.

    Fields:
        op: its short name.
        builder: an instance of the builder that serves it; None for the torch reference.
        source: "device", "host", "plugin" (a feature plugin) or "reference".
        rejected: (where, reason) of every better place that does not serve it.
    """

    op: str
    builder: Any | None
    source: Source
    rejected: tuple[tuple[str, str], ...]

    def why(self) -> str:
        """The rejected places and their reasons, in one line; "" when the best place serves the op."""
        return _joined(self.rejected)


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
    rejected: list[tuple[str, str]] = []
    for provider, builder, reason in _candidates(op):
        if builder is not None and (reason := incompatible(builder)) is None:
            return Resolution(op, builder, provider.source, tuple(rejected))
        rejected.append((provider.where, str(reason)))
    return Resolution(op, None, "reference", tuple(rejected) or _disabled_reason(op))


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


def builder_name(op: str) -> str:
    """The class name of the builders of `op`.

    Raises:
        ConfigError: nobody knows an op of that name.
    """
    if op in OPS:
        return OPS[op].builder
    names = builder_names()
    if op in names:
        return op
    for name in names:
        if any(getattr(kind, "NAME", None) == op for _, kind in offered(name)):
            return name
    close = difflib.get_close_matches(op, [*OPS, *names], n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(OPS)}"
    raise ConfigError(f"op {op!r} is not known; {hint}")


def op_names() -> list[str]:
    """Every op to report on: the short names of the documented ones, and of those that only a vendor has."""
    documented = {op.builder for op in OPS.values()}
    own = [name for name in builder_names() if name not in documented]
    return [*OPS, *(op_of(offered(name)[0][1], name) if offered(name) else name for name in own)]


def builder_names() -> list[str]:
    """Every builder name that is documented, or offered for the accelerator in force, sorted."""
    names = {op.builder for op in OPS.values()}
    for provider in providers(get_accelerator()):
        try:
            names.update(provider.names())
        except Exception:  # noqa: BLE001, S112 - a place that cannot be asked says why in each Resolution
            continue
    return sorted(names)


def offered(class_name: str) -> list[tuple[Source, Any]]:
    """(source, class) of every builder called `class_name` for the accelerator in force, the preferred first."""
    return [(place.source, kind) for place, kind, _ in _places(class_name) if kind is not None]


def create_builder(class_name: str, *args: Any, **kwargs: Any) -> Any:
    """An instance of the builder called `class_name`: the first whose op works on this machine, else the first.

    What calling `deepspeed.ops.op_builder.<X>Builder` does.

    Raises:
        OpUnavailable: no place has such a builder; the message gives every reason.
    """
    builders, reasons = [], []
    for provider, kind, reason in _places(class_name):
        builder, failure = (None, reason) if kind is None else _construct(kind, *args, **kwargs)
        if builder is None:
            reasons.append((provider.where, str(failure)))
        elif incompatible(builder) is None:
            return builder
        else:
            builders.append(builder)
    if not builders:
        raise OpUnavailable(f"no {class_name} for the accelerator in force: {_joined(tuple(reasons))}")
    return builders[0]


def incompatible(builder: Any) -> str | None:
    """Why `builder` cannot serve this machine, in one line, or None when it can. Compiles nothing."""
    try:
        if _quietly(builder.is_compatible):
            return None
    except Exception as error:  # noqa: BLE001 - a vendor's builder, whatever it raises
        return f"is_compatible failed: {_first_line(error)}"
    told = getattr(builder, "reason", None) or getattr(builder, "error_log", None)  # the second: DeepSpeed's name
    return f"{_INCOMPATIBLE}: {told or 'its builder gives no reason'}"


def op_of(builder: Any, class_name: str) -> str:
    """The short name of the op of `builder`, an object or a class, found as `class_name`: documented, else its own."""
    for op, entry in OPS.items():
        if entry.builder == class_name:
            return op
    return str(getattr(builder, "NAME", None) or getattr(builder, "name", None) or class_name)


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
            found = _load_best(op)
            table.resolutions[op] = found.resolution
            table.kernels[op] = found.kernel
            if found.kernel is None:
                _tell_reference(found.resolution)
        return _Found(table.kernels[op], table.resolutions[op])


def _load_best(op: str) -> _Found:
    rejected: list[tuple[str, str]] = []
    for provider, builder, reason in _candidates(op):
        if builder is not None and (reason := incompatible(builder)) is None:
            try:
                loaded = _quietly(builder.load)
            except Exception as error:  # noqa: BLE001 - a vendor's builder, whatever it raises
                reason = f"{_LOAD_FAILED}: {_first_line(error)}"
            else:
                reason = _unfit(op, builder, loaded)
                if reason is None:
                    return _Found(loaded, Resolution(op, builder, provider.source, tuple(rejected)))
        rejected.append((provider.where, str(reason)))
    return _Found(None, Resolution(op, None, "reference", tuple(rejected) or _disabled_reason(op)))


def _unfit(op: str, builder: Any, loaded: Any) -> str | None:
    """Why the front of `op` cannot use `loaded`, or None when it can."""
    if loaded is None:
        return f"{_LOAD_FAILED}: {type(builder).__name__}.load() returned None"
    missing = [name for name in (OPS[op].operators if op in OPS else ()) if not hasattr(loaded, name)]
    if missing:
        return f"{type(builder).__name__} gives no {', '.join(missing)}, which is called here; it has other callers"
    return None


def _candidates(op: str) -> Iterator[tuple[Provider, Any | None, str | None]]:
    """(place, its builder or None, why None) in order of preference; nothing for an op that was disabled."""
    class_name = builder_name(op)
    if _is_disabled(op):
        return
    for provider, kind, reason in _places(class_name):
        if kind is None:
            yield provider, None, reason
        else:
            yield provider, *_construct(kind)


def _places(class_name: str) -> Iterator[tuple[Provider, Any | None, str | None]]:
    """(place, its class of that name or None, why None) in order of preference, each class once."""
    accelerator = get_accelerator()
    seen: list[Any] = []
    for provider in providers(accelerator):
        if provider.source == "host" and class_name not in _ON_HOST and not is_host(accelerator):
            yield provider, None, f"serves tensors in host memory, and these are on {accelerator._name!r}"
            continue
        kind, reason = _find(provider, class_name)
        if kind is None or kind not in seen:  # set_accelerator(CPU_Accelerator()) offers the host extension's itself
            seen.append(kind)
            yield provider, kind, reason


def _find(provider: Provider, class_name: str) -> tuple[Any | None, str | None]:
    try:
        kind = provider.find(class_name)
    except Exception as error:  # noqa: BLE001 - a vendor's package, whatever it raises
        return None, _first_line(error)
    return kind, f"has no {class_name}" if kind is None else None


def _construct(kind: Any, *args: Any, **kwargs: Any) -> tuple[Any | None, str | None]:
    try:
        return kind(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - a vendor's class, whatever it raises
        return None, f"{getattr(kind, '__name__', kind)}() failed: {_first_line(error)}"


def _quietly(method: Any) -> Any:
    """`method(verbose=False)`, or `method()` for a builder written before that argument was."""
    if "verbose" in inspect.signature(method).parameters:
        return method(verbose=False)
    return method()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if isinstance(error, DeepSpeedError) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _joined(rejected: tuple[tuple[str, str], ...]) -> str:
    return "; ".join(f"{where}: {reason}" for where, reason in rejected)


def _is_disabled(op: str) -> bool:
    named = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")}
    return "all" in named or op in named


def _disabled_reason(op: str) -> tuple[tuple[str, str], ...]:
    return (("environment", f"disabled by {VARIABLE}={os.environ.get(VARIABLE, '')}"),)


_told: set[str] = set()


def _tell_reference(resolution: Resolution) -> None:
    """One line per op and process, from rank 0; seen by default when a kernel is installed and cannot be used."""
    if resolution.op not in _told:
        _told.add(resolution.op)
        failed = any(reason.startswith((_INCOMPATIBLE, _LOAD_FAILED)) for _, reason in resolution.rejected)
        level = logging.WARNING if failed else logging.INFO
        log_dist(f"op {resolution.op!r} runs on its torch reference ({resolution.why()})", level=level)
