"""Read a config into a dict, from a dict, a path, JSON text, hjson text, or base64 of either text.

`DeepSpeedConfig` and the command line tools call `read_config`. Duplicate keys are refused. `check_bounds` limits the
size of a config, so that code that walks it later cannot fail. Messages show only the beginning of a value. `redacted`
removes the secrets from a config or a part of one. Code that prints or saves a config, or shows a user's value, calls
it.
"""

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed.errors import ConfigError

MAX_CHARACTERS = 1024 * 1024
MAX_DEPTH = 64
MAX_VALUES = 20_000
MAX_DIGITS = 20
_MAX_BITS = 64


def check_bounds(value: Any, path: str = "") -> None:
    """Raise ConfigError for deep nesting, too many values, a key that is not text, or an integer of more than 64 bits.

    path: dotted key of `value`, for messages. A dict that contains itself counts as nested too deeply.
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
    """Create the error for a config that is nested too deeply."""
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
    """Return the repr of a value, cut to a length for messages."""
    return cut(repr(value))


def shown_key(written: str) -> str:
    """Return a key in a printable form for messages."""
    return cut(written if written.isprintable() else repr(written), 80)


def cut(text: str, length: int = 200) -> str:
    """Return the text, or its beginning and an ellipsis if it is longer than `length`."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


REDACTED = "<redacted>"

# `_words` makes "apiKey", "API-KEY" and "api_key" one name
_SECRET = re.compile(
    r"(^|_)(api|access|account|auth|private|secret|shared|signing|encryption|storage|session|license|ssh)_?keys?($|_)"
    r"|(^|_)(password|passwd|passphrase|pwd|secret|credential|authorization|bearer|connection_string|dsn|webhook)s?($|_)"
    r"|(^|_)(auth|jwt|cookie)s?$"
    r"|(^|_)tokens?(_value)?$"
)
_PLUGIN_ARGUMENTS = "monitor_plugins"  # only the plugin knows what its arguments mean
_USER_OF_URL = re.compile(r"(?<=://)[^/?#\s]*@")  # up to the last @: a password may contain one
_QUERY_OF_URL = re.compile(r"(?<=[?&;])([^=&;?#\s]+)=([^&;#\s]+)")
_SIGNATURES = frozenset({"sig", "signature", "x_amz_signature", "x_goog_signature"})  # in a signed link to a file


def redacted(value: Any, key: str = "") -> Any:
    """Return a copy of `value` with `REDACTED` in place of each secret.

    Args:
        value: a config or a part of one: nested dicts and lists of plain values.
        key: the key, or dotted path, of `value`.

    A secret is a value under a key with a telling name (`api_key`, `password`, `...token`, `secret`, ...), any text in
    the arguments of `monitor_plugins`, and in a URL the user information and the values of such keys in the query.
    A number under a key that ends in "token" or "tokens" is no secret: `max_tokens: 512` stays.
    """
    names = key.split(".")
    return _redacted(value, names[-1], hides_text=_PLUGIN_ARGUMENTS in names)


def _redacted(value: Any, name: str, hides_text: bool) -> Any:
    if _is_secret(name, value):
        return REDACTED
    if isinstance(value, Mapping):
        hides = hides_text or name == _PLUGIN_ARGUMENTS
        return {inner: _redacted(item, str(inner), hides) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_redacted(item, "", hides_text) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return REDACTED if hides_text and value else _without_secrets_of_urls(value)
    return value


def _without_secrets_of_urls(text: str) -> str:
    if "://" not in text:
        return text
    return _QUERY_OF_URL.sub(_redacted_pair, _USER_OF_URL.sub(f"{REDACTED}@", text))


def _redacted_pair(pair: re.Match[str]) -> str:
    name, value = pair.groups()
    is_secret = _words(name) in _SIGNATURES or _is_secret(name, value)
    return f"{name}={REDACTED}" if is_secret else pair.group()


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value in ("", "auto")):
        return False
    words = _words(name)
    counts = words.endswith(("token", "tokens")) and isinstance(value, int | float)  # a number of tokens
    return bool(_SECRET.search(words)) and not counts


def _words(name: str) -> str:
    """Convert a key to snake case."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower())


_LONGEST_PATH = 4096
ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


class _RefusedError(ConfigError):
    """Ends the parse at once: valid JSON that this module refuses is not parsed again as hjson."""


def read_config(source: ConfigSource) -> dict[str, Any]:
    """Return the config as a dict. If `source` is a dict, return the same object.

    source: a dict; a path to a JSON or hjson file; the text itself (it begins with a brace or a comment); or its base64
        encoding, standard or url-safe, padded or not. At most 2**20 characters, 64 levels and 20,000 values.

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
    """Return the path of the config's file; "" if the config is not a file."""
    if isinstance(source, os.PathLike):
        return os.fspath(source)
    return source if isinstance(source, str) and len(source) < _LONGEST_PATH and os.path.isfile(source) else ""


@contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Put the path of the config's file, if not "", before the message of a ConfigError raised inside."""
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
    import hjson  # late: plain JSON does not need it

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
    """Build the dict of a JSON object (a parser's object_pairs_hook). Raises ConfigError for a duplicate key."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            first, second = (brief(redacted(one, name)) for one in (result[name], value))
            raise _RefusedError(f"the key {brief(name)} appears twice ({first} and {second}); keep one")
        result[name] = value
    return result
