"""Pieces that cut a buffer."""

import pytest
from deepspeed.comm.pieces import even_pieces


@pytest.mark.parametrize(("numel", "world_size"), [(0, 2), (1, 4), (5, 4), (8, 4), (1_000_003, 8)])
def test_even_pieces_cover_in_order(numel, world_size):
    pieces = even_pieces(numel, world_size)
    assert [p.owner for p in pieces] == list(range(world_size))
    assert pieces[0].start == 0
    assert pieces[-1].stop == numel
    assert all(a.stop == b.start for a, b in zip(pieces, pieces[1:], strict=False))
    assert sum(p.numel for p in pieces) == numel
