"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks.

Data-parallel ranks are those that see different samples (`Mesh.size("dp")`); ranks that divide a sequence or a model
are not counted again. Any two of the three give the third; the train size or the micro size alone gives all, with one
accumulation step. Pure integers; `root.DeepSpeedConfig` calls it once.
"""

from dataclasses import dataclass

from deepspeed.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchTriple:
    """Samples per update over all ranks; samples per data-parallel rank and forward; forwards per update."""

    train: int
    micro: int
    steps: int


def resolve_batch(train: int | None, micro: int | None, steps: int | None, world_size: int) -> BatchTriple:
    """Fill what is None and check the product. `world_size`: data-parallel ranks. Raises ConfigError."""
    for name, value in ((TRAIN, train), (MICRO, micro), (STEPS, steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: found {value}; allowed: an integer >= 1")
    if world_size < 1:
        raise ConfigError(
            f"world_size: found {world_size}; allowed: an integer >= 1, the number of data-parallel ranks"
        )

    if train is None and micro is None:
        found = f"only {STEPS} ({steps})" if steps is not None else f"neither it, nor {MICRO}, nor {STEPS}"
        raise ConfigError(f"{TRAIN}: found {found}; give {TRAIN} or {MICRO}")
    if train is None:
        assert micro is not None
        steps = 1 if steps is None else steps
        return BatchTriple(micro * steps * world_size, micro, steps)
    if micro is None:
        steps = 1 if steps is None else steps
        micro = _quotient(train, STEPS, steps, world_size)
    elif steps is None:
        steps = _quotient(train, MICRO, micro, world_size)
    if micro * steps * world_size != train:
        raise ConfigError(_inconsistent(train, micro, steps, world_size))
    return BatchTriple(train, micro, steps)


def _quotient(train: int, name: str, size: int, world_size: int) -> int:
    """The size that is not given, from `train` and `size`, the value of the key `name`. Raises ConfigError."""
    product = size * world_size
    if train % product:
        raise ConfigError(
            f"{TRAIN}: found {train}, which is not a multiple of {name} x data-parallel ranks = {size} x {world_size} "
            f"= {product}; change {TRAIN} or {name}"
        )
    return train // product


def _inconsistent(train: int, micro: int, steps: int, world_size: int) -> str:
    product = micro * steps * world_size
    return (
        f"{TRAIN}: found {train}, which is not {MICRO} x {STEPS} x data-parallel ranks = {micro} x {steps} x "
        f"{world_size} = {product}; {_remedy(train, micro * steps, world_size)}"
    )


def _remedy(train: int, samples_of_rank: int, world_size: int) -> str:
    if world_size > 1 and train == samples_of_rank:
        return (
            f"it is right for 1 rank, so what wrote it saw one process where there are {world_size}. Leave {TRAIN} "
            "out; a library that wrote it is to be started for as many processes, and Accelerate without an "
            'accelerator device also takes kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]'
        )
    return "change one of them, or give two that divide evenly and leave the third out"
