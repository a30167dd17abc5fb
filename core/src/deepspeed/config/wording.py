"""Types and errors in a user's words: what is allowed for a key, and a pydantic complaint as one ConfigError line.

Called by `intake.parse_section` and `root.DeepSpeedConfig`; the reference page uses `allowed` for its type column.
"""

import re
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from deepspeed.config.base import AUTO, Says, Section, default_of, json_keys, section_of
from deepspeed.config.read import brief, redacted
from deepspeed.errors import ConfigError

T = TypeVar("T")

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "null",
    Any: "anything",
}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


def validated(path: str, model: type[Section], build: Callable[[], T]) -> T:
    """Run `build` (a pydantic validation of `model`) and raise its first complaint as a ConfigError at `path`."""
    try:
        return build()
    except ValidationError as error:
        raise ConfigError(_first_complaint(path, model, error)) from None


def _first_complaint(path: str, model: type[Section], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    names = [path] if path else []
    info: FieldInfo | None = None
    inner: type[Section] | None = model
    for part in first["loc"]:
        if inner is not None:
            name = json_keys(inner).get(str(part))
            if name is None:
                continue  # pydantic's own label for a branch of a union
            info = inner.model_fields[name]
            names.append(info.alias or name)
            inner = section_of(info)
        elif isinstance(part, int):
            names[-1] += f"[{part}]"
    where = ".".join(names) or "config"
    if info is None:
        return f"{where}: {first['msg']}"
    if first["type"] == "missing":
        return f"{where}: is missing; write {allowed(info)}"
    hint = "; write it without quotes" if _is_quoted(first["input"]) and _takes_number(info) else ""
    value = first["input"] if hint else redacted(first["input"], where)  # a number in quotes is no secret
    return f"{where}: found {brief(value)}; allowed: {allowed(info)}{hint}"


def _is_quoted(value: object) -> bool:
    """Whether it is a text that would be a number or a truth value if it were not in quotes."""
    return isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false", value, re.I) is not None


def _takes_number(info: FieldInfo) -> bool:
    text = allowed(info)
    return "integer" in text or "number" in text or "true or false" in text


def allowed(info: FieldInfo) -> str:
    """Say what a key accepts, for example "an integer >= 1 or null"."""
    text = _words(info.annotation, info.metadata)
    if default_of(info) == AUTO and '"auto"' not in text:
        text += ' or "auto"'
    return text


def _words(annotation: Any, metadata: Any = ()) -> str:
    said = next((item for item in metadata if isinstance(item, Says)), None)
    if said is not None:
        return said.text + _bounds(metadata)
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *rest = get_args(annotation)
        return _words(base, [*rest, *metadata])
    if origin in (Union, types.UnionType):
        parts = [_words(part, metadata if part is not type(None) else ()) for part in get_args(annotation)]
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        return " or ".join(f'"{item}"' if isinstance(item, str) else str(item) for item in get_args(annotation))
    if origin is list:
        return f"a list, each item {_words(get_args(annotation)[0])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return "an object"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation))) + _bounds(metadata)


def _bounds(metadata: Any) -> str:
    found = []
    for item in metadata:
        inner = [item, *getattr(item, "metadata", ())]  # a FieldInfo inside Annotated carries its own list
        found += [f" {sign} {getattr(one, name)}" for one in inner for name, sign in _BOUNDS if hasattr(one, name)]
    return " and".join(dict.fromkeys(found))
