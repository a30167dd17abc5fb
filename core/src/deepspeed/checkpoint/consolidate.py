#!/usr/bin/env python3
"""Plain fp32 weights out of a ZeRO checkpoint. This file is also the `zero_to_fp32.py` beside every checkpoint.

    python zero_to_fp32.py <checkpoint_dir> <output_dir> [--safe_serialization] [--max_shard_size 5GB] [-t TAG] [-e]

It stands alone: it needs torch and the standard library. First the sizes and checksums of the files are compared with
`index.json` beside them, where there is one. Files are read with `weights_only=True`, so no code in them is
run, and mapped rather than read. Memory holds one output file of `torch.save`, or one weight of a safetensors file.

[Note: what the shards hold] Every parameter group's trainable parameters, in the order of `param_shapes`, lie end to
end in one fp32 buffer.
Stages 1 and 2: rank r holds the r-th part of each group's buffer (`single_partition_of_fp32_groups`), which is padded
at its end. Joined in rank order, the parts are the buffer.
Stage 3: each parameter of n elements is cut into W = world size parts of ceil(n / W), the last one padded; rank r holds
the r-th part of every parameter, end to end (`fp32_flat_groups`).
Stage 0: the masters, when there are any, lie whole in the model file; else its weights are the best there is.
"""

import argparse
import json
import logging
import math
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

try:
    from deepspeed.checkpoint.index import DamagedCheckpoint
    from deepspeed.errors import CheckpointError
except ImportError:  # standing alone

    class CheckpointError(RuntimeError):  # type: ignore[no-redef]
        """A checkpoint cannot be read; the message names the file."""

    DamagedCheckpoint = CheckpointError  # type: ignore[assignment,misc]


log = logging.getLogger("zero_to_fp32")


class Attributes:
    """An object of DeepSpeed in a file, as its attributes only."""


#: The classes in DeepSpeed's own files, and what is made of them when such a file is loaded.
DEEPSPEED_CLASSES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (Attributes, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Attributes, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Attributes, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
_LOAD_ELSEWHERE = (
    "This program does not join them: load the checkpoint with engine.load_checkpoint() on any number of ranks, and "
    "call engine.save_16bit_model()."
)
_ADVICE = "Copy the file again from where it came, or take another tag."
_LOADED_BYTES = 256 * 2**20  # of weights at a time, into a model
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SAFETENSORS_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}


class LazyTensor:
    """A weight whose pieces still lie in checkpoint files. `contiguous()` brings it into memory, again at each call."""

    def __init__(
        self, pieces: Sequence[torch.Tensor], shape: Iterable[int], dtype: torch.dtype = torch.float32
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._pieces = pieces

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> torch.Tensor:
        whole = torch.empty(self.numel(), dtype=self.dtype)
        start = 0
        for piece in self._pieces:
            flat = piece.reshape(-1)
            whole[start : start + flat.numel()] = flat
            start += flat.numel()
        assert start == whole.numel()
        return whole.view(self.shape)


class _Cursor:
    """Walks over buffers that lie end to end and takes the next elements as views."""

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._buffers = [buffer.reshape(-1) for buffer in buffers]
        self._index, self._offset = 0, 0

    def take(self, numel: int) -> list[torch.Tensor]:
        pieces = []
        while numel:
            if self._index == len(self._buffers):
                raise CheckpointError(f"the optimizer shards end {numel} elements too early for param_shapes")
            piece = self._buffers[self._index][self._offset : self._offset + numel]
            numel -= piece.numel()
            self._offset += piece.numel()
            if self._offset == self._buffers[self._index].numel():
                self._index, self._offset = self._index + 1, 0
            if piece.numel():
                pieces.append(piece)
        return pieces

    def rest(self) -> int:
        """Elements that were not taken."""
        return sum(buffer.numel() for buffer in self._buffers[self._index :]) - self._offset


# --- finding and reading files


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """The first rank's model file in a tag's folder; stage 3 has one per rank. Looked up by Lightning."""
    prefix = "zero_pp_rank_0_" if zero_stage == 3 else ""
    path = Path(checkpoint_dir) / f"{prefix}mp_rank_00_model_states.pt"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: {checkpoint_dir} is not the folder of a ZeRO stage {zero_stage} tag."
        )
    return str(path)


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """The optimizer shards in a tag's folder, in rank order. Looked up by Lightning."""
    files = sorted(Path(checkpoint_dir).glob("*_optim_states.pt"), key=_rank_order)
    if not files:
        raise CheckpointError(f"{checkpoint_dir} holds no optimizer shards (*_optim_states.pt).")
    return [str(path) for path in files]


def _rank_order(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"rank_(\d+)", path.name)]


def tag_folder(checkpoint_dir: str | Path, tag: str | None) -> Path:
    root = Path(checkpoint_dir)
    names = _latest_names(root) if tag is None else [tag]
    for name in names:
        # A save that was killed between its two renames leaves the former version under the second name.
        for folder in (root / name, root / f".{name}.former"):
            if name.strip("/") and folder.is_dir():
                return folder
    raise CheckpointError(f"{root / names[-1]} is missing: there is no checkpoint with the tag {names[-1]!r}.")


def _latest_names(root: Path) -> list[str]:
    """The tag that `latest` names: exactly, or without the white space that an editor may have put around it."""
    latest = root / "latest"
    if not latest.is_file():
        raise CheckpointError(f"{latest} is missing. Pass the directory that holds it, or a tag (-t).")
    text = latest.read_text(encoding="utf-8")
    name = text.strip()
    if not name or name.startswith(".") or any(c in text.rstrip("\n") for c in "/\\\0\n"):
        raise CheckpointError(f"{latest} holds {text[:200]!r}, which is no tag. Correct it, or pass a tag (-t).")
    return [text.rstrip("\n"), name]


def read_file(path: str | Path) -> dict[str, Any]:
    log.info("reading %s", path)
    if Path(path).exists() and not Path(path).is_file():  # a FIFO would wait for its writer
        raise CheckpointError(f"{path} is no regular file. Copy the file again from where it came.")
    try:
        with torch.serialization.safe_globals(DEEPSPEED_CLASSES):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} was refused: it holds more than tensors and plain values. {error}") from error
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is no file of a checkpoint: it holds a {type(state).__name__}.")
    return state


def check_files(folder: Path, content: bool = True, advance: Callable[[int], object] | None = None) -> None:
    """Compare the files in a tag's folder with the `index.json` beside them; without one, nothing is known of them.

    Args:
        content: read each file and compare its checksums; else sizes only.
        advance: is called with the number of bytes of each part that was read, to show progress.

    Raises `CheckpointError`, which names the file that is missing or damaged.
    """
    path = folder / "index.json"
    if not path.is_file():
        return
    text, seal, _ = (raw := path.read_bytes()).rpartition(b',\n "checksum": "crc32:')
    if raw != text + seal + b'%08x"\n}\n' % zlib.crc32(text):
        raise DamagedCheckpoint(
            f"{path} is damaged: its checksum does not fit its content. Copy it again from where it came; without this "
            "file nothing is verified."
        )
    index = json.loads(raw)
    if index["format"] != 1:
        raise CheckpointError(f"{path} has format {index['format']}, and this program reads 1; use a later version.")
    for entry in index["files"]:
        if entry["name"] != Path(entry["name"]).name:
            raise DamagedCheckpoint(f"{path} lists {entry['name']!r}, which is no file beside it. {_ADVICE}")
        _check_file(folder / entry["name"], entry, index["block_bytes"], content, advance)


def _check_file(
    file: Path, entry: Mapping[str, Any], block_bytes: int, content: bool, advance: Callable[[int], object] | None
) -> None:
    num_bytes = file.stat().st_size if file.is_file() else None
    if num_bytes is None or entry["bytes"] not in (None, num_bytes):
        absent = "is no regular file" if file.exists() else "is missing"
        found = absent if num_bytes is None else f"is damaged: it has {num_bytes} bytes"
        raise DamagedCheckpoint(f"{file} {found}, and was saved with {entry['bytes']}. {_ADVICE}")
    if not content or entry["crc32"] is None:
        return
    log.info("verifying %s", file)
    for block, found in enumerate(_checksums(file, block_bytes, advance)):
        saved = entry["crc32"][block] if block < len(entry["crc32"]) else None
        if found != saved:
            raise DamagedCheckpoint(
                f"{file} is damaged: its block of {block_bytes} bytes from byte {block * block_bytes} on has the "
                f"CRC-32 {found}, and was saved with {saved}. {_ADVICE}"
            )


def _checksums(path: Path, block_bytes: int, advance: Callable[[int], object] | None) -> Iterator[str]:
    """Of each block of a file."""
    buffer = memoryview(bytearray(2**20))
    checksum, in_block = 0, 0
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer[: block_bytes - in_block]):
            checksum, in_block = zlib.crc32(buffer[:num_bytes], checksum), in_block + num_bytes
            if advance is not None:
                advance(num_bytes)
            if in_block == block_bytes:
                yield f"{checksum:08x}"
                checksum, in_block = 0, 0
    if in_block:
        yield f"{checksum:08x}"


def _read_shards(folder: Path) -> list[dict[str, Any]]:
    """Every rank's `optimizer_state_dict`, checked to be all of one checkpoint. Empty for stage 0."""
    files = [Path(path) for path in get_optim_files(folder)] if any(folder.glob("*_optim_states.pt")) else []
    if strange := [path.name for path in files if len(_rank_order(path)) != 2]:
        raise CheckpointError(
            f"{folder} holds {', '.join(strange)}, which is no optimizer shard: found no two ranks in the name, as in "
            "zero_pp_rank_0_mp_rank_00_optim_states.pt. Move it elsewhere."
        )
    if len({_rank_order(path)[1] for path in files}) > 1:
        raise CheckpointError(f"{folder} was saved by several model parallel ranks. {_LOAD_ELSEWHERE}")
    ranks = [_rank_order(path)[0] for path in files]
    if ranks != list(range(len(ranks))):
        raise CheckpointError(f"{folder} is incomplete or mixed: it holds the optimizer shards of ranks {ranks}.")
    shards = [read_file(path).get("optimizer_state_dict", {}) for path in files]
    for path, shard in zip(files, shards, strict=True):
        if "zero_stage" not in shard:
            raise CheckpointError(f"{path} was not saved under ZeRO: it has no optimizer_state_dict with a zero_stage.")
        counts = shard.get("partition_count", len(shards))
        for count in counts if isinstance(counts, (list, tuple)) else [counts]:
            if count not in (1, len(shards)):  # 1: a group that every rank holds whole
                raise CheckpointError(f"{path} is one of {count} shards, but {folder} holds {len(shards)}.")
    return shards


# --- putting weights together


def _join_contiguous(shards: Sequence[Mapping[str, Any]], param_shapes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Weights of stages 0, 1 and 2; see [Note: what the shards hold]. The parts may be of unequal length."""
    groups = [shard["single_partition_of_fp32_groups"] for shard in shards]
    if any(len(group) != len(param_shapes) for group in groups):
        found = [len(group) for group in groups]
        raise CheckpointError(f"param_shapes has {len(param_shapes)} parameter groups, the shards have {found}")
    weights = {}
    for index, shapes in enumerate(param_shapes):
        cursor = _Cursor(group[index] for group in groups[: _partition_count(shards[0], index, len(groups))])
        for name, shape in shapes.items():
            weights[name] = LazyTensor(cursor.take(math.prod(shape)), shape)
        padding = max(2 * len(shards), sum(_padding(shard, index) for shard in shards))
        if cursor.rest() > padding:
            raise CheckpointError(
                f"param_shapes leaves {cursor.rest()} elements of parameter group {index} unnamed, more than any "
                f"padding ({padding}): the model file and the shards are not of one checkpoint"
            )
    return weights


def _partition_count(shard: Mapping[str, Any], group: int, default: int) -> int:
    """In how many parts a group lies: one per rank, or one that every rank holds whole."""
    counts = shard.get("partition_count", default)
    return int(counts[group]) if isinstance(counts, (list, tuple)) and group < len(counts) else default


def _padding(shard: Mapping[str, Any], group: int) -> int:
    paddings = shard.get("group_paddings") or []
    return int(paddings[group]) if group < len(paddings) else 0


def _join_per_parameter(
    shards: Sequence[Mapping[str, Any]], param_shapes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Weights of stage 3; see [Note: what the shards hold]."""
    cursors = [_Cursor(shard["fp32_flat_groups"]) for shard in shards]
    weights = {}
    for shapes in param_shapes:
        for name, shape in shapes.items():
            weights[name] = _from_parts(
                [cursor.take(math.ceil(math.prod(shape) / len(shards))) for cursor in cursors], shape
            )
    return weights


def _from_parts(parts: Iterable[Sequence[torch.Tensor]], shape: Sequence[int]) -> LazyTensor:
    """One parameter out of every rank's part of it, without the padding after its last element."""
    cursor = _Cursor(piece for part in parts for piece in part)
    return LazyTensor(cursor.take(math.prod(shape)), shape)


def _frozen(models: Sequence[Mapping[str, Any]], stage: int) -> dict[str, LazyTensor]:
    """Frozen parameters, which no optimizer shard holds: whole in the model file, or in parts under stage 3."""
    shapes = models[0].get("frozen_param_shapes") or {}
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    if stage == 3:
        return {
            name: _from_parts([[fragment[name]] for fragment in fragments], shape)
            for name, shape in shapes.items()
            if name in fragments[0]
        }
    return {name: LazyTensor([fragments[0][name]], shape) for name, shape in shapes.items() if name in fragments[0]}


def _from_module(tensor: torch.Tensor) -> LazyTensor:
    """A tensor of the model file; floating-point ones become fp32, counters and masks keep their type."""
    return LazyTensor([tensor], tensor.shape, torch.float32 if tensor.is_floating_point() else tensor.dtype)


def _refuse_divided(folder: Path, model: Mapping[str, Any]) -> None:
    """Parts of parameters are not joined here: each model parallel rank has files of its own, and each expert rank."""
    num_ranks = int(model.get("mp_world_size") or 1)
    if num_ranks > 1:
        raise CheckpointError(f"{folder} was saved by several model parallel ranks ({num_ranks}). {_LOAD_ELSEWHERE}")
    if (model.get("ds_model_parallel") or {}).get("experts"):
        raise CheckpointError(f"{folder} holds experts that are divided over ranks. {_LOAD_ELSEWHERE}")


def lazy_state_dict(folder: Path, exclude_frozen_parameters: bool) -> dict[str, Any]:
    shards = _read_shards(folder)
    if not shards and (folder / "zero").is_dir():
        raise CheckpointError(
            f"{folder} is in DeepSpeed's universal format; give the checkpoint that it was made from."
        )
    stage = int(shards[0]["zero_stage"]) if shards else 0
    first = get_model_state_file(folder, stage)
    models = [read_file(first)]
    if stage == 3:
        names = [Path(first).name.replace("rank_0_", f"rank_{rank}_", 1) for rank in range(1, len(shards))]
        models += [read_file(folder / name) for name in names]
    model = models[0]
    _refuse_divided(folder, model)
    if not shards and "single_partition_of_fp32_groups" in (model.get("optimizer") or {}):
        shards = [model["optimizer"]]  # stage 0 with masters
    module, param_shapes = model["module"], model.get("param_shapes") or []
    frozen_names = set(model.get("frozen_param_shapes") or {})
    if shards and not param_shapes:
        raise CheckpointError(f"{first} has no param_shapes, so the shards beside it cannot be cut into weights.")

    join = _join_per_parameter if stage == 3 else _join_contiguous
    weights = join(shards, param_shapes) if shards else {}
    if not exclude_frozen_parameters:
        weights.update(_frozen(models, stage))
    # Stage 3 leaves empty tensors in `module`; buffers alone are whole there.
    wanted = set(model.get("buffer_names") or []) if stage == 3 else set(module) - frozen_names
    aliases = dict(model.get("shared_params") or {})
    for name, tensor in module.items():
        if name in wanted and name not in weights and name not in aliases and isinstance(tensor, torch.Tensor):
            weights[name] = _from_module(tensor)
    for alias, name in aliases.items():
        if name in weights:
            weights[alias] = weights[name]
    log.info("%d weights and buffers, ZeRO stage %d, %d shards", len(weights), stage, len(shards))
    order = {name: index for index, name in enumerate(module)}
    return dict(sorted(weights.items(), key=lambda item: order.get(item[0], len(order))))


def _in_memory(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Each weight in memory; names that share a weight go on sharing it."""
    tensors: dict[int, torch.Tensor] = {}
    for name, weight in weights.items():
        if id(weight) not in tensors:
            log.debug("%s %s", name, tuple(weight.shape))
            tensors[id(weight)] = weight.contiguous()
    return {name: tensors[id(weight)] for name, weight in weights.items()}


# --- what users call


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """The whole model's fp32 `state_dict` from a checkpoint of any number of ranks, on the CPU.

    Called offline, by users and by Lightning, after or beside a training.

    Args:
        checkpoint_dir: the directory that holds `latest` and the tags' folders.
        tag: default: what `latest` names.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: give `LazyTensor`s, which stay in the files until their `contiguous()` is called.
        verify: compare checksums of the files first, which reads them once more; else sizes only.

    Floating-point values are fp32: the optimizer's masters where there are any. Raises `CheckpointError`.
    """
    folder = tag_folder(checkpoint_dir, tag)
    check_files(folder, verify)
    weights = lazy_state_dict(folder, exclude_frozen_parameters)
    return weights if lazy_mode else _in_memory(weights)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None, verify: bool = True
) -> torch.nn.Module:
    """Move `model` to the CPU, load the checkpoint's fp32 weights into it and return it. For use after a training.

    Beside the model, memory holds weights of 256 MiB, or one weight where that is larger. `verify` is that of
    `get_fp32_state_dict_from_zero_checkpoint`.

    Names that only one side has are reported as a warning; `CheckpointError` when there is no common name at all.
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
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    verify: bool = True,
) -> None:
    """Write a checkpoint's fp32 weights as files that load without this package.

    `<output_dir>/pytorch_model.bin` or `model.safetensors`; above `max_shard_size` ("5GB", "500MB", bytes, None for no
    limit) several files and an index, as Hugging Face names them. Tied weights are one tensor in a `.bin` file and are
    written under each name in `.safetensors`, which knows no sharing. `verify` is that of
    `get_fp32_state_dict_from_zero_checkpoint`.
    """
    write = _write_safetensors if safe_serialization else _write_bin
    limit_bytes, folder = _parse_size_bytes(max_shard_size), tag_folder(checkpoint_dir, tag)
    check_files(folder, verify)
    weights = lazy_state_dict(folder, exclude_frozen_parameters)
    files = _split(weights, limit_bytes, shares=not safe_serialization)
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    output = _create_folder(Path(output_dir))
    weight_map = {}
    for index, names in enumerate(files):
        name = f"{stem}.{ending}" if len(files) == 1 else f"{stem}-{index + 1:05d}-of-{len(files):05d}.{ending}"
        log.info("writing %s (%d of %d files)", output / name, index + 1, len(files))
        _write(write, {key: weights[key] for key in names}, output / name)
        weight_map.update(dict.fromkeys(names, name))
    if len(files) > 1:
        sizes = {id(weight): _nbytes(weight) for weight in weights.values()}
        index_text = json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}, indent=2)
        (output / f"{stem}.{ending}.index.json").write_text(index_text + "\n", encoding="utf-8")


def _create_folder(output: Path) -> Path:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(
            f"output_dir: {output} is a file, or lies below one; give a directory, in which the weights are written as "
            "pytorch_model.bin or model.safetensors"
        ) from error
    return output


def _write_bin(weights: Mapping[str, Any], path: Path) -> None:
    torch.save(_in_memory(weights), path)


def _write_safetensors(weights: Mapping[str, Any], path: Path) -> None:
    """The format of the package safetensors: the length of a header, the header as JSON, the bytes of each tensor."""
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
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, weight in weights.items():
            log.debug("%s %s", name, tuple(weight.shape))
            if weight.numel():
                file.write(memoryview(weight.contiguous().reshape(-1).view(torch.uint8).numpy()))


def _write(write: Callable[[Mapping[str, Any], Path], None], weights: Mapping[str, Any], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(weights, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _split(weights: Mapping[str, Any], limit_bytes: int | None, shares: bool) -> list[list[str]]:
    """Names by output file: in order, a new file whenever the next weight would not fit. Tied weights stay together."""
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


def _parse_size_bytes(size: str | int | None) -> int | None:
    if size is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = (match[2].upper() or "B") if match else ""
    num_bytes = float(match[1]) * _UNITS[unit] if match and unit in _UNITS else -1
    if num_bytes != 0 and num_bytes < 1:  # which is no limit, and must not become one
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
