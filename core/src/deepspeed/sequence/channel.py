"""The ranks of one sequence as a channel for collectives, apart from those of ZeRO.

[Note: a group of its own] ZeRO launches buckets in the backward when they are full, at places that may differ between
ranks. Sequence parallelism runs collectives in the same backward, often among the same ranks, and in one group they
would be matched by their order. So each sequence-parallel group gets a second process group of the same ranks, made at
its first use, by all of them together.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.give_up import give_up_after
from deepspeed.comm.own_group import group_of_members
from deepspeed.errors import CommError

_F = TypeVar("_F", bound=Callable[..., Any])
_own: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
#: elements of a layout that ranks compare: of up to three tensors, number of dims, sizes, and bytes of an element
_HEADER_NUMEL = 24


def channel(group: ProcessGroup) -> GroupBackend:
    """The collectives of sequence parallelism among the ranks of `group`. A collective of them at the first call."""
    own = _own.get(group)
    if own is None:
        own = group if group.size() == 1 else group_of_members(dist.get_all_ranks_from_group(group))
        _own[group] = own
    backend = dist.group_backend(own)
    backend.connect()
    return backend


def fails_with_engine(loss: _F) -> _F:
    """Decorator of a loss, which a script computes between an engine's forward and its backward. If it
    fails on this rank, or because a peer did in a call of its engine, no call of the engine here sees it: see
    `give_up_after`. Not where ranks make different collectives: one of them has gone on to its next step then, which
    that error costs it, so this rank is to lose its next step too, and it does in its next collective."""

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
    """Raise on every rank if ranks bring different shapes or element sizes, before a collective that would hang.

    Costs a collective of a few integers. Where collectives complete on the device, reading them would stop the host in
    every layer, so there it is the caller's to bring equal shapes.

    Raises:
        ValueError: names the shapes of each rank.
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
    """The shapes and element sizes in a header, as text."""
    found = []
    while sizes and sizes[0]:
        dims = sizes[0]
        found.append(f"{tuple(sizes[1 : dims + 1])} of {sizes[dims + 1]} bytes")
        sizes = sizes[dims + 2 :]
    return " and ".join(found)
