"""The section `deterministic`: a run whose losses are bitwise the same for every number of ranks, stage of ZeRO,
placement and number of accumulation steps that share the global batch in micro-batches of the same samples.

    sums of gradients     one binary tree over the micro-batches of a step       `FixedOrder`
    their norm            a sum that no order changes                            `ExactSquares`
    random numbers        of a forward: from (seed, step, micro-batch)           `OneOrder`
    samples               of `training_data`: whole micro-batches by turns       `DeepSpeedDataLoader`
    kernels               those that torch calls deterministic; others raise     `torch.use_deterministic_algorithms`

What cannot be bitwise the same is refused here, by its name. Called by `build.py`, once per engine.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.values import check_same
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.compression import asks_for_moq, asks_for_steps
from deepspeed.errors import ConfigError, StateError
from deepspeed.optim import is_elementwise
from deepspeed.parallel.expert_params import expert_sizes
from deepspeed.parallel.mesh import Mesh
from deepspeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from deepspeed.engine.training import Accumulation


_NOWHERE = (-1, -1)


class OneOrder:
    """`OneOrder` knows the place of every micro-batch in the global batch, and gives its forward random numbers of its
    own, whatever rank runs it.

    They follow from the seed, the step, the place, and which forward of the micro-batch it is. The generators of this
    process are as before when the forward is over: what the script draws is its own.

    Args:
        seed: the same on all ranks.
        world_size: ranks of data parallelism.
        rank: among them.
    """

    def __init__(self, seed: int, world_size: int, rank: int) -> None:
        self._seed = seed
        self._world_size, self._rank = world_size, rank
        self._num_reduced = 0  # backwards since the last step whose gradients are summed over the ranks
        self._num_of_micro_batch = 0  # the same of the current micro-batch
        self._last = _NOWHERE  # step and backwards before the last forward
        self._num_forwards = 0  # of the same micro-batch before this one

    def saw_reduction(self) -> None:
        """One more backward ends in a sum over the ranks."""
        self._num_reduced += 1
        self._num_of_micro_batch += 1

    def end_micro_batch(self, schedule: "Accumulation") -> StateError | None:
        """The micro-batch is over. Returns what to raise if it was not one summand: two would be those of two
        micro-batches on another number of ranks. Where a user sets boundaries, none ends before the step does."""
        found, self._num_of_micro_batch = self._num_of_micro_batch, 0
        if found <= 1 or schedule.boundary is not None:
            return None
        return StateError(
            f"deterministic.enabled: found {found} backwards in one micro-batch, which have no place in one order of "
            "sums over micro-batches; add the losses up and call backward once, or enclose the backwards in "
            "engine.coalesce_grad_reduction()"
        )

    def restart(self) -> None:
        """A step begins, or begins again."""
        self._num_reduced = self._num_of_micro_batch = 0
        self._last = _NOWHERE

    @contextmanager
    def of_forward(self, step: int) -> Iterator[None]:
        """Enclose one forward that trains, after so many steps."""
        place = step, self._num_reduced
        self._num_forwards = self._num_forwards + 1 if self._last == place else 0
        self._last = place
        micro_batch = self._num_reduced * self._world_size + self._rank
        name = f"{self._seed} {step} {micro_batch} {self._num_forwards}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        accelerator = get_accelerator()
        on_host = accelerator.device_name() == "cpu"
        host, device = torch.get_rng_state(), None if on_host else accelerator.get_rng_state()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        try:
            yield
        finally:
            torch.set_rng_state(host)
            if device is not None:
                accelerator.set_rng_state(device)


def create_order(
    config: DeepSpeedConfig, module: nn.Module, mesh: Mesh, optimizer: Optimizer | None
) -> OneOrder | None:
    """Turn determinism on, where the configuration asks for it; None: it does not. A collective.

    Raises:
        ConfigError: something is asked for, or found in the model, with which losses depend on the number of ranks.
    """
    if not config.deterministic.enabled:
        return None
    refuse_undetermined(config, module, mesh, optimizer)
    facts = {
        "deterministic.seed": str(config.deterministic.seed),
        "torch.get_num_threads(), which changes the order of sums in kernels of the host": str(torch.get_num_threads()),
    }
    check_same(facts, mesh.norm_group)
    torch.use_deterministic_algorithms(True)
    return OneOrder(config.deterministic.seed, mesh.size("dp"), mesh.rank("dp"))


def refuse_undetermined(config: DeepSpeedConfig, module: nn.Module, mesh: Mesh, optimizer: Optimizer | None) -> None:
    """Refuse what cannot be bitwise the same on another number of ranks."""
    _refuse_mesh(mesh, module)
    _refuse_keys(config)
    if optimizer is not None and not is_elementwise(optimizer):
        _refuse(
            f"the optimizer {type(optimizer).__name__}",
            "whose update of an element is not known to depend on that element alone, and shards differ",
            "use AdamW, SGD, Adagrad or Lion",
        )
    for name, size in expert_sizes(module).items():
        if size > 1:
            _refuse(f"experts divided over {size} ranks ({name})", "which take tokens of several", "use ep_size 1")
    for path, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            _refuse(
                f"module {path or '(the model)'}, a {type(part).__name__}",
                "whose running statistics are those of the micro-batches of one rank",
                "use LayerNorm or GroupNorm, or track_running_stats=False",
            )


def _refuse_mesh(mesh: Mesh, module: nn.Module) -> None:
    if isinstance(module, PipelineModule) or mesh.size("pp") > 1:
        _refuse("a pipeline", "which computes and sums several micro-batches at a time", "train without one")
    for axis, name in (("tp", "tensor"), ("sp", "sequence")):
        if (size := mesh.size(axis)) > 1:
            _refuse(f"{size} {name}-parallel ranks", "whose matrix products have other shapes and sums", "use 1")
    if (size := mesh.size("dp")) & (size - 1):
        _refuse(f"{size} data-parallel ranks", "which is no power of two, as one binary tree needs", "use 2, 4, 8 ...")


def _refuse_keys(config: DeepSpeedConfig) -> None:
    zero, efficiency = config.zero_optimization, config.data_efficiency
    rounds = "which rounds in blocks that another number of ranks cuts elsewhere"
    given = {
        "zero_optimization.zero_quantized_weights": (zero.zero_quantized_weights, rounds),
        "zero_optimization.zero_quantized_gradients": (zero.zero_quantized_gradients, rounds),
        "zero_optimization.zero_quantized_nontrainable_weights": (zero.zero_quantized_nontrainable_weights, rounds),
        "zero_optimization.mics_shard_size": (zero.mics_shard_size > 0, "whose copies are summed after the steps"),
        "communication_data_type": (
            config.communication_data_type not in (None, "fp32"),
            "which rounds gradients that cross, and one rank sends none",
        ),
        "data_types.grad_accum_dtype": (
            config.data_types.grad_accum_dtype not in (None, "fp32"),
            "and sums in one order are made in fp32",
        ),
        "gradient_predivide_factor": (
            config.gradient_predivide_factor != 1.0 and not config.prescale_gradients,
            "and gradients are divided by the number of ranks, which rounds nothing",
        ),
        "compression_training": (asks_for_steps(config.compression_training), "whose ranges are those of one rank"),
        "quantize_training": (asks_for_moq(config), "whose periods follow the losses of one rank"),
        "data_efficiency.data_sampling": (
            efficiency.asks_for_curriculum() or efficiency.asks_for_dynamic_batching(),
            "whose batches follow from the number of ranks",
        ),
    }
    for name, (is_given, reason) in given.items():
        if is_given:
            _refuse(f"the key {name}", reason, "leave it out")


def _refuse(found: str, reason: str, instead: str) -> None:
    raise ConfigError(
        f"deterministic.enabled: asked for losses that are bitwise the same for every number of ranks, and found "
        f"{found}, {reason}; {instead}, or set deterministic.enabled to false"
    )
