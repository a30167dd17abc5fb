"""`PagedCache`: keys and values of many sequences in blocks (arXiv 2309.06180). `RaggedBatch`: a plan of one forward.

A forward computes the new tokens of all its sequences as one sequence of T tokens; only attention knows where one
ends. Its kernel takes sequences that have equally many new tokens, so the plan puts those side by side.

Shape legend: T new tokens of the forward, H query heads, G key-value heads, D head size.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import ConfigError, StateError, counted
from deepspeed.ops.transformer import decode_attention


class SchedulingResult(Enum):
    """Whether a forward can be computed, or which limit forbids it."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    BatchSequenceLimitExceeded = 2
    BatchTokenLimitExceeded = 3
    KVCacheLimitExceeded = 4
    SequenceTokenLimitExceeded = 5


class SchedulingError(StateError):
    """A forward is over a limit of the engine, whose sequences are as they were. `result` says which."""

    result: SchedulingResult

    def __init__(self, result: SchedulingResult, text: str = "") -> None:
        self.result = result
        super().__init__(text or f"put: {result.name}")


@dataclass
class CachedSequence:
    """A sequence whose tokens lie in the cache.

    num_tokens: of those that were computed.
    blocks: that it has, in the order of its tokens.
    """

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)

    def slots(self, num_new: int, block_size: int) -> list[int]:
        """Return where the next `num_new` tokens lie, in tokens from the beginning of the cache."""
        positions = range(self.num_tokens, self.num_tokens + num_new)
        return [self.blocks[each // block_size] * block_size + each % block_size for each in positions]


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences side by side in a forward that have equally many new tokens.

    first: of the forward's tokens.
    num_new: of each sequence.
    lengths: [sequences], with the new ones; on the host, where the op checks them, if the device is the host.
    table: [sequences, blocks of the longest].
    """

    first: int
    num_new: int
    lengths: Tensor
    table: Tensor


class RaggedBatch:
    """A ragged batch holds the tokens that one forward computes, side by side, and where their keys and values go.

    tokens, positions: [1, T].
    slots: [T], where the keys and values are written.
    last: [sequences], the index of the last token of each sequence, in the order in which they were given.
    """

    def __init__(
        self, sequences: Items[CachedSequence], new_tokens: Items[Tensor], block_size: int, device: torch.device
    ) -> None:
        order = sorted(range(len(sequences)), key=lambda index: len(new_tokens[index]))
        positions: list[int] = []
        slots: list[int] = []
        last = [0] * len(sequences)
        self.groups: list[AttentionGroup] = []
        for num_new, indices in groupby(order, key=lambda index: len(new_tokens[index])):
            first, lengths, blocks = len(slots), [], []
            for index in indices:
                sequence = sequences[index]
                slots += sequence.slots(num_new, block_size)
                positions += range(sequence.num_tokens, sequence.num_tokens + num_new)
                last[index] = len(slots) - 1
                lengths.append(sequence.num_tokens + num_new)
                blocks.append(sequence.blocks)
            width = max(map(len, blocks))
            table = torch.tensor([each + [0] * (width - len(each)) for each in blocks], dtype=torch.int32)
            self.groups.append(AttentionGroup(first, num_new, torch.tensor(lengths).to(device), table.to(device)))
        self.tokens = torch.cat([new_tokens[index] for index in order]).to(device).unsqueeze(0)
        self.positions = torch.tensor(positions).to(device).unsqueeze(0)
        self.slots = torch.tensor(slots).to(device)
        self.last = torch.tensor(last).to(device)


@dataclass(frozen=True)
class LayerShape:
    """A layer's shape gives its key-value heads on this rank, and their size."""

    heads: int
    head_dim: int

    def num_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block's keys and values."""
        return 2 * block_size * self.heads * self.head_dim * dtype.itemsize


class PagedCache:
    """The cache that models are given. Fused blocks call `attend`; `begin` comes before each forward.

    Args:
        layers: by their index in the model.
        num_blocks: of every layer. A sequence's block has the same number in all of them.
    """

    def __init__(
        self,
        layers: Items[LayerShape],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size, self.num_blocks, self.device = block_size, num_blocks, device
        self._layers = [
            tuple(
                torch.empty(num_blocks, block_size, layer.heads, layer.head_dim, dtype=dtype, device=device)
                for _ in ("keys", "values")
            )
            for layer in layers
        ]
        self._free = list(range(num_blocks - 1, -1, -1))  # the last one is given next, so that few are ever written
        self._batch: RaggedBatch | None = None

    # ----- blocks ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that no sequence has."""
        return len(self._free)

    def missing(self, sequence: CachedSequence, num_new: int) -> int:
        """Blocks that the sequence needs besides its own, for so many tokens more."""
        return max(0, -(-(sequence.num_tokens + num_new) // self.block_size) - len(sequence.blocks))

    def extend(self, sequence: CachedSequence, num_new: int) -> None:
        """Give the sequence the blocks that it needs; the caller has seen that there are as many."""
        needed = self.missing(sequence, num_new)
        assert needed <= len(self._free), "blocks are counted before they are given"
        sequence.blocks += [self._free.pop() for _ in range(needed)]

    def shrink(self, sequence: CachedSequence, num_blocks: int) -> None:
        """Take back all blocks of the sequence but the first `num_blocks`."""
        self._free += reversed(sequence.blocks[num_blocks:])
        del sequence.blocks[num_blocks:]

    # ----- one forward -----------------------------------------------------------------------------------------------

    def begin(self, batch: RaggedBatch | None) -> None:
        """The forward that follows computes `batch`; None: there is none."""
        self._batch = batch

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        *,
        scale: float,
        alibi_slopes: Tensor | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Write the new keys and values, and attend over all that each sequence has: [1, T, H D].

        Args:
            query: [1, H, T, D]. key, value: [1, G, T, D].
        """
        batch = self._batch
        assert batch is not None, "begin() comes before a forward"
        keys, values = self._layers[layer]
        keys.flatten(0, 1).index_copy_(0, batch.slots, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, batch.slots, value[0].transpose(0, 1))
        parts = []
        for group in batch.groups:
            count = group.lengths.shape[0]
            own = query[0, :, group.first : group.first + count * group.num_new]
            own = own.unflatten(1, (count, group.num_new)).transpose(0, 1)
            out = decode_attention(own, keys, values, group.lengths, scale, group.table, alibi_slopes, window, softcap)
            parts.append(out.transpose(1, 2).reshape(count * group.num_new, -1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    # ----- what models ask of a cache --------------------------------------------------------------------------------

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 1, so that a bias by position that a model makes has at least two positions, and with them its slope.
        Masks and positions of the model's own making are not used."""
        return 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 1, as `get_seq_length` does."""
        return 1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the sizes of a mask that models make and no fused block uses."""
        return query_length + 1, 0

    def update(self, *_: object, **__: object) -> None:
        """A layer's own forward would write here, which knows of one sequence only.

        Raises:
            StateError: a layer does not compute by its fused block.
        """
        raise StateError(
            "put: a layer of the model does not compute by its fused block any more: since the engine was built the "
            "model was put into training mode, or one of the layer's parts was replaced or got hooks (adapters do "
            "that); call model.eval(), and merge adapters before the engine is built"
        )


def check_distinct(uids: Items[int]) -> None:
    """Refuse a call that names a sequence twice."""
    if len(set(uids)) < len(uids):
        again = next(uid for index, uid in enumerate(uids) if uid in uids[:index])
        raise ConfigError(f"put: found uid {again} twice; give all new tokens of a sequence together")


def as_pairs(uids: Items[int], others: Items[Any]) -> list[tuple[int, Any]]:
    """Each uid with what the call gives for it."""
    if len(uids) != len(others) or not uids:
        raise ConfigError(
            f"InferenceEngineV2: found {counted(len(uids), 'uid')} and {counted(len(others), 'list')} of tokens or "
            "lengths; give one for each uid, and one uid at least"
        )
    return list(zip(uids, others, strict=True))
