"""`engine.compile()` under every stage: the same weights as the engine that is not compiled, on two ranks."""

import copy
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime import compiler
from deepspeed.testing.distributed import run_ranks
from torch import nn
from torch._dynamo.utils import counters

STAGES = (0, 1, 2, 3)
#: every parameter is gathered for each forward and each backward
STAGE_3 = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x_BI)))


def trained(
    model: nn.Module, stage: int, backend: str | None, micro_batches: list[torch.Tensor], *, before: bool
) -> dict[str, Any]:
    """Weights after the micro-batches, two a step, with the module compiled if a backend is named, by torch before
    `initialize` or by the engine."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20, **STAGE_3},
    }
    if backend is not None and before:
        model = torch.compile(model, backend=backend)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if backend is not None and not before:
        engine.compile(backend=backend)
    graphs = []
    for x_BI in micro_batches:
        engine.backward(engine(x_BI).square().mean())
        engine.step()
        graphs.append(counters["stats"]["unique_graphs"])
    compiled = engine.is_compiled
    engine.destroy()
    assert len(set(graphs)) == 1, f"compiled again after the first micro-batch: {graphs}"
    return {"state": engine.module.state_dict(), "compiled": compiled}


def compiled_and_plain(backend: str, stages: tuple[int, ...], before: bool) -> dict[int, Any]:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    start = Net()
    torch.manual_seed(1 + dist.get_rank())
    micro_batches = [torch.randn(4, 5) for _ in range(6)]
    torch._dynamo.reset()
    results = {}
    for stage in stages:
        plain, compiled = (
            trained(copy.deepcopy(start), stage, name, micro_batches, before=before) for name in (None, backend)
        )
        values = {name.removeprefix("_orig_mod."): value for name, value in compiled["state"].items()}
        gap = max(float((plain["state"][name] - value).abs().max()) for name, value in values.items())
        moved = max(float((start.state_dict()[name] - value).abs().max()) for name, value in plain["state"].items())
        results[stage] = (plain["compiled"], compiled["compiled"], gap, moved)
    torch._dynamo.reset()
    return results


@pytest.mark.parametrize(("stages", "before"), [(STAGES, False), ((3,), True)], ids=["engine.compile", "torch.compile"])
def test_a_compiled_engine_trains_as_the_plain_one(stages: tuple[int, ...], before: bool) -> None:
    for results in run_ranks(2, compiled_and_plain, "aot_eager", stages, before):
        for was_plain, was_compiled, gap, moved in results.values():
            assert (was_plain, was_compiled) == (False, not before)
            assert moved > 0.01
            assert gap < 1e-6


def test_the_compiler_module_has_deepspeeds_names() -> None:
    assert compiler.is_compile_supported()
    assert not compiler.is_compiling()

    seen = []

    @compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def inside(x: torch.Tensor) -> torch.Tensor:
        return outside(x) * 2 + (1 if compiler.is_compiling() else 0)

    assert torch.compile(inside, backend="eager")(torch.ones(1)).item() == 5
    assert seen == [False]


@pytest.mark.parametrize(("min_version", "compiles"), [(None, True), ("2.6.0", True), ("99.0", False)])
def test_enable_needs_a_version(min_version: str | None, compiles: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    assert (compiler.enable(min_version)(function) is not function) == compiles
    assert compiler.dummy_decorator(function) is function
