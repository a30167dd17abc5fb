"""A config from wherever the user keeps it, as a dict: path, dict, JSON text, hjson text, base64 of either.

`read_config` is called by `DeepSpeedConfig` and by the command line tools. Keys that appear twice are refused.
"""

import base64
import binascii
import json
import os
from collections.abc import Mapping
from typing import Any

from deepspeed.errors import ConfigError

ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


class _DuplicateKeyError(ConfigError):
    """Ends the parse at once: hjson must not be asked for a second opinion on a key that stands there twice."""


def read_config(source: ConfigSource) -> dict[str, Any]:
    """Return the config as a dict. A dict is returned as it is, the same object.

    source: a dict; a path to a JSON or hjson file; the text itself (it begins with a brace); or its base64 encoding,
        standard or url-safe, with or without padding. Raises ConfigError.
    """
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
    raise ConfigError(f"config: found {type(source).__name__} {source!r}; give a dict, a path, JSON text or its base64")


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: cannot read the file {path!r}: {error}") from None
    return _parse(text, f"the file {path!r}")


def _read_base64(text: str) -> dict[str, Any]:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
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
    try:
        value = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        value = _parse_hjson(text, what, error)
    except _DuplicateKeyError as error:
        raise ConfigError(f"config: in {what}, {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"config: {what} holds {type(value).__name__} {value!r}; the outermost value must be {{...}}")
    return value


def _parse_hjson(text: str, what: str, json_error: json.JSONDecodeError) -> Any:
    import hjson  # comments and bare keys are rare: plain JSON does not pay for the import

    try:
        return hjson.loads(text, object_pairs_hook=_refuse_duplicates)
    except hjson.HjsonDecodeError:
        raise ConfigError(f"config: {what} is neither JSON nor hjson: {json_error}; correct it there") from None
    except _DuplicateKeyError as error:
        raise ConfigError(f"config: in {what}, {error}") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise _DuplicateKeyError(f"the key {name!r} stands twice ({result[name]!r} and {value!r}); keep one")
        result[name] = value
    return result
