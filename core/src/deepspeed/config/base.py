"""Declare sections and keys with type, default, meaning and unit, and with the support that this version has for them.

    class CommsLoggerConfig(Section):
        enabled: Flag = key(False, "Record every collective.", support=warned("nothing is recorded"))

The reference page (`docs/generate/config.py`) and `supported.py` read the declarations through `declared()`.
`intake.parse_section` builds a section from a user's dict.
"""

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deepspeed._absent import absent_members
from deepspeed.config.read import redacted

AUTO = "auto"
"""Hugging Face's placeholder: its Trainer or Accelerate fills the value before DeepSpeed sees it."""

Action = Literal["acted", "quiet", "warned", "refused"]


@dataclass(frozen=True)
class Support:
    """`Support` says what this version does with a key, if the user wrote a value that is not "off".

    action: "acted": implemented; "quiet": ignored silently, because the feature that it tunes is refused as a whole or
        not in use; "warned": ignored with one warning, results stay the same; "refused": ConfigError, because ignoring
        it would change results or memory.
    note: the end of the message for the user.
    off: values, besides the default, that ask for nothing and are therefore accepted.
    """

    action: Action
    note: str = ""
    off: tuple[Any, ...] = ()


ACTED = Support("acted")


def quiet(note: str) -> Support:
    """Return the support of a key that is ignored silently because it has no effect here."""
    return Support("quiet", note)


def warned(note: str, off: tuple[Any, ...] = ()) -> Support:
    """Return the support of a key that changes no result: it is ignored with one warning."""
    return Support("warned", note, off)


def refused(note: str, off: tuple[Any, ...] = ()) -> Support:
    """Return the support of a key that must not be ignored: switching it on raises ConfigError."""
    return Support("refused", note, off)


def key(
    default: Any = ...,
    meaning: str = "",
    *,
    unit: str = "",
    support: Support = ACTED,
    json_key: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare one key of a section. `json_key` is the name in the JSON if it differs from the attribute's name."""
    declared_as: dict[str, Any] = {
        "unit": unit,
        "action": support.action,
        "note": support.note,
        "off": list(support.off),
    }
    if isinstance(default, type):  # a section, list or dict: each config gets its own
        constraints["default_factory"] = default
    elif default is not ...:
        constraints["default"] = default
    if json_key is not None:
        constraints["alias"] = json_key
    return Field(description=meaning, json_schema_extra=declared_as, **constraints)


def declared(field: FieldInfo) -> tuple[Support, str]:
    """Return the support and the unit of a field that `key` declared."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict), "every key of a section is declared with key()"
    off = extra["off"]
    assert isinstance(off, list)
    return Support(extra["action"], str(extra["note"]), tuple(off)), str(extra["unit"])  # type: ignore[arg-type]


def default_of(field: FieldInfo) -> Any:
    """Return the default of a key; `PydanticUndefined` if the key is required."""
    return field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal. False for arrays and tensors, whose comparison has no single result."""
    if one is other:
        return True
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def one_of(*names: str) -> WithJsonSchema:
    """Create Annotated metadata for the JSON Schema: the names that a converter accepts in any letter case."""
    return WithJsonSchema(
        {"enum": list(dict.fromkeys(one for name in names for one in (name, name.lower(), name.upper())))}
    )


class Says:
    """Annotated metadata that describes the allowed values in messages, for a type with a converter."""

    def __init__(self, text: str) -> None:
        self.text = text


def flag(value: Any) -> Any:
    """Validate a switch: raise ValueError for any value but true, false, 1 and 0."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError("not a boolean")


def number(value: Any) -> Any:
    """Validate the input of a numeric type: raise ValueError for booleans, strings, null and NaN."""
    # "32" in quotes (except in a `LaxSection`) and `true` are mistakes; 5e8 is accepted for an integer.
    if isinstance(value, bool | str) or value is None:
        raise ValueError("not a number")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("not a number")
    return value


def _finite(value: Any) -> Any:
    if isinstance(number(value), float) and math.isinf(value):
        raise ValueError("not a finite number")
    return value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Flag = Annotated[bool, BeforeValidator(flag), WithJsonSchema({"enum": [False, True, 0, 1]})]
Int = Annotated[int, BeforeValidator(number)]
Float = Annotated[float, BeforeValidator(number)]
Finite = Annotated[float, BeforeValidator(_finite), Says("a finite number")]
Text = Annotated[str, Field(strict=True)]
Texts = Annotated[
    list[str],
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Free = dict[str, Any]


@absent_members("runtime.config_utils:DeepSpeedConfigModel")
class Section(BaseModel):
    """One object of the JSON. Attributes are the keys; `model_fields_set` holds the keys that the user wrote."""

    model_config = ConfigDict(populate_by_name=True, extra="forbid", protected_namespaces=(), validate_assignment=False)

    tolerates_unknown: ClassVar[bool] = False
    """Whether an unknown key is a warning. Only the root's: other libraries keep keys there."""

    closed: ClassVar[bool] = False
    """Whether every unknown key is an error, since arguments of something else are easily misplaced there."""

    moved: ClassVar[dict[str, tuple[str, str]]] = {}
    """Deprecated key -> (dotted key of this section that replaces it, rule of `intake.MOVES` for the value)."""

    @classmethod
    def normalize(cls, value: Any) -> Any:
        """Turn an old spelling of the whole section into its object, for example `"zero_optimization": true`."""
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redacted(value, name or "")


#: pydantic's parsers for a value in quotes
_READERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (int, float, bool)}


class LaxSection(Section):
    """A section that DeepSpeed parses with pydantic, which accepts numbers and booleans in quotes: "2", "1e-3", "true".

    In its other sections DeepSpeed fails for a number in quotes, and reads "false" as true.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_quotes(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        names = json_keys(cls)
        return {
            written: _unquoted(value, cls.model_fields[names[written]].annotation)
            if isinstance(value, str) and written in names
            else value
            for written, value in data.items()
        }


def _unquoted(value: str, annotation: Any) -> Any:
    """Convert a text to a type that the key accepts; return the text if the key accepts texts, or no type fits."""
    kinds = set(_kinds_in(annotation))
    if str in kinds:
        return value
    for kind, reader in _READERS.items():
        if kind in kinds:
            try:
                return reader.validate_python(value)
            except ValidationError:
                continue
    return value


def _kinds_in(annotation: Any) -> Iterator[Any]:
    """Yield the types that values of an annotation may have."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds_in(get_args(annotation)[0])
    elif origin is Literal:
        yield from map(type, get_args(annotation))
    elif origin in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _kinds_in(each)
    else:
        yield annotation


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the section type of a field, also of an optional one; None for a plain value."""
    for candidate in (info.annotation, *get_args(info.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def json_keys(model: type[Section]) -> dict[str, str]:
    """Return every accepted spelling of a section's keys -> attribute name."""
    names = {name: name for name in model.model_fields}
    names.update({info.alias: name for name, info in model.model_fields.items() if info.alias})
    return names
