"""`PagedCache` holds keys and values of many sequences in blocks (arXiv 2309.06180). `RaggedBatch` plans one forward.

A forward computes the new tokens of all its sequences as one sequence of T tokens; only attention separates the
sequences. Its kernel needs sequences with equal numbers of new tokens, so the plan groups them.

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
    """A forward exceeds a limit of the engine, which `result` names. The engine's sequences did not change."""

    result: SchedulingResult

    def __init__(self, result: SchedulingResult, text: str = "") -> None:
        self.result = result
        super().__init__(text or f"put: {result.name}")


@dataclass
class CachedSequence:
    """A sequence in the cache.

    num_tokens: number of computed tokens.
    blocks: its blocks, in the order of its tokens.
    """

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)

    def slots(self, num_new: int, block_size: int) -> list[int]:
        """Return the slots of the next `num_new` tokens, as token indices into the cache."""
        positions = range(self.num_tokens, self.num_tokens + num_new)
        return [self.blocks[each // block_size] * block_size + each % block_size for each in positions]


@dataclass(frozen=True)
class AttentionGroup:
    """Consecutive sequences of a forward with the same number of new tokens.

    first: index of the group's first token in the forward.
    num_new: number of new tokens per sequence.
    lengths: [sequences], lengths with the new tokens; the op checks them if the device is the host.
    table: block numbers, [sequences, blocks of the longest].
    """

    first: int
    num_new: int
    lengths: Tensor
    table: Tensor


class RaggedBatch:
    """A ragged batch holds the tokens of one forward, concatenated, and the slots of their keys and values.

    tokens, positions: [1, T].
    slots: [T], the cache slots for keys and values.
    last: [sequences], the index of each sequence's last token, in the given order of sequences.
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
    """A layer's number of key-value heads on this rank, and their size."""

    heads: int
    head_dim: int

    def num_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block's keys and values."""
        return 2 * block_size * self.heads * self.head_dim * dtype.itemsize


class PagedCache:
    """The cache that the engine passes to models. Fused blocks call `attend`; `begin` comes before each forward.

    Args:
        layers: shapes of the layers, in the model's order.
        num_blocks: number of blocks of every layer. A sequence's block has the same number in all layers.
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
        self._free = list(range(num_blocks - 1, -1, -1))  # used as a stack, so that few blocks are ever written
        self._batch: RaggedBatch | None = None

    # ----- blocks ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def missing(self, sequence: CachedSequence, num_new: int) -> int:
        """Return how many more blocks the sequence needs for `num_new` further tokens."""
        return max(0, -(-(sequence.num_tokens + num_new) // self.block_size) - len(sequence.blocks))

    def extend(self, sequence: CachedSequence, num_new: int) -> None:
        """Give the sequence the blocks that it needs; the caller has checked that enough are free."""
        needed = self.missing(sequence, num_new)
        assert needed <= len(self._free), "blocks are counted before they are given"
        sequence.blocks += [self._free.pop() for _ in range(needed)]

    def shrink(self, sequence: CachedSequence, num_blocks: int) -> None:
        """Take back all blocks of the sequence but the first `num_blocks`."""
        self._free += reversed(sequence.blocks[num_blocks:])
        del sequence.blocks[num_blocks:]

    # ----- one forward -----------------------------------------------------------------------------------------------

    def begin(self, batch: RaggedBatch | None) -> None:
        """Set the batch of the next forward; None after a forward."""
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
        """Write the new keys and values, and attend over all tokens of each sequence. Returns [1, T, H D].

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

    # ----- transformers' interface of a cache ------------------------------------------------------------------------

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 1, so that a position bias that the model creates has at least two positions, which give its slope.
        Masks and positions that the model creates are not used."""
        return 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 1, like `get_seq_length`."""
        return 1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the sizes of a mask that models create, but fused blocks ignore."""
        return query_length + 1, 0

    def update(self, *_: object, **__: object) -> None:
        """Refuse the call: only a layer's own forward, which supports a single sequence, calls this method.

        Raises:
            StateError: always; a layer does not use its fused block.
        """
        raise StateError(
            "put: a layer of the model does not compute by its fused block any more: since the engine was built the "
            "model was put into training mode, or one of the layer's parts was replaced or got hooks (adapters do "
            "that); call model.eval(), and merge adapters before the engine is built"
        )


def check_distinct(uids: Items[int]) -> None:
    """Raise ConfigError if a uid occurs twice."""
    if len(set(uids)) < len(uids):
        again = next(uid for index, uid in enumerate(uids) if uid in uids[:index])
        raise ConfigError(f"put: found uid {again} twice; give all new tokens of a sequence together")


def as_pairs(uids: Items[int], others: Items[Any]) -> list[tuple[int, Any]]:
    """Pair each uid with its value; raise ConfigError if the numbers differ, or there are none."""
    if len(uids) != len(others) or not uids:
        raise ConfigError(
            f"InferenceEngineV2: found {counted(len(uids), 'uid')} and {counted(len(others), 'list')} of tokens or "
            "lengths; give one for each uid, and one uid at least"
        )
    return list(zip(uids, others, strict=True))
