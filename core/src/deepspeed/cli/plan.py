"""`ds_plan`: estimate which meshes and ZeRO stages a model fits on, and the memory and traffic of a rank.

    ds_plan config.json --ranks 512 --memory 80GiB
    ds_plan config.json --ranks 64 --memory 40GiB --config ds.json --sequence 4096 --tp 4
    ds_plan config.json --ranks 64 --memory 40GiB --pp any --verbose

The command measures nothing and needs no device: it uses formulas (docs/explanation/memory-and-traffic.md).
Exit code 0; 1 if no mesh fits; 2 for wrong arguments or an unreadable file.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed.cli.console import make_console, make_parser, make_table, size_with_unit
from deepspeed.errors import ConfigError, counted
from deepspeed.planning import Choice, Machine, Plan, Training, plan, read_training
from deepspeed.planning.memory import PARTS

FITS, FITS_NOT, WRONG = 0, 1, 2
_MEBIBYTE, _GIBIBYTE = 2**20, 2**30
_ANY = "any"
_AXES = ("pp", "dp", "sp", "tp", "ep")
_SHOWN = {
    "weights": "weights",
    "master_weights": "master",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "gathered": "gathered",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        found = _plan(options)
    except (ConfigError, OSError) as error:
        print(f"ds_plan: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
        return WRONG
    if options.json:
        print(json.dumps(_as_json(found, options.top), indent=1))  # noqa: T201
    else:
        _show(found, options.top, verbose=options.verbose)
    return FITS if found.fitting else FITS_NOT


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ds_plan", "Estimate on which meshes and stages of ZeRO a model fits, with a rank's memory.")
    add = parser.add_argument
    add("model", help="a config.json of transformers, its folder, or a plain description")
    add("--ranks", type=int, required=True, help="the number of ranks of the job")
    add("--memory", type=size_with_unit, required=True, help="memory of a rank's device that training may use: 80GiB")
    add("--config", help="a DeepSpeed configuration; its stage, precision, batch, mesh and offload are taken")
    add("--sequence", type=int, default=2048, help="tokens of a sequence (default 2048)")
    add("--micro-batch", type=int, help="sequences in a forward (default 1)")
    add("--global-batch", type=int, help="sequences of a step (default: one micro-batch per rank)")
    add(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        help="precision of the model (default: of --config, or bf16)",
    )
    add("--optimizer", help="the optimizer's name: adamw (default), lion, sgd, ...")
    add("--stages", type=_stage, nargs="+", help="stages of ZeRO to try (default 0 1 2 3)")
    pipeline = "fix the ranks along pp, or try `any` (default 1: a pipeline needs a PipelineModule)"
    add("--pp", type=_ranks_or_any, metavar="N|any", help=pipeline)
    for axis in _AXES[1:]:
        add(f"--{axis}", type=int, help=f"fix the ranks along {axis}")
    add("--checkpoint-activations", action="store_true", help="compute layers again in the backward")
    add("--offload-optimizer", action="store_true", help="keep optimizer states in host memory")
    machine = Machine()
    add("--ranks-per-node", type=int, default=machine.ranks_per_node, help="ranks within a node (default %(default)s)")
    add("--intra", type=float, default=machine.intra / 1e9, help="GB/s of a rank within a node (default %(default)s)")
    add("--inter", type=float, default=machine.inter / 1e9, help="GB/s of a rank between nodes (default %(default)s)")
    add("--tflops", type=float, default=machine.flops / 1e12, help="TFLOP/s that a rank sustains (default %(default)s)")
    add("--top", type=int, default=8, help="how many choices are shown (default 8)")
    add("-v", "--verbose", action="store_true", help="show the parts of memory and of traffic too")
    add("--json", action="store_true", help="print JSON")
    return parser


def _stage(text: str) -> int:
    if not text.isdecimal():  # argparse takes a word after the stages for another stage
        raise argparse.ArgumentTypeError(
            f"found {text!r}; give numbers of 0 to 3. A model goes before --stages, or after another option"
        )
    return int(text)


def _ranks_or_any(text: str) -> int | str:
    if text != _ANY and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}; give a number of ranks, or {_ANY}")
    return _ANY if text == _ANY else int(text)


def _plan(options: argparse.Namespace) -> Plan:
    given: dict[str, Any] = {"sequence": options.sequence}
    if options.micro_batch is not None:
        given["micro_batch"] = options.micro_batch
    if options.precision is not None:
        given["precision"] = options.precision
    if options.optimizer is not None:
        given["optimizer"] = options.optimizer
    if options.checkpoint_activations:
        given["checkpoints_activations"] = True
    if options.offload_optimizer:
        given["offloads_optimizer"] = True
    training, fixed = (Training(**given), {}) if options.config is None else read_training(options.config, **given)
    stages = options.stages or ([fixed["stage"]] if "stage" in fixed else [0, 1, 2, 3])
    asked = {axis: getattr(options, axis) for axis in _AXES if getattr(options, axis) is not None}
    axes = {"pp": 1} | {axis: fixed[axis] for axis in _AXES if axis in fixed} | asked
    if axes["pp"] == _ANY:
        del axes["pp"]
    if min(options.ranks_per_node, options.intra, options.inter, options.tflops) <= 0:
        raise ConfigError("--ranks-per-node, --intra, --inter and --tflops: give numbers above 0")
    return plan(
        options.model,
        ranks=options.ranks,
        memory=options.memory,
        training=training,
        stages=stages,
        axes=axes,
        global_batch=options.global_batch or fixed.get("global_batch"),
        machine=Machine(
            ranks_per_node=options.ranks_per_node,
            intra=options.intra * 1e9,
            inter=options.inter * 1e9,
            flops=options.tflops * 1e12,
        ),
    )


# ----- output --------------------------------------------------------------------------------------------------------


def _show(found: Plan, top: int, *, verbose: bool) -> None:
    console = make_console()
    ranks = counted(found.ranks, "rank")
    title = f"{found.shape.family}, {found.parameters:,} parameters, {ranks} of {_bytes(found.limit)}"
    if found.fitting:
        choices = counted(len(found.fitting) + len(found.others), "choice")
        fit = "fits" if len(found.fitting) == 1 else "fit"
        head = f"{title}: {len(found.fitting)} of {choices} {fit}; the fastest by estimate"
        console.print(_table(head, found.fitting[:top], verbose=verbose))
    else:
        console.print(_table(f"{title}: nothing fits; the closest", found.others[:top], verbose=verbose))
        for what, choice in found.advice:
            verdict = "fits" if choice.memory.total <= found.limit else "does not fit yet"
            console.print(
                f"With {what}, {choice.mesh}, stage {choice.training.stage}: {_bytes(choice.memory.total)}, {verdict}"
            )
        return
    if found.others:
        closest = found.others[0]
        console.print(
            f"{len(found.others)} {'does' if len(found.others) == 1 else 'do'} not fit; of these {closest.mesh}, stage "
            f"{closest.training.stage} needs least: {_bytes(closest.memory.total)}, of which {_largest(closest)}"
        )
    best = found.fitting[0]
    console.print(f"The sections of the first, {best.mesh}:")
    console.print_json(json.dumps(best.config()))
    if best.mesh.pp > 1:
        console.print("The model must be a PipelineModule for pp; activation checkpointing is its own argument.")
    elif best.training.checkpoints_activations:
        console.print("Activation checkpointing is switched on in the model.")


def _table(title: str, choices: Sequence[Choice], *, verbose: bool) -> Any:
    columns = ["mesh", "stage", "memory", "step, estimate"]
    if verbose:
        columns += [*_SHOWN.values(), "sent", "ZeRO", "tp", "pp", "sp", "ep", "idle"]
    return make_table(title, columns, (_row(choice)[: len(columns)] for choice in choices))


def _row(choice: Choice) -> list[str]:
    memory, traffic = choice.memory, choice.traffic
    sent = [traffic.total, traffic.reduce + traffic.gather, traffic.tp, traffic.pp, traffic.sp, traffic.ep]
    return [
        str(choice.mesh),
        str(choice.training.stage),
        _bytes(memory.total),
        f"{choice.step_seconds:.3g} s",
        *(_bytes(getattr(memory, part)) for part in _SHOWN),
        *map(_bytes, sent),
        f"{choice.idle_share:.0%}" if choice.mesh.pp > 1 else "",
    ]


def _largest(choice: Choice) -> str:
    part = max(PARTS, key=lambda name: getattr(choice.memory, name))
    return f"{_SHOWN[part]} {_bytes(getattr(choice.memory, part))}"


def _bytes(number: float) -> str:
    if number == 0:
        return ""
    return f"{number / _GIBIBYTE:.2f} GiB" if number >= _GIBIBYTE / 10 else f"{number / _MEBIBYTE:.2f} MiB"


def _as_json(found: Plan, top: int) -> dict[str, Any]:
    return {
        "parameters": found.parameters,
        "ranks": found.ranks,
        "memory_bytes": found.limit,
        "fitting": len(found.fitting),
        "not_fitting": len(found.others),
        "choices": [_choice_as_json(each) for each in (found.fitting or found.others)[:top]],
        "advice": [{"with": what, **_choice_as_json(choice)} for what, choice in found.advice],
    }


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    return {
        "mesh": dataclasses.asdict(choice.mesh),
        "stage": choice.training.stage,
        "memory_bytes": {**dataclasses.asdict(choice.memory), "total": choice.memory.total},
        "sent_bytes": {**dataclasses.asdict(choice.traffic), "total": choice.traffic.total},
        "idle_share": choice.idle_share,
        "estimated_step_seconds": choice.step_seconds,
        "config": choice.config(),
    }


if __name__ == "__main__":
    sys.exit(main())
