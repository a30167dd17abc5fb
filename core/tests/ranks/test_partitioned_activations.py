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


class Drops(torch.nn.Module):
    """Drops features by the named state, at two places of a block that is computed again."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.masks = []

    def block(self, x):
        hidden = self.up(x)
        with checkpointing.get_cuda_rng_tracker().fork():
            mask = torch.rand(5)
        self.masks.append(mask)
        return self.down(hidden * mask.mean())

    def forward(self, x):
        return checkpointing.checkpoint(self.block, x).square().mean()


def two_engines_job(order):
    """Masks of an engine whose layers are divided over both ranks, and of one that has them whole."""
    engines = {}
    for name in order:
        config = {"train_micro_batch_size_per_gpu": 1}
        if name == "divided":
            config["tensor_parallel"] = {
                "autotp_size": 2,
                "partition_config": {
                    "layer_specs": [
                        {"patterns": [r"up\.weight"], "partition_type": "column"},
                        {"patterns": [r"down\.weight"], "partition_type": "row"},
                    ]
                },
            }
        groups.reset()
        engines[name] = deepspeed.initialize(model=Drops(), config=config)[0]
    checkpointing.configure(None)
    checkpointing.model_parallel_cuda_manual_seed(1)
    for name in ("divided", "whole", "divided"):
        engines[name].backward(engines[name](torch.ones(1, 8)))
    found = {name: engine.module.masks for name, engine in engines.items()}
    for engine in engines.values():
        engine.destroy()
    checkpointing.get_cuda_rng_tracker().reset()
    groups.reset()
    return found


@pytest.mark.parametrize("order", [("divided", "whole"), ("whole", "divided")], ids=" then ".join)
def test_the_named_state_is_that_of_the_engine_whose_forward_it_is(order):
    first, second = run_ranks(2, two_engines_job, order)
    of_rank = [torch.rand(5, generator=torch.Generator().manual_seed(1 + 2718 + rank)) for rank in range(2)]
    assert torch.equal(first["divided"][0], of_rank[0])
    assert torch.equal(second["divided"][0], of_rank[1])
    assert torch.equal(second["whole"][0], of_rank[0])  # the only rank of its mesh
    for masks in (*first.values(), *second.values()):
        for mask, computed_again in zip(masks[::2], masks[1::2], strict=True):
            assert torch.equal(mask, computed_again)
    assert not torch.equal(first["divided"][2], second["divided"][2])
