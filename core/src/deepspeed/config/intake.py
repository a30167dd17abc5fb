"""`take_in` prepares a user's dict for validation: it handles "auto", null, deprecated keys and unknown keys.

`root.DeepSpeedConfig` calls it before pydantic, and `parse_section` calls it for a single section. It never changes the
user's dict. The functions of DeepSpeed's `runtime.config_utils` are here for scripts that read sections of a dict
themselves.

An unknown key is an error if it resembles a known key, and a warning otherwise. It resembles a known key that is
mistyped, lacks a word, has shortened words, or stands in the wrong place. Any other key may belong to a newer
DeepSpeed or, at the top level, to another library, so it only warns; `DS_CONFIG_STRICT=1` makes it an error too.

The module also words types and errors for users: `allowed` describes the values of a key (also on the reference page),
and `validated` turns a pydantic error into a ConfigError of one line.
"""

import difflib
import functools
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from deepspeed.config.base import AUTO, Says, Section, default_of, flag, is_same, json_keys, section_of
from deepspeed.config.precision import BF16Config, FP16Config
from deepspeed.config.read import brief, check_bounds, redacted, shown_key
from deepspeed.config.zero import ZeroConfig
from deepspeed.errors import (
    MAX_NAME_LENGTH,
    STRICT_VARIABLE,
    ConfigError,
    by_words,
    is_strict,
    nearest_name,
)
from deepspeed.log import warn_once

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
    """Run `build` (a pydantic validation of `model`), and raise its first error as a ConfigError at `path`."""
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
    """Return whether `value` is a string that holds a number or a boolean."""
    return isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?|true|false", value, re.I) is not None


def _takes_number(info: FieldInfo) -> bool:
    text = allowed(info)
    return "integer" in text or "number" in text or "true or false" in text


def allowed(info: FieldInfo) -> str:
    """Describe the values that a key accepts, for example "an integer >= 1 or null"."""
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


_MAX_OWNERS = 2  # a hint names at most this many sections that have the key
COMMENTS = ("_", "#", "//", "$", "comment")  # prefixes of keys that serve as comments, which JSON lacks
# other trainers' name of a setting -> dotted key here
_FOREIGN_NAMES = {
    "zero": "zero_optimization",
    "zero_stage": "zero_optimization.stage",
    **dict.fromkeys(("clip_grad", "grad_clip", "gradient_clip_val", "max_grad_norm"), "gradient_clipping"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "train_micro_batch_size_per_gpu"),
    **dict.fromkeys(("accumulate_grad_batches", "accumulation_steps"), "gradient_accumulation_steps"),
    **{name: f"optimizer.params.{name}" for name in ("lr", "weight_decay", "betas")},
    **dict.fromkeys(("bfloat16_enabled", "use_bf16"), "bf16.enabled"),
    **dict.fromkeys(("fp16_enabled", "use_fp16"), "fp16.enabled"),
}
_NOWHERE: Mapping[str, tuple[str, ...]] = types.MappingProxyType({})


def unknown_key(
    written: str,
    path: str,
    known: Collection[str],
    *,
    former: Collection[str] = (),
    top_level: Collection[str] = (),
    elsewhere: Mapping[str, tuple[str, ...]] = _NOWHERE,
    tolerated: bool,
    closed: bool = False,
) -> None:
    """Raise ConfigError for the key `written` of the section at `path`, or warn once.

    known: every accepted spelling of the section's keys.  former: deprecated names of the keys.
    top_level: top-level keys of the whole config.  elsewhere: keys of all its sections -> the sections' dotted keys.
    tolerated: True for the top level, where other libraries keep keys: only a key that differs by one letter, or
        resembles a known key by its words, is an error, and keys that begin like `COMMENTS` are accepted.
    closed: every unknown key is an error.
    """
    if tolerated and written.startswith(COMMENTS):
        return
    # the message omits the value: under a mistyped `api_key` it is a secret
    where = f"{path}.{shown_key(written)}" if path else shown_key(written)
    near = nearest_name(written, (*known, *former), 1 if tolerated else 2)
    misplaced = None if tolerated else _misplaced(written, known, top_level)
    if near is None and misplaced is None and written not in elsewhere:
        near = by_words(written, known)
    is_slip = near is not None or misplaced is not None or not written.isprintable()
    is_slip = is_slip or (not tolerated and (closed or written in elsewhere or len(written) > MAX_NAME_LENGTH))
    owners = elsewhere.get(written, ())
    inside = tuple(owner for owner in owners if path and owner.startswith(f"{path}."))
    if near is not None:
        hint = f"did you mean '{near}'?"
    elif inside or (tolerated and owners):
        hint = _of_sections(inside or owners)
    elif tolerated and written in _FOREIGN_NAMES:
        hint = f"here it is '{_FOREIGN_NAMES[written]}'"
    else:
        hint = misplaced or _hint(written, known)
    if not is_slip and not is_strict():
        warn_once(f"{where}: unknown config key, ignored" + (f"; {hint}" if hint else ""))
        return
    rest = f"{STRICT_VARIABLE}=1 refuses it; remove the key" if not is_slip else f"allowed: {', '.join(sorted(known))}"
    raise ConfigError(f"{where}: found an unknown key; {hint or rest}")


def _misplaced(written: str, known: Collection[str], top_level: Collection[str]) -> str | None:
    """Return a hint if the key is the beginning of a known key, or a top-level key; else None."""
    extended = [key for key in known if key.startswith(f"{written}_")]
    if extended:
        return f"did you mean {' or '.join(map(repr, sorted(extended)))}?"
    return "it is a key of the top level, close the braces before it" if written in top_level else None


def _of_sections(owners: tuple[str, ...]) -> str:
    return f"it is a key of {' or '.join(owners)}, write it there" if len(owners) <= _MAX_OWNERS else ""


def _hint(written: str, known: Collection[str]) -> str:
    head, _, rest = written.partition(".")
    if rest and head in known:
        return f'a dot does not nest: write "{shown_key(head)}": {{"{shown_key(rest)}": ...}}'
    near = difflib.get_close_matches(written[:MAX_NAME_LENGTH].lower(), known, n=1)
    return f"did you mean '{near[0]}'?" if near else ""


S = TypeVar("S", bound=Section)

MOVES: dict[str, dict[bool, str | None]] = {
    "same": {},
    "true means cpu": {True: "cpu", False: "none"},
    "true means fp32": {True: "fp32", False: None},
}
"""The rules by which the value of a deprecated key becomes the value of its replacement: a table of what a switch
means, with None where it says nothing of the replacement. With an empty table the value stays as it is."""


@dataclass
class Intake:
    """values: attribute name -> value for the model.  auto: dotted keys whose value is "auto".  old: dotted key ->
    deprecated dotted key that the user wrote."""

    values: dict[str, Any] = field(default_factory=dict)
    auto: list[str] = field(default_factory=list)
    old: dict[str, str] = field(default_factory=dict)


def parse_section(model: type[S], value: Any, path: str = "") -> S:
    """Build a section of type `model` from a user's dict; handle "auto", old and unknown keys like the root does.

    path: dotted key of the section, for messages. Raises ConfigError.
    """
    check_bounds(value, path)
    intake = take_in(model, value, path)
    with naming_old_keys(intake.old):
        return validated(path, model, lambda: model.model_validate(intake.values))


@contextmanager
def naming_old_keys(old: Mapping[str, str]) -> Iterator[None]:
    """Rewrite a ConfigError about the replacement of a deprecated key, so that it begins with the key in the file."""
    try:
        yield
    except ConfigError as error:
        where, colon, rest = str(error).partition(":")
        for new, written in old.items():
            if where == new or where.startswith((f"{new}.", f"{new}[")):
                raise ConfigError(f"{written}{where[len(new) :]} (now {where}){colon}{rest}") from None
        raise


def take_in(model: type[Section], data: Any, path: str = "", whole: type[Section] | None = None) -> Intake:
    """Prepare `data`, the user's value for a section of type `model` at dotted key `path`. Raises ConfigError.

    whole: type of the config that contains the section; None for the config itself and for a single section.
    """
    data = model.normalize(data)
    if not isinstance(data, Mapping):
        if isinstance(data, bool):
            switch = str(data).lower()
            example = f'{{"enabled": {switch}}}' if "enabled" in json_keys(model) else "{...}"
            raise ConfigError(f"{path or 'config'}: found {switch}; allowed: an object, such as {example}")
        raise ConfigError(f"{path or 'config'}: found {brief(redacted(data, path))}; allowed: an object, as in {{...}}")
    intake = Intake()
    data = _moved(model, data, path, intake.old)
    with naming_old_keys(intake.old):
        _take_values(intake, model, data, path, whole)
    return intake


def _take_values(
    intake: Intake, model: type[Section], data: Mapping[Any, Any], path: str, whole: type[Section] | None
) -> None:
    names = json_keys(model)
    for written, value in data.items():
        where = f"{path}.{shown_key(written)}" if path else shown_key(written)
        name = names.get(written)
        if name is None:
            around = whole or (model if model.tolerates_unknown else None)
            unknown_key(
                *(written, path, names),
                former=model.moved,
                top_level=json_keys(whole) if whole is not None else (),
                elsewhere=_owners(around) if around is not None else {},
                tolerated=model.tolerates_unknown,
                closed=model.closed,
            )
        elif name in intake.values and not is_same(intake.values[name], value):
            raise ConfigError(f"{where}: is given twice under two spellings, with different values; keep one")
        else:
            _take_value(intake, model.model_fields[name], name, value, where, whole if path else model)


def _take_value(
    intake: Intake, info: FieldInfo, name: str, value: Any, where: str, whole: type[Section] | None
) -> None:
    if isinstance(value, str) and value == AUTO and not _means_auto(info):
        intake.auto.append(where)
        if info.is_required():
            intake.values[name] = value
        return
    if value is None and not info.is_required():
        return  # Accelerate writes null for an unset key
    section = section_of(info)
    if section is None or isinstance(value, Section):
        intake.values[name] = value
        if isinstance(value, Mapping):
            intake.auto += auto_keys(value, where)
        return
    if value is False and default_of(info) is None:
        return  # "offload_param": false, a form from old documentation
    inner = take_in(section, value, where, whole)
    intake.values[name] = inner.values
    intake.auto += inner.auto
    intake.old |= inner.old


@functools.cache
def _owners(model: type[Section]) -> Mapping[str, tuple[str, ...]]:
    """Return the keys of all sections in `model`, at any depth -> dotted keys of the sections that have them."""
    found: dict[str, tuple[str, ...]] = {}
    for name, info in model.model_fields.items():
        section = section_of(info)
        if section is None:
            continue
        path = info.alias or name
        below = {key: tuple(f"{path}.{owner}" for owner in owners) for key, owners in _owners(section).items()}
        for key in {**json_keys(section), **below}:
            own = (path,) if key in json_keys(section) else ()
            found[key] = (*found.get(key, ()), *own, *below.get(key, ()))
    return found


def auto_keys(value: Any, where: str) -> Iterator[str]:
    """Yield the dotted keys under a free dict, such as `optimizer.params`, whose value is "auto"."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from auto_keys(inner, f"{where}.{shown_key(name)}")
    elif isinstance(value, str) and value == AUTO:
        yield where


def _means_auto(info: FieldInfo) -> bool:
    """Return whether "auto" is a regular value of this key, as for pipeline.stages."""
    return default_of(info) == AUTO


def _moved(model: type[Section], data: Mapping[Any, Any], path: str, said: dict[str, str]) -> dict[Any, Any]:
    """Return a copy of `data` with deprecated keys under their new names. Warn once per key, and add it to `said`."""
    result = {written: value for written, value in data.items() if written not in model.moved}
    for old in (written for written in data if written in model.moved):
        new, rule = model.moved[old]
        here = f"{path}." if path else ""
        warn_once(f"{here}{old} is deprecated; write {here}{new}")
        said[f"{here}{new}"] = f"{here}{old}"
        value = _as_new(data[old], rule, f"{here}{old}")
        if value is not None:
            _put(result, new.split("."), value, f"{here}{old}")
    return result


def _as_new(value: Any, rule: str, old: str) -> Any:
    """Convert the value of a deprecated key for its replacement; None if it sets nothing there."""
    table = MOVES[rule]
    if not table or value is None or (isinstance(value, str) and value in (AUTO, *table.values())):
        return value
    try:
        return table[flag(value)]
    except ValueError:
        raise ConfigError(f"{old}: found {brief(redacted(value, old))}; allowed: true or false") from None


def _put(result: dict[Any, Any], names: list[str], value: Any, old: str) -> None:
    for name in names[:-1]:
        inner = result.get(name) or {}
        if not isinstance(inner, Mapping):
            return  # validation refuses the value of the replacement
        result[name] = dict(inner)
        result = result[name]
    present = result.get(names[-1], value)
    if not is_same(present, value):
        raise ConfigError(f"{old}: found {brief(value)}, but its replacement {'.'.join(names)} says {brief(present)}; "
                          "keep the new key only")  # fmt: skip
    result[names[-1]] = value


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return `param_dict[param_name]`, or the default if the key is absent."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_scalar_param
get_dict_param = get_scalar_param


def get_zero_config(param_dict: Mapping[str, Any]) -> ZeroConfig:
    """Return the section `zero_optimization` of a whole config; the section may be `true`. Raises ConfigError."""
    return parse_section(ZeroConfig, param_dict.get("zero_optimization", {}), "zero_optimization")


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> BF16Config:
    """Return the section `bf16`, or `bfloat16`, of a whole config. Raises ConfigError."""
    return parse_section(BF16Config, param_dict.get("bf16", param_dict.get("bfloat16", {})), "bf16")


def get_float16_config(param_dict: Mapping[str, Any]) -> FP16Config:
    """Return the section `fp16` of a whole config. Raises ConfigError."""
    return parse_section(FP16Config, param_dict.get("fp16", {}), "fp16")
