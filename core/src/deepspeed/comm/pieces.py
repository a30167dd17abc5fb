"""Cutting a flat buffer into pieces with owners. Used by `torch_backend.py` and `in_place_group.py`."""

import math
from collections.abc import Sequence

import torch

from deepspeed.comm.backend import Piece
from deepspeed.errors import CommError


def even_pieces(numel: int, world_size: int) -> list[Piece]:
    """Cut `[0, numel)` into `world_size` pieces in rank order, the last ones shorter or empty."""
    size = math.ceil(numel / world_size)
    return [Piece(min(r * size, numel), min((r + 1) * size, numel), r) for r in range(world_size)]


def checked(flat_N: torch.Tensor, pieces: Sequence[Piece], world_size: int) -> list[Piece]:
    """The pieces that hold something; raises `CommError` for a buffer or piece that breaks the contract."""
    if flat_N.dim() != 1 or not flat_N.is_contiguous():
        raise CommError(
            f"an exchange needs a contiguous 1-D buffer, got shape {tuple(flat_N.shape)} with strides"
            f" {flat_N.stride()}; pass buffer.view(-1)"
        )
    filled = []
    for piece in pieces:
        if not (0 <= piece.start <= piece.stop <= flat_N.numel() and 0 <= piece.owner < world_size):
            raise CommError(
                f"{piece} does not fit a buffer of {flat_N.numel()} elements and a group of {world_size} ranks;"
                " `owner` is a rank within the group"
            )
        if piece.stop > piece.start:
            filled.append(piece)
    return filled


def is_even_cover(flat_N: torch.Tensor, pieces: Sequence[Piece], world_size: int) -> bool:
    """True if the pieces are W equal parts of the whole buffer in the order of ranks."""
    size, rest = divmod(flat_N.numel(), world_size)
    return (
        rest == 0
        and len(pieces) == world_size
        and all(p == (r * size, (r + 1) * size, r) for r, p in enumerate(pieces))
    )


def view(flat_N: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of `piece`."""
    return flat_N[piece.start : piece.stop]
