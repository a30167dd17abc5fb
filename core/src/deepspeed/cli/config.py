"""`ds_config` writes a configuration with reasons, checks a configuration, or prints the JSON Schema of all.

    ds_config write ds.json --model config.json --ranks 8 --memory 80GiB --global-batch 256
    ds_config check ds.json --ranks 8       all problems and warnings of its keys, without a device
    ds_config check ds.json --show          also all resolved values
    ds_config schema > ds.schema.json       then "$schema": "./ds.schema.json" in ds.json

`write` prompts for missing options on a terminal, and chooses by the estimates of `ds_plan`. `check` cannot check what
depends on the model or the mesh, or the ranges of an optimizer's arguments; `initialize` does.

Exit code: 0; 1 if a file has problems, or nothing fits; 2 if a file cannot be read or written, or an option is missing.
"""

import argparse
import copy
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic.fields import FieldInfo

from deepspeed.cli.console import make_console, make_parser, make_table, size_with_unit
from deepspeed.config.base import AUTO, LaxSection, Section, declared, default_of, section_of
from deepspeed.config.read import read_config
from deepspeed.config.root import DeepSpeedConfig
from deepspeed.config.supported import objections
from deepspeed.config.training import MICRO, STEPS, TRAIN
from deepspeed.errors import ConfigError, DeepSpeedError, counted
from deepspeed.log import logger, warn_once

if TYPE_CHECKING:
    from deepspeed.planning import Choice

FINE, WRONG, UNREADABLE = 0, 1, 2
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DEFAULTS: dict[str, Any] = {"micro_batch": 1, "precision": "bf16", "optimizer": "AdamW", "lr": 1e-4}  # of `write`
_LONGEST_LIST = 50  # problems of one file
#: patterns of the quoted values that a `LaxSection` accepts, by the type of the key
_IN_QUOTES = {
    "integer": r"^\s*[+-]?\d+(_\d+)*(\.0*)?\s*$",
    "number": r"^\s*[+-]?(\d+(_\d+)*(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*$",
    "boolean": "^([01]|"
    + "|".join(
        "".join(f"[{letter}{letter.upper()}]" for letter in word)
        for word in ("true", "t", "on", "yes", "y", "false", "f", "off", "no", "n")
    )
    + ")$",
}
#: names of a number's bounds: in annotations -> in the schema
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
#: `write` tries these until something fits: (description, changes of the training, axes that may have several ranks)
_REMEDIES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("", {}, ()),
    ("activation checkpointing", {"checkpoints_activations": True}, ()),
    ("activation checkpointing and layers divided over ranks", {"checkpoints_activations": True}, ("tp",)),
    (
        "activation checkpointing and the optimizer in host memory",
        {"checkpoints_activations": True, "offloads_optimizer": True},
        (),
    ),
    (
        "activation checkpointing, and optimizer and weights in host memory",
        {"checkpoints_activations": True, "offloads_optimizer": True, "offloads_parameters": True},
        (),
    ),
)
#: schema entries of pydantic and of `key` that are not rules for the value
_BESIDE = {"title", "description", "default", "action", "note", "off", "unit"}


@dataclass
class Findings:
    """`Findings` holds the results of `check` for one configuration."""

    file: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    auto: list[str] = field(default_factory=list)
    """Dotted keys that wait for Hugging Face's Trainer or Accelerate."""
    config: DeepSpeedConfig | None = None
    """The configuration without the keys that have problems; None if what is left has some too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "schema":
        print(json.dumps(make_schema(), indent=1))  # noqa: T201 - a command's answer
        return FINE
    if options.command == "write":
        return _write(options)
    code, found = FINE, []
    for file in options.files:
        try:
            found.append(check(file, options.ranks))
        except (ConfigError, OSError) as error:
            print(f"ds_config: {error}", file=sys.stderr)  # noqa: T201
            code = UNREADABLE
    if options.json:
        answer = [{name: value for name, value in vars(one).items() if name != "config"} for one in found]
        print(json.dumps(answer, indent=1))  # noqa: T201
    else:
        for one in found:
            print("\n".join(_lines(one, shows_values=options.show)))  # noqa: T201
    return code or (WRONG if any(one.problems for one in found) else FINE)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ds_config", "Write or check a configuration, or print the JSON Schema of all configurations.")
    commands = parser.add_subparsers(dest="command", required=True)
    writes = commands.add_parser("write", help="write a configuration for a model and a machine, and say why it is so")
    add = writes.add_argument
    add("file", metavar="FILE", help="the JSON file to write; one that exists needs --force")
    add("--model", help="a config.json of transformers, its folder, or a plain description, as for ds_plan")
    add("--ranks", type=_count, help="the number of ranks of the job")
    add("--memory", type=size_with_unit, help="memory of a rank's device that training may use: 80GiB")
    add("--global-batch", type=_count, help="sequences of a step (default: one micro-batch per rank)")
    add("--micro-batch", type=_count, help="sequences in a forward (default 1)")
    add("--sequence", type=_count, default=2048, help="tokens of a sequence (default 2048)")
    add("--precision", choices=["bf16", "fp16", "fp32"], help="precision of the model (default bf16)")
    add("--optimizer", help="the optimizer's name (default AdamW)")
    add("--lr", type=float, help="its learning rate (default 1e-4)")
    writes.set_defaults(**_DEFAULTS)
    add("--hugging-face", action="store_true", help='leave at "auto" what the Trainer or Accelerate fills')
    add("--force", action="store_true", help="write over a file that exists")
    checks = commands.add_parser("check", help="list what is wrong with configuration files")
    checks.add_argument("files", nargs="+", metavar="FILE", help="a JSON or hjson file")
    checks.add_argument("--ranks", type=_count, help="data-parallel ranks, for which batch sizes are checked")
    checks.add_argument("--show", action="store_true", help="also show all values; * marks those of the file")
    checks.add_argument("--json", action="store_true", help="print what was found as JSON")
    commands.add_parser("schema", help="print the JSON Schema, for editors")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; give a whole number of at least 1")
    return int(text)


def _write(options: argparse.Namespace) -> int:
    try:
        _ask(options)
        if os.path.exists(options.file) and not options.force:
            raise ConfigError(f"{options.file}: exists; give --force to write over it, or another name")
        choice, remedies = _choose(options)
        if choice is None:
            print(f"ds_config: {remedies[0]}", file=sys.stderr)  # noqa: T201
            return WRONG
        config, reasons = _explained(choice, remedies, options)
        DeepSpeedConfig(config, batch_required=False).check_supported()
        with open(options.file, "w", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=4) + "\n")
    except (ConfigError, OSError) as error:
        print(f"ds_config: {error}", file=sys.stderr)  # noqa: T201
        return UNREADABLE
    console = make_console()
    rows = ([key, json.dumps(value), reasons.get(key, "")] for key, value in _leaves(config))
    console.print(make_table(options.file, ["key", "value", "why"], rows))
    if choice.training.checkpoints_activations:
        console.print("Switch activation checkpointing on in the model: the estimate counts on it.")
    return FINE


def _ask(options: argparse.Namespace) -> None:
    """Prompt for missing options on the terminal.

    Raises:
        ConfigError: an option is missing, and stdin is no terminal.
    """
    questions: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
        ("model", "The model's config.json, or its folder", str),
        ("ranks", "Ranks of the job", _count),
        ("memory", "Memory of a rank's device that training may use, such as 80GiB", size_with_unit),
    )
    missing = [name for name, _, _ in questions if getattr(options, name) is None]
    if missing and not sys.stdin.isatty():
        flags = ", ".join(f"--{name}" for name in missing)
        raise ConfigError(f"write: found no {flags}; give them, or start it on a terminal, where it asks")
    for name, question, read in questions:
        while getattr(options, name) is None:
            try:
                setattr(options, name, read(input(f"{question}: ").strip()))
            except argparse.ArgumentTypeError as error:
                print(error)  # noqa: T201


def _choose(options: argparse.Namespace) -> "tuple[Choice | None, list[str]]":
    """Return the fastest choice, by estimate, of the first of `_REMEDIES` with which something fits.

    The list has the memory needs of earlier remedies, then this one's description. If nothing fits: None, [message].

    Raises:
        ConfigError: the model cannot be read, or the batch fits no number of ranks.
    """
    from deepspeed.planning import Training, plan  # late: other subcommands do not need it

    failed: list[str] = []
    for words, changes, axes in _REMEDIES:
        training = Training(
            micro_batch=options.micro_batch,
            sequence=options.sequence,
            precision=options.precision,
            optimizer=options.optimizer.lower(),
            **changes,
        )
        found = plan(
            options.model,
            ranks=options.ranks,
            memory=options.memory,
            training=training,
            stages=(3,) if training.offloads_parameters else (1, 2, 3) if training.offloads_optimizer else (0, 1, 2, 3),
            axes={axis: 1 for axis in ("pp", "sp", "tp") if axis not in axes},
            global_batch=options.global_batch,
        )
        if found.best is not None:
            return found.best, [*failed, words]
        closest = found.others[0]
        failed.append(f"{_gib(closest.memory.total)}{f' with {words}' if words else ''}")
    return None, [
        f"{options.model} does not fit {counted(options.ranks, 'rank')} of {_gib(options.memory)}: a rank would need "
        f"{', '.join(failed)}; give more --ranks or --memory, or a shorter --sequence"
    ]


def _explained(
    choice: "Choice", remedies: list[str], options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the configuration of a choice, and dotted key -> reason for its value."""
    *failed, words = remedies
    config = choice.config()
    batch = choice.training.micro_batch * choice.training.accumulation * choice.mesh.dp
    memory = f"a rank needs {_gib(choice.memory.total)} of {_gib(options.memory)}, by estimate"

    def without(change: str) -> str:
        """Return the memory need of the last remedy without this change or axis, as text."""
        first = next(place for place, (_, changes, axes) in enumerate(_REMEDIES) if change in changes or change in axes)
        return f"else a rank would need {failed[first - 1]}" if failed[first - 1 : first] else ""

    def said(name: str) -> str:
        """Return a text that says whether an option has its default."""
        return "the default" if getattr(options, name) == _DEFAULTS[name] else "as asked"

    reasons = {
        "train_micro_batch_size_per_gpu": f"sequences in a forward, {said('micro_batch')}",
        "gradient_accumulation_steps": f"{counted(batch, 'sequence')} a step on dp {choice.mesh.dp}",
        "zero_optimization.stage": f"the fastest that fits: {memory}" + (f", with {words}" if words else ""),
        "zero_optimization.offload_optimizer.device": without("offloads_optimizer"),
        "zero_optimization.offload_param.device": without("offloads_parameters"),
        "mesh.dp": "copies of the model's layers",
        "mesh.tp": f"ranks that share each layer; {without('tp')}",
        "tensor_parallel.autotp_size": "as mesh.tp",
        "optimizer.type": said("optimizer"),
        "optimizer.params.lr": said("lr"),
        "gradient_clipping": "the default, written so that it is seen",
        "bf16.enabled": f"{said('precision')}; needs no loss scale",
        "fp16.enabled": f"{said('precision')}; the loss is scaled",
    }
    config["gradient_clipping"] = 1.0
    if options.hugging_face:
        filled = ["train_batch_size", MICRO, STEPS, "gradient_clipping"]
        config.update(dict.fromkeys(filled, AUTO))
        reasons.update(dict.fromkeys(filled, "an argument of the Trainer or of Accelerate fills it"))
        reasons[MICRO] += f"; the estimate is for {choice.training.micro_batch}"
    else:
        config["optimizer"] = {"type": options.optimizer, "params": {"lr": options.lr}}
    return config, reasons


def _leaves(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _gib(number: float) -> str:
    return f"{number / 2**30:.2f} GiB"


def check(file: str, ranks: int | None = None) -> Findings:
    """Return all problems with the keys of the configuration in `file`.

    To find the next problem, the key with the last one is removed. So each problem is the next error of a run after
    the earlier problems are solved.

    Args:
        ranks: data-parallel ranks; None: do not check batch sizes.

    Raises:
        ConfigError: the file does not hold a JSON object.
    """
    left = copy.deepcopy(read_config(file))
    found = Findings(file)
    with _collecting(found.warnings):
        while found.config is None and len(found.problems) < _LONGEST_LIST:
            try:
                found.config = DeepSpeedConfig(left, batch_required=False)
            except ConfigError as error:
                if str(error) not in found.problems:
                    found.problems.append(str(error))
                if not _leave_out(left, str(error).partition(":")[0].partition(" (now ")[0]):
                    return found
        if found.config is not None:
            _look_further(found, found.config, ranks)
            _look_at_classes(found.problems, found.config)
    return found


def _look_at_classes(problems: list[str], config: DeepSpeedConfig) -> None:
    """Add problems with optimizer and scheduler: unknown names, and wrong names or types of arguments."""
    if config.optimizer is None and config.scheduler is None:
        return
    from deepspeed.optim.factory import check_optimizer, check_scheduler  # late: they load torch

    offloaded = config.zero_optimization.offload_optimizer
    is_offloaded = offloaded is not None and offloaded.device != "none"
    checks: tuple[tuple[Any, Callable[..., None]], ...] = (
        (config.optimizer, partial(check_optimizer, offload=is_offloaded)),
        (config.scheduler, check_scheduler),
    )
    for section, ask in checks:
        params = dict(section.params) if section is not None else {}
        while section is not None:
            try:
                ask(section.type, params)
                break
            except ConfigError as error:
                problems.append(str(error))
                key = str(error).partition(":")[0].rpartition(".")[2]
                if params.pop(key, None) is None:
                    break


def _look_further(found: Findings, config: DeepSpeedConfig, ranks: int | None) -> None:
    """Add unsupported keys, and batch sizes that do not match `ranks`."""
    found.auto = config.unresolved_auto()
    for one in objections(config):
        (found.problems if one.support.action == "refused" else found.warnings).append(one.sentence())
    if ranks is not None and not {TRAIN, MICRO, STEPS} & set(found.auto):
        try:
            config.resolve_batch(ranks)
        except DeepSpeedError as error:
            found.problems.append(str(error))


@contextmanager
def _collecting(lines: list[str]) -> Iterator[None]:
    """Collect the warnings logged inside in `lines`, without duplicates, instead of printing them."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() not in lines:
                lines.append(record.getMessage())

    warn_once.cache_clear()  # repeat warnings that an earlier file has given
    before, logger.handlers = logger.handlers, [Collector(logging.WARNING)]
    try:
        yield
    finally:
        logger.handlers = before


def _leave_out(section: Any, where: str) -> bool:
    """Remove the value at the dotted key `where`, or the nearest section around it; return False if there is none."""
    if not isinstance(section, dict):
        return False
    around = [name for name in section if where == name or where.startswith((f"{name}.", f"{name}["))]
    if not any(_leave_out(section[name], where[len(name) + 1 :]) for name in around if where != name):
        for name in around:
            del section[name]
    return bool(around)


def _lines(found: Findings, *, shows_values: bool) -> Iterator[str]:
    counts = [counted(len(found.problems), "problem"), counted(len(found.warnings), "warning")]
    yield f"{found.file}: {', '.join(counts)}"
    yield from (f"  problem  {line}" for line in found.problems)
    yield from (f"  warning  {line}" for line in found.warnings)
    if found.auto:
        yield f"  auto     {', '.join(found.auto)}: filled by Hugging Face's Trainer or Accelerate"
    config = found.config
    if config is None:
        return
    if not found.problems:
        yield f"  {_summary(config)}"
    if shows_values:
        yield config.describe()


def _summary(config: DeepSpeedConfig) -> str:
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    batch = ""
    if None not in sizes:
        batch = f"; {sizes[0]} samples a step: micro-batches of {sizes[1]}, {sizes[2]} a step on each of "
        batch += counted(config.world_size, "rank")
    dtype = next((name for name in ("bf16", "fp16") if getattr(config, name).enabled), "fp32")
    return f"ZeRO stage {config.zero_optimization.stage}, {dtype}{batch}"


def make_schema() -> dict[str, Any]:
    """Return the JSON Schema of the configuration: type, bounds and meaning of each key, and the deprecated keys.

    The schema accepts what parses, and refuses wrong types, wrong values and unknown keys in sections. Unknown keys at
    the top level are accepted, because other libraries keep keys there. Only `check` finds mutually exclusive keys.
    """
    whole = DeepSpeedConfig.model_json_schema()
    for section in _sections(DeepSpeedConfig):
        _complete(section, whole if section is DeepSpeedConfig else whole["$defs"][section.__name__])
    return {"$schema": DIALECT, "title": "Configuration of DeepSpeed", **{k: whole[k] for k in whole if k != "title"}}


def _sections(model: type[Section]) -> Iterator[type[Section]]:
    known: dict[type[Section], None] = {}
    left = [model]
    while left:
        each = left.pop()
        if each not in known:
            known[each] = None
            left += [inner for info in each.model_fields.values() if (inner := section_of(info)) is not None]
    yield from known


def _complete(section: type[Section], written: dict[str, Any]) -> None:
    """Add to a section's schema what `intake.take_in` accepts besides the declared types: "auto", null, old keys."""
    declared_rules, properties = written["properties"], {}
    for name, info in section.model_fields.items():
        value = _value(info, declared_rules[info.alias or name], is_lax=issubclass(section, LaxSection))
        properties.update(dict.fromkeys((info.alias or name, name), value))
    for old, (new, _) in section.moved.items():
        properties[old] = {"description": f"Deprecated: write {new}.", "deprecated": True}
    written["properties"] = properties
    written["additionalProperties"] = section.tolerates_unknown
    if "description" in written:
        written["description"] = " ".join(written["description"].split())


def _value(info: FieldInfo, written: Mapping[str, Any], *, is_lax: bool) -> dict[str, Any]:
    rule = {name: value for name, value in written.items() if name not in _BESIDE}
    result: dict[str, Any] = {"description": _description(info)}
    if "default" in written:
        result["default"] = written["default"]
    if not rule:
        return result
    inner = section_of(info)
    rules = [_bounded(one, info) for one in rule.get("anyOf", [rule])]
    if is_lax and not any(one.get("type") == "string" for one in rules):
        rules += [quoted for one in rules for quoted in _in_quotes(one)]
    rules.append({"const": AUTO})
    if not info.is_required():
        rules.append({"type": "null"})
    if inner is not None and default_of(info) is None:
        rules.append({"const": False})
    if inner is not None and "normalize" in vars(inner):  # the section may be a boolean, an older spelling
        rules.append({"type": "boolean"})
    unique = [one for place, one in enumerate(rules) if one not in rules[:place]]
    if inner is None:
        return {**result, **_any_of(unique)}
    objects = [one for one in unique if "$ref" in one]
    assert len(objects) == 1, objects
    # no `anyOf` with the other rules: for a wrong key, a validator would name only the section
    others = _any_of([one for one in unique if one not in objects])
    return {**result, "if": {"type": "object"}, "then": objects[0], "else": others}


def _any_of(rules: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one rule that allows what any of `rules` allows. Single values become one list, for clear messages."""
    listed = [one for one in rules if {"enum", "const"} & one.keys() or one == {"type": "null"}]
    if len(listed) < len(rules):
        return {"anyOf": rules}
    values = [value for one in listed for value in one.get("enum", [one.get("const")])]
    return {"enum": list({json.dumps(value): value for value in values}.values())}


def _bounded(rule: dict[str, Any], info: FieldInfo) -> dict[str, Any]:
    if rule.get("type") not in ("integer", "number"):
        return rule
    bounds = {word: getattr(one, name) for one in info.metadata for name, word in _BOUNDS.items() if hasattr(one, name)}
    return {**rule, **bounds}


def _in_quotes(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rule for the same value in quotes. The rule has no bounds for a number."""
    values = rule.get("enum", [])
    if bool in map(type, values):
        yield {"type": "string", "pattern": _IN_QUOTES["boolean"]}
    elif values:
        yield {"enum": [str(value) for value in values if isinstance(value, int)]}
    elif rule.get("type") in _IN_QUOTES:
        yield {"type": "string", "pattern": _IN_QUOTES[rule["type"]]}


def _description(info: FieldInfo) -> str:
    support, unit = declared(info)
    text = (info.description or "") + (f" In {unit}." if unit else "")
    notes = {"quiet": "No effect", "warned": "Ignored with a warning", "refused": "Not supported"}
    return f"{text} {notes[support.action]}: {support.note}." if support.action in notes else text


if __name__ == "__main__":
    sys.exit(main())
