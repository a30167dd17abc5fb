"""Which builders there are under a name, for the accelerator in force, and why there are none elsewhere.

Asked by `registry.py` for kernels, by `op_builder/names.py` for the names that users import, and by reports. Every
question is answered anew from `providers.py`: nothing is bound to the accelerator that came first.
"""

import difflib
import inspect
from collections.abc import Iterator
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError, DeepSpeedError, OpUnavailable, first_line
from deepspeed.ops.documented import OPS
from deepspeed.ops.providers import Provider, Source, is_host, providers

_ON_HOST = {op.builder for op in OPS.values() if op.on_host}


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
    return [(place.source, kind) for place, kind, _, _ in places(class_name) if kind is not None]


def create_builder(class_name: str, *args: Any, **kwargs: Any) -> Any:
    """An instance of the builder called `class_name`: the first whose op works on this machine, else the first.

    What calling `deepspeed.ops.op_builder.<X>Builder` does.

    Raises:
        OpUnavailable: no place has such a builder; the message gives every reason.
    """
    builders, reasons = [], []
    for provider, kind, reason, _ in places(class_name):
        builder, failure = (None, reason) if kind is None else construct(kind, *args, **kwargs)
        if builder is None:
            reasons.append((provider.where, str(failure)))
        elif incompatible(builder) is None:
            return builder
        else:
            builders.append(builder)
    if not builders:
        raise OpUnavailable(f"no {class_name} for the accelerator in force: {joined(tuple(reasons))}")
    return builders[0]


def incompatible(builder: Any) -> str | None:
    """Why `builder` cannot serve this machine, in one line, or None when it can. Compiles nothing."""
    try:
        if quietly(builder.is_compatible):
            return None
    except Exception as error:  # noqa: BLE001 - a vendor's builder, whatever it raises
        return f"is_compatible failed: {told_by(error)}"
    told = getattr(builder, "reason", None) or getattr(builder, "error_log", None)  # the second: DeepSpeed's name
    return f"not compatible: {told or 'its builder gives no reason'}"


def op_of(builder: Any, class_name: str) -> str:
    """The short name of the op of `builder`, an object or a class, found as `class_name`: documented, else its own."""
    for op, entry in OPS.items():
        if entry.builder == class_name:
            return op
    return str(getattr(builder, "NAME", None) or getattr(builder, "name", None) or class_name)


def places(class_name: str) -> Iterator[tuple[Provider, Any | None, str | None, bool]]:
    """(place, its class of that name or None, why None, whether it failed) in order of preference, each class once.

    A place that failed could not be asked, so nobody knows what it has: its package cannot be imported, for example.
    """
    accelerator = get_accelerator()
    seen: list[Any] = []
    for provider in providers(accelerator):
        if provider.source == "host" and class_name not in _ON_HOST and not is_host(accelerator):
            yield provider, None, f"serves tensors in host memory, and these are on {accelerator._name!r}", False
            continue
        kind, reason, failed = _find(provider, class_name)
        if kind is None or kind not in seen:  # set_accelerator(CPU_Accelerator()) offers the host extension's itself
            seen.append(kind)
            yield provider, kind, reason, failed


def _find(provider: Provider, class_name: str) -> tuple[Any | None, str | None, bool]:
    try:
        kind = provider.find(class_name)
    except OpUnavailable as error:  # the place is not there, or kept out by the environment
        return None, told_by(error), False
    except Exception as error:  # noqa: BLE001 - a vendor's package, whatever it raises
        return None, told_by(error), True
    return kind, f"has no {class_name}" if kind is None else None, False


def construct(kind: Any, *args: Any, **kwargs: Any) -> tuple[Any | None, str | None]:
    try:
        return kind(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - a vendor's class, whatever it raises
        return None, f"{getattr(kind, '__name__', kind)}() failed: {told_by(error)}"


def quietly(method: Any) -> Any:
    """`method(verbose=False)`, or `method()` for a builder written before that argument was."""
    if "verbose" in inspect.signature(method).parameters:
        return method(verbose=False)
    return method()


def told_by(error: BaseException) -> str:
    """The first line of what a vendor's code raised, with its type where our own errors would need none."""
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, DeepSpeedError) or line == kind else f"{kind}: {line}"


def joined(rejected: tuple[tuple[str, str], ...]) -> str:
    return "; ".join(f"{where}: {reason}" for where, reason in rejected)
