"""What users call around stage 3: the layout, estimates of memory, local elements, leaf modules with experts."""

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from deepspeed.testing.distributed import run_ranks
from torch import Tensor, nn


def create_engine(net: nn.Module, stage: int, **keys: Any) -> Any:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10, **keys.pop("zero", {})}
    config = {
        "train_batch_size": deepspeed.comm.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
        **keys,
    }
    return deepspeed.initialize(model=net, config=config)[0]


def train(engine: Any, x: Tensor) -> float:
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


# ---- show_layout -----------------------------------------------------------------------------------------------------


def layout_job(stage: int) -> list[tuple[Any, ...]]:
    deepspeed.init_distributed()
    net = nn.ModuleDict({"body": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), "scale": nn.Linear(1, 1)})
    net.scale.requires_grad_(False)
    rows = deepspeed.zero.show_layout(create_engine(net, stage))
    return [
        (row.module, row.parameters, row.elements, row.shard_elements, row.bytes, row.ranks, row.status) for row in rows
    ]


@pytest.mark.parametrize("stage", [0, 2])
def test_the_layout_of_whole_parameters(stage: int) -> None:
    shares = {0: [108, 108], 2: [54, 54]}[stage]
    for found, share in zip(run_ranks(2, layout_job, stage), shares, strict=True):
        assert found == [
            ("body", 4, 108, share, 432, 2, "AVAILABLE"),
            ("scale", 2, 2, 0, 8, 1, "AVAILABLE"),
        ]


def test_the_layout_of_stage_3() -> None:
    for found in run_ranks(2, layout_job, 3):
        assert found == [
            ("body", 2, 96, 48, 192, 2, "NOT_AVAILABLE"),
            ("body", 2, 12, 6, 48, 2, "AVAILABLE"),
            ("scale", 2, 2, 0, 8, 1, "AVAILABLE"),
        ]


# ---- estimates -------------------------------------------------------------------------------------------------------


def held_bytes(engine: Any) -> int:
    """Bytes of all tensors that the sharding and the optimizer hold."""
    sharding = engine.sharding
    tensors = [param.data for param in engine.module.parameters()]
    tensors += [
        tensor
        for unit in (sharding.units.modules.all if sharding.stage == 3 else [])
        for tensor in (unit.shard_S, unit._full_N)
    ]
    for shard in (shard for group in sharding.units for shard in group.shards):
        tensors += [shard.master, shard.grad, *sharding.optimizer.state[shard.master].values()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def memory_job(stage: int) -> tuple[int, int, int, int]:
    """Elements of the model and of a layer; bytes before a step, with no layer whole, and after it."""
    deepspeed.init_distributed()
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    engine = create_engine(net, stage, bf16={"enabled": True})
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    train(engine, x)
    engine.backward(engine(x).float().square().mean())
    engine.sharding.gradients.reduce()
    engine.sharding.release_gathered()
    before = held_bytes(engine)
    engine.step()
    return 8 * 257 * 256, 257 * 256, before, held_bytes(engine)


def test_memory_is_as_estimated() -> None:
    total, largest, before, after = run_ranks(2, memory_job, 2)[0]
    assert before == pytest.approx(estimate_zero2_model_states_mem_needs(total, 2, cpu_offload=False)[1], rel=0.1)
    assert before - after == total  # between steps no gradient takes memory: 2 bytes of half of the elements
    total, largest, before, after = run_ranks(2, memory_job, 3)[0]
    estimate = estimate_zero3_model_states_mem_needs(total, largest, 2, 1, False, False)
    assert before == pytest.approx(estimate[1] - estimate[2], rel=0.1)
    assert before - after == total


def set_without_backward_job() -> None:
    deepspeed.init_distributed()
    net = nn.Linear(4, 4)
    engine = create_engine(net, 2)
    train(engine, torch.ones(1, 4))
    deepspeed.utils.safe_set_full_grad(net.weight, torch.full((4, 4), 2.0))
    torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(net.weight), torch.full((4, 4), 2.0))
    engine.sharding.gradients.reduce()
    assert engine.sharding.gradients.norm() == pytest.approx(8.0)


def test_a_gradient_that_is_set_without_a_backward() -> None:
    run_ranks(2, set_without_backward_job)


# ---- one parameter's elements ----------------------------------------------------------------------------------------


def local_job(stage: int) -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    engine = create_engine(net, stage)
    local, full = deepspeed.utils.safe_get_local_fp32_param, deepspeed.utils.safe_get_full_fp32_param
    engine.backward(engine(torch.ones(1, 5)).sum())
    for param in net.parameters():
        mine, whole = deepspeed.utils.safe_get_local_grad(param), deepspeed.utils.safe_get_full_grad(param)
        check_parts(stage, mine, whole)
        deepspeed.utils.safe_set_local_grad(param, mine * 2)
        torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(param), whole * 2)
        assert mine.numel() == 0 or deepspeed.utils.safe_get_local_optimizer_state(param, "exp_avg") is None
    engine.step()
    for param in net.parameters():
        check_parts(stage, local(param), full(param))
        state = deepspeed.utils.safe_get_local_optimizer_state(param, "exp_avg")
        deepspeed.utils.safe_set_local_optimizer_state(param, state + 1, "exp_avg")
        check_parts(stage, state + 1, deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg"))
        deepspeed.utils.safe_set_local_fp32_param(param, torch.full_like(local(param), 3.0))
        assert (full(param) == 3).all()
        if stage == 0 or hasattr(param, "ds_unit"):
            with deepspeed.zero.GatheredParameters(param):
                assert (param == 3).all()
        with pytest.raises(ValueError, match="found a value of 1000 elements, this rank has"):
            deepspeed.utils.safe_set_local_fp32_param(param, torch.ones(1000))


def check_parts(stage: int, mine: Tensor, whole: Tensor) -> None:
    parts: list[Any] = [None, None]
    torch.distributed.all_gather_object(parts, mine)
    assert mine.dim() == 1
    torch.testing.assert_close(mine if stage == 0 else torch.cat(parts), whole.reshape(-1))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_local_elements_are_this_ranks_part(stage: int) -> None:
    run_ranks(2, local_job, stage)


# ---- experts ---------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each rank uses one expert, another one in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[self.chosen](x)


def create_experts() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 8), Experts(), nn.Linear(8, 2))


def experts_job(stage: int, leaf: dict[str, Any] | None) -> list[float]:
    deepspeed.init_distributed()
    net = create_experts()
    zero: dict[str, Any] = {"stage3_prefetch_bucket_size": 100, "stage3_max_reuse_distance": 0}
    if leaf is None:
        deepspeed.utils.set_z3_leaf_modules(net, [Experts])
    else:
        zero["leaf_module"] = leaf
    engine = create_engine(net, stage, zero=zero)
    assert stage < 3 or deepspeed.utils.z3_leaf_parameter(net[1].experts[2].weight)
    assert not deepspeed.utils.z3_leaf_parameter(net[0].weight)
    losses = []
    for step in range(6):
        for place, module in enumerate((net[1], net[3])):
            module.chosen = (step * (1 + deepspeed.comm.get_rank()) + place) % 3
        losses.append(train(engine, torch.full((1, 8), step + 1.0)))
    return losses


def test_each_rank_uses_other_experts_of_a_leaf_module() -> None:
    expected = run_ranks(2, experts_job, 2, None)
    for leaf in (None, {"classes": ["Experts"]}, {"names": ["1", "3"]}, {"name_suffixes": ["1", "3"]}):
        for found, losses in zip(run_ranks(2, experts_job, 3, leaf), expected, strict=True):
            assert found == pytest.approx(losses, rel=1e-5)
