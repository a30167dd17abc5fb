"""`ds_elastic`: show the batch sizes that `elasticity` of a configuration chooses, before a job starts.

    ds_elastic -c ds_config.json              the global batch, and the numbers of ranks that can compute it
    ds_elastic -c ds_config.json -w 8         and the micro-batch for 8 ranks

Exit code 0; 2 if the section is invalid or does not allow that many ranks.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from deepspeed._version import __version__
from deepspeed.cli.console import make_parser
from deepspeed.config.read import read_config
from deepspeed.elasticity import compute_elastic_config
from deepspeed.errors import ConfigError

_RULE = "-" * 42


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        config = read_config(options.config)
        found = compute_elastic_config(config, __version__, options.world_size)
    except (ConfigError, OSError) as error:
        print(f"ds_elastic: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
        return 2
    lines = [_RULE, "Elasticity config:", _RULE, json.dumps(config["elasticity"], indent=4, sort_keys=True), _RULE]
    world = f" for world size {options.world_size}" if options.world_size else ""
    lines += [f"Calculated results{world}:", _RULE]
    names = ("final_batch_size", "valid_gpus", "micro_batch_size")
    lines += [f"{name} {'.' * (20 - len(name))} {value}" for name, value in zip(names, found, strict=False)]
    print("\n".join(lines))  # noqa: T201 - a command's answer
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ds_elastic", "Print the batch sizes that the section elasticity of a configuration chooses.")
    parser.add_argument("-c", "--config", required=True, help="the configuration, a JSON file")
    parser.add_argument(
        "-w", "--world-size", type=_ranks, default=0, help="the number of ranks; 0, the default: any that is valid"
    )
    return parser


def _ranks(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}; give a whole number of 0 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
