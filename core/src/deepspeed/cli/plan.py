"""`ds_plan`: which meshes and stages of ZeRO a model fits on, with memory and traffic of a rank, on paper.

    ds_plan config.json --ranks 512 --memory 80GiB
    ds_plan config.json --ranks 64 --memory 40GiB --config ds.json --sequence 4096 --tp 4

Nothing is measured and no device is needed: figures follow from formulas (docs/explanation/memory-and-traffic.md).
Exit code 0; 1 if no mesh fits; 2 for a question that cannot be answered.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed.cli.console import make_console, make_table
from deepspeed.errors import ConfigError
from deepspeed.planning import Choice, Machine, Plan, Training, plan, read_training
from deepspeed.planning.memory import PARTS

FITS, FITS_NOT, WRONG = 0, 1, 2
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)
_MEBIBYTE, _GIBIBYTE = 2**20, 2**30
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


def size(text: str) -> int:
    """Bytes of "80GiB", "80G" (both binary), "80GB" (decimal) or a plain number."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"found {text!r}; give a size such as 80GiB, 80GB or 85899345920")
    number, letter, suffix = found.groups()
    unit = letter.upper() + ("B" if letter and suffix and not suffix.lower().startswith("i") else "")
    return int(float(number) * _UNITS[unit])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = _parser().parse_args(arguments)
    try:
        found = _plan(options)
    except (ConfigError, OSError) as error:
        print(f"ds_plan: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
        return WRONG
    if options.json:
        print(json.dumps(_as_json(found, options.top), indent=1))  # noqa: T201
    else:
        _show(found, options.top)
    return FITS if found.fitting else FITS_NOT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_plan", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="config.json of transformers, its folder, or a plain description")
    parser.add_argument("--ranks", type=int, required=True, help="of the job")
    parser.add_argument("--memory", type=size, required=True, help="of a rank's device, such as 80GiB")
    parser.add_argument("--config", help="a DeepSpeed configuration: stage, precision, batch, mesh and offload are its")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence (default 2048)")
    parser.add_argument("--micro-batch", type=int, help="sequences in a forward (default 1)")
    parser.add_argument("--global-batch", type=int, help="sequences of a step (default: ranks micro-batches)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default bf16, or that of --config")
    parser.add_argument("--optimizer", help="adamw (default), lion, sgd, ...")
    parser.add_argument("--stages", type=int, nargs="+", help="of ZeRO, to try (default 0 1 2 3)")
    for axis in _AXES:
        parser.add_argument(f"--{axis}", type=int, help=f"fix the ranks along {axis}")
    parser.add_argument("--checkpoint-activations", action="store_true", help="compute layers again in the backward")
    parser.add_argument("--offload-optimizer", action="store_true", help="optimizer states in host memory")
    machine = Machine()
    parser.add_argument("--ranks-per-node", type=int, default=machine.ranks_per_node)
    parser.add_argument("--intra", type=float, default=machine.intra / 1e9, help="GB/s of a rank within a node")
    parser.add_argument("--inter", type=float, default=machine.inter / 1e9, help="GB/s of a rank between nodes")
    parser.add_argument("--tflops", type=float, default=machine.flops / 1e12, help="that a rank sustains")
    parser.add_argument("--top", type=int, default=8, help="choices that are shown (default 8)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


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
    axes = {axis: fixed[axis] for axis in _AXES if axis in fixed}
    axes |= {axis: getattr(options, axis) for axis in _AXES if getattr(options, axis) is not None}
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


# ----- what is printed -----------------------------------------------------------------------------------------------


def _show(found: Plan, top: int) -> None:
    console = make_console()
    title = f"{found.shape.family}, {found.parameters:,} parameters, {found.ranks} ranks of {_bytes(found.limit)}"
    if found.fitting:
        num_choices = len(found.fitting) + len(found.others)
        head = f"{title}: {len(found.fitting)} of {num_choices} choices fit; the fastest by estimate"
        console.print(_table(head, found.fitting[:top]))
    else:
        console.print(_table(f"{title}: nothing fits; the closest", found.others[:top]))
        for what, choice in found.advice:
            verdict = "fits" if choice.memory.total <= found.limit else "does not fit yet"
            console.print(
                f"With {what}, {choice.mesh}, stage {choice.training.stage}: {_bytes(choice.memory.total)}, {verdict}"
            )
        return
    if found.others:
        closest = found.others[0]
        console.print(
            f"{len(found.others)} do not fit; of these {closest.mesh}, stage {closest.training.stage} needs least: "
            f"{_bytes(closest.memory.total)}, of which {_largest(closest)}"
        )
    best = found.fitting[0]
    console.print(f"The sections of the first, {best.mesh}:")
    console.print_json(json.dumps(best.config()))
    if best.mesh.pp > 1:
        console.print("The model must be a PipelineModule for pp; activation checkpointing is its own argument.")
    elif best.training.checkpoints_activations:
        console.print("Activation checkpointing is switched on in the model.")


def _table(title: str, choices: Sequence[Choice]) -> Any:
    columns = [
        "mesh",
        "stage",
        "memory",
        *_SHOWN.values(),
        "sent",
        "ZeRO",
        "tp",
        "pp",
        "sp",
        "ep",
        "idle",
        "step, estimate",
    ]
    return make_table(title, columns, map(_row, choices))


def _row(choice: Choice) -> list[str]:
    memory, traffic = choice.memory, choice.traffic
    sent = [traffic.total, traffic.reduce + traffic.gather, traffic.tp, traffic.pp, traffic.sp, traffic.ep]
    return [
        str(choice.mesh),
        str(choice.training.stage),
        _bytes(memory.total),
        *(_bytes(getattr(memory, part)) for part in _SHOWN),
        *map(_bytes, sent),
        f"{choice.idle_share:.0%}" if choice.mesh.pp > 1 else "",
        f"{choice.step_seconds:.3g} s",
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
