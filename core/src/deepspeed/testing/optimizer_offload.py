"""Engines whose optimizer may be in another memory or on a disk, and what is compared with those without offload.

For jobs of `run_ranks`.
"""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed
from deepspeed.optim import create_optimizer
from deepspeed.testing.engines import make_engine
from deepspeed.testing.models import OddMLP
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
    """An `OddMLP` in two groups of parameters, in several buckets and sub-groups.

    Its optimizer is the host's, with offload and without: two kinds of kernels differ by roundings.

    Args:
        section: further keys of `zero_optimization`.
        freezes: one of the layers is frozen.
        kind: of the optimizer, a key of `OPTIMIZERS`.
        arguments: as those of `make_engine`.
        keys: of the config.
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
    """1-D fp64: for each step the losses of its micro-batches, the norm of the gradients, and the loss scale."""
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
    """Copies of the whole weights."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


def state_of(engine: "DeepSpeedEngine") -> list[Tensor]:
    """Whole master weights and moments of AdamW, by parameter; not those that a parameter does not have."""
    trained = [param for param in engine.module.parameters() if param.requires_grad]
    tensors = [fragments.safe_get_full_fp32_param(param) for param in trained]
    for name in ("exp_avg", "exp_avg_sq"):
        tensors += [fragments.safe_get_full_optimizer_state(param, name) for param in trained]
    return [tensor.clone() for tensor in tensors if tensor is not None]
