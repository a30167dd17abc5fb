"""Error types. Every message says what was asked, what was found and what to do.

    DeepSpeedError
    ├── ConfigError        the user's JSON, arguments or environment   (also a ValueError)
    ├── PluginError        an accelerator or feature plugin            (also a RuntimeError)
    ├── OpUnavailable      a kernel that was requested by name         (also a RuntimeError)
    ├── CommError          process groups and collectives              (also a RuntimeError)
    ├── CheckpointError    files that are missing, foreign or damaged  (also a RuntimeError)
    ├── StateError         a call that is illegal at this moment       (also a RuntimeError)
    │   └── PipelineError  a call that pipelines do not support
    └── AbsentMemberError  a missing member of DeepSpeed's             (also an AttributeError)

May import nothing of the project.
"""

import collections.abc
import contextlib
import operator
import os
import re
import typing

_SHOWN_LENGTH = 60  # maximum length of a value in a message
_INT32_MAX = 2**31 - 1
STRICT_VARIABLE = "DS_CONFIG_STRICT"
MAX_NAME_LENGTH = 80  # characters of a name that is compared letter by letter
_MANY_WORDS = 4  # words of a name that is recognized with one word missing
_SHORTEST = 3  # letters of a word's short form


class DeepSpeedError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(DeepSpeedError, ValueError):
    """A configuration value is wrong. The message starts with the path of the key."""


class PluginError(DeepSpeedError, RuntimeError):
    """A plugin that was requested by name is missing or broken."""


class OpUnavailable(DeepSpeedError, RuntimeError):
    """An op has no implementation here; the message lists every candidate with the reason against it."""


class CommError(DeepSpeedError, RuntimeError):
    """A process group could not be built or a collective was misused."""


class CheckpointError(DeepSpeedError, RuntimeError):
    """A checkpoint cannot be written or read; the message names the file."""


class StateError(DeepSpeedError, RuntimeError):
    """A call is illegal at this moment, for example `step()` inside a backward."""


class PipelineError(StateError):
    """A pipeline's engine or module does not support a call. The name is DeepSpeed's."""


class AbsentMemberError(DeepSpeedError, AttributeError):
    """A member of one of DeepSpeed's classes is missing; the message names the alternative. `hasattr` is False."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number of things for a message; `plural` if it is not the noun with an s.

    >>> counted(1, "rank"), counted(2, "rank"), counted(2, "query", "queries")
    ('1 rank', '2 ranks', '2 queries')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def either(choices: collections.abc.Iterable[object]) -> str:
    """Return alternatives for a message.

    >>> either([1]), either([1, 3]), either(["a", "b", "c"])
    ('1', '1 or 3', 'a, b or c')
    """
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def shown(value: str) -> str:
    """Return foreign text for a one-line message: quoted, and cut if it is long.

    >>> shown("one\\ntwo"), len(shown("x" * 5000)) < 100
    ("'one\\\\ntwo'", True)
    """
    return repr(value) if len(value) <= _SHOWN_LENGTH else f"{value[:_SHOWN_LENGTH]!r}... ({len(value)} characters)"


def stated(variable: str) -> str:
    """Return an environment variable and its value for a message, in shell syntax if it is short and printable.

    >>> os.environ["DS_EXAMPLE"] = "one\\ntwo"
    >>> stated("DS_EXAMPLE"), os.environ.pop("DS_EXAMPLE")
    ("DS_EXAMPLE='one\\\\ntwo'", 'one\\ntwo')
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
    """Return the integer in an environment variable.

    Args:
        variable: its name.
        default: value if the variable is not set; None: raise then. An empty variable always raises: with
            `export RANK=$NOT_SET` in a script, every process would be rank 0.
        least, most: allowed range.
        error: class of the error.
        environment: default: the environment of this process.

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
    """Return an argument that counts or names something: an integer of any library, for example an integral tensor with
    one element and at most one dimension.

    Args:
        asked: the beginning of the message, for example a configuration key.
        value: the argument.
        least: minimum; None: every integer is allowed.

    Raises:
        ConfigError: if the value is not an integer, or is too small.
    """
    number: int | None = None
    if type(value) is int:
        number = value
    elif isinstance(value, typing.SupportsIndex) and not _is_truth_value(value):
        with contextlib.suppress(TypeError):  # a tensor or an array of other values
            number = operator.index(value)
    if number is None or (least is not None and number < least):
        limit = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{asked}: asked for {value!r}, allowed is an integer{limit}")
    return number


def _is_truth_value(value: object) -> bool:
    """Return whether `value` is a bool, or a tensor or an array of bools."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def first_line(error: BaseException) -> str:
    """Return the first line of `error`'s message, for a one-line text; the error's type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


# ----- names that are mistyped ---------------------------------------------------------------------------------------


def nearest_name(written: str, known: collections.abc.Collection[str], limit: int) -> str | None:
    """Return the known name within an edit distance of `limit` (less for short keys), ignoring case; else None."""
    typed = written.lower()
    if len(typed) > MAX_NAME_LENGTH:
        return None
    by_distance = {key: _distance(typed, key.lower(), min(limit, max(1, len(typed) // 4))) for key in sorted(known)}
    found = [key for key, distance in by_distance.items() if distance is not None]
    return min(found, key=lambda key: by_distance[key] or 0) if found else None


def by_words(written: str, known: collections.abc.Collection[str]) -> str | None:
    """Return the only known key whose words match `written`, else None. One word of four or more, but not the first,
    may be missing, or words may be shortened or lengthened ("grad_accum_steps", "stage3_max_live_params")."""
    words = written.lower().split("_")
    found = [key for key in known if _leaves_one_out(words, key.split("_")) or _shortens(words, key.split("_"))]
    return found[0] if len(found) == 1 else None


def _leaves_one_out(words: list[str], wanted: list[str]) -> bool:
    if len(wanted) < _MANY_WORDS or len(words) != len(wanted) - 1:
        return False
    return any(words == wanted[:place] + wanted[place + 1 :] for place in range(1, len(wanted)))


def _shortens(words: list[str], wanted: list[str]) -> bool:
    others = [pair for pair in zip(words, wanted, strict=False) if pair[0] != pair[1]]
    is_alike = len(words) == len(wanted) and len(wanted) >= _MANY_WORDS - 1 and 0 < len(others) < len(wanted)
    return is_alike and all(_is_short_form(*sorted(pair, key=len)) for pair in others)


def _is_short_form(short: str, long: str) -> bool:
    """Return whether `short` is a subsequence of `long` that starts with the same letter."""
    if not (
        _SHORTEST <= len(short) < len(long) <= MAX_NAME_LENGTH and (short + long).isalpha() and short[0] == long[0]
    ):
        return False
    letters = iter(long)
    return all(letter in letters for letter in short)


def _distance(one: str, other: str, limit: int) -> int | None:
    """Return the edit distance (insert, delete, replace, swap neighbors); None if it exceeds `limit`."""
    if abs(len(one) - len(other)) > limit:
        return None
    before, above = [0] * (len(other) + 1), list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        line = [row]
        for column, wanted in enumerate(other, 1):
            cost = min(above[column] + 1, line[-1] + 1, above[column - 1] + (letter != wanted))
            if row > 1 and column > 1 and (letter, one[row - 2]) == (other[column - 2], wanted):
                cost = min(cost, before[column - 2] + 1)
            line.append(cost)
        before, above = above, line
    return above[-1] if above[-1] <= limit else None


def is_strict() -> bool:
    """Return whether `DS_CONFIG_STRICT` makes every unknown key of a configuration an error.

    Raises:
        ConfigError: its value is neither 0 nor 1.
    """
    value = os.environ.get(STRICT_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{STRICT_VARIABLE}: found {value!r}; allowed: 0 or 1")
    return value == "1"
