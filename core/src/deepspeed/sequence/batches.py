"""`UlyssesSPDataLoaderAdapter` divides the batches of a loader, so each rank gets its part of every sequence.

A loader returns different samples on each rank. The ranks that share sequences take turns: one batch per rank gives as
many steps as there are ranks. In each step all of them train on one rank's batch, each on its own tokens.

    rank 0 loads A, rank 1 loads B:    step 1   A[:, :T/2] | A[:, T/2:]
                                       step 2   B[:, :T/2] | B[:, T/2:]

Labels are shifted before they are divided, since the label of a part's last token is in the next part.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed._absent import absent_members
from deepspeed.comm.backend import GroupBackend, host_or_device
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.give_up import give_up
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import counted, first_line
from deepspeed.sequence.exchange import channel

IGNORED = -100
#: keys that determine the length of a batch; the first key in the batch is used
_TOKENS = ("input_ids", "inputs_embeds", "position_ids", "labels")


@absent_members("runtime.sequence_parallel.ulysses_sp:UlyssesSPDataLoaderAdapter")
class UlyssesSPDataLoaderAdapter:
    """Iterates over this rank's parts of the batches of `dl`; other attributes are the loader's own.

    Each batch is a mapping. Tensors with tokens in dim 1 (as long as `input_ids`) are divided; other tensors are whole
    on every rank. Missing `position_ids` are added; `labels` become `shift_labels`. A length that is not a multiple of
    the number of ranks is padded: labels with -100, positions by counting on, all else with 0. A model that attends in
    both directions then needs an `attention_mask` in its batches.

    Args:
        dl: the loader; all ranks of the group iterate together. If a rank's loader ends early, the rank still takes
            part in the remaining batches of the others.
        sp_rank: this rank's part of the sequence.
        sp_group: the ranks that share sequences.
        sp_world_size: the number of these ranks.
        device: the device of the parts.
        pad_to_sp_multiple: if False, raise for a length that is not a multiple.
    """

    def __init__(
        self,
        dl: Any,
        sp_rank: int,
        sp_group: ProcessGroup,
        sp_world_size: int,
        device: torch.device | str,
        pad_to_sp_multiple: bool = True,
    ) -> None:
        if sp_group.size() != sp_world_size or sp_group.rank() != sp_rank:
            raise ValueError(
                f"UlyssesSPDataLoaderAdapter: found sp_rank {sp_rank} of sp_world_size {sp_world_size}, but in "
                f"sp_group this rank is {sp_group.rank()} of {sp_group.size()}; give the numbers of the group"
            )
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = torch.device(device)
        self.pad_to_sp_multiple = pad_to_sp_multiple

    def __len__(self) -> int:
        """Return the number of steps per epoch, if all ranks load as many batches as this one."""
        return len(self.dl) * self.sp_world_size

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # before __init__, for example while unpickling
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches: Iterator[Any] | None = None
        while True:
            own, error = _NOTHING, None
            try:
                batches = iter(self.dl) if batches is None else batches
                own = self._parts_of(next(batches, None))
            except BaseException as found:  # noqa: BLE001 - `_share` raises it when the other ranks know of it
                error = found
            shared = self._share(own, error)
            if not shared:
                return
            yield from shared

    def _parts_of(self, batch: Mapping[str, Any] | None) -> "_Parts":
        """Cut this rank's batch into one part per rank. Returns `_NOTHING` for None, at the loader's end."""
        if batch is None:
            return _NOTHING
        try:
            pieces, record = _cut(prepare(batch, self.sp_world_size, self.pad_to_sp_multiple), self.sp_world_size)
            json.dumps(record)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"a batch of rank {self.sp_rank} of the sequence-parallel group: {first_line(error)}"
            ) from error
        return _Parts(record, [torch.cat([_bytes(tensor) for tensor in theirs]) for theirs in pieces])

    def _share(self, own: "_Parts", error: BaseException | None) -> list[dict[str, Any]]:
        """Return this rank's parts of the batches of all ranks that have one. A collective.

        Args:
            error: this rank's error instead of a batch. Then all ranks of the group raise, and so do ranks that wait
                in a step for one of them.
        """
        reason = None if error is None else f"{type(error).__name__}: {first_line(error)}"
        try:
            backend = channel(self.sp_group)
            gathered = all_gather_values([own.record, reason], backend=backend)
            for rank, (_, theirs) in enumerate(gathered):
                if theirs is not None and error is None:
                    cause = f"rank {dist.get_global_rank(self.sp_group, rank)} failed with {theirs}"
                    raise PeerFailed(f"UlyssesSPDataLoaderAdapter: no batch, since {cause}", cause)
            if error is not None:
                raise error
            return self._swap(backend, own.to_each, [each for each, _ in gathered])
        except BaseException as found:
            give_up()
            if error is None or found is error:
                raise
            raise error from None

    def _swap(self, backend: GroupBackend, sent: list[torch.Tensor], records: list[Any]) -> list[dict[str, Any]]:
        where = host_or_device(self.sp_group)
        input_numels = [each.numel() for each in sent] or [0] * self.sp_world_size
        layouts = [record["tensors"] if record else [] for record in records]
        sizes = [[math.prod(shape) * _dtype(name).itemsize for _, shape, name in layout] for layout in layouts]
        received = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=where)
        source = torch.cat(sent).to(where) if sent else torch.empty(0, dtype=torch.uint8, device=where)
        if any(records):
            backend.all_to_all(received, source, [sum(each) for each in sizes], input_numels, tag="batches").wait()
        batches = []
        raw = iter(received.split([size for each in sizes for size in each]))
        for record, layout in zip(records, layouts, strict=True):
            tensors = {
                key: next(raw).clone().view(_dtype(name)).view(shape).to(self.device) for key, shape, name in layout
            }
            if record:
                batches.append({**tensors, **record["values"]})
        return batches


class _Parts(NamedTuple):
    """`_Parts` holds a rank's batch as bytes for each rank, and a record of their layout; None without a batch."""

    record: dict[str, Any] | None
    to_each: list[torch.Tensor]


_NOTHING = _Parts(None, [])


def prepare(batch: Mapping[str, Any], num_ranks: int, pads: bool = True) -> dict[str, Any]:
    """Prepare a batch for division: add positions, shift labels, and pad the length to a multiple of the ranks.

    Raises:
        ValueError: if the batch has no tokens or packed sequences, or needs padding and `pads` is False.
    """
    prepared = dict(batch)
    known = [key for key in _TOKENS if isinstance(prepared.get(key), torch.Tensor) and prepared[key].dim() >= 2]
    if not known:
        raise ValueError(f"found the keys {', '.join(prepared) or 'none'}; sequences are known by input_ids [B, T]")
    first = prepared[known[0]]
    length = first.shape[-1] if known[0] == "position_ids" else first.shape[1]
    if "position_ids" not in prepared:
        prepared["position_ids"] = torch.arange(length, device=first.device).repeat(first.shape[0], 1)
    elif not _is_consecutive(prepared["position_ids"], prepared.get("attention_mask")):
        raise ValueError(
            "position_ids begin again within a sequence: several documents were packed into one, and attention over "
            "divided sequences keeps no documents apart; give one document per sequence, padded"
        )
    if "labels" in prepared:
        prepared["shift_labels"] = F.pad(prepared.pop("labels"), (0, 1), value=IGNORED)[..., 1:].contiguous()
    missing = -length % num_ranks
    if missing and not pads:
        raise ValueError(
            f"sequences of {counted(length, 'token')} are to be divided among {num_ranks} ranks; pad them to "
            f"{length + missing}, or set pad_to_sp_multiple"
        )
    for key, value in prepared.items():
        dim = _token_dim(key, value, length)
        if missing and dim is not None:
            prepared[key] = _padded(key, value, dim, missing)
    return prepared


def _is_consecutive(position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> bool:
    """Whether each position is the previous one plus 1, ignoring padding."""
    follows = position_ids.diff(dim=-1) == 1
    if attention_mask is not None and attention_mask.dim() == 2 and position_ids.dim() == 2:
        is_token = attention_mask.bool()
        follows = follows | ~(is_token[:, 1:] & is_token[:, :-1])
    return bool(follows.all())


def _token_dim(key: str, value: Any, length: int) -> int | None:
    """Return the dim of the tokens in a tensor, or None."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    if key == "position_ids" and value.dim() == 3:  # [3, B, T]: time, height, width
        return 2
    return 1 if value.shape[1] == length else None


def _padded(key: str, tensor: torch.Tensor, dim: int, missing: int) -> torch.Tensor:
    if key == "position_ids":
        last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
        more = last + torch.arange(1, missing + 1, dtype=tensor.dtype, device=tensor.device)
    else:
        shape = [*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]]
        more = tensor.new_full(shape, IGNORED if key == "shift_labels" else 0)
    return torch.cat((tensor, more), dim=dim)


def _cut(batch: Mapping[str, Any], num_ranks: int) -> tuple[list[list[torch.Tensor]], dict[str, Any]]:
    """Return the tensors for each rank, and a record of their layout, which is equal for all ranks."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    length = batch["position_ids"].shape[-1]
    pieces: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
    layout = []
    for key, tensor in tensors.items():
        dim = _token_dim(key, tensor, length)
        parts = [tensor] * num_ranks if dim is None else list(tensor.chunk(num_ranks, dim))
        for rank, part in enumerate(parts):
            pieces[rank].append(part)
        layout.append((key, list(parts[0].shape), str(tensor.dtype).removeprefix("torch.")))
    values = {key: value for key, value in batch.items() if key not in tensors}
    return pieces, {"tensors": layout, "values": values}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
