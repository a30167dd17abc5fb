"""Inputs of recomputed blocks in parts over tensor-parallel ranks: memory, and gradients as without it."""

import deepspeed
import pytest
import torch
from deepspeed.activation import checkpointing
from deepspeed.parallel import groups
from deepspeed.testing.distributed import run_ranks

NUMEL = 4097  # which neither two nor three ranks divide


def partition_job(tp, contiguous):
    groups.set_mesh({"tp": tp})
    options = {"contiguous_checkpointing": True, "num_checkpoints": 2} if contiguous else {}
    checkpointing.configure(None, partition_activations=True, **options)
    keeping = checkpointing._settings.keeping
    kept = []
    pack = keeping.pack

    def count(tensor):
        result = pack(tensor)
        if result.shape is not None and tensor.numel():  # torch before 2.11 keeps an empty one with each block
            stored = getattr(result.stored, "tensor", result.stored)
            kept.append(stored.numel() if contiguous else stored.untyped_storage().nbytes() // 4)
        return result

    keeping.pack = count
    weight = torch.linspace(0.5, 1.5, NUMEL).requires_grad_()
    hidden = x = torch.linspace(-1, 1, NUMEL).requires_grad_()
    for _ in range(2):
        hidden = deepspeed.checkpointing.checkpoint(lambda hidden: torch.tanh(weight * hidden), hidden)
    hidden.sum().backward()
    found = [x.grad.clone(), weight.grad.clone()]
    x.grad = weight.grad = None
    torch.tanh(weight * torch.tanh(weight * x)).sum().backward()
    return kept, all(torch.equal(one, other) for one, other in zip(found, [x.grad, weight.grad], strict=True))


@pytest.mark.parametrize(("tp", "contiguous"), [(2, False), (3, True)])
def test_each_rank_keeps_its_part(tp, contiguous):
    for kept, is_equal in run_ranks(tp, partition_job, tp, contiguous):
        assert kept == [-(-NUMEL // tp)] * 2
        assert is_equal


class MPU:
    """As Megatron's: its groups exist before an engine does."""

    def get_model_parallel_rank(self):
        return deepspeed.comm.get_rank()


def seeds_job(unit):
    if unit is None:
        groups.set_mesh({"tp": 2})
    checkpointing.configure(unit)
    checkpointing.model_parallel_cuda_manual_seed(1)
    common = torch.rand(1).item()
    with checkpointing.get_cuda_rng_tracker().fork():
        return common, torch.rand(1).item()


@pytest.mark.parametrize("unit", [None, MPU()], ids=["mesh", "mpu"])
def test_ranks_draw_equal_numbers_by_default_and_different_ones_by_name(unit):
    (first, own), (second, other) = run_ranks(2, seeds_job, unit)
    assert first == second
    assert own != other
