"""Find the files of a checkpoint, compare them with `index.json`, and read them. First part of `zero_to_fp32.py`."""

import json
import logging
import pickle
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

try:
    from deepspeed.checkpoint.index import DamagedCheckpoint
    from deepspeed.errors import CheckpointError, counted
except ImportError:  # standing alone

    class CheckpointError(RuntimeError):  # type: ignore[no-redef]
        """A checkpoint cannot be read; the message names the file."""

    DamagedCheckpoint = CheckpointError  # type: ignore[assignment,misc]

    def counted(number: int, noun: str, plural: str = "") -> str:
        """A number of things, for messages."""
        return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


log = logging.getLogger("zero_to_fp32")


class Attributes:
    """`Attributes` is an object of a DeepSpeed class in a file, reduced to its attributes."""


#: The classes in DeepSpeed's own files, and the class that replaces each of them when such a file is loaded.
DEEPSPEED_CLASSES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (Attributes, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Attributes, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Attributes, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Attributes, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
ADVICE = "Copy the file again from where it came, or take another tag."
#: keys of a model file whose weights, or whose optimizer state, are in files beside it; see `saved_states.py`
MODULE_FILES, MODULE_REST, OPTIMIZER_FILE = "ds_module_files", "ds_module_rest", "ds_optimizer_file"
#: key of the rank that wrote a file of experts
DATA_RANK = "ds_data_rank"


class LazyTensor:
    """A weight whose pieces are still in checkpoint files. Each call of `contiguous()` reads it into memory."""

    def __init__(
        self, pieces: Sequence[torch.Tensor], shape: Iterable[int], dtype: torch.dtype = torch.float32
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.pieces = pieces

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> torch.Tensor:
        whole = torch.empty(self.numel(), dtype=self.dtype)
        start = 0
        for piece in self.pieces:
            flat = piece.reshape(-1)
            whole[start : start + flat.numel()] = flat
            start += flat.numel()
        assert start == whole.numel()
        return whole.view(self.shape)


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Return the first rank's model file in a tag's folder; stage 3 has one per rank. Lightning calls it."""
    prefix = "zero_pp_rank_0_" if zero_stage == 3 else ""
    path = Path(checkpoint_dir) / f"{prefix}mp_rank_00_model_states.pt"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: {checkpoint_dir} is not the folder of a ZeRO stage {zero_stage} tag."
        )
    return str(path)


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Return the optimizer shards in a tag's folder, in rank order. Lightning calls it."""
    found = Path(checkpoint_dir).glob("*_optim_states.pt")
    files = sorted((path for path in found if not path.name.startswith("expp_rank_")), key=_rank_order)
    if not files:
        raise CheckpointError(f"{checkpoint_dir} holds no optimizer shards (*_optim_states.pt).")
    return [str(path) for path in files]


def _rank_order(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"rank_(\d+)", path.name)]


def tag_folder(checkpoint_dir: str | Path, tag: str | int | None) -> Path:
    root = Path(checkpoint_dir)
    names = _latest_names(root) if tag is None else [str(tag)]
    for name in names:
        # A save that was killed between its two renames leaves the former version under the second name.
        for folder in (root / name, root / f".{name}.former"):
            if name.strip("/") and folder.is_dir():
                return folder
    raise CheckpointError(
        f"{root / names[-1]} is missing: there is no checkpoint with the tag {names[-1]!r}. {_tags_there(root)}"
    )


def _tags_there(root: Path) -> str:
    """Return the end of an error message that lists the tags in `root`, in the order of their numbers."""
    folders = {file.parent.name for file in root.glob("*/*_states.pt")}
    found = [re.fullmatch(r"([^.].*)|\.(.+)\.former", name) for name in folders]
    tags = {name[1] or name[2] for name in found if name}
    if not tags:
        return f"No tag is in {root}: pass the directory that a checkpoint was saved to."
    return f"It holds: {', '.join(sorted(tags, key=_by_number))}. Pass one of these as the tag."


def _by_number(tag: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", tag)]


def _latest_names(root: Path) -> list[str]:
    """Return the name in `latest`: as written, and without the white space that an editor may have added."""
    latest = root / "latest"
    if not latest.is_file():
        if not root.is_dir():
            raise CheckpointError(f"{root} is no directory. Pass the one that a checkpoint was saved to.")
        if (root.parent / "latest").is_file():
            raise CheckpointError(
                f"{latest} is missing, and {root.parent} has one. Pass that directory, and {root.name!r} as the tag."
            )
        raise CheckpointError(f"{latest} is missing. {_tags_there(root)}")
    text = latest.read_text(encoding="utf-8")
    name = text.strip()
    if not name or name.startswith(".") or any(c in text.rstrip("\n") for c in "/\\\0\n"):
        raise CheckpointError(f"{latest} holds {text[:200]!r}, which is no tag. {_tags_there(root)}")
    return [text.rstrip("\n"), name]


def read_file(path: str | Path) -> dict[str, Any]:
    log.debug("reading %s", path)
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


def merged(
    state: dict[str, Any], load: Callable[[str], Any], join: Callable[[Sequence[torch.Tensor]], Any]
) -> dict[str, Any]:
    """Return the content of a model file joined with the files beside it, under the names of the module.

    Args:
        load: returns the content of the file of this name.
        join: makes one weight of its rows, which are in several files.

    Raises:
        CheckpointError: a file lacks something that the model file refers to.
    """
    if state.keys().isdisjoint((MODULE_FILES, OPTIMIZER_FILE)):
        return state
    for name in (*state.get(MODULE_FILES, ()), *filter(None, [state.get(OPTIMIZER_FILE)])):
        if not isinstance(name, str) or name != Path(name).name or not name.endswith("_states.pt"):
            raise CheckpointError(f"a model file names {name!r} as a file beside it, which is no name of one. {ADVICE}")
    rest = state["module"] or state.get(MODULE_REST) or {}
    module: dict[str, Any] = OrderedDict(rest)
    metadata = dict(getattr(rest, "_metadata", {}))
    rows: dict[str, dict[int, torch.Tensor]] = {}
    for file, names in state.get(MODULE_FILES, {}).items():
        content = load(file)
        for key, name in names.items():
            if not isinstance(content, Mapping) or key not in content:
                raise CheckpointError(f"{file} has nothing under {key!r}, which is to be there. {ADVICE}")
            if isinstance(name, str):
                module[name] = content[key]
            else:
                rows.setdefault(name[0], {})[int(name[1])] = content[key]
        metadata.update(_metadata_of(content, names))
    for name, found in rows.items():
        if sorted(found) != list(range(len(found))) or len({tuple(row.shape) for row in found.values()}) > 1:
            raise CheckpointError(f"{name}: the files of its experts hold the rows {sorted(found)} of it. {ADVICE}")
        module[name] = join([found[index] for index in range(len(found))])
    module._metadata = metadata  # type: ignore[attr-defined]
    own = {**state, "module": module}
    own.pop(MODULE_REST, None)
    if own.pop(OPTIMIZER_FILE, None):
        content = load(state[OPTIMIZER_FILE])
        if not isinstance(content, Mapping) or "optimizer" not in content:
            raise CheckpointError(f"{state[OPTIMIZER_FILE]} has no key 'optimizer'. {ADVICE}")
        own["optimizer"] = content["optimizer"]
    return own


def naming_files(
    state: dict[str, Any],
    path: Path,
    load: Callable[[str], Any],
    prefixes: Mapping[int, str] | None = None,
    held: Collection[int] = (),
) -> dict[str, Any]:
    """Return the content of the model file `path`; if DeepSpeed wrote it, with the names of the files beside it.

    Args:
        load: as for `merged`.
        prefixes: name prefixes of a pipeline's layers in the module, by layer number; default: the number, or, for a
            module that stages share, its name if the files say it.
        held: layers of this rank, in the place of the rank that wrote the file; used if layers are cut into slices.
    """
    rank = re.search(r"mp_rank_(\d+)", path.name)
    if MODULE_FILES in state or rank is None or "zero_pp_rank" in path.name or path.name.startswith("exp"):
        return state
    names = sorted(each.name for each in path.parent.iterdir())
    experts = [
        name for name in names if re.fullmatch(rf"layer_\d+_expert_\d+_mp_rank_{rank[1]}_model_states\.pt", name)
    ]
    if experts:
        files = {name: {key: key for key in load(name)} for name in experts}
        states = f"expp_rank_0_mp_rank_{rank[1]}_optim_states.pt"
        has_all = states in names and f"expp_rank_1_mp_rank_{rank[1]}_optim_states.pt" not in names
        return {**state, MODULE_FILES: files, **({OPTIMIZER_FILE: states} if has_all else {})}
    layers = [match for name in names if (match := re.fullmatch(r"layer_(\d+)(-[\w-]+)?-model_states\.pt", name))]
    module = state.get("module")
    if not layers or not (module is None or module == {}):
        return state
    slices = sorted({str(match[2]) for match in layers})
    own, files = slices[int(rank[1]) % len(slices)], {}
    models = [name for name in names if re.fullmatch(r"mp_rank_\d+_model_states\.pt", name)]
    groups = [group for name in models if prefixes is None for group in load(name).get("param_shapes") or ()]
    named = {name for group in groups for name in group}
    for match in layers:
        number = int(match[1])
        prefix = _prefix_of(number, load(match[0]), named) if prefixes is None else prefixes.get(number)
        is_wanted = len(slices) == 1 or not held or number in held
        if str(match[2]) == own and prefix is not None and is_wanted:
            files[match[0]] = {key: prefix + key for key in load(match[0])}
    division = {"axes": {"pp": len(models), "tp": 1}, "parts": {}} if len(slices) == 1 else None
    return {**state, "module": None, MODULE_FILES: files, "mp_world_size": len(models), "ds_model_parallel": division}


def _prefix_of(number: int, keys: Collection[str], named: Collection[str]) -> str:
    """Return the prefix that a layer's weights have in the module; `named` has the names of trained parameters."""
    shared: dict[str, set[str]] = {}
    for name in named:
        if match := re.match(r"tied_modules\.[^.]+\.", name):
            shared.setdefault(match[0], set()).add(name[match.end() :])
    if any(f"{number}.{key}" in named for key in keys):
        return f"{number}."
    return next((prefix for prefix, suffixes in sorted(shared.items()) if suffixes <= set(keys)), f"{number}.")


def _metadata_of(content: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of the modules in a file, by the path of the module in the whole model."""
    key, name = next(iter(names.items()), ("", []))
    if not isinstance(name, str):
        return {}
    pairs = enumerate(zip(reversed(key), reversed(name), strict=False))
    end = next((at for at, (one, other) in pairs if one != other), min(len(key), len(name)))
    before, after = key[: len(key) - end], name[: len(name) - end]
    return {
        (after + f"{path}.".removeprefix(before)).removesuffix("."): value
        for path, value in getattr(content, "_metadata", {}).items()
        if f"{path}.".startswith(before)
    }


def read_model(path: Path) -> dict[str, Any]:
    """Return the content of a model file joined with the files beside it."""

    def join(rows: Sequence[torch.Tensor]) -> LazyTensor:
        return LazyTensor(rows, (len(rows), *rows[0].shape), rows[0].dtype)

    def load(name: str) -> dict[str, Any]:
        return read_file(path.parent / name)

    state = naming_files(read_file(path), path, load)
    return merged(state, load, join) if MODULE_FILES in state else state


def check_files(folder: Path, content: bool = True, advance: Callable[[int], object] | None = None) -> None:
    """Compare the files in a tag's folder with the `index.json` beside them; without one, nothing is checked.

    Args:
        content: read each file and compare its checksums; False: compare only sizes.
        advance: called with the number of bytes of each part that was read, to show progress.

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
            raise DamagedCheckpoint(f"{path} lists {entry['name']!r}, which is no file beside it. {ADVICE}")
        _check_file(folder / entry["name"], entry, index["block_bytes"], content, advance)


def _check_file(
    file: Path, entry: Mapping[str, Any], block_bytes: int, content: bool, advance: Callable[[int], object] | None
) -> None:
    num_bytes = file.stat().st_size if file.is_file() else None
    if num_bytes is None or entry["bytes"] not in (None, num_bytes):
        absent = "is no regular file" if file.exists() else "is missing"
        found = absent if num_bytes is None else f"is damaged: it has {num_bytes} bytes"
        raise DamagedCheckpoint(f"{file} {found}, and was saved with {entry['bytes']}. {ADVICE}")
    if not content or entry["crc32"] is None:
        return
    log.debug("verifying %s", file)
    for block, found in enumerate(_checksums(file, block_bytes, advance)):
        saved = entry["crc32"][block] if block < len(entry["crc32"]) else None
        if found != saved:
            raise DamagedCheckpoint(
                f"{file} is damaged: its block of {block_bytes} bytes from byte {block * block_bytes} on has the "
                f"CRC-32 {found}, and was saved with {saved}. {ADVICE}"
            )


def _checksums(path: Path, block_bytes: int, advance: Callable[[int], object] | None) -> Iterator[str]:
    """Yield the CRC-32 of each block of a file, as 8 hexadecimal digits."""
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


def read_shards(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Read every data-parallel rank's `optimizer_state_dict`, by model-parallel rank, and check that all are of one
    checkpoint. Empty for stage 0."""
    has_shards = any(not path.name.startswith("expp_rank_") for path in folder.glob("*_optim_states.pt"))
    files = [Path(path) for path in get_optim_files(folder)] if has_shards else []
    if strange := [path.name for path in files if len(_rank_order(path)) != 2]:
        raise CheckpointError(
            f"{folder} holds {', '.join(strange)}, which is no optimizer shard: found no two ranks in the name, as in "
            "zero_pp_rank_0_mp_rank_00_optim_states.pt. Move it elsewhere."
        )
    by_rank: dict[int, list[Path]] = {}
    for path in files:
        by_rank.setdefault(_rank_order(path)[1], []).append(path)
    return {rank: _shards_of_one(folder, by_rank[rank]) for rank in sorted(by_rank)}


def _shards_of_one(folder: Path, files: list[Path]) -> list[dict[str, Any]]:
    """Read every `optimizer_state_dict` of one model-parallel rank, and check that all are there and no others."""
    ranks = [_rank_order(path)[0] for path in files]
    if ranks != list(range(len(ranks))):
        raise CheckpointError(f"{folder} is incomplete or mixed: it holds the optimizer shards of ranks {ranks}.")
    shards = [read_file(path).get("optimizer_state_dict", {}) for path in files]
    for path, shard in zip(files, shards, strict=True):
        if "zero_stage" not in shard:
            raise CheckpointError(f"{path} was not saved under ZeRO: it has no optimizer_state_dict with a zero_stage.")
        _refuse_other_form(path, shard)
        counts = shard.get("partition_count", len(shards))
        count = max(counts, default=1) if isinstance(counts, (list, tuple)) else counts  # experts have fewer ranks
        if count not in (1, len(shards)):  # 1: a group that every rank holds whole
            raise CheckpointError(f"{path} is one of {count} shards, but {folder} holds {len(shards)}.")
    return shards


def _refuse_other_form(path: Path, shard: dict[str, Any]) -> None:
    """Raise CheckpointError if the stage is none, or the master weights are no list of tensors."""
    stage = shard["zero_stage"]
    if stage not in range(4):
        raise CheckpointError(f"{path}: found zero_stage {stage!r}, which is none of 0 to 3; the file is damaged.")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    groups = shard.get(key)
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, torch.Tensor) for group in groups):
        found = "nothing" if groups is None else f"a {type(groups).__name__} of another kind"
        raise CheckpointError(
            f"{path}: found {found} as {key}, which is to be a list of tensors in stage {int(stage)}; the file is "
            "damaged, or of another stage."
        )


def read_models(folder: Path, stage: int, mp_rank: int, num_shards: int) -> dict[int, dict[str, Any]]:
    """Return the model files of a model-parallel rank, by data-parallel rank: all of them in stage 3, else the first
    one and those that save experts."""
    first = Path(get_model_state_file(folder, stage))
    name = first.name.replace("mp_rank_00", f"mp_rank_{mp_rank:02d}")
    names = (
        {rank: name.replace("rank_0_", f"rank_{rank}_", 1) for rank in range(num_shards)} if stage == 3 else {0: name}
    )
    for path in folder.glob(f"expert_rank_*_{name}"):  # of earlier versions
        names[_rank_order(path)[0]] = path.name
    for path in folder.glob(f"expp_rank_*_mp_rank_{mp_rank:02d}_optim_states.pt"):
        if rank := int(read_file(path).get(DATA_RANK, 0)):
            names[rank] = path.name
    return {rank: read_model(folder / names[rank]) for rank in sorted(names)}
