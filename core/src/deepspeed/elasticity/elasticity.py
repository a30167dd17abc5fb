"""Choose a global batch size that works for many numbers of ranks, and the micro-batch for one of them.

A number of ranks is valid for a batch if some micro-batch divides the samples of a rank. So the batch needs many
divisors. The candidates are each micro-batch, and their least common multiple, times the largest highly composite
number that stays within `max_train_batch_size`. The candidate with the most valid numbers of ranks wins. Version 0.2
counts whole nodes, each with `num_gpus_per_node / model_parallel_size` data-parallel ranks, and gives an invalid number
of ranks its own batch size.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

from deepspeed.elasticity.config import (
    DEEPSPEED_ELASTICITY_CONFIG,
    ELASTICITY,
    ENABLED,
    MAX_ACCEPTABLE_BATCH_SIZE,
    MICRO_BATCHES,
    MINIMUM_DEEPSPEED_VERSION,
    VERSION,
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from deepspeed.errors import counted, shown
from deepspeed.log import logger, warn_once

# Highly composite numbers (OEIS A002182): each has more divisors than every smaller number.
HCN_LIST = [
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
]
_SHOWN_SIZES = 12  # maximum number of sizes in a message


class ElasticBatch(NamedTuple):
    """An `ElasticBatch` is the chosen global batch size, with the numbers of ranks that can compute it.

    Args:
        train: samples per update over all ranks.
        valid: numbers of data-parallel ranks that can compute the batch, ascending.
        micro: samples per forward pass; None if no number of ranks was given.
    """

    train: int
    valid: list[int]
    micro: int | None = None


def is_torch_elastic_compatible() -> bool:
    """Return True: every supported torch has an elastic agent."""
    return True


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the configuration, as a dict, enables `elasticity`."""
    return bool((ds_config.get(ELASTICITY) or {}).get(ENABLED, False))


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Return the global batch size, and the numbers of data-parallel ranks that are valid for it.

    Args:
        ds_config: the configuration as a dict; its section `elasticity` has to be enabled.
        target_deepspeed_version: version of the DeepSpeed for the training; 0.3.8 or newer.
        world_size: number of ranks; if given, the micro-batch is a third value. 0: unknown; version 0.2 and
            `return_microbatch` then use the environment variable WORLD_SIZE.
        return_microbatch: whether the micro-batch is a third value in any case.

    Raises:
        ElasticityConfigError: the section is invalid, or the number of ranks is needed but unknown.
        ElasticityIncompatibleWorldSize: the batch size cannot be divided over this number of ranks.
    """
    if not isinstance(ds_config, Mapping):
        raise ElasticityConfigError(f"ds_config: found {type(ds_config).__name__}; give the configuration as a dict")
    if ELASTICITY not in ds_config:
        raise ElasticityConfigError(f"{ELASTICITY}: the configuration has no such section; add it, with enabled true")
    config = ElasticityConfig(ds_config[ELASTICITY])
    if not config.enabled:
        raise ElasticityConfigError(f"{ELASTICITY}.{ENABLED}: found false; set it to true to have batch sizes chosen")
    _check_version(target_deepspeed_version)
    wants_micro = world_size > 0 or return_microbatch
    if world_size < 1 and (wants_micro or config.version > 0.1):
        world_size = _environment_world_size(needed=wants_micro)
    found = choose_batch(config, world_size)
    if not wants_micro:
        return found.train, found.valid
    assert found.micro is not None
    return found.train, found.valid, found.micro


def get_compatible_gpus(ds_config: Mapping[str, Any], target_deepspeed_version: str) -> tuple[int, list[int]]:
    """Call `compute_elastic_config` without a number of ranks. This is an older name."""
    found = compute_elastic_config(ds_config, target_deepspeed_version)
    return found[0], found[1]


def choose_batch(config: ElasticityConfig, num_ranks: int) -> ElasticBatch:
    """Return the batch for a checked section.

    Args:
        config: the section.
        num_ranks: the number of all ranks, including model-parallel ones; 0 if unknown.

    Raises:
        ElasticityConfigError: no number of ranks from min_gpus to max_gpus can compute a batch of the allowed size.
        ElasticityIncompatibleWorldSize: this number of ranks cannot compute the batch.
    """
    by_node = config.version > 0.1
    node_size = config.num_gpus_per_node if by_node else 1
    dp_per_node = node_size // config.model_parallel_size if by_node else 1
    micros = sorted({*config.micro_batches})
    limit = config.max_acceptable_batch_size // dp_per_node
    bases = [base for base in {*micros, math.lcm(*micros)} if base <= limit]
    fewest, most = math.ceil(config.min_gpus / node_size), config.max_gpus // node_size
    train, nodes = get_best_candidates(
        get_candidate_batch_sizes(bases, limit), micros, fewest, most, config.prefer_larger_batch_size
    )
    found = ElasticBatch(train * dp_per_node, [each * dp_per_node for each in nodes])
    if num_ranks:
        num_parallel = num_ranks // config.model_parallel_size
        if num_parallel * config.model_parallel_size != num_ranks:
            raise ElasticityIncompatibleWorldSize(
                f"elasticity: {num_ranks} ranks are no multiple of model_parallel_size ({config.model_parallel_size}); "
                "start another number"
            )
        if num_parallel in found.valid:
            return found._replace(micro=_largest_micro(found.train // num_parallel, micros))
        if by_node:
            own = _own_batch(config, num_parallel, micros)
            warn_once(
                f"elasticity: {num_parallel} data-parallel ranks cannot compute the batch of {found.train} that others "
                f"can, and train with one of {own.train}; those that can are {_listed(found.valid, near=num_parallel)}"
            )
            return own
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: {counted(num_ranks, 'rank')} cannot compute a batch of {found.train}; the "
            f"numbers that can are {_listed(found.valid, near=num_ranks)}; start one of these, or change "
            f"{MICRO_BATCHES}"
        )
    if not found.valid:
        raise ElasticityConfigError(
            f"elasticity: no number of ranks from min_gpus ({config.min_gpus}) to max_gpus ({config.max_gpus}) can "
            f"compute a batch of up to {config.max_acceptable_batch_size} of micro-batches {micros}; widen the range"
        )
    return found


def get_candidate_batch_sizes(base_list: Iterable[int], max_acceptable_batch_size: int) -> list[int]:
    """Return each base times the largest highly composite number within the limit, ascending, without duplicates."""
    candidates = set()
    for base in base_list:
        scales = [number for number in HCN_LIST if base * number <= max_acceptable_batch_size]
        if scales:
            candidates.add(base * scales[-1])
    return sorted(candidates)


def get_valid_gpus(
    batch_size: int, micro_batches: Sequence[int], min_valid_gpus: int, max_valid_gpus: int
) -> list[int]:
    """Return the numbers of ranks for which some micro-batch divides a rank's samples, ascending."""
    valid = set()
    for micro in micro_batches:
        if batch_size % micro == 0:
            passes = batch_size // micro
            for divisor in range(1, math.isqrt(passes) + 1):
                if passes % divisor == 0:
                    valid |= {divisor, passes // divisor}
    return sorted(number for number in valid if min_valid_gpus <= number <= max_valid_gpus)


def get_best_candidates(
    candidate_batch_sizes: Iterable[int],
    micro_batches: Sequence[int],
    min_gpus: int,
    max_gpus: int,
    prefer_larger: bool,
) -> tuple[int, list[int]]:
    """Return the batch size with the most valid numbers of ranks, and these numbers. `prefer_larger` breaks ties."""
    best: tuple[int, list[int]] = (min(micro_batches), [])
    best_rank: tuple[int, int] | None = None
    for batch_size in candidate_batch_sizes:
        valid = get_valid_gpus(batch_size, micro_batches, min_gpus, max_gpus)
        rank = len(valid), batch_size if prefer_larger else -batch_size
        if valid and (best_rank is None or rank > best_rank):
            best, best_rank = (batch_size, valid), rank
    return best


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Compare the section with the scheduler's section, if the scheduler has put that into the environment.

    Raises:
        ElasticityConfigError: a key that affects the valid numbers of ranks, which the scheduler uses, differs.
    """
    text = os.environ.get(DEEPSPEED_ELASTICITY_CONFIG)
    if text is None:
        logger.debug(f"{DEEPSPEED_ELASTICITY_CONFIG} is not set: the scheduler may choose any number of ranks")
        return
    try:
        said = json.loads(text)
    except json.JSONDecodeError as error:
        raise ElasticityConfigError(
            f"{DEEPSPEED_ELASTICITY_CONFIG}: found {shown(text)}, which is no JSON ({error}); mend or unset it"
        ) from error
    if not isinstance(said, dict):
        raise ElasticityConfigError(
            f"{DEEPSPEED_ELASTICITY_CONFIG}: found {shown(text)}; give the section as an object"
        )
    theirs = ElasticityConfig(said.get(ELASTICITY, said))
    ours = ElasticityConfig(runtime_elastic_config_dict)
    for name, attribute in (
        (MAX_ACCEPTABLE_BATCH_SIZE, "max_acceptable_batch_size"),
        (MICRO_BATCHES, "micro_batches"),
        (VERSION, "version"),
    ):
        found, scheduled = getattr(ours, attribute), getattr(theirs, attribute)
        if found != scheduled:
            raise ElasticityConfigError(
                f"elasticity.{name}: found {found}, but the scheduler was given {scheduled} "
                f"({DEEPSPEED_ELASTICITY_CONFIG}); a job keeps its section for as long as it runs, restore it"
            )


def _own_batch(config: ElasticityConfig, num_parallel: int, micros: Sequence[int]) -> ElasticBatch:
    """Return version 0.2's batch for a number of ranks that is invalid for the common batch."""
    limit = config.max_acceptable_batch_size
    sizes = {micro: limit // (micro * num_parallel) * micro * num_parallel for micro in micros}
    sizes = {micro: size for micro, size in sizes.items() if size}
    if not sizes:
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: {num_parallel} data-parallel ranks with a micro-batch of {min(micros)} each exceed "
            f"{MAX_ACCEPTABLE_BATCH_SIZE} ({limit}); start fewer"
        )
    train = max(sizes.values()) if config.prefer_larger_batch_size else min(sizes.values())
    return ElasticBatch(train, [num_parallel], _largest_micro(train // num_parallel, micros))


def _largest_micro(samples_of_rank: int, micros: Sequence[int]) -> int:
    """Return the largest micro-batch that divides a rank's samples."""
    return max(micro for micro in micros if samples_of_rank % micro == 0)


def _environment_world_size(needed: bool) -> int:
    """Return WORLD_SIZE; 0 if it is neither set nor needed."""
    text = os.environ.get("WORLD_SIZE", "")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text or needed:
        raise ElasticityConfigError(
            f"WORLD_SIZE: found {shown(text)}, and the micro-batch depends on the number of ranks; give world_size, or "
            "set the variable to a whole number of 1 or more"
        )
    return 0


def _check_version(target: str) -> None:
    try:
        is_old = Version(target) < Version(MINIMUM_DEEPSPEED_VERSION)
    except (InvalidVersion, TypeError) as error:
        raise ElasticityError(f"target_deepspeed_version: found {target!r}; give a version such as 0.19.6") from error
    if is_old:
        raise ElasticityError(
            f"target_deepspeed_version: found {target}; elasticity is there from {MINIMUM_DEEPSPEED_VERSION} on"
        )


def _listed(sizes: Sequence[int], near: int) -> str:
    """Format the sizes for a message; of a long list, only the sizes closest to `near`."""
    if len(sizes) <= _SHOWN_SIZES:
        return ", ".join(map(str, sizes)) or "none"
    nearest = sorted(sorted(sizes, key=lambda size: abs(size - near))[:_SHOWN_SIZES])
    return f"{', '.join(map(str, nearest))} ({len(sizes)} in all)"
