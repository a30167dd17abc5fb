"""`python -m deepspeed.checkpoint.ds_to_universal`: DeepSpeed's command that writes its universal format.

    ... --input_folder DIR/global_step3 --output_folder DIR/global_step3_universal

Both are folders of tags. Afterwards `latest_universal` beside the second one names it. Parts of tensor-parallel ranks,
stages of a pipeline and experts are joined. The command is for DeepSpeed: here, checkpoints load at any number of ranks
and any stage without it. `ds_ckpt convert DIR OUT --to universal` does the same.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed._absent import complete
from deepspeed.checkpoint import layout
from deepspeed.checkpoint.consolidate_files import check_files
from deepspeed.checkpoint.other_formats import write_latest_universal, write_universal
from deepspeed.checkpoint.saved_run import open_run
from deepspeed.checkpoint.tags import read_latest
from deepspeed.errors import CheckpointError

__all__ = ["ds_to_universal", "main"]


def ds_to_universal(input_folder: str | Path, output_folder: str | Path, *, num_workers: int = 2) -> None:
    """Write the checkpoint in the tag's folder `input_folder` to `output_folder`, in the universal format.

    Args:
        num_workers: number of parameters that are written at a time; memory holds one value of each.

    Raises:
        DamagedCheckpoint: a file is missing or is not what was saved.
        CheckpointError: the checkpoint cannot be read, or `output_folder` holds something.
    """
    source, target = Path(input_folder).absolute(), Path(output_folder).absolute()
    if not source.is_dir():
        raise CheckpointError(f"--input_folder: found no folder {source}; give that of a tag, such as global_step100")
    _refuse_root(source)
    check_files(source)
    write_universal(open_run(source.parent, source.name), target, num_workers=num_workers)
    write_latest_universal(target)


def _refuse_root(source: Path) -> None:
    """Refuse the folder of all tags, which has no files of weights itself."""
    tags = layout.tags_in(source)
    if not tags or source.name in layout.tags_in(source.parent):
        return
    latest = read_latest(source)
    named = f", and {layout.LATEST_FILE!r} there names {latest!r}" if latest in tags else ""
    raise CheckpointError(
        f"--input_folder: found {source}, the folder of {', '.join(tags)}{named}; give the folder of one tag, "
        f"{source / (latest if latest in tags else tags[-1])}"
    )


def main(arguments: Sequence[str] | argparse.Namespace | None = None) -> int:
    """Run the command, and return the exit code.

    Args:
        arguments: words, or parsed arguments; default: the words of the command line.
    """
    options = arguments if isinstance(arguments, argparse.Namespace) else _parser().parse_args(arguments)
    try:
        ds_to_universal(options.input_folder, options.output_folder, num_workers=options.num_merge_workers)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"ds_to_universal: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_to_universal", description="Write a ZeRO checkpoint in universal format.")
    parser.add_argument("--input_folder", required=True, help="folder of a tag, such as checkpoints/global_step100")
    parser.add_argument("--output_folder", required=True, help="a new or empty folder beside it")
    parser.add_argument("--num_extract_workers", type=_count, default=4, help="accepted: nothing is extracted first")
    parser.add_argument("--num_merge_workers", type=_count, default=2, help="how many parameters are written at a time")
    parser.add_argument("--keep_temp_folder", action="store_true", help="accepted: there is no temporary folder")
    parser.add_argument("--no_strict", action="store_true", help="accepted: each parameter is always checked")
    parser.add_argument("--inject_missing_state", action="store_true", help="accepted: none is missing")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer >= 1")
    return int(text)


complete(__name__)

if __name__ == "__main__":
    sys.exit(main())
