"""Helpers of DeepSpeed's `runtime.utils` that ranks call together: tensors in parts, and overflows."""

import math

import deepspeed.comm as deepspeed_comm
import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import ConfigError
from deepspeed.runtime.utils import CheckOverflow, PartitionedTensor
from deepspeed.testing.distributed import run_ranks


def parts_job(shape):
    """What each rank keeps, whether the whole is the same bits, and whether another holder of the part says so too."""
    group = deepspeed_comm.get_world_group()
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    part = PartitionedTensor(tensor, group)
    again = PartitionedTensor.from_meta(part.to_meta(), part.data().clone(), group, device="cpu")
    wholes = part.full(), again.full()
    return part.local_data.numel(), part.to_meta().tolist(), [torch.equal(whole, tensor) for whole in wholes]


@pytest.mark.parametrize(
    ("shape", "cuts"), [((2, 7), [0, 7, 14]), ((3, 5), [0, 8, 15]), ((), [0, 1, 1]), ((0, 4), [0, 0, 0])]
)
def test_a_tensor_in_parts_is_whole_again(shape, cuts):
    for rank, (numel, header, is_same) in enumerate(run_ranks(2, parts_job, shape)):
        assert numel == cuts[rank + 1] - cuts[rank]
        assert header == [len(shape), *shape, 2, rank, *cuts]  # as DeepSpeed writes it
        assert is_same == [True, True]


def wrong_headers_job():
    group = deepspeed_comm.get_world_group()
    part = PartitionedTensor(torch.ones(4), group)
    header, found = part.to_meta(), []
    of_three = torch.tensor([1, 4, 3, 0, 0, 2, 3, 4])
    for meta, data in (
        (header[:3], part.data()),
        (torch.tensor([-1, 2]), part.data()),
        (of_three, part.data()),
        (torch.tensor([1, 400, 2, part.rank, 0, 2, 4]), part.data()),
        (torch.tensor([1, 4, 2, 1 - part.rank, 0, 2, 4]), part.data()),
        (header, torch.ones(1)),
    ):
        with pytest.raises(ConfigError) as error:
            PartitionedTensor.from_meta(meta, data, group)
        found.append(str(error.value))
    return found


def test_a_header_that_does_not_fit_is_refused():
    cut, negative, ranks, shape, other, part = run_ranks(2, wrong_headers_job)[0]
    assert "none of `to_meta`" in cut
    assert "none of `to_meta`" in negative
    assert "a header of 3 parts in a group of 2 ranks" in ranks
    assert "do not fit its shape [400]" in shape
    assert "the header of rank 1 on rank 0" in other
    assert "a part of 1 elements on rank 0, but its header says 2" in part


def overflow_job():
    rank = dist.get_rank()
    fine, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    fine.grad = torch.ones(3)
    late.grad = torch.tensor([0.0, math.nan if rank else 1.0, 0.0])
    params = [[fine, late]]
    alone, together = CheckOverflow(params), CheckOverflow(params, zero_reduce_scatter=True)

    class Mpu:
        get_model_parallel_group = staticmethod(deepspeed_comm.get_world_group)

    divided = CheckOverflow(mpu=Mpu)
    return {
        "alone": alone.check(),
        "together": together.check(),
        "divided": divided.check(params),
        "nothing": divided.check([[fine]]),
        "serial": together.has_overflow_serial([fine, late]),
        "norm": divided.check_using_norm([1.0, -1 if rank else 2.0]),
        "own norm": divided.check_using_norm([1.0, -1 if rank else 2.0], reduce_overflow=False),
    }


def test_an_overflow_of_one_rank_is_one_of_all_that_step_together():
    for rank, found in enumerate(run_ranks(2, overflow_job)):
        mine = bool(rank)
        assert found == {
            "alone": mine,
            "together": True,
            "divided": True,
            "nothing": False,
            "serial": mine,
            "norm": True,
            "own norm": mine,
        }
