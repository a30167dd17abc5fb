"""Join weights from the files: shards of data-parallel ranks, and parts of model-parallel ranks. The second part of
`zero_to_fp32.py`.

[Note: what the shards hold] The trainable parameters of each parameter group are stored end to end in one fp32 buffer,
in the order of `param_shapes`.
Stages 1 and 2: rank r holds the r-th part of each group's buffer (`single_partition_of_fp32_groups`), which is padded
at its end. Joined in rank order, the parts are the buffer.
Stage 3: each parameter of n elements is cut into W = world size parts of ceil(n / W), the last one padded; rank r holds
the r-th part of every parameter, end to end (`fp32_flat_groups`).
Stage 0: the master weights, if any, are whole in the model file; else the model file's weights are used.

[Note: divided models] Each model-parallel rank (pipeline stage, tensor-parallel rank) has such files of its own, and so
have the ranks with other experts. Their model files record under `ds_model_parallel` which part of a parameter they
have: ranges along one dimension, and the name in the undivided model if it differs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.checkpoint.consolidate_files import (
    CheckpointError,
    LazyTensor,
    counted,
    get_model_state_file,
    log,
    read_model,
    read_models,
    read_shards,
)


class _Cursor:
    """`_Cursor` walks over buffers end to end, and takes the next elements as views."""

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._buffers = [buffer.reshape(-1) for buffer in buffers]
        self._index, self._offset = 0, 0

    def take(self, numel: int) -> list[torch.Tensor]:
        pieces = []
        while numel:
            if self._index == len(self._buffers):
                raise CheckpointError(
                    f"the optimizer shards end {counted(numel, 'element')} too early for param_shapes"
                )
            piece = self._buffers[self._index][self._offset : self._offset + numel]
            numel -= piece.numel()
            self._offset += piece.numel()
            if self._offset == self._buffers[self._index].numel():
                self._index, self._offset = self._index + 1, 0
            if piece.numel():
                pieces.append(piece)
        return pieces

    def rest(self) -> int:
        """Return the number of elements that were not taken."""
        return sum(buffer.numel() for buffer in self._buffers[self._index :]) - self._offset


def _join_contiguous(
    shards: Sequence[Mapping[str, Any]], param_shapes: Sequence[Mapping[str, Any]], holders: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the weights of stages 0, 1 and 2; see [Note: what the shards hold]. Parts may differ in length.

    Args:
        holders: for each group, the ranks whose shards divide it.
    """
    groups = [shard["single_partition_of_fp32_groups"] for shard in shards]
    if any(len(group) != len(param_shapes) for group in groups):
        found = [len(group) for group in groups]
        raise CheckpointError(
            f"param_shapes has {counted(len(param_shapes), 'parameter group')}, the shards have {found}"
        )
    weights = {}
    for index, shapes in enumerate(param_shapes):
        first, num_parts = holders[index][0], len(holders[index])
        ranks = holders[index][: _partition_count(shards[first], index, num_parts)]
        cursor = _Cursor(groups[rank][index] for rank in ranks)
        for name, shape in shapes.items():
            weights[name] = LazyTensor(cursor.take(math.prod(shape)), shape)
        padding = max(2 * len(shards), sum(_padding(shard, index) for shard in shards))
        if cursor.rest() > padding:
            raise CheckpointError(
                f"param_shapes leaves {counted(cursor.rest(), 'element')} of parameter group {index} unnamed, more "
                f"than any padding ({padding}): the model file and the shards are not of one checkpoint"
            )
    return weights


def _partition_count(shard: Mapping[str, Any], group: int, default: int) -> int:
    """Return the number of parts of a group: one per rank, or 1 if every rank holds the whole group."""
    counts = shard.get("partition_count", default)
    return int(counts[group]) if isinstance(counts, (list, tuple)) and group < len(counts) else default


def _padding(shard: Mapping[str, Any], group: int) -> int:
    paddings = shard.get("group_paddings") or []
    return int(paddings[group]) if group < len(paddings) else 0


def _join_per_parameter(
    shards: Sequence[Mapping[str, Any]], param_shapes: Sequence[Mapping[str, Any]], holders: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the weights of stage 3; see [Note: what the shards hold]. The arguments are as for `_join_contiguous`."""
    cursors = [_Cursor(shard["fp32_flat_groups"]) for shard in shards]
    weights = {}
    for index, shapes in enumerate(param_shapes):
        if any(len(ranks) < len(shards) for ranks in holders):  # then each group has a buffer of its own
            cursors = [_Cursor(shard["fp32_flat_groups"][index : index + 1]) for shard in shards]
        for name, shape in shapes.items():
            part_numel = math.ceil(math.prod(shape) / len(holders[index]))
            weights[name] = _from_parts([cursors[rank].take(part_numel) for rank in holders[index]], shape)
    return weights


def _from_parts(parts: Iterable[Sequence[torch.Tensor]], shape: Sequence[int]) -> LazyTensor:
    """Join one parameter from every rank's part, without the padding after its last element."""
    cursor = _Cursor(piece for part in parts for piece in part)
    return LazyTensor(cursor.take(math.prod(shape)), shape)


def _frozen(own: Mapping[str, Any], of_name: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, LazyTensor]:
    """Return the frozen parameters, which no optimizer shard holds: whole in the model file, or in parts in stage 3.

    Args:
        of_name: for each parameter, the contents of the model files that have parts of it.
    """
    shapes = own.get("frozen_param_shapes") or {}
    parts = own.get("frozen_param_fragments") or {}
    return {
        name: _from_parts([[model["frozen_param_fragments"][name]] for model in of_name[name]], shape)
        for name, shape in shapes.items()
        if name in parts
    }


def _from_module(value: torch.Tensor | LazyTensor) -> LazyTensor:
    """Return a tensor of the model file: floating-point ones in fp32, counters and masks in their own dtype."""
    pieces = value.pieces if isinstance(value, LazyTensor) else [value]
    return LazyTensor(pieces, value.shape, torch.float32 if value.dtype.is_floating_point else value.dtype)


class _Held(NamedTuple):
    """`_Held` has one rank's values of a weight, and says which part of the whole weight they are."""

    weight: LazyTensor
    part: Mapping[str, Any] | None  # of the whole; None: all of it


class JoinedTensor(LazyTensor):
    """A weight whose parts are on several ranks. Memory holds one part at a time beside the whole."""

    def __init__(self, held: Sequence[_Held], name: str) -> None:
        shapes = {tuple(each.part["shape"]) for each in held if each.part is not None}
        dims = {int(each.part["dim"]) for each in held if each.part is not None}
        if len(shapes) != 1 or len(dims) != 1 or any(each.part is None for each in held):
            raise CheckpointError(f"{name}: the model-parallel ranks of the save hold parts of different parameters")
        super().__init__([], shapes.pop(), held[0].weight.dtype)
        self._held, self._dim = held, dims.pop()
        end = 0
        for start, stop in sorted(tuple(ranges) for each in held if each.part for ranges in each.part["ranges"]):
            if start > end:
                break
            end = max(end, stop)
        if end < self.shape[self._dim]:
            raise CheckpointError(
                f"{name}: found nothing of number {end} of the {self.shape[self._dim]} along dimension {self._dim} in "
                "the files of any model-parallel rank; files are missing"
            )

    def contiguous(self) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        for weight, part in self._held:
            assert part is not None
            own, at = weight.contiguous(), 0
            for start, stop in part["ranges"]:
                numel = stop - start
                whole.narrow(self._dim, start, numel).copy_(own.narrow(self._dim, at, numel))
                at += numel
        return whole


def _is_whole(part: Mapping[str, Any]) -> bool:
    shape = list(part["shape"])
    return not shape or [list(each) for each in part["ranges"]] == [[0, shape[part["dim"]]]]


def _weights_of_rank(
    models: Mapping[int, Mapping[str, Any]],
    shards: Sequence[Mapping[str, Any]],
    dp_rank: int,
    *,
    exclude_frozen: bool,
) -> dict[str, Any]:
    """Return the weights of one model-parallel rank, by its own names; for `dp_rank` > 0 the experts that it saves.

    Args:
        models: content of its model files, by data-parallel rank.
        shards: shards of its data-parallel ranks.
    """
    model = models[dp_rank]
    experts = (model.get("ds_model_parallel") or {}).get("experts") or {}
    holders = {name: its for its, names in experts.values() for name in names}
    module, param_shapes = model["module"], model.get("param_shapes") or []
    stage = int(shards[0]["zero_stage"]) if shards else 0
    ranks = holders  # the ranks whose shards divide an expert
    if shards and not param_shapes:
        raise CheckpointError("a model file has no param_shapes, so the shards beside it cannot be cut into weights.")
    if not shards and "single_partition_of_fp32_groups" in (model.get("optimizer") or {}):
        shards, ranks = [model["optimizer"]], {}  # stage 0 with master weights
    everyone = range(len(shards))
    of_groups = [next((ranks[name] for name in group if name in ranks), everyone) for group in param_shapes]
    join = _join_per_parameter if stage == 3 else _join_contiguous
    weights = join(shards, param_shapes, of_groups) if shards else {}
    frozen = model.get("frozen_param_shapes") or {}
    if not exclude_frozen:
        frozen_ranks = {name: holders.get(name, sorted(models)) if stage == 3 else [dp_rank] for name in frozen}
        weights.update(_frozen(model, {name: [models[rank] for rank in its] for name, its in frozen_ranks.items()}))
    # Stage 3 leaves empty tensors in `module`; only buffers are whole there.
    wanted = set(model.get("buffer_names") or []) if stage == 3 else set(module) - set(frozen)
    aliases = dict(model.get("shared_params") or {})
    for name, tensor in module.items():
        is_left = name in wanted and name not in weights and name not in aliases
        if is_left and isinstance(tensor, torch.Tensor | LazyTensor):
            weights[name] = _from_module(tensor)
    for alias, name in aliases.items():
        if name in weights:
            weights[alias] = weights[name]
    saves = {name: its[0] == dp_rank for name, its in holders.items()}
    order = {name: index for index, name in enumerate(module)}
    kept = {name: weight for name, weight in weights.items() if saves.get(name, dp_rank == 0)}
    return dict(sorted(kept.items(), key=lambda item: order.get(item[0], len(order))))


def _refuse_unknown_division(folder: Path, model: Mapping[str, Any]) -> int:
    """Return the number of model-parallel ranks; refuse a model that is divided in an unknown way."""
    num_ranks = int(model.get("mp_world_size") or 1)
    if num_ranks > 1 and not model.get("ds_model_parallel"):
        raise CheckpointError(
            f"{folder} was saved by several model parallel ranks ({num_ranks}), and its files do not say which part of "
            "a parameter each has. Load it with engine.load_checkpoint() in the layout of the save, and write the "
            "module's own state_dict() on every rank."
        )
    return num_ranks


def lazy_state_dict(folder: Path, exclude_frozen_parameters: bool) -> dict[str, Any]:
    """Return `LazyTensor`s under the names of the undivided model. Raises `CheckpointError`."""
    shards = read_shards(folder)
    if not shards and (folder / "zero").is_dir():
        raise CheckpointError(
            f"{folder} is in DeepSpeed's universal format; give the checkpoint that it was made from."
        )
    first = next(iter(shards.values()), [])
    stage = int(first[0]["zero_stage"]) if first else 0
    num_ranks = _refuse_unknown_division(folder, read_model(Path(get_model_state_file(folder, stage))))
    if shards and list(shards) != list(range(num_ranks)):
        raise CheckpointError(
            f"{folder} is incomplete or mixed: it holds the optimizer shards of the model parallel ranks "
            f"{', '.join(map(str, shards))}, and {num_ranks} saved it."
        )
    held: dict[str, list[_Held]] = {}
    names_of: dict[int, str] = {}  # names of one weight still share it
    aliases: dict[str, str] = {}
    for mp_rank in range(num_ranks):
        own_shards = shards.get(mp_rank, [])
        models = read_models(folder, stage, mp_rank, len(own_shards))
        for dp_rank, model in models.items():
            division = model.get("ds_model_parallel") or {}
            if dp_rank > 0 and all(ranks[0] != dp_rank for ranks, _ in (division.get("experts") or {}).values()):
                continue
            parts = division.get("parts") or {}
            own = _weights_of_rank(models, own_shards, dp_rank, exclude_frozen=exclude_frozen_parameters)
            for local, weight in own.items():
                part = parts.get(local)
                name = (part and part["name"]) or local
                if id(weight) in names_of:
                    aliases[name] = names_of[id(weight)]
                    continue
                names_of[id(weight)] = name
                is_whole = part is None or _is_whole(part)
                held.setdefault(name, []).append(_Held(weight, None if is_whole else part))
    weights: dict[str, Any] = {}
    for name, its in held.items():
        whole = [each.weight for each in its if each.part is None]
        weights[name] = whole[0] if whole else JoinedTensor(its, name)
    weights.update({alias: weights[name] for alias, name in aliases.items()})
    num_shards = counted(sum(map(len, shards.values())), "shard")
    log.debug(
        "%s, ZeRO stage %d, %s", counted(len(weights), "weight or buffer", "weights and buffers"), stage, num_shards
    )
    return weights
