"""`checkpoint` of `init_inference`: parse its description of the files, and read the weights in them.

    {"type": "BLOOM", "checkpoints": ["pytorch_model_00001-of-00002.bin", ...], "version": 1.0}
    {"type": "ds_model", "checkpoints": {"non_tp": ["non-tp.pt"], "tp": ["tp_00_00.pt", "tp_01_00.pt"]},
     "version": 1.0, "parallelization": "tp", "tp_size": 2}

In the first form ("pp") each weight is whole, in one of the files, and may be divided over any number of ranks. The
second form is pre-sharded: rank r of `tp_size` ranks reads every `tp_size`-th file, starting with the r-th, and the
"non_tp" files. A list with "parallelization" "tp", the default for types Megatron and DeepSpeed, has a file per rank.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.model_ranks import DIVISION, Division, Source
from deepspeed.checkpoint.tensors import JoinedTensor, StoredTensor, WeightFile, open_weights
from deepspeed.config.intake import unknown_key
from deepspeed.errors import CheckpointError, ConfigError, counted, first_line
from deepspeed.parallel.model_part import ModelPart

#: name of the JSON that `save_mp_checkpoint_path` writes
JSON_NAME = "ds_inference_config.json"
#: in a folder, the first of these files that exists is read
_IN_FOLDERS = (
    *(JSON_NAME, "model.safetensors.index.json", "model.safetensors"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin", "checkpoints.json", "checkpoint.json"),
)
_KEYS = (
    *("type", "version", "checkpoints", "parallelization", "mp_size", "tp_size", "base_dir", "dtype"),
    *("weight_map", "metadata", "division", "checkpoint_path"),
)
_FILE_PER_RANK = ("megatron", "deepspeed", "ds")  # types whose lists have one file per rank by default

Read = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class CheckpointFiles:
    """`CheckpointFiles` lists the files that `checkpoint` names, and says how they divide the weights.

    Args:
        what: name of the checkpoint in messages.
        kind: the "type" of the description, or "".
        whole: files of whole weights.
        of_ranks: the files of each tensor-parallel rank that saved.
        is_list: whether there is one file per rank; such files may record their division.
        division: a digest of the parts of each rank; () if the description has none.
    """

    what: str
    kind: str
    whole: tuple[Path, ...]
    of_ranks: tuple[tuple[Path, ...], ...] = ()
    is_list: bool = False
    division: tuple[str, ...] = ()


def read_description(checkpoint: Any, base_dir: str = "") -> CheckpointFiles:
    """Return the files of `checkpoint`: a dict, or the path of a JSON file, of a folder or of a file of weights.

    Args:
        base_dir: base of relative names, unless the JSON names another; "": the JSON's folder.

    Raises:
        ConfigError: a key is missing or invalid; the message names the key.
        CheckpointError: the path does not exist, or cannot be read as JSON.
    """
    if isinstance(checkpoint, Mapping):
        return _described(checkpoint, "the dict", Path(base_dir or "."))
    if not isinstance(checkpoint, str | os.PathLike) or not os.fspath(checkpoint):
        raise ConfigError(
            f"checkpoint: found {type(checkpoint).__name__} {checkpoint!r}; give the path of a JSON file, of a folder "
            'or of a file of weights, or a dict {"type", "checkpoints", "version"}'
        )
    path = Path(checkpoint)
    if path.is_dir():
        found = [path / name for name in _IN_FOLDERS if (path / name).is_file()]
        if not found:
            raise CheckpointError(f"checkpoint: found none of {', '.join(_IN_FOLDERS)} in the folder {path}")
        path = found[0]
    if not path.is_file() and not path.is_absolute() and base_dir:
        path = Path(base_dir) / path
    if not path.is_file():
        raise CheckpointError(f"checkpoint: {path} is missing; give a JSON file, a folder, a file of weights or a dict")
    if path.suffix != ".json":
        return CheckpointFiles(str(path), "", (path,))
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"checkpoint: {path} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"checkpoint: {path} holds {type(value).__name__}; it must be an object with checkpoints")
    return _described(value, str(path), Path(base_dir) if base_dir else path.parent)


def _described(value: Mapping[str, Any], what: str, base_dir: Path) -> CheckpointFiles:
    for key in value:
        if key not in _KEYS:
            unknown_key(str(key), "checkpoint", _KEYS, tolerated=False)
    if own := value.get("base_dir"):
        base_dir = base_dir / _text("base_dir", own)
    kind = _text("type", value.get("type") or "")
    if "checkpoints" not in value and value.get("checkpoint_path"):  # the form of DeepSpeed's tutorial
        return read_description(base_dir / _text("checkpoint_path", value["checkpoint_path"]))
    if "checkpoints" not in value and isinstance(value.get("weight_map"), Mapping):  # transformers' index
        paths = _paths("weight_map", list(value["weight_map"].values()), base_dir)
        return CheckpointFiles(what, kind, tuple(sorted(set(paths))))
    named = value.get("checkpoints")
    has_ranks = isinstance(named, Mapping) or kind.lower() in _FILE_PER_RANK
    layout = value.get("parallelization") or ("tp" if has_ranks else "pp")
    if layout not in ("pp", "tp"):
        raise ConfigError(
            f'checkpoint.parallelization: found {layout!r}; give "pp" for files of whole weights, or "tp" for files of '
            "tensor-parallel ranks"
        )
    if isinstance(named, Mapping):
        return _pre_sharded(value, named, what, kind, base_dir)
    paths = _paths("checkpoints", named, base_dir)
    if layout == "pp":
        return CheckpointFiles(what, kind, paths)
    size = _size(value) or len(paths)
    if size != len(paths):
        raise ConfigError(
            f"checkpoint.checkpoints: found {len(paths)} for {counted(size, 'rank')}; name one file for each rank"
        )
    return CheckpointFiles(what, kind, (), tuple((path,) for path in paths), is_list=True)


def _pre_sharded(
    value: Mapping[str, Any], named: Mapping[str, Any], what: str, kind: str, base_dir: Path
) -> CheckpointFiles:
    for key in named:
        if key not in ("non_tp", "tp"):
            unknown_key(str(key), "checkpoint.checkpoints", ("non_tp", "tp"), tolerated=False, closed=True)
    whole = _paths("checkpoints.non_tp", named["non_tp"], base_dir) if named.get("non_tp") else ()
    parts = _paths("checkpoints.tp", named["tp"], base_dir) if named.get("tp") else ()
    if not whole and not parts:
        raise ConfigError('checkpoint.checkpoints: found no file; give {"non_tp": [...], "tp": [...]}')
    size = _size(value) or (1 if not parts else 0)
    if not size or len(parts) % size:
        found = "no tp_size" if not size else f"tp_size {size} and {counted(len(parts), 'file')} in checkpoints.tp"
        raise ConfigError(f"checkpoint.tp_size: found {found}; give the number of ranks, which divides that of files")
    division = value.get("division") or ()
    if isinstance(division, str) or not isinstance(division, Sequence):
        raise ConfigError(f"checkpoint.division: found {division!r}; give the list that was saved, or leave it out")
    division = tuple(map(str, division))
    return CheckpointFiles(what, kind, whole, tuple(parts[rank::size] for rank in range(size)), division=division)


def _size(value: Mapping[str, Any]) -> int:
    for key in ("tp_size", "mp_size"):
        size = value.get(key)
        if size is not None:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"checkpoint.{key}: found {size!r}; give the number of tensor-parallel ranks")
            return size
    return 0


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"checkpoint.{key}: found {value!r}; give a string")
    return value


def _paths(key: str, names: Any, base_dir: Path) -> tuple[Path, ...]:
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"checkpoint.{key}: found {names!r}; give a list of file names")
    return tuple(base_dir / name for name in names)


@dataclass(frozen=True)
class Found:
    """A weight in the files.

    Args:
        name: name of the weight in the files.
        shape: shape of the whole weight, or of this rank's part if `is_own`.
        is_own: whether the files hold only this rank's part.
        file: the first file that holds the weight.
        held: for each rank that holds a part: the part (None: all of the weight), and the stored tensor.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    file: WeightFile
    is_own: bool
    held: tuple[tuple[ModelPart | None, StoredTensor], ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of the whole weight, the smallest unit of a read."""
        return self.shape[1:].numel() * self.dtype.itemsize

    def reader(self, part: ModelPart) -> Read:
        """Return a function (start, numel) -> [numel] that reads `part` of the weight from element `start` on."""
        if self.is_own:
            return self.held[0][1].read
        source = Source(
            [(own or ModelPart.all_elements(self.shape), stored.read) for own, stored in self.held], self.name
        )
        return lambda start, numel: source.read(part, start, numel)


class CheckpointWeights(AbstractContextManager["CheckpointWeights"]):
    """The weights in the files that one rank reads. Values are read only on demand.

    Args:
        files: see `read_description`.
        rank, num_ranks: this rank, and the number of ranks that share the model.

    Raises:
        CheckpointError: a file is missing or damaged, or the files are for another number of ranks.
    """

    def __init__(self, files: CheckpointFiles, rank: int, num_ranks: int) -> None:
        self.files = files
        self._open = ExitStack()
        self._held: dict[str, list[tuple[ModelPart | None, StoredTensor, WeightFile]]] = {}
        self._own: set[str] = set()
        self._used: set[str] = set()
        try:
            if files.is_list:
                self._take_ranks(rank, num_ranks)
            else:
                self._check_size(num_ranks, len(files.of_ranks))
                own = files.of_ranks[rank] if files.of_ranks else ()
                self._take((*files.whole, *own))
                self._own = set(self._held) if files.of_ranks else set()
        except BaseException:
            self._open.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _check_size(self, num_ranks: int, saved: int) -> None:
        if saved not in (0, num_ranks):
            raise CheckpointError(
                f"checkpoint: {self.files.what} is divided over {counted(saved, 'tensor-parallel rank')}, and the "
                f"model over {num_ranks}; give tp_size {saved} in tensor_parallel and as many ranks, or name files of "
                "whole weights (engine.export writes them)"
            )

    def _take_ranks(self, rank: int, num_ranks: int) -> None:
        """Open the files of all ranks if the files record their division, else only this rank's file."""
        paths = [path for (path,) in self.files.of_ranks]
        first = self._open.enter_context(open_weights(paths[0]))
        if DIVISION not in first.content:
            self._check_size(num_ranks, len(paths))
            self._take((paths[rank],))
            self._own = set(self._held) if num_ranks > 1 else set()
            return
        opened = [first, *(self._open.enter_context(open_weights(path)) for path in paths[1:])]
        divisions = [Division.of_file(file.content, str(file.path)) for file in opened]
        for file, division in zip(opened, divisions, strict=True):
            if division is None or division.axes["tp"] != len(paths):
                saved = "does not say by how many" if division is None else f"was saved by {division.axes['tp']}"
                raise CheckpointError(
                    f"checkpoint: {file.path} {saved} tensor-parallel ranks, and {self.files.what} names "
                    f"{counted(len(paths), 'file')}; name the file of each rank"
                )
            for name, stored in file.tensors.items():
                self._held.setdefault(name, []).append((division.parts.get(name), stored, file))
        for name, held in self._held.items():
            if held[0][0] is None:  # whole on each rank
                self._held[name] = held[:1]

    def _take(self, paths: Iterable[Path]) -> None:
        for path in paths:
            file = self._open.enter_context(open_weights(path))
            for name, stored in file.tensors.items():
                self._held.setdefault(name, [(None, stored, file)])

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Rename weights, unless the files already have a weight of the new name."""
        for name in list(self._held):
            other = new_name(name)
            if other not in self._held:
                self._held[other] = self._held.pop(name)
                if name in self._own:
                    self._own.add(other)

    def join(self, name: str, rows: Sequence[Sequence[str]], *, is_stacked: bool) -> None:
        """Join weights into one weight that holds their elements consecutively, row by row.

        Args:
            rows: names of weights; the weights of a row are joined along their first dimension.
            is_stacked: whether the rows form a new first dimension; otherwise there is one row.

        Raises:
            CheckpointError: the weights differ in shape or dtype; the message names two of them.
        """
        names = [piece for row in rows for piece in row]
        held = [self._held[piece][0] for piece in names]
        stored = [each for _, each, _ in held]
        of_row = stored[: len(rows[0])]
        for place, each in enumerate(stored):
            like = of_row[place % len(of_row)]
            if each.shape != like.shape or each.shape[1:] != stored[0].shape[1:] or each.dtype != stored[0].dtype:
                raise CheckpointError(
                    f"checkpoint: {name} is joined of {names[0]} {tuple(stored[0].shape)} {stored[0].dtype} and "
                    f"{names[place]} {tuple(each.shape)} {each.dtype} of {self.files.what}, which do not fit; the "
                    "files are of different models"
                )
        first = sum(each.shape[0] for each in of_row)
        shape = torch.Size(((len(rows),) if is_stacked else ()) + (first, *stored[0].shape[1:]))
        if any(piece in self._own for piece in names):
            self._own.add(name)
        for piece in names:
            del self._held[piece]
        self._held[name] = [(None, JoinedTensor(shape, stored), held[0][2])]

    def find(self, names: Iterable[str]) -> Found | None:
        """Return the weight with the first of `names` that exists, or None. All existing `names` count as used."""
        found = [name for name in names if name in self._held]
        self._used.update(found)
        if not found:
            return None
        name = found[0]
        part, stored, file = self._held[name][0]
        shape = stored.shape if part is None else part.shape
        held = tuple((part, stored) for part, stored, _ in self._held[name])
        return Found(name, shape, stored.dtype, file, name in self._own, held)

    def unused(self) -> Iterator[str]:
        """Return the names in the files that no `find` has used."""
        return (name for name in self._held if name not in self._used)

    def names(self) -> list[str]:
        """Return all names in the files."""
        return list(self._held)
