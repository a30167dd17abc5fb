"""A config is kept so small that whoever walks it later cannot fail; messages show only the beginning of a value.

`read.read_config` and `intake.parse_section` call `check_bounds` before anything else looks at a user's values.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed.errors import ConfigError

MAX_CHARACTERS = 1024 * 1024
MAX_DEPTH = 64
MAX_VALUES = 20_000
MAX_DIGITS = 20
_MAX_BITS = 64


def check_bounds(value: Any, path: str = "") -> None:
    """Raise ConfigError unless `value` and all it contains is nested little, with text for keys and 64-bit integers.

    path: dotted key of `value`, for messages. A dict that contains itself is nested too deeply.
    """
    pending = [(path, value, 0)]
    num_values = 0
    while pending:
        where, inner, depth = pending.pop()
        num_values += 1
        if isinstance(inner, int) and inner.bit_length() > _MAX_BITS:
            found = f"an integer of more than {_MAX_BITS} bits"
            raise ConfigError(f"{where or 'config'}: found {found}; write a smaller one")
        if not isinstance(inner, Mapping | list | tuple):
            continue
        if depth >= MAX_DEPTH:
            raise too_deep(path or "config")
        if num_values + len(inner) > MAX_VALUES:
            raise ConfigError(f"{path or 'config'}: found more than {MAX_VALUES} values; write fewer")
        pending += [(name, item, depth + 1) for name, item in _items(inner, where)]


def too_deep(what: str) -> ConfigError:
    """The error for a config that is nested too deeply."""
    return ConfigError(f"{what}: is nested too deeply; found more than {MAX_DEPTH} levels")


def _items(container: Any, where: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(container, Mapping):
        yield from ((where, item) for item in container)
        return
    for name, item in container.items():
        if not isinstance(name, str):
            raise ConfigError(f"{where or 'config'}: the key {brief(name)} is not text; put it in double quotes")
        yield (f"{where}.{shown_key(name)}" if where else shown_key(name)), item


def brief(value: Any) -> str:
    """The repr of a value, cut to what a message can show."""
    return cut(repr(value))


def shown_key(written: str) -> str:
    """A key as one printable word of a message."""
    return cut(written if written.isprintable() else repr(written), 80)


def cut(text: str, length: int = 200) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
