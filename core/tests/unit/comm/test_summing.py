"""The local sum: rank order to the last bit, one rounding for low precision."""

import pytest
import torch
from deepspeed.comm.transports import add_in_rank_order


@pytest.mark.parametrize("numel", [1, 7, 300_001])
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_rank_computes_the_same_bits(dtype, world_size, numel):
    torch.manual_seed(0)
    terms = [torch.randn(numel).to(dtype) for _ in range(world_size)]
    expected = terms[0].float()
    for term in terms[1:]:
        expected = expected + term
    expected = expected.to(dtype)
    for rank in range(world_size):
        copies = [t.clone() for t in terms]
        own = copies.pop(rank)
        add_in_rank_order(own, copies, rank)
        assert torch.equal(own, expected)


def test_low_precision_rounds_once():
    # 256 + 1 is 256 in bfloat16; three ones on top are 259 in fp32, which rounds to 260.
    terms = [torch.full((4,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    add_in_rank_order(terms[0], terms[1:], 0)
    assert terms[0].tolist() == [260.0] * 4
