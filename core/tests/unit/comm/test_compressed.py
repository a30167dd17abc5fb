"""What one bit per element says of a tensor: the layout of messages, the errors that stay, without ranks."""

import math

import pytest
import torch
from deepspeed.comm.compressed import RoundingErrors, _OneBitLayout, _packed, _unpacked, average, part_numel


def rounded(values):
    """|x| / sqrt(n) * sign(x), sign(0) = 1."""
    return values.norm() / math.sqrt(max(values.numel(), 1)) * torch.where(values >= 0, 1.0, -1.0)


def plain_average(by_rank, worker, server):
    """Algorithm 1 of arXiv 2102.02888 for one tensor on all ranks; [W, N], [W, N], [N]. Changes the errors."""
    corrected = by_rank + worker
    sent = torch.stack([rounded(each) for each in corrected])
    worker.copy_(corrected - sent)
    mean = sent.mean(0) + server
    numel = part_numel(mean.numel(), len(by_rank))
    parts = [rounded(part) for part in mean.split(numel)]
    server.copy_(mean - torch.cat(parts))
    return torch.cat(parts)


def average_of_all(tensors, errors):
    """What `average` does, for the ranks of one process: their messages are passed by hand."""
    world_size, numels = len(tensors), tuple(each.numel() for each in tensors[0])
    layouts = [_OneBitLayout(numels, world_size, rank) for rank in range(world_size)]
    num_bytes = layouts[0].num_bytes
    sent = torch.empty(world_size, world_size, num_bytes, dtype=torch.uint8)
    for rank, layout in enumerate(layouts):
        layout.compress(tensors[rank], errors[rank], sent[rank])
    gathered = torch.empty(world_size, num_bytes, dtype=torch.uint8)
    for rank, layout in enumerate(layouts):
        layout.average_part(sent[:, rank].contiguous(), errors[rank], gathered[rank])
    for rank, layout in enumerate(layouts):
        layout.expand(gathered, tensors[rank])
    return num_bytes


def test_bits_are_the_signs():
    values = torch.tensor([[1.0, -1.0, 0.0, -0.5, 3.0, -2.0, -7.0, 0.1], [-1.0] * 8])
    packed = _packed(values)
    assert packed.dtype is torch.uint8
    assert packed.tolist() == [[0b10010101], [0]]
    assert torch.equal(_unpacked(packed), torch.where(values >= 0, 1.0, -1.0))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("shapes", [[(5,)], [(33, 7), (1,), (64,), (3, 3)]])
def test_many_tensors_are_each_averaged_as_the_paper_has_it(world_size, shapes):
    generator = torch.Generator().manual_seed(0)
    numels = [math.prod(shape) for shape in shapes]
    worker = [torch.zeros(world_size, numel) for numel in numels]
    server = [torch.zeros(numel) for numel in numels]
    errors = [[RoundingErrors.zero(torch.empty(shape), world_size) for shape in shapes] for _ in range(world_size)]
    for _ in range(10):
        tensors = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(world_size)]
        wanted = [
            plain_average(torch.stack([tensors[rank][place].flatten() for rank in range(world_size)]), *its)
            for place, its in enumerate(zip(worker, server, strict=True))
        ]
        average_of_all(tensors, errors)
        for place, shape in enumerate(shapes):
            for rank in range(world_size):
                assert torch.equal(tensors[rank][place], tensors[0][place])
            torch.testing.assert_close(tensors[0][place], wanted[place].view(shape))
    for place in range(len(shapes)):
        for rank in range(world_size):
            torch.testing.assert_close(errors[rank][place].worker, worker[place][rank])
        left = torch.cat([errors[rank][place].server for rank in range(world_size)])
        torch.testing.assert_close(left[: numels[place]], server[place])
        assert not left[numels[place] :].any(), "padding has nothing to send"


def test_what_was_not_sent_is_sent_later():
    """The sum of what came is that of what was put in, but for errors, which do not grow."""
    generator = torch.Generator().manual_seed(1)
    fixed = [[torch.randn(40, generator=generator)] for _ in range(2)]
    exact = (fixed[0][0] + fixed[1][0]) / 2
    errors = [[RoundingErrors.zero(exact, 2)] for _ in range(2)]
    total = torch.zeros(40)
    for _ in range(400):
        tensors = [[each.clone() for each in its] for its in fixed]
        average_of_all(tensors, errors)
        total += tensors[0][0]
    assert (total / 400 - exact).abs().max() < 0.1 * exact.abs().max()


def test_a_message_has_one_bit_per_element_and_a_scale_per_tensor():
    numels = (100_000, 17)
    layout = _OneBitLayout(numels, 4, 0)
    assert layout.num_bytes <= sum(part_numel(numel, 4) // 8 for numel in numels) + 2 * 4 + 2 * 16


def test_values_that_are_not_finite_reach_every_rank():
    tensors = [[torch.ones(9)], [torch.tensor([math.inf] + [0.0] * 8)]]
    average_of_all(tensors, [[RoundingErrors.zero(torch.ones(9), 2)] for _ in range(2)])
    assert not any(bool(its[0].isfinite().any()) for its in tensors)


class Alone:
    world_size = 1


def test_one_rank_sends_and_rounds_nothing():
    values = torch.randn(7)
    before, errors = values.clone(), RoundingErrors.zero(values, 1)
    average(Alone(), [values], [errors])
    assert torch.equal(values, before)
    assert not errors.worker.any()
