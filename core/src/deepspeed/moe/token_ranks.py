"""The ranks between which tokens travel: an all-to-all of rows, differentiable, with counts that differ.

The tokens have process groups of their own. A group of ZeRO may have the same ranks, and its collectives are issued
when gradients arrive, between those of the model's backward in an order that differs between ranks.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.group_backend import group_backend
from deepspeed.comm.members import group_of_members
from deepspeed.parallel.mesh import Mesh

_TAG = "tokens of experts"
# By world group, the groups of tokens by their ranks: layers share them, and they go with their world.
_made: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()


def token_ranks(mesh: Mesh, ep_size: int) -> GroupBackend:
    """The collectives of the ranks over which experts are divided. A collective of all ranks of the mesh.

    Raises:
        ConfigError: if `ep_size` does not divide dp x sp.
    """
    ranks = mesh.experts(ep_size).ranks("ep")
    made = _made.setdefault(mesh.world, {})
    if ranks not in made:
        made[ranks] = group_of_members(ranks)
    backend = group_backend(made[ranks])
    backend.connect()
    return backend


def send_counts(counts_WE: Tensor, ranks: GroupBackend) -> Tensor:
    """Row r of `counts_WE`, int64, goes to rank r; returns what the ranks sent to this one, by rank. A collective."""
    received_WE = torch.empty_like(counts_WE)
    ranks.all_to_all(received_WE.view(-1), counts_WE.contiguous().view(-1), tag=_TAG).wait()
    return received_WE


def send_rows(rows_NH: Tensor, to_each: Sequence[int], from_each: Sequence[int], ranks: GroupBackend) -> Tensor:
    """The first `to_each[0]` rows go to rank 0, and so on; returns what came, by rank. Collective, and so in backward.

    Args:
        from_each: rows that come from each rank.
    """
    sent: Tensor = _SendRows.apply(rows_NH, to_each, from_each, ranks)
    return sent


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_NH: Tensor, to_each: Sequence[int], from_each: Sequence[int], ranks: GroupBackend
    ) -> Tensor:
        ctx.to_each, ctx.from_each, ctx.ranks = to_each, from_each, ranks
        return _send(rows_NH, to_each, from_each, ranks)

    @staticmethod
    def backward(ctx: Any, *grads_NH: Tensor) -> tuple[Tensor, None, None, None]:
        return send_rows(grads_NH[0], ctx.from_each, ctx.to_each, ctx.ranks), None, None, None


def _send(rows_NH: Tensor, to_each: Sequence[int], from_each: Sequence[int], ranks: GroupBackend) -> Tensor:
    width = rows_NH.shape[1]
    received_NH = rows_NH.new_empty(sum(from_each), width)
    ranks.all_to_all(
        received_NH.view(-1),
        rows_NH.contiguous().view(-1),
        [count * width for count in from_each],
        [count * width for count in to_each],
        tag=_TAG,
    ).wait()
    return received_NH
