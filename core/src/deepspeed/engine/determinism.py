"""The section `deterministic`: a run whose losses are bitwise the same for every number of ranks, stage of ZeRO,
placement and number of accumulation steps that share the global batch in micro-batches of the same samples.

    sums of gradients     one binary tree over the micro-batches of a step       `FixedOrder`
    their norm            a sum that no order changes                            `ExactSquares`
    random numbers        of a forward: from (seed, step, micro-batch)           `OneOrder`
    samples               of `training_data`: whole micro-batches by turns       `DeepSpeedDataLoader`
    kernels               those that torch calls deterministic; others raise     `torch.use_deterministic_algorithms`

What cannot be bitwise the same is refused by its name: keys in `sharding.py`, all else here. Called by `build.py`, once
per engine.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.values import check_same
from deepspeed.config.training import DeterministicConfig
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
    section: DeterministicConfig, module: nn.Module, mesh: Mesh, optimizer: Optimizer | None
) -> OneOrder | None:
    """Turn determinism on, where the section asks for it; None: it does not. A collective.

    Raises:
        ConfigError: losses depend on the number of ranks with this model, mesh or optimizer.
    """
    if not section.enabled:
        return None
    _refuse_mesh(mesh, module)
    _refuse_parts(module, optimizer)
    threads = "torch.get_num_threads(), which changes the order of sums in kernels of the host"
    check_same({threads: str(torch.get_num_threads())}, mesh.norm_group)
    torch.use_deterministic_algorithms(True)
    return OneOrder(section.seed, mesh.size("dp"), mesh.rank("dp"))


def _refuse_parts(module: nn.Module, optimizer: Optimizer | None) -> None:
    if optimizer is not None and not is_elementwise(optimizer):
        refuse_undetermined(
            f"the optimizer {type(optimizer).__name__}",
            "whose update of an element is not known to depend on that element alone, and shards differ",
            "use AdamW, SGD, Adagrad or Lion",
        )
    for name, size in expert_sizes(module).items():
        if size > 1:
            refuse_undetermined(
                f"experts divided over {size} ranks ({name})", "which take tokens of several", "use ep_size 1"
            )
    for path, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            refuse_undetermined(
                f"module {path or '(the model)'}, a {type(part).__name__}",
                "whose running statistics are those of the micro-batches of one rank",
                "use LayerNorm or GroupNorm, or track_running_stats=False",
            )


def _refuse_mesh(mesh: Mesh, module: nn.Module) -> None:
    if isinstance(module, PipelineModule) or mesh.size("pp") > 1:
        refuse_undetermined(
            "a pipeline", "which computes and sums several micro-batches at a time", "train without one"
        )
    for axis, name in (("tp", "tensor"), ("sp", "sequence")):
        if (size := mesh.size(axis)) > 1:
            refuse_undetermined(
                f"{size} {name}-parallel ranks", "whose matrix products have other shapes and sums", "use 1"
            )
    if (size := mesh.size("dp")) & (size - 1):
        refuse_undetermined(
            f"{size} data-parallel ranks", "which is no power of two, as one binary tree needs", "use 2, 4, 8 ..."
        )


def refuse_undetermined(found: str, reason: str, instead: str) -> NoReturn:
    """Raise the error of what cannot be bitwise the same on another number of ranks."""
    raise ConfigError(
        f"deterministic.enabled: asked for losses that are bitwise the same for every number of ranks, and found "
        f"{found}, {reason}; {instead}, or set deterministic.enabled to false"
    )
