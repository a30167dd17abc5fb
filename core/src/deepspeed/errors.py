"""Each thing that can go wrong has a type. Every message says what was asked, what was found and what to do.

    DeepSpeedError
    ├── ConfigError        the user's JSON, arguments or environment   (also a ValueError)
    ├── PluginError        an accelerator or feature plugin            (also a RuntimeError)
    ├── OpUnavailable      a kernel that was asked for by name         (also a RuntimeError)
    ├── CommError          process groups and collectives              (also a RuntimeError)
    ├── CheckpointError    files that are missing, foreign or damaged  (also a RuntimeError)
    ├── StateError         a call that is not legal now                (also a RuntimeError)
    │   └── PipelineError  one that a pipeline cannot answer
    └── AbsentMemberError  a member of DeepSpeed's that is not here    (also an AttributeError)

May import nothing of the project.
"""

import collections.abc
import contextlib
import operator
import os
import re
import typing

_SHOWN_LENGTH = 60  # of a value in a message
_INT32_MAX = 2**31 - 1


class DeepSpeedError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(DeepSpeedError, ValueError):
    """A configuration value is wrong. The message starts with the path of the key."""


class PluginError(DeepSpeedError, RuntimeError):
    """A plugin that was asked for by name is missing or broken."""


class OpUnavailable(DeepSpeedError, RuntimeError):
    """An op has no implementation here; the message lists every "no" with its reason."""


class CommError(DeepSpeedError, RuntimeError):
    """A process group could not be built or a collective was misused."""


class CheckpointError(DeepSpeedError, RuntimeError):
    """A checkpoint cannot be written or read; the message names the file."""


class StateError(DeepSpeedError, RuntimeError):
    """A call came at a moment at which it is not legal, for example `step()` inside a backward."""


class PipelineError(StateError):
    """A pipeline's engine or module cannot answer a call. DeepSpeed's name."""


class AbsentMemberError(DeepSpeedError, AttributeError):
    """A member of one of DeepSpeed's classes that is not here; the message says what is instead. `hasattr` is False."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things, for messages; `plural` where it is not the noun with an s.

    >>> counted(1, "rank"), counted(2, "rank"), counted(2, "query", "queries")
    ('1 rank', '2 ranks', '2 queries')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def either(choices: collections.abc.Iterable[object]) -> str:
    """Alternatives, of which one is to be taken, for messages.

    >>> either([1]), either([1, 3]), either(["a", "b", "c"])
    ('1', '1 or 3', 'a, b or c')
    """
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def shown(value: str) -> str:
    """A text of somebody else's for a message of one line: quoted, and cut if it is long.

    >>> shown("one\\ntwo"), len(shown("x" * 5000)) < 80
    ("'one\\\\ntwo'", True)
    """
    return repr(value) if len(value) <= _SHOWN_LENGTH else f"{value[:_SHOWN_LENGTH]!r}... ({len(value)} characters)"


def stated(variable: str) -> str:
    """An environment variable and its value, for a message: as a shell takes it where that is short and printable.

    >>> os.environ["DS_EXAMPLE"] = "one\ntwo"
    >>> stated("DS_EXAMPLE"), os.environ.pop("DS_EXAMPLE")
    ("DS_EXAMPLE='one\\ntwo'", 'one\ntwo')
    """
    value = os.environ.get(variable, "").strip()
    return f"{variable}={value if value.isprintable() and len(value) <= _SHOWN_LENGTH else shown(value)}"


def environment_int(
    variable: str,
    default: int | None = None,
    *,
    least: int = 0,
    most: int = _INT32_MAX,
    error: type[DeepSpeedError] = ConfigError,
    environment: collections.abc.Mapping[str, str] | None = None,
) -> int:
    """The integer in an environment variable.

    Args:
        variable: its name.
        default: of a variable that is not set; None: such a one is refused. An empty one is refused in any case: with
            `export RANK=$NOT_SET` in its script every process would be rank 0.
        least, most: what is allowed.
        error: what is raised.
        environment: that of this process.

    Raises:
        DeepSpeedError: names the variable and shows its value.
    """
    text = (os.environ if environment is None else environment).get(variable)
    if text is None:
        if default is not None:
            return default
        raise error(f"the environment variable {variable} is not set; set it to an integer")
    if re.fullmatch(r"\s*[+-]?[0-9]{1,10}\s*", text) and least <= int(text) <= most:
        return int(text)
    limits = f"from {least} to {most}" if most < _INT32_MAX else f"of at least {least}"
    raise error(f"the environment variable {variable} must be an integer {limits}, found {shown(text)}")


def whole_number(asked: str, value: object, *, least: int | None = 1) -> int:
    """An argument that counts or names something: an integer of any library, for example an integral tensor of none
    or one dimension that holds one.

    Args:
        asked: what the message begins with, for example the name of the configuration's key.
        value: what was given.
        least: what is allowed; None: every integer.

    Raises:
        ConfigError: it is no integer, or smaller.
    """
    number: int | None = None
    if type(value) is int:
        number = value
    elif isinstance(value, typing.SupportsIndex) and not _is_truth_value(value):
        with contextlib.suppress(TypeError):  # a tensor or an array of something else
            number = operator.index(value)
    if number is None or (least is not None and number < least):
        limit = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{asked}: asked for {value!r}, allowed is an integer{limit}")
    return number


def _is_truth_value(value: object) -> bool:
    """Whether `value` is a truth value of Python, or a tensor or an array of such values."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def first_line(error: BaseException) -> str:
    """Return the first line of `error`'s message, for a text of one line; its type when the message is empty."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
