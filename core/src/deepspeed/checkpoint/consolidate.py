"""Convert a ZeRO checkpoint to plain fp32 weights: this is the `zero_to_fp32.py` beside every checkpoint.

    python zero_to_fp32.py <checkpoint_dir> <output_dir> [--safe_serialization] [--max_shard_size 5GB] [-t TAG] [-e]

It stands alone: it needs torch and the standard library. First the sizes and checksums of the files are compared with
`index.json` beside them, if there is one. Files are read with `weights_only=True`, so no code in them is run, and
memory-mapped. Memory holds one output file of `torch.save`, or one weight of a safetensors file.

A save joins three files of `deepspeed.checkpoint` into this program (`tags.py`): this one,
`consolidate_files.py` and `consolidate_join.py`.
"""

import argparse
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from deepspeed.checkpoint.consolidate_files import (
    DEEPSPEED_CLASSES,
    CheckpointError,
    check_files,
    counted,
    get_model_state_file,
    get_optim_files,
    log,
    read_file,
    tag_folder,
)
from deepspeed.checkpoint.consolidate_join import LazyTensor, lazy_state_dict

__all__ = [
    "DEEPSPEED_CLASSES",
    "CheckpointError",
    "LazyTensor",
    "check_files",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "lazy_state_dict",
    "load_state_dict_from_zero_checkpoint",
    "main",
    "read_file",
    "tag_folder",
]

_LOADED_BYTES = 256 * 2**20  # of weights that are loaded into a model at a time
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SAFETENSORS_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}


def _in_memory(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return each weight in memory; names of one weight still share it."""
    tensors: dict[int, torch.Tensor] = {}
    for name, weight in weights.items():
        if id(weight) not in tensors:
            log.debug("%s %s", name, tuple(weight.shape))
            tensors[id(weight)] = weight.contiguous()
    return {name: tensors[id(weight)] for name, weight in weights.items()}


# --- what users call


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Return the whole model's fp32 `state_dict` from a checkpoint of any number of ranks, on the CPU.

    Users and Lightning call it offline, after or beside a training.

    Args:
        checkpoint_dir: the directory that holds `latest` and the tags' folders.
        tag: default: the tag that `latest` names.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: return `LazyTensor`s, which stay in the files until their `contiguous()` is called.
        verify: first compare the checksums of the files, which reads them once more; False: compare only sizes.

    Floating-point values are fp32: the optimizer's master weights if there are any. Raises `CheckpointError`.
    """
    folder = tag_folder(checkpoint_dir, tag)
    check_files(folder, verify)
    weights = lazy_state_dict(folder, exclude_frozen_parameters)
    return weights if lazy_mode else _in_memory(weights)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | int | None = None, verify: bool = True
) -> torch.nn.Module:
    """Move `model` to the CPU, load the checkpoint's fp32 weights into it and return it. For use after a training.

    Beside the model, memory holds 256 MiB of weights, or one weight if that is larger. `verify` is as for
    `get_fp32_state_dict_from_zero_checkpoint`.

    Names that only one side has are logged as a warning; raises `CheckpointError` if there is no common name.
    """
    folder = tag_folder(checkpoint_dir, tag)
    check_files(folder, verify)
    weights = lazy_state_dict(folder, exclude_frozen_parameters=False)
    model = model.cpu()
    missing, unexpected = set(model.state_dict()), []
    for names in _split(weights, _LOADED_BYTES, shares=True):
        result = model.load_state_dict(_in_memory({name: weights[name] for name in names}), strict=False)
        missing.intersection_update(result.missing_keys)
        unexpected += result.unexpected_keys
    if weights and len(unexpected) == len(weights):
        raise CheckpointError(
            f"{checkpoint_dir} is of another model: it holds {sorted(weights)[:3]} ..., none of which fits."
        )
    if missing or unexpected:
        log.warning("not in the checkpoint: %s; not in the model: %s", sorted(missing), unexpected)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | int | None = None,
    exclude_frozen_parameters: bool = False,
    verify: bool = True,
) -> None:
    """Write a checkpoint's fp32 weights as files that load without this package.

    `<output_dir>/pytorch_model.bin` or `model.safetensors`; above `max_shard_size` ("5GB", "500MB", bytes, None for no
    limit) several files and an index, as Hugging Face names them. Tied weights are one tensor in a `.bin` file and are
    written under each name in `.safetensors`, which cannot share tensors. `verify` is as for
    `get_fp32_state_dict_from_zero_checkpoint`.
    """
    write = _write_safetensors if safe_serialization else _write_bin
    limit_bytes, folder = _parse_size_bytes(max_shard_size), tag_folder(checkpoint_dir, tag)
    found = [file for file in folder.iterdir() if file.suffix != ".json" and file.is_file()]
    size = _shown_size(sum(file.stat().st_size for file in found))
    log.info(
        "%s %s in %s, %s", "verifying and reading" if verify else "reading", counted(len(found), "file"), folder, size
    )
    check_files(folder, verify)
    weights = lazy_state_dict(folder, exclude_frozen_parameters)
    files = _split(weights, limit_bytes, shares=not safe_serialization)
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    output = _create_folder(Path(output_dir))
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        name = f"{stem}.{ending}" if len(files) == 1 else f"{stem}-{index + 1:05d}-of-{len(files):05d}.{ending}"
        log.debug("writing %s (%d of %s)", output / name, index + 1, counted(len(files), "file"))
        with new_file(output / name) as file:
            write({key: weights[key] for key in names}, file)
        weight_map.update(dict.fromkeys(names, name))
    total_bytes = sum({id(weight): _nbytes(weight) for weight in weights.values()}.values())
    if len(files) > 1:
        index_text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
        with new_file(output / f"{stem}.{ending}.index.json") as file:
            file.write(f"{index_text}\n".encode())
    of = counted(len(weights), "weight or buffer", "weights and buffers")
    first = f"{stem}.{ending}.index.json and {counted(len(files), 'file')}" if len(files) > 1 else name
    log.info("wrote %s, %s, as %s in %s", of, _shown_size(total_bytes), first, output)


def _create_folder(output: Path) -> Path:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(
            f"output_dir: {output} is a file, or lies below one; give a directory, in which the weights are written as "
            "pytorch_model.bin or model.safetensors"
        ) from error
    return output


def _write_bin(weights: Mapping[str, Any], file: BinaryIO) -> None:
    torch.save(_in_memory(weights), file)


def _write_safetensors(weights: Mapping[str, Any], file: BinaryIO) -> None:
    """Write the format of the package safetensors: the length of a header, the header as JSON, each tensor's bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, weight in weights.items():
        if weight.dtype not in _SAFETENSORS_NAMES:
            raise CheckpointError(f"{name} has dtype {weight.dtype}, which safetensors files cannot hold; write a .bin")
        stop = start + _nbytes(weight)
        kind = _SAFETENSORS_NAMES[weight.dtype]
        header[name] = {"dtype": kind, "shape": list(weight.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, weight in weights.items():
        log.debug("%s %s", name, tuple(weight.shape))
        if weight.numel():
            file.write(memoryview(weight.contiguous().reshape(-1).view(torch.uint8).numpy()))


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the body is over; a failure leaves `path` as it was.

    Raises:
        CheckpointError: the disk refuses; `torch.save` reports that as a RuntimeError.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        refusal: BaseException | None = error
        while refusal is not None and not isinstance(refusal, OSError):
            refusal = refusal.__cause__ or refusal.__context__
        if refusal is None or isinstance(error, CheckpointError):
            raise
        room = ""
        with suppress(OSError):  # the folder may be gone
            room = f" ({shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free there)"
        raise CheckpointError(
            f"cannot write {path}: {refusal.strerror or refusal}{room}. The checkpoint is untouched; make room in that "
            "folder, or give another one, and convert again"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _split(weights: Mapping[str, Any], limit_bytes: int | None, shares: bool) -> list[list[str]]:
    """Divide the names among output files, in order, as many as fit into each file. Tied weights stay together."""
    together: dict[int, list[str]] = {}
    for name, weight in weights.items():
        together.setdefault(id(weight), []).append(name)
    files: list[list[str]] = [[]]
    room = limit_bytes
    for names in together.values():
        size = _nbytes(weights[names[0]]) * (1 if shares else len(names))
        if limit_bytes is not None and room is not None:
            if size > room and files[-1]:
                files.append([])
                room = limit_bytes
            room -= size
        files[-1].extend(names)
    return files


def _nbytes(weight: Any) -> int:
    return int(weight.numel()) * weight.dtype.itemsize


def _shown_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _parse_size_bytes(size: str | int | None) -> int | None:
    if size is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = (match[2].upper() or "B") if match else ""
    num_bytes = float(match[1]) * _UNITS[unit] if match and unit in _UNITS else -1
    if num_bytes != 0 and num_bytes < 1:  # a fraction would round to 0, which means no limit
        raise ValueError(
            f"max_shard_size: found {size!r}; write for example '5GB', '500MB', '2GiB', or a number of bytes."
        )
    return int(num_bytes) or None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the fp32 weights of a ZeRO checkpoint as plain files.")
    parser.add_argument("checkpoint_dir", help="the directory that holds the file `latest`")
    parser.add_argument("output_dir", help="where pytorch_model.bin or model.safetensors goes")
    parser.add_argument("--max_shard_size", default="5GB", help="largest output file, e.g. 500MB; 0: no limit")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint; default: the one that `latest` names")
    parser.add_argument("-e", "--exclude_frozen_parameters", action="store_true", help="only what was trained")
    parser.add_argument("--no_verify", action="store_true", help="compare sizes of files only, and no checksums")
    parser.add_argument("--lazy", action="store_true", help="accepted: a weight is always read when it is written")
    parser.add_argument("-d", "--debug", action="store_true", help="name every weight, and show tracebacks")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG if args.debug else logging.INFO, format="%(message)s")
    if args.output_dir.endswith((".bin", ".pt", ".safetensors")):
        log.info("%s is a folder, in which the files of weights are written", args.output_dir)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            args.checkpoint_dir,
            args.output_dir,
            max_shard_size=args.max_shard_size,
            safe_serialization=args.safe_serialization,
            tag=args.tag,
            exclude_frozen_parameters=args.exclude_frozen_parameters,
            verify=not args.no_verify,
        )
    except (CheckpointError, OSError, ValueError) as error:
        if args.debug:
            raise
        parser.exit(1, f"zero_to_fp32: {error}\n")


if __name__ == "__main__":
    main()
