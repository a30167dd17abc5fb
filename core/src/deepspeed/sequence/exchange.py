"""All-to-alls that switch the division of tensors between the sequence and the heads (arXiv 2309.14509, section 3).

    q, k, v = scatter_heads(backend, (q, k, v), parts, sequence_dim=1, head_dim=2)   # all tokens, own heads
    y = gather_heads(backend, y, parts_of_y, sequence_dim=1, head_dim=2)             # own tokens, all heads

Both are differentiable any number of times; each is the other's backward. One collective sends all tensors of a call.

With P ranks and N tokens in total, a rank sends (n - own heads) * N/P * d * e bytes of a tensor with n heads of width d
and elements of e bytes: the part of its N/P tokens that other ranks compute. With even heads this is
N * n * d * e * (P - 1) / P**2; `sent_bytes` computes it for a call. A layer with as many KV heads as query heads sends
four such tensors in the forward and four in the backward.

`HeadDivision` computes the heads of each rank:

    heads = HeadDivision(num_heads=6, num_kv_heads=2, num_ranks=3)
    heads.query                  # ((0, 2), (2, 4), (4, 6)): half-open ranges by rank
    heads.key_value              # ((0, 1), (0, 2), (1, 2)): the KV heads of those query heads
    heads.local_kv_index(1)      # (0, 1): for each query head of rank 1, its index among the rank's own KV heads

Query heads are divided as evenly as possible: the first ranks may have one more. If query heads of several ranks share
a KV head, each of these ranks gets the KV head.

`channel` returns a backend for the ranks of one sequence, separate from the groups of ZeRO.

[Note: a group of its own] ZeRO launches buckets in the backward when they are full, at places that may differ between
ranks. Sequence parallelism runs collectives in the same backward, often among the same ranks. In one group, these
collectives would be matched by their order. So each sequence-parallel group gets a second process group of the same
ranks, which all of them create together at its first use.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.give_up import give_up_after
from deepspeed.comm.own_group import group_of_members
from deepspeed.errors import CommError, counted

_F = TypeVar("_F", bound=Callable[..., Any])
_own: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
#: elements of a layout that ranks compare: number of dims, sizes and element size for each of up to three tensors
_HEADER_NUMEL = 24

Range = tuple[int, int]


@dataclass(frozen=True)
class HeadDivision:
    """The heads of one attention layer by rank.

    num_heads: query heads of the whole layer.
    num_kv_heads: its key and value heads, a divisor of `num_heads`.
    num_ranks: ranks that share the sequence.
    """

    num_heads: int
    num_kv_heads: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention: found {counted(self.num_heads, 'query head')} with {self.num_kv_heads} key and value "
                "heads; the former must be a multiple of the latter"
            )
        if self.num_heads < self.num_ranks:
            raise ValueError(
                f"sequence parallelism: found {counted(self.num_heads, 'attention head')} for "
                f"{counted(self.num_ranks, 'rank')}, and each rank needs a head; use at most "
                f"{counted(self.num_heads, 'rank')} per sequence, or deepspeed.sequence.ring.RingAttention, which "
                "divides no heads"
            )

    @functools.cached_property
    def query(self) -> tuple[Range, ...]:
        """Query heads of each rank; together they cover all heads."""
        size, extra = divmod(self.num_heads, self.num_ranks)
        stops = [(rank + 1) * size + min(rank + 1, extra) for rank in range(self.num_ranks)]
        return tuple(zip([0, *stops[:-1]], stops, strict=True))

    @functools.cached_property
    def key_value(self) -> tuple[Range, ...]:
        """KV heads of each rank; the ranges of neighbors overlap if they share a head."""
        group = self.num_heads // self.num_kv_heads
        return tuple((start // group, -(-stop // group)) for start, stop in self.query)

    @functools.cache  # noqa: B019 - divisions are few and small
    def local_kv_index(self, rank: int) -> tuple[int, ...]:
        """Return for each query head of `rank` the index of its KV head among the rank's own KV heads."""
        group = self.num_heads // self.num_kv_heads
        (start, stop), (first, _) = self.query[rank], self.key_value[rank]
        return tuple(head // group - first for head in range(start, stop))

    def is_grouped(self, rank: int) -> bool:
        """Whether each KV head of the rank serves equally many of its query heads, in order, as attention functions
        with grouped heads expect. Otherwise KV heads must be repeated by `local_kv_index`."""
        index = self.local_kv_index(rank)
        num_kv = self.key_value[rank][1] - self.key_value[rank][0]
        size, rest = divmod(len(index), num_kv)
        return rest == 0 and index == tuple(head // size for head in range(len(index)))


@functools.lru_cache(maxsize=256)
def divide_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadDivision:
    """Return the cached division; see `HeadDivision` for the arguments and errors."""
    return HeadDivision(num_heads, num_kv_heads, num_ranks)


#: by rank, its half-open range of the heads of one tensor
Parts = Sequence[Range]


def scatter_heads(
    backend: GroupBackend,
    tensors: Sequence[torch.Tensor],
    parts: Sequence[Parts],
    *,
    sequence_dim: int,
    head_dim: int,
) -> tuple[torch.Tensor, ...]:
    """Gather all tokens of the heads that this rank computes.

    Args:
        backend: the backend of the ranks that share the sequence; all of them call this together.
        tensors: each with this rank's part of the tokens and all heads; of one dtype and device, and of equal shapes on
            all ranks.
        parts: for each tensor, the heads of every rank; ranges may overlap, and then their gradients are added.
        sequence_dim: the dim of tokens in all tensors.
        head_dim: the dim of heads in all tensors.

    Returns:
        the tensors, contiguous, with all tokens in rank order and the heads of this rank's range.
    """
    return _ScatterHeads.apply(backend, parts, (sequence_dim, head_dim), *tensors)  # type: ignore[no-any-return,no-untyped-call]


def gather_heads(
    backend: GroupBackend, tensor: torch.Tensor, parts: Parts, *, sequence_dim: int, head_dim: int
) -> torch.Tensor:
    """Gather all heads of this rank's tokens; the inverse of `scatter_heads` for one tensor.

    Args:
        backend: see `scatter_heads`.
        tensor: all tokens, in W equal parts, and the heads `parts[backend.rank]`.
        parts: the heads of every rank; ranges do not overlap.
        sequence_dim: the dim of tokens.
        head_dim: the dim of heads.

    Raises:
        ValueError: if the number of tokens is not a multiple of the number of ranks.
    """
    (whole,) = _GatherHeads.apply(backend, (parts,), [parts[-1][1]], (sequence_dim, head_dim), tensor)  # type: ignore[no-untyped-call]
    return whole  # type: ignore[no-any-return]


def sent_bytes(
    tensors: Sequence[torch.Tensor], parts: Sequence[Parts], rank: int, *, sequence_dim: int, head_dim: int
) -> int:
    """Return the bytes that `scatter_heads` sends to other ranks for these tensors; its backward receives as many."""
    total = 0
    for tensor, ranges in zip(tensors, parts, strict=True):
        row_bytes = tensor.numel() // tensor.shape[head_dim] * tensor.element_size()
        total += sum((stop - start) * row_bytes for peer, (start, stop) in enumerate(ranges) if peer != rank)
    return total


class _ScatterHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backend: GroupBackend, parts: Sequence[Parts], dims: tuple[int, int], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.backend, ctx.parts, ctx.dims = backend, parts, dims
        ctx.num_heads = [tensor.shape[dims[1]] for tensor in tensors]
        return _scatter(backend, tensors, parts, dims)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, None, *_GatherHeads.apply(ctx.backend, ctx.parts, ctx.num_heads, ctx.dims, *grads))  # type: ignore[no-untyped-call]


class _GatherHeads(torch.autograd.Function):
    """Gather the heads of several tensors; overlapping parts of a tensor are added."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: GroupBackend,
        parts: Sequence[Parts],
        num_heads: Sequence[int],
        dims: tuple[int, int],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.backend, ctx.parts, ctx.dims = backend, parts, dims
        return _gather(backend, tensors, parts, num_heads, dims)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, None, None, *_ScatterHeads.apply(ctx.backend, ctx.parts, ctx.dims, *grads))  # type: ignore[no-untyped-call]


def _scatter(
    backend: GroupBackend, tensors: Sequence[torch.Tensor], parts: Sequence[Parts], dims: tuple[int, int]
) -> tuple[torch.Tensor, ...]:
    sequence_dim, head_dim = dims
    pairs = list(zip(tensors, parts, strict=True))
    sent = [
        [tensor.narrow(head_dim, start, stop - start) for tensor, ranges in pairs for start, stop in (ranges[rank],)]
        for rank in range(backend.world_size)
    ]
    own = [tensor.narrow(head_dim, 0, ranges[backend.rank][1] - ranges[backend.rank][0]) for tensor, ranges in pairs]
    received = _swap(backend, sent, [[each.shape for each in own]] * backend.world_size, tensors[0])
    return tuple(torch.cat(pieces, dim=sequence_dim) for pieces in zip(*received, strict=True))


def _gather(
    backend: GroupBackend,
    tensors: Sequence[torch.Tensor],
    parts: Sequence[Parts],
    num_heads: Sequence[int],
    dims: tuple[int, int],
) -> tuple[torch.Tensor, ...]:
    sequence_dim, head_dim = dims
    num_tokens = tensors[0].shape[sequence_dim]
    if num_tokens % backend.world_size:
        raise ValueError(
            f"sequence parallelism: a sequence of {counted(num_tokens, 'token')} is to be divided among "
            f"{backend.world_size} ranks; give a number of tokens that is a multiple of the ranks, padded if it must be"
        )
    size = num_tokens // backend.world_size
    sent = [
        [tensor.narrow(sequence_dim, rank * size, size) for tensor in tensors] for rank in range(backend.world_size)
    ]
    shapes = [
        [_resized(tensor.shape, {sequence_dim: size, head_dim: ranges[rank][1] - ranges[rank][0]})
         for tensor, ranges in zip(tensors, parts, strict=True)]
        for rank in range(backend.world_size)
    ]  # fmt: skip
    received = _swap(backend, sent, shapes, tensors[0])
    return tuple(
        _joined(pieces, ranges, heads, head_dim)
        for pieces, ranges, heads in zip(zip(*received, strict=True), parts, num_heads, strict=True)
    )


def _joined(pieces: Sequence[torch.Tensor], ranges: Parts, num_heads: int, head_dim: int) -> torch.Tensor:
    """Join the heads of all ranks; overlapping ranges are added in rank order."""
    if all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges)):
        return torch.cat(tuple(pieces), dim=head_dim)
    whole = pieces[0].new_zeros(_resized(pieces[0].shape, {head_dim: num_heads}))
    for piece, (start, stop) in zip(pieces, ranges, strict=True):
        whole.narrow(head_dim, start, stop - start).add_(piece)
    return whole


def _swap(
    backend: GroupBackend,
    sent: Sequence[Sequence[torch.Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    like: torch.Tensor,
) -> list[list[torch.Tensor]]:
    """Send `sent[r]` to rank r in one collective. Returns the tensors from each rank r, with shapes `shapes[r]`."""
    if backend.world_size == 1:
        return [list(sent[0])]
    input_N = torch.cat([tensor.reshape(-1) for tensors in sent for tensor in tensors])
    numels = [[torch.Size(shape).numel() for shape in theirs] for theirs in shapes]
    output_numels = [sum(each) for each in numels]
    output_N = backend.allocate(sum(output_numels), like.dtype, like.device)
    input_numels = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    backend.all_to_all(output_N, input_N, output_numels, input_numels, tag="sequence").wait()
    pieces = iter(output_N.split([numel for each in numels for numel in each]))
    return [[next(pieces).view(torch.Size(shape)) for shape in theirs] for theirs in shapes]


def _resized(shape: Sequence[int], sizes: dict[int, int]) -> list[int]:
    """Return `shape` with the given sizes of some dims."""
    resized = list(shape)
    for dim, size in sizes.items():
        resized[dim] = size
    return resized


def channel(group: ProcessGroup) -> GroupBackend:
    """Return the backend of sequence parallelism for the ranks of `group`. The first call is a collective of them."""
    own = _own.get(group)
    if own is None:
        own = group if group.size() == 1 else group_of_members(dist.get_all_ranks_from_group(group))
        _own[group] = own
    backend = dist.group_backend(own)
    backend.connect()
    return backend


def fails_with_engine(loss: _F) -> _F:
    """Decorate a loss function, which a script calls between an engine's forward and backward. If the function fails
    here, or because a peer failed in a call of its engine, no call of this engine sees the error, so call
    `give_up_after`. Other `CommError`s mean that ranks ran different collectives. Then a peer is already in its next
    step and loses that step, so this rank must also lose its next step, and it does in its next collective."""

    @functools.wraps(loss)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return loss(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, PeerFailed) or not isinstance(error, CommError):
                give_up_after([each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)])
            raise

    return call  # type: ignore[return-value]


def check_layout(backend: GroupBackend, tensors: Sequence[torch.Tensor], asked: str) -> None:
    """Raise on every rank if ranks pass different shapes or element sizes, before a collective that would hang.

    Costs a collective of a few integers. If collectives complete on the device, reading the integers would block the
    host in every layer, so nothing is checked and the caller must pass equal shapes.

    Raises:
        ValueError: the shapes differ; the error names the shapes of each rank.
    """
    if backend.world_size == 1 or not backend.capabilities.completes_on_host:
        return
    sizes = [size for tensor in tensors for size in (tensor.dim(), *tensor.shape, tensor.element_size())]
    header = torch.zeros(_HEADER_NUMEL, dtype=torch.int64)
    header[: len(sizes)] = torch.tensor(sizes)
    everyone = torch.empty(backend.world_size * _HEADER_NUMEL, dtype=torch.int64)
    backend.all_to_all(everyone, header.repeat(backend.world_size), tag="sequence layout").wait()
    theirs = everyone.view(backend.world_size, -1)
    if (theirs == header).all():
        return
    shapes = ", ".join(f"{_shapes(row.tolist())} on rank {rank}" for rank, row in enumerate(theirs))
    raise ValueError(
        f"{asked}: the ranks of one sequence brought different shapes or element sizes: {shapes} of the "
        "sequence-parallel group; give every rank an equal part of the sequence, padded if it must be"
    )


def _shapes(sizes: list[int]) -> str:
    """Format the shapes and element sizes in a header."""
    found = []
    while sizes and sizes[0]:
        dims = sizes[0]
        found.append(f"{tuple(sizes[1 : dims + 1])} of {sizes[dims + 1]} bytes")
        sizes = sizes[dims + 2 :]
    return " and ".join(found)
