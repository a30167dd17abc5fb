"""`redacted`: a config, or a part of one, without the secrets in it. Whatever prints or saves a config calls it.

Called by `root.py` (what `dump_state` prints), by `base.Section` (its repr), by error messages that show a value the
user wrote, and by the engine for the `ds_config` of a checkpoint.
"""

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"

# "apiKey", "API-KEY" and "api_key" are one name: see _words.
_SECRET = re.compile(
    r"(^|_)(api|access|account|auth|private|secret|shared|signing|encryption|storage|session|license|ssh)_?keys?($|_)"
    r"|(^|_)(password|passwd|passphrase|pwd|secret|credential|authorization|bearer|connection_string|dsn|webhook)s?($|_)"
    r"|(^|_)(auth|jwt|cookie)s?$"
    r"|(^|_)tokens?(_value)?$"
)
_PLUGIN_ARGUMENTS = "monitor_plugins"  # only the plugin knows what its arguments mean
_USER_OF_URL = re.compile(r"(?<=://)[^/?#\s]*@")  # up to the last @: a password may have one
_QUERY_OF_URL = re.compile(r"(?<=[?&;])([^=&;?#\s]+)=([^&;#\s]+)")
_SIGNATURES = frozenset({"sig", "signature", "x_amz_signature", "x_goog_signature"})  # of a link that opens a file


def redacted(value: Any, key: str = "") -> Any:
    """`value` with `REDACTED` in place of each secret; a copy where anything changes inside.

    Args:
        value: of a config: nested dicts and lists of plain values.
        key: the key, or dotted path, under which `value` was written.

    A secret is text (or a section) under a key that says so (`api_key`, `password`, `...token`, `secret`, ...), any
    text among the arguments of `monitor_plugins`, and in a URL the user information and what such a key of the query
    has. A number is one only under a password or secret: `max_tokens: 512` stays.
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
    """A key in snake case."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower())
