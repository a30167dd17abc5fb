"""Engines of stage 3 whose parameters rest in another memory or on a disk, and what is compared with those without.

For jobs of `run_ranks`, on the cpu and on devices with memory of their own.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import deepspeed
from deepspeed.testing.engines import make_engine
from deepspeed.testing.models import CheckpointedMLP

if TYPE_CHECKING:
    from deepspeed.engine.engine import DeepSpeedEngine

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
#: losses of a run, and the weights at its end
Result = tuple[list[float], list[torch.Tensor]]


def create_engine(precision: str, section: dict[str, Any], model: torch.nn.Module | None = None) -> "DeepSpeedEngine":
    """Seeded; it accumulates over two micro-batches and clips.

    The smallest biases stay whole, units are released after every use and hardly gathered ahead.

    Args:
        precision: a key of `PRECISIONS`.
        section: further keys of `zero_optimization`.
        model: a `CheckpointedMLP` if None.
    """
    torch.manual_seed(0)
    stage3 = {
        "stage3_param_persistence_threshold": 4,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 60,
    }
    return make_engine(
        model or CheckpointedMLP(),
        3,
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        zero_optimization={**stage3, **section},
        **PRECISIONS[precision],
    )


def dtype_of(engine: "DeepSpeedEngine") -> torch.dtype:
    """Return the dtype of the weights."""
    return next(engine.module.parameters()).dtype


def run(engine: "DeepSpeedEngine", steps: int) -> list[float]:
    """The losses of all micro-batches of `steps` steps."""
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    losses = []
    for _ in range(2 * steps):
        loss = engine(torch.randn(4, 7, generator=generator).to(engine.device, dtype_of(engine)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train(precision: str, section: dict[str, Any], steps: int = 20) -> Result:
    """The losses of a run, and of an evaluation after it; the weights that the engine leaves."""
    engine = create_engine(precision, section)
    losses = run(engine, steps)
    engine.eval()
    with torch.no_grad():
        losses.append(engine(torch.ones(2, 7, device=engine.device, dtype=dtype_of(engine))).item())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        gathered = [param.cpu() for param in engine.module.parameters()]
    saved = engine._zero3_consolidated_16bit_state_dict() or {}
    engine.destroy()
    weights = [param.detach().cpu() for param in engine.module.parameters()]
    assert all(map(torch.equal, gathered, weights))
    final = engine.module.state_dict()
    assert all(torch.equal(value.cpu(), final[name].cpu()) for name, value in saved.items())
    return losses, weights


def access(precision: str, section: dict[str, Any]) -> list[Any]:
    """Read and change single parameters as users do, between steps and beside a second engine; return lists."""
    engine, other = create_engine(precision, section), create_engine(precision, section)
    run(engine, 1)
    model: Any = engine.module
    weight, frozen = model.layers[1].weight, model.frozen.weight
    with deepspeed.zero.GatheredParameters([weight, frozen], modifier_rank=0), torch.no_grad():
        weight.mul_(2)
        frozen.add_(1)
    whole = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert whole is not None
    values: list[Any] = [whole]
    deepspeed.utils.safe_set_full_fp32_param(weight, whole / 2)
    run(engine, 1)
    values.append(deepspeed.utils.safe_get_full_fp32_param(weight))
    local = deepspeed.utils.safe_get_local_fp32_param(weight)
    assert local is not None
    deepspeed.utils.safe_set_local_fp32_param(weight, local * 2)
    values.append(deepspeed.utils.safe_get_full_fp32_param(weight))
    values.append(deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg"))
    with deepspeed.zero.GatheredParameters([weight, frozen]):
        values += [weight.clone(), frozen.clone()]
    run(other, 1)
    seen = [run(engine, 1), run(other, 1), *(value.detach().cpu().tolist() for value in values)]
    engine.destroy()
    other.destroy()
    return seen


def assert_same(results: Sequence[Result], others: Sequence[Result], tolerance: float = 1e-6) -> None:
    """The results of all ranks are equal."""
    for (losses, weights), (other_losses, other_weights) in zip(results, others, strict=True):
        torch.testing.assert_close(losses, other_losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(weights, other_weights, rtol=tolerance, atol=tolerance)
