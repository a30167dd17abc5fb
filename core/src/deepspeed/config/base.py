"""Sections and keys are declared with type, default, meaning and unit, and with what this version does with them.

    class CommsLoggerConfig(Section):
        enabled: Flag = key(False, "Record every collective.", support=warned("nothing is recorded"))

The reference page (`docs/generate/config.py`) and `supported.py` read the declarations back through `declared()`.
`intake.parse_section` makes a section from a user's dict.
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

from deepspeed._absent_members import absent_members
from deepspeed.config.read import redacted

AUTO = "auto"
"""Hugging Face's placeholder: its Trainer or Accelerate fills the value before DeepSpeed sees it."""

Action = Literal["acted", "quiet", "warned", "refused"]


@dataclass(frozen=True)
class Support:
    """`Support` says what this version does with a key. Only a value that the user wrote and that is not "off" counts.

    action: "acted" on; "quiet": has nothing to act on (it tunes a feature that is refused as a whole, or another
        stage); "warned": ignored with one warning, results stay the same; "refused": ConfigError, because going on
        without it would change results or memory.
    note: the rest of the sentence the user reads.
    off: values besides the default which ask for nothing and are therefore fine.
    """

    action: Action
    note: str = ""
    off: tuple[Any, ...] = ()


ACTED = Support("acted")


def quiet(note: str) -> Support:
    """A key with nothing to act on here, for example stage 3 tuning."""
    return Support("quiet", note)


def warned(note: str, off: tuple[Any, ...] = ()) -> Support:
    """A key whose absence changes no result: it is ignored, and says so once."""
    return Support("warned", note, off)


def refused(note: str, off: tuple[Any, ...] = ()) -> Support:
    """A key that must not be ignored: switching it on raises ConfigError."""
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
    """Declare one key of a section. `json_key` is its name in the JSON when the attribute is called otherwise."""
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
    """The support and the unit that `key` put into a field."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict), "every key of a section is declared with key()"
    off = extra["off"]
    assert isinstance(off, list)
    return Support(extra["action"], str(extra["note"]), tuple(off)), str(extra["unit"])  # type: ignore[arg-type]


def default_of(field: FieldInfo) -> Any:
    """The value a key has when the user is silent; `PydanticUndefined` when it must be written."""
    return field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of a user are equal; arrays and tensors, which cannot be in a config, are equal to nothing."""
    if one is other:
        return True
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def one_of(*names: str) -> WithJsonSchema:
    """Annotated metadata: the names that a converter takes in any case, for the JSON Schema."""
    return WithJsonSchema(
        {"enum": list(dict.fromkeys(one for name in names for one in (name, name.lower(), name.upper())))}
    )


class Says:
    """Annotated metadata: the words for a type which a converter accepts in many spellings."""

    def __init__(self, text: str) -> None:
        self.text = text


def flag(value: Any) -> Any:
    """Validator of every switch: raises ValueError for what is neither true or false nor 1 or 0."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise ValueError("not a boolean")


def number(value: Any) -> Any:
    """Validator in front of every numeric type: raises ValueError for what only looks like a number."""
    # "32" in quotes (but in a `LaxSection`) and `true` are slips, not numbers; 5e8 is what people write for an integer.
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
    """One object of the JSON. Attributes are the keys; `model_fields_set` holds those that the user wrote."""

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


#: how pydantic reads a value in quotes
_READERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (int, float, bool)}


class LaxSection(Section):
    """A section that DeepSpeed reads by pydantic, which takes numbers and truth values in quotes: "2", "1e-3", "true".

    Elsewhere DeepSpeed fails for a number in quotes, and takes "false" for true.
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
    """Return a text as another type that the key takes; the text itself where the key takes texts or none reads it."""
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
    """The types that values of an annotation may have."""
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
    """The section type of a field (also of an optional one), None for a plain value."""
    for candidate in (info.annotation, *get_args(info.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def json_keys(model: type[Section]) -> dict[str, str]:
    """Every accepted spelling of a section's keys -> attribute name."""
    names = {name: name for name in model.model_fields}
    names.update({info.alias: name for name, info in model.model_fields.items() if info.alias})
    return names
