"""`take_in` turns a user's dict into the values a model may validate: "auto", null, deprecated keys, unknown keys.

Called by `root.DeepSpeedConfig` before pydantic sees anything, and through `parse_section` by whoever holds one section
alone; never changes the user's dict. The functions of DeepSpeed's `runtime.config_utils` are for scripts that read
sections of a dict themselves.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from deepspeed.config.base import AUTO, Section, default_of, flag, is_same, json_keys, section_of
from deepspeed.config.precision import BF16Config, FP16Config
from deepspeed.config.read import brief, check_bounds, redacted, shown_key
from deepspeed.config.unknown import unknown_key
from deepspeed.config.wording import validated
from deepspeed.config.zero import ZeroConfig
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once

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
    """values: by attribute name, ready for the model.  auto: dotted keys that still say "auto".  old: by dotted key the
    deprecated one that the user wrote."""

    values: dict[str, Any] = field(default_factory=dict)
    auto: list[str] = field(default_factory=list)
    old: dict[str, str] = field(default_factory=dict)


def parse_section(model: type[S], value: Any, path: str = "") -> S:
    """Build a section of type `model` from a user's dict, with the root's treatment of "auto", old and unknown keys.

    path: dotted key of the section, for messages. Raises ConfigError.
    """
    check_bounds(value, path)
    intake = take_in(model, value, path)
    with naming_old_keys(intake.old):
        return validated(path, model, lambda: model.model_validate(intake.values))


@contextmanager
def naming_old_keys(old: Mapping[str, str]) -> Iterator[None]:
    """Let a ConfigError for a key that replaces a deprecated one begin with the one that the user's file has."""
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

    whole: the config around the section; None for the config itself and for a section alone.
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
            around = (json_keys(whole), _keys_below(whole)) if whole is not None else ((), ())
            unknown_key(
                *(written, path, names),
                former=model.moved,
                top_level=around[0],
                elsewhere=around[1],
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
        return  # null is how Accelerate writes "not said"
    section = section_of(info)
    if section is None or isinstance(value, Section):
        intake.values[name] = value
        if isinstance(value, Mapping):
            intake.auto += auto_keys(value, where)
        return
    if value is False and default_of(info) is None:
        return  # "offload_param": false, as the old pages write it
    inner = take_in(section, value, where, whole)
    intake.values[name] = inner.values
    intake.auto += inner.auto
    intake.old |= inner.old


@functools.cache
def _keys_below(model: type[Section]) -> frozenset[str]:
    """Keys of all sections in `model`, at any depth."""
    sections = [section for info in model.model_fields.values() if (section := section_of(info)) is not None]
    return frozenset().union(*(frozenset(json_keys(each)) | _keys_below(each) for each in sections))


def auto_keys(value: Any, where: str) -> Iterator[str]:
    """Dotted keys under a free dict, for example `optimizer.params`, which still say "auto"."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from auto_keys(inner, f"{where}.{shown_key(name)}")
    elif isinstance(value, str) and value == AUTO:
        yield where


def _means_auto(info: FieldInfo) -> bool:
    """Whether "auto" is a value of its own for this key, for example pipeline.stages."""
    return default_of(info) == AUTO


def _moved(model: type[Section], data: Mapping[Any, Any], path: str, said: dict[str, str]) -> dict[Any, Any]:
    """A copy of `data` with deprecated keys under their new names; each is reported once, and put into `said`."""
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
    """The value of a deprecated key as its replacement has it; None where it says nothing."""
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
            return  # the replacement is refused where it stands
        result[name] = dict(inner)
        result = result[name]
    present = result.get(names[-1], value)
    if not is_same(present, value):
        raise ConfigError(f"{old}: found {brief(value)}, but its replacement {'.'.join(names)} says {brief(present)}; "
                          "keep the new key only")  # fmt: skip
    result[names[-1]] = value


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """`param_dict[param_name]`, or the default where the key is absent."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_scalar_param
get_dict_param = get_scalar_param


def get_zero_config(param_dict: Mapping[str, Any]) -> ZeroConfig:
    """The section `zero_optimization` of a whole config, also in its form `true`. Raises ConfigError."""
    return parse_section(ZeroConfig, param_dict.get("zero_optimization", {}), "zero_optimization")


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> BF16Config:
    """The section `bf16`, or `bfloat16`, of a whole config. Raises ConfigError."""
    return parse_section(BF16Config, param_dict.get("bf16", param_dict.get("bfloat16", {})), "bf16")


def get_float16_config(param_dict: Mapping[str, Any]) -> FP16Config:
    """The section `fp16` of a whole config. Raises ConfigError."""
    return parse_section(FP16Config, param_dict.get("fp16", {}), "fp16")
