"""Convert checkpoints to other programs' formats, for `ds_ckpt convert`. One process, in bounded memory.

`FORMATS` can be read without torch, for the command's help.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from deepspeed.checkpoint import layout
from deepspeed.checkpoint.layout import local_folder
from deepspeed.errors import CheckpointError, ConfigError


def convert(
    directory: str | Path,
    output: str | Path,
    to: str,
    *,
    tag: str | None = None,
    max_shard_size: str = "5GB",
    verify: bool = True,
    advance: Callable[[int], object] | None = None,
) -> None:
    """Write the checkpoint `tag` of `directory` into the new or empty folder `output`.

    Args:
        to: one of `FORMATS`. "safetensors" and "torch" hold fp32 weights and buffers; "dcp" and "torchtitan" also the
            optimizer's states, as `torch.distributed.checkpoint` files; "universal" is DeepSpeed's format of that name,
            under the tag `<tag>_universal`.
        tag: default: the tag that `latest` names.
        max_shard_size: largest file of weights, for example "500MB"; "0" for one file.
        verify: first compare the checksums of all files with those in `index.json`; False: compare only sizes.
        advance: called with the number of bytes of each part that was verified, to show progress.

    Raises:
        ConfigError: `to` is none of `FORMATS`.
        DamagedCheckpoint: a file is missing or is not what was saved.
        CheckpointError: the checkpoint cannot be read, `output` holds something, or one of them is a URL.
    """
    if to not in FORMATS:
        raise ConfigError(f"convert: found the format {to!r}; allowed: {', '.join(FORMATS)}")
    source, target = local_folder(directory, "convert"), local_folder(output, "write a converted checkpoint to")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is there and not empty; give a folder that is new or empty")
    from deepspeed.checkpoint.consolidate_files import check_files, tag_folder

    check_files(tag_folder(source, tag), verify, advance)
    FORMATS[to].write(source, target, tag, max_shard_size)


def _to_safetensors(directory: Path, output: Path, tag: str | None, max_shard_size: str) -> None:
    from deepspeed.checkpoint.consolidate import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(
        directory, output, max_shard_size, safe_serialization=True, tag=tag, verify=False
    )


def _to_torch(directory: Path, output: Path, tag: str | None, max_shard_size: str) -> None:
    from deepspeed.checkpoint.consolidate import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(directory, output, max_shard_size, tag=tag, verify=False)


def _to_dcp(directory: Path, output: Path, tag: str | None, max_shard_size: str) -> None:
    from deepspeed.checkpoint.other_formats import write_dcp
    from deepspeed.checkpoint.saved_run import open_run

    write_dcp(open_run(directory, tag), output)


def _to_torchtitan(directory: Path, output: Path, tag: str | None, max_shard_size: str) -> None:
    from deepspeed.checkpoint.other_formats import write_dcp
    from deepspeed.checkpoint.saved_run import open_run

    write_dcp(open_run(directory, tag), output, "torchtitan")


def _to_universal(directory: Path, output: Path, tag: str | None, max_shard_size: str) -> None:
    from deepspeed.checkpoint.consolidate import new_file
    from deepspeed.checkpoint.other_formats import write_latest_universal, write_universal
    from deepspeed.checkpoint.saved_run import open_run

    run = open_run(directory, tag)
    folder = output / f"{layout.tag_of(run.folder)}_universal"
    output.mkdir(parents=True, exist_ok=True)
    write_universal(run, folder)
    write_latest_universal(folder)
    with new_file(output / layout.LATEST_FILE) as file:
        file.write(folder.name.encode())


class Format(NamedTuple):
    """`Format` is a format of another program."""

    meaning: str
    write: Callable[[Path, Path, str | None, str], None]
    """Called with the directory, the output, the tag and the largest file of weights."""


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "safetensors": Format("fp32 weights and buffers", _to_safetensors),
        "torch": Format("the same, as pickles of torch.save", _to_torch),
        "dcp": Format("torch.distributed.checkpoint, with the optimizer's states, for FSDP2", _to_dcp),
        "torchtitan": Format("the same, as torchtitan names its entries", _to_torchtitan),
        "universal": Format("DeepSpeed's universal checkpoint", _to_universal),
    }
)
