"""Engines with offload to another memory or to a disk, and the values to compare with engines without offload.

First come engines with optimizer offload, then engines with parameter offload at stage 3 (`create_param_engine`). They
are for jobs of `run_ranks`, on the cpu and on devices with their own memory.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.optim import create_optimizer
from deepspeed.testing.models import CheckpointedMLP, OddMLP, make_engine
from deepspeed.zero import fragments

if TYPE_CHECKING:
    from deepspeed.engine.engine import DeepSpeedEngine

#: arguments of the optimizers that an engine can have
OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": {"lr": 1e-2, "weight_decay": 0.1}, "Lamb": {"lr": 1e-2}}


def create_engine(
    stage: int,
    section: dict[str, Any],
    *,
    freezes: bool = False,
    kind: str = "AdamW",
    seed: int = 3,
    arguments: dict[str, Any] | None = None,
    **keys: Any,
) -> "DeepSpeedEngine":
    """Return an engine of an `OddMLP` with two parameter groups, several buckets and sub-groups.

    The optimizer is always the one for the host, also without offload, because other kernels round differently.

    Args:
        section: further keys of `zero_optimization`.
        freezes: whether one of the layers is frozen.
        kind: the optimizer, a key of `OPTIMIZERS`.
        arguments: arguments of `make_engine`.
        keys: keys of the config.
    """
    torch.manual_seed(seed)
    net = OddMLP()
    net.middle[1].requires_grad_(not freezes)
    make = functools.partial(create_optimizer, kind, OPTIMIZERS[kind], offload=True)
    decayed = [net.first.weight, *net.middle.parameters(), net.last.weight]
    others = [net.first.bias, *net.unused.parameters(), net.gain, net.last.bias]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    sizes = {"reduce_bucket_size": 60, "stage3_param_persistence_threshold": 20, "sub_group_size": 16}
    return make_engine(
        net,
        stage,
        arguments={"optimizer": lambda _: make(groups), **(arguments or {})},
        zero_optimization={**sizes, **section},
        **{"zero_force_ds_cpu_optimizer": False, **keys},
    )


def loss_of(engine: "DeepSpeedEngine", step: int) -> Tensor:
    """Return the loss of this rank's samples of `step`: the mean of (y - 1)^2 over 4 random rows."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    x = torch.randn(4, 5, generator=generator).to(next(engine.module.parameters()).dtype)
    return (engine(x).float() - 1.0).square().mean()


def train(engine: "DeepSpeedEngine", steps: Iterable[int]) -> Tensor:
    """Train, and return a 1-D fp64 tensor: for each step the losses, the gradient norm and the loss scale."""
    seen = []
    for step in steps:
        for micro_step in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, 10 * step + micro_step)
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
        seen += [float(engine.get_global_grad_norm() or 0.0), float(engine.loss_scale() or 0.0)]
    return torch.tensor(seen, dtype=torch.float64)


def weights_of(engine: "DeepSpeedEngine") -> list[Tensor]:
    """Return copies of the whole weights."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


def state_of(engine: "DeepSpeedEngine") -> list[Tensor]:
    """Return the whole master weights and AdamW moments of all trained parameters, as far as they exist."""
    trained = [param for param in engine.module.parameters() if param.requires_grad]
    tensors = [fragments.safe_get_full_fp32_param(param) for param in trained]
    for name in ("exp_avg", "exp_avg_sq"):
        tensors += [fragments.safe_get_full_optimizer_state(param, name) for param in trained]
    return [tensor.clone() for tensor in tensors if tensor is not None]


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
#: losses of a run, and the weights at its end
Result = tuple[list[float], list[Tensor]]


def create_param_engine(
    precision: str, section: dict[str, Any], model: torch.nn.Module | None = None
) -> "DeepSpeedEngine":
    """Create a seeded engine that accumulates over two micro-batches and clips gradients.

    The smallest biases stay whole; units are released after every use, and are hardly prefetched.

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


def losses_of(engine: "DeepSpeedEngine", steps: int) -> list[float]:
    """Return the losses of all micro-batches of `steps` steps."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(2 * steps):
        loss = engine(torch.randn(4, 7, generator=generator).to(engine.device, dtype_of(engine)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_params(precision: str, section: dict[str, Any], steps: int = 20) -> Result:
    """Return the losses of a run and of an evaluation after it, and the final weights."""
    engine = create_param_engine(precision, section)
    losses = losses_of(engine, steps)
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


def access_params(precision: str, section: dict[str, Any]) -> list[Any]:
    """Read and change single parameters like users, between steps and beside a second engine; return the results."""
    engine, other = create_param_engine(precision, section), create_param_engine(precision, section)
    losses_of(engine, 1)
    model: Any = engine.module
    weight, frozen = model.layers[1].weight, model.frozen.weight
    with deepspeed.zero.GatheredParameters([weight, frozen], modifier_rank=0), torch.no_grad():
        weight.mul_(2)
        frozen.add_(1)
    whole = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert whole is not None
    values: list[Any] = [whole]
    deepspeed.utils.safe_set_full_fp32_param(weight, whole / 2)
    losses_of(engine, 1)
    values.append(deepspeed.utils.safe_get_full_fp32_param(weight))
    local = deepspeed.utils.safe_get_local_fp32_param(weight)
    assert local is not None
    deepspeed.utils.safe_set_local_fp32_param(weight, local * 2)
    values.append(deepspeed.utils.safe_get_full_fp32_param(weight))
    values.append(deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg"))
    with deepspeed.zero.GatheredParameters([weight, frozen]):
        values += [weight.clone(), frozen.clone()]
    losses_of(other, 1)
    seen = [losses_of(engine, 1), losses_of(other, 1), *(value.detach().cpu().tolist() for value in values)]
    engine.destroy()
    other.destroy()
    return seen


def assert_same(results: Sequence[Result], others: Sequence[Result], tolerance: float = 1e-6) -> None:
    """Assert that two sequences of results agree within `tolerance`."""
    for (losses, weights), (other_losses, other_weights) in zip(results, others, strict=True):
        torch.testing.assert_close(losses, other_losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(weights, other_weights, rtol=tolerance, atol=tolerance)
