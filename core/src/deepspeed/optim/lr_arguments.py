"""Command-line arguments for schedules, as in DeepSpeed's scripts, and their conversion to a config section.

Users call `add_tuning_arguments(parser)`, then `get_config_from_args(args)`. Scripts import both from
`deepspeed.runtime.lr_schedules`, the old address of `lr_schedules.py`.
"""

import argparse
from typing import Any

# argument -> (default, type, help), by schedule, in DeepSpeed's order
_RANGE_TEST = {
    "lr_range_test_min_lr": (0.001, float, "first learning rate"),
    "lr_range_test_step_rate": (1.0, float, "growth of the learning rate per interval, as a multiple of the first"),
    "lr_range_test_step_size": (1000, int, "steps per interval"),
    "lr_range_test_staircase": (False, bool, "grow once per interval rather than at every step"),
}
_ONE_CYCLE = {
    "cycle_first_step_size": (1000, int, "steps of the rising half"),
    "cycle_first_stair_count": (-1, int, "stairs of the rising half; none if not positive"),
    "cycle_second_step_size": (-1, int, "steps of the falling half; as the rising one if negative"),
    "cycle_second_stair_count": (-1, int, "stairs of the falling half; as the rising one if negative"),
    "decay_step_size": (1000, int, "steps per decay interval after the cycle; 0 for no decay"),
    "cycle_min_lr": (0.01, float, "learning rate at both ends of the cycle"),
    "cycle_max_lr": (0.1, float, "learning rate in the middle of the cycle"),
    "decay_lr_rate": (0.0, float, "decay of the learning rate per interval"),
    "cycle_momentum": (False, bool, "cycle the momentum, inversely to the learning rate"),
    "cycle_min_mom": (0.8, float, "momentum in the middle of the cycle"),
    "cycle_max_mom": (0.9, float, "momentum at both ends of the cycle"),
    "decay_mom_rate": (0.0, float, "growth of the momentum per decay interval"),
}
_WARMUP = {
    "warmup_min_lr": (0.0, float, "first learning rate of the warm-up"),
    "warmup_max_lr": (0.001, float, "learning rate after the warm-up"),
    "warmup_num_steps": (1000, int, "steps of the warm-up"),
    "warmup_type": ("log", str, "shape of the warm-up: log or linear"),
}
_TOTAL = {"total_num_steps": (None, int, "steps of the whole training, for the schedules that decay to its end")}
_COSINE = {
    "warmup_min_ratio": (0.01, float, "first learning rate of the warm-up, as a part of the optimizer's"),
    "warmup_num_steps": _WARMUP["warmup_num_steps"],
    "warmup_type": _WARMUP["warmup_type"],
    "cos_min_ratio": (0.01, float, "last learning rate, as a part of the optimizer's"),
}
_BY_SCHEDULE: dict[str, dict[str, tuple[Any, Any, str]]] = {
    "LRRangeTest": _RANGE_TEST,
    "OneCycle": _ONE_CYCLE,
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {**_WARMUP, **_TOTAL},
    "WarmupCosineLR": {**_COSINE, **_TOTAL},
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule` and the arguments of every schedule to `parser`, and return it."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, default=None, help="LR schedule for training")
    merged = {name: spec for arguments in _BY_SCHEDULE.values() for name, spec in arguments.items()}
    for name, (default, kind, text) in merged.items():
        if kind is bool:
            # accepts `--cycle_momentum`, and `--lr_range_test_staircase True` as in DeepSpeed's scripts
            group.add_argument(f"--{name}", type=_boolean, nargs="?", const=True, default=default, help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse this process's command line. Return the tuning arguments and the unknown arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Copy every tuning argument of `args` that is not None to `params`."""
    for arguments in _BY_SCHEDULE.values():
        for name in arguments:
            value = getattr(args, name, None)
            if value is not None:
                params[name] = value


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return (config section {"type", "params"}, None), or (None, reason)."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in _BY_SCHEDULE:
        return None, f"{name} is not supported LR schedule; use one of {', '.join(_BY_SCHEDULE)}"
    values = {key: getattr(args, key, None) for key in _BY_SCHEDULE[name]}
    return {"type": name, "params": {key: value for key, value in values.items() if value is not None}}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """Return (the peak or first learning rate of a config section, ""), or (None, reason)."""
    if "type" not in config:
        return None, "LR schedule type not defined in config"
    if "params" not in config:
        return None, "LR schedule params not defined in config"
    keys = {
        "LRRangeTest": "lr_range_test_min_lr",
        "OneCycle": "cycle_max_lr",
        "WarmupLR": "warmup_max_lr",
        "WarmupDecayLR": "warmup_max_lr",
    }
    name, params = config["type"], config["params"]
    if name == "WarmupCosineLR":
        return None, "WarmupCosineLR scales the optimizer's learning rate and names none itself"
    if name not in keys:
        return None, f"{name} is not a valid LR schedule; use one of {', '.join(_BY_SCHEDULE)}"
    if keys[name] not in params:
        return None, f"{keys[name]} not defined in the params of {name}"
    return params[keys[name]], ""


def _boolean(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"found {text!r}, but it must be true or false")
    return words[text.lower()]
