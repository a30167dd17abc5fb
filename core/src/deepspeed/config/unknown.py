"""What happens to a key that no section declares: an error inside a section, a warning at the top level.

At the top level other libraries keep keys of their own, so the config goes on; `DS_CONFIG_STRICT=1` refuses them too.
Called by `intake.take_in`.
"""

import difflib
import os
from collections.abc import Collection

from deepspeed.config.bounds import shown_key
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once

VARIABLE = "DS_CONFIG_STRICT"


def unknown_key(
    written: str, path: str, known: Collection[str], *, top_level: Collection[str] = (), tolerated: bool
) -> None:
    """Raise ConfigError for the key `written` of the section at `path`, or warn once.

    known: every accepted spelling of the section's keys.  top_level: those of the config that the section is in.
    tolerated: warn, unless DS_CONFIG_STRICT=1.
    """
    # the value is not shown: a mistyped `api_key` would print a secret
    where = f"{path}.{shown_key(written)}" if path else shown_key(written)
    hint = _hint(written, known, top_level)
    if tolerated and not _is_strict():
        warn_once(f"{where}: unknown config key, ignored" + (f"; {hint}" if hint else ""))
        return
    rest = f"{VARIABLE}=1 refuses it; remove the key" if tolerated else f"allowed: {', '.join(sorted(known))}"
    raise ConfigError(f"{where}: found an unknown key; {hint or rest}")


def _hint(written: str, known: Collection[str], top_level: Collection[str]) -> str:
    extended = [key for key in known if key.startswith(f"{written}_")]
    if extended:
        return f"did you mean {' or '.join(map(repr, sorted(extended)))}?"
    if written in top_level:
        return "it is a key of the top level, close the braces before it"
    head, _, rest = written.partition(".")
    if rest and head in known:
        return f'a dot does not nest: write "{shown_key(head)}": {{"{shown_key(rest)}": ...}}'
    near = difflib.get_close_matches(written[:80].lower(), known, n=1)
    return f"did you mean '{near[0]}'?" if near else ""


def _is_strict() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}: found {value!r}; allowed: 0 or 1")
    return value == "1"
