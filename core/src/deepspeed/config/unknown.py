"""A key that no section declares is an error where it is a slip of a known one, else it causes a warning.

A slip is a known key mistyped, with a word left out or cut short, or in the wrong place. What resembles nothing may be
a key of a newer DeepSpeed, or at the top level of another library, so the config goes on; `DS_CONFIG_STRICT=1` refuses
that too. Called by `intake.take_in`.
"""

import difflib
import os
from collections.abc import Collection

from deepspeed.config.read import shown_key
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once

VARIABLE = "DS_CONFIG_STRICT"
_MAX_LENGTH = 80  # of a key that is compared letter by letter
_MANY_WORDS = 4  # so that a key can lack one and still be known
_SHORTEST = 3  # letters of a word's short form


def unknown_key(
    written: str,
    path: str,
    known: Collection[str],
    *,
    former: Collection[str] = (),
    top_level: Collection[str] = (),
    elsewhere: Collection[str] = (),
    tolerated: bool,
    closed: bool = False,
) -> None:
    """Raise ConfigError for the key `written` of the section at `path`, or warn once.

    known: every accepted spelling of the section's keys.  former: their older names.
    top_level: keys of the config that the section is in.  elsewhere: those of its other sections.
    tolerated: only one letter, or the words, make a slip, since other libraries keep keys there: of the top level.
    closed: every unknown key is an error.
    """
    # the value is not shown: a mistyped `api_key` would print a secret
    where = f"{path}.{shown_key(written)}" if path else shown_key(written)
    near = _nearest(written, (*known, *former), 1 if tolerated else 2)
    misplaced = None if tolerated else _misplaced(written, known, top_level)
    if near is None and misplaced is None and written not in elsewhere:
        near = by_words(written, known)
    is_slip = near is not None or misplaced is not None or not written.isprintable()
    is_slip = is_slip or (not tolerated and (closed or written in elsewhere or len(written) > _MAX_LENGTH))
    hint = f"did you mean '{near}'?" if near is not None else misplaced or _hint(written, known)
    if not is_slip and not _is_strict():
        warn_once(f"{where}: unknown config key, ignored" + (f"; {hint}" if hint else ""))
        return
    rest = f"{VARIABLE}=1 refuses it; remove the key" if not is_slip else f"allowed: {', '.join(sorted(known))}"
    raise ConfigError(f"{where}: found an unknown key; {hint or rest}")


def _misplaced(written: str, known: Collection[str], top_level: Collection[str]) -> str | None:
    """Return the hint for a key of the top level or for the beginning of a known key; None if it is neither."""
    extended = [key for key in known if key.startswith(f"{written}_")]
    if extended:
        return f"did you mean {' or '.join(map(repr, sorted(extended)))}?"
    return "it is a key of the top level, close the braces before it" if written in top_level else None


def _hint(written: str, known: Collection[str]) -> str:
    head, _, rest = written.partition(".")
    if rest and head in known:
        return f'a dot does not nest: write "{shown_key(head)}": {{"{shown_key(rest)}": ...}}'
    near = difflib.get_close_matches(written[:_MAX_LENGTH].lower(), known, n=1)
    return f"did you mean '{near[0]}'?" if near else ""


def _nearest(written: str, known: Collection[str], limit: int) -> str | None:
    """The known key that is at most so many letters away, capitals aside; short keys must be nearer."""
    typed = written.lower()
    if len(typed) > _MAX_LENGTH:
        return None
    by_distance = {key: _distance(typed, key.lower(), min(limit, max(1, len(typed) // 4))) for key in sorted(known)}
    found = [key for key, distance in by_distance.items() if distance is not None]
    return min(found, key=lambda key: by_distance[key] or 0) if found else None


def by_words(written: str, known: Collection[str]) -> str | None:
    """The only known key that `written` is by its words, which underscores part: one of four or more is left out, but
    the first, or words are shorter or longer forms of one another ("grad_accum_steps", "stage3_max_live_params")."""
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
    """Whether the letters of `short` are some of those of `long`, in their order, from its first one on."""
    if not (_SHORTEST <= len(short) < len(long) <= _MAX_LENGTH and (short + long).isalpha() and short[0] == long[0]):
        return False
    letters = iter(long)
    return all(letter in letters for letter in short)


def _distance(one: str, other: str, limit: int) -> int | None:
    """Letters to add, drop, replace or exchange with their neighbor from one to the other; None: more than `limit`."""
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


def _is_strict() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}: found {value!r}; allowed: 0 or 1")
    return value == "1"
