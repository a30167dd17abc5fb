"""A config from wherever the user keeps it, as a dict: path, dict, JSON text, hjson text, base64 of either.

`read_config` is called by `DeepSpeedConfig` and by the command line tools. Keys that appear twice are refused.
"""

import base64
import binascii
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed.config.bounds import MAX_CHARACTERS, MAX_DIGITS, brief, check_bounds, cut, too_deep
from deepspeed.config.redact import redacted
from deepspeed.errors import ConfigError

_LONGEST_PATH = 4096
ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


class _RefusedError(ConfigError):
    """Ends the parse at once: text that JSON can parse and this module refuses is not tried as hjson."""


def read_config(source: ConfigSource) -> dict[str, Any]:
    """Return the config as a dict. A dict is returned as it is, the same object.

    source: a dict; a path to a JSON or hjson file; the text itself (it begins with a brace); or its base64 encoding,
        standard or url-safe, with or without padding. Of at most 2**20 characters, 64 levels and 20,000 values.

    Raises ConfigError.
    """
    value = _read(source)
    check_bounds(value)
    return value


def _read(source: ConfigSource) -> dict[str, Any]:
    if isinstance(source, dict):
        return source
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, os.PathLike):
        return _read_file(os.fspath(source))
    if isinstance(source, str):
        if source.lstrip().startswith(("{", "#", "//", "/*")) and not os.path.isfile(source):
            return _parse(source, "the config text")
        if os.path.exists(source):
            return _read_file(source)
        return _read_base64(source)
    raise ConfigError(
        f"config: found {type(source).__name__} {brief(redacted(source))}; give a dict, a path, JSON text or its base64"
    )


def file_of(source: ConfigSource) -> str:
    """The path of the file that the config comes from; "": from no file."""
    if isinstance(source, os.PathLike):
        return os.fspath(source)
    return source if isinstance(source, str) and len(source) < _LONGEST_PATH and os.path.isfile(source) else ""


@contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Errors in keys, raised inside, begin with the file that they are in, if there is one."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") if path else error from None


def _read_file(path: str) -> dict[str, Any]:
    if path.lower().endswith((".yaml", ".yml")):
        raise ConfigError(f"config: found {brief(path)}, a YAML file; write the configuration as JSON")
    try:
        with open(path, encoding="utf-8-sig") as file:  # editors on Windows begin a file with a byte order mark
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null byte in the path
        raise ConfigError(f"config: cannot read the file {brief(path)}: {error}") from None
    return _parse(text, f"the file {brief(path)}")


def _read_base64(text: str) -> dict[str, Any]:
    shown = cut(text, 80)
    body = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        decoded = base64.b64decode(body + "=" * (-len(body) % 4), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        decoded = ""
    if not decoded.lstrip().startswith(("{", "#", "//", "/*")):
        raise ConfigError(f"config: {shown!r} is neither a file that exists, nor JSON text, nor base64 of JSON; "
                          "check the path")  # fmt: skip
    return _parse(decoded, "the base64 config")


def _parse(text: str, what: str) -> dict[str, Any]:
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"config: {what} has more than {MAX_CHARACTERS} characters; a config has at most as many")
    try:
        value = _parse_either(text, what)
    except _RefusedError as error:
        raise ConfigError(f"config: in {what}, {error}") from None
    except RecursionError:
        raise too_deep(f"config: {what}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"config: {what} holds {type(value).__name__} {brief(redacted(value))}; "
                          "the outermost value must be {...}")  # fmt: skip
    return value


def _parse_either(text: str, what: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=refuse_duplicates, parse_int=_integer)
    except json.JSONDecodeError as error:
        return _parse_hjson(text, what, error)


def _parse_hjson(text: str, what: str, json_error: json.JSONDecodeError) -> Any:
    import hjson  # comments and bare keys are rare: plain JSON does not pay for the import

    try:
        return hjson.loads(text, object_pairs_hook=refuse_duplicates, parse_int=_integer)
    except _RefusedError:
        raise
    except (ValueError, IndexError) as error:  # hjson's own error is a ValueError
        own = str(error) if isinstance(error, ValueError) else "the text ends too early"
        raise ConfigError(
            f"config: {what} is neither JSON nor hjson: as JSON, {json_error}; as hjson, {own}. Correct it there"
        ) from None


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:  # Python refuses to convert thousands of them, with a ValueError
        raise _RefusedError(f"found an integer of {len(text)} digits; at most {MAX_DIGITS} are allowed")
    return int(text)


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The hook of a JSON parser for objects: the dict of `pairs`, or a ConfigError for a key that is there twice."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            first, second = (brief(redacted(one, name)) for one in (result[name], value))
            raise _RefusedError(f"the key {brief(name)} appears twice ({first} and {second}); keep one")
        result[name] = value
    return result
