"""`ds_ckpt`: look at the checkpoints in a directory, verify and compare them, remove old ones, and convert them.

    ds_ckpt verify DIR [TAG ...]              read every file and compare it with its checksums
    ds_ckpt show DIR                          the tags: step, stage, ranks, size, date, whether complete
    ds_ckpt show DIR --persistent PATH        those of both tiers of `nebula`, and in which each tag is
    ds_ckpt show DIR TAG                      the files of a tag, and its parameters with their shapes
    ds_ckpt show DIR TAG --tensors            where in the files the values of each parameter are
    ds_ckpt prune DIR --keep-last N           remove all but the last N tags; --dry-run only lists them
    ds_ckpt convert DIR OUT --to FORMAT       write a tag for another program into the folder OUT
    ds_ckpt compare DIR OTHER                 say which weights and states of two tags differ, and by how much

DIR is the argument of `save_checkpoint`. With `--json` the result is one JSON object on stdout. Exit code 0; 1 if a
file is missing or damaged, a tag could not be removed, or two tags differ; 2 if the command could not run.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint.convert import FORMATS
from deepspeed.checkpoint.index import DamagedCheckpoint
from deepspeed.checkpoint.layout import location, store_failures
from deepspeed.cli.console import make_console, make_parser
from deepspeed.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from deepspeed.cli.ckpt_commands import Result

_DONE, _FAULTS, _NOT_RUN = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        with store_failures(options.directory):
            options.directory = location(options.directory)
            _check_directory(options.directory)
            result = _run(options)
    except DamagedCheckpoint as error:
        sys.stderr.write(f"ds_ckpt: {error}\n")
        return _FAULTS
    except (CheckpointError, ConfigError, OSError) as error:
        sys.stderr.write(f"ds_ckpt: {error}\n")
        return _NOT_RUN
    if options.json:
        sys.stdout.write(json.dumps(result.record, indent=1) + "\n")
    else:
        result.show(make_console())
    return _FAULTS if result.has_faults else _DONE


def _parser() -> argparse.ArgumentParser:
    meaning = "Look at checkpoints, verify and compare them, remove old ones, and convert them."
    parser = make_parser("ds_ckpt", meaning)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Intermixed)
    verify = _command(commands, "verify", "read every file and compare it with its checksums")
    verify.add_argument("tags", metavar="TAG", nargs="*", help="only these; default: all")
    show = _command(commands, "show", "list the tags, or what is in one")
    show.add_argument("tag", metavar="TAG", nargs="?", help="list its files and parameters")
    show.add_argument("--tensors", action="store_true", help="list where in its files the values of parameters are")
    show.add_argument("--persistent", metavar="PATH", help="list nebula.persistent_storage_path too, with the tiers")
    prune = _command(commands, "prune", "remove old tags")
    prune.add_argument("--keep-last", metavar="N", type=_positive, required=True, help="how many tags stay")
    prune.add_argument("--dry-run", action="store_true", help="remove nothing")
    convert = _command(commands, "convert", "write a tag for another program", where="the directory")
    convert.add_argument("output", metavar="OUT", help="a new or empty folder")
    meanings = "; ".join(f"{name}: {each.meaning}" for name, each in FORMATS.items())
    convert.add_argument("--to", choices=FORMATS, required=True, help=f"the format. {meanings}")
    convert.add_argument("--no-verify", action="store_true", help="compare sizes of files only, and no checksums")
    convert.add_argument("-t", "--tag", metavar="TAG", help="default: what `latest` names")
    convert.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of a file of weights; 0: no limit")
    compare = _command(commands, "compare", "compare the weights and states of two tags", where="the directory")
    compare.add_argument("other", metavar="OTHER", help="the directory of the second tag; it may be the same")
    compare.add_argument("-t", "--tag", metavar="TAG", help="of DIR; default: what `latest` names")
    compare.add_argument("--other-tag", metavar="TAG", help="of OTHER; default: what `latest` names")
    compare.add_argument(
        "--within",
        metavar="SHARE",
        type=_share,
        default=0.0,
        help="how far apart values may lie, as a share of a tensor's largest number (default 0: the same bits)",
    )
    compare.add_argument("--top", metavar="N", type=_positive, default=10, help="how many tensors to show (default 10)")
    return parser


class _Intermixed(argparse.ArgumentParser):
    """A parser that accepts TAG after an option too. argparse alone would already have given TAG its default there."""

    _is_inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse intermixed arguments; argparse then calls this method again for each part."""
        if self._is_inside:
            return super().parse_known_args(args, namespace)
        self._is_inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inside = False


def _command(
    commands: "argparse._SubParsersAction[_Intermixed]",
    name: str,
    meaning: str,
    where: str = "the directory, or URL,",
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}.")
    command.add_argument("directory", metavar="DIR", help=f"{where} that holds the tags")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    return command


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer >= 1")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number >= 0, such as 1e-6")
    return share


def _run(options: argparse.Namespace) -> "Result":
    # late: these import torch, and --help and wrong arguments should not wait for it
    from deepspeed.cli import ckpt_commands, ckpt_show

    if options.command == "verify":
        return ckpt_commands.verify(options.directory, options.tags)
    if options.command == "prune":
        return ckpt_commands.prune(options.directory, options.keep_last, dry_run=options.dry_run)
    if options.command == "convert":
        arguments = (options.directory, options.output, options.to, options.tag, options.max_shard_size)
        return ckpt_commands.convert(*arguments, verify=not options.no_verify)
    if options.command == "compare":
        other = location(options.other)
        _check_directory(other)
        tags = (options.tag, options.other_tag)
        return ckpt_commands.compare(options.directory, other, *tags, within=options.within, top=options.top)
    if options.tag is None:
        if options.tensors:
            raise ConfigError("--tensors: found no TAG, whose tensors to list; add it after DIR")
        return ckpt_show.run(options.directory, None if options.persistent is None else location(options.persistent))
    if options.persistent is not None:
        raise ConfigError(f"--persistent: found the TAG {options.tag} too; give the directory that holds it, alone")
    return (ckpt_show.run_tensors if options.tensors else ckpt_show.run_tag)(options.directory, options.tag)


def _check_directory(directory: Path) -> None:
    from deepspeed.checkpoint.load import tag_folder_hint

    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}; give the one that save_checkpoint was given")
    if hint := tag_folder_hint(directory):
        raise CheckpointError(f"{directory}: {hint}")


if __name__ == "__main__":
    sys.exit(main())
