"""Take the micro-batches of one batch from the iterators of the first and the last stage; all ranks agree on them.

If an iterator ends early or fails, or two iterators disagree, other stages would hang. So all micro-batches are taken
and compared between ranks before the first of them is computed. They are copied, as in DeepSpeed: an iterator may
reuse the memory of a micro-batch for the next, and a layer may change its input in place.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import deepspeed.comm as dist
from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.values import HeardFailure, all_gather_values
from deepspeed.errors import ConfigError, DeepSpeedError, StateError, counted, first_line

_KINDS: dict[str, type[DeepSpeedError]] = {"ConfigError": ConfigError, "StateError": StateError}


class DataFailed(Exception):
    """The script's own iterator or batch function raised on this rank.

    Args:
        number: the number of the micro-batch.
        error: the error that the user sees.
    """

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__(f"failed at micro-batch {number}: {_reason(error)}")
        self.error = error


@dataclass(frozen=True)
class Batch:
    """`Batch` holds the micro-batches that a stage loads for one batch.

    Args:
        micro_batches: (inputs, labels) of each; empty on stages that load nothing.
        shapes_vary: shapes between stages may change between micro-batches.
    """

    micro_batches: list[tuple[Any, Any]] = field(default_factory=list)
    shapes_vary: bool = False


def take_batch(
    iterator: Iterator[Any] | None,
    num_micro_batches: int,
    *,
    loads: bool,
    call: str,
    options: Mapping[str, Any],
    backend: GroupBackend,
    pipeline: int,
    stage: int,
    batch_fn: Callable[[Any], Any] | None,
    shapes_vary: bool,
    remedy: str = "pass an iterator",
) -> Batch:
    """Take the micro-batches of one batch. A collective of `backend`.

    Args:
        iterator: the data iterator; None: the caller has none.
        num_micro_batches: the number of micro-batches to take.
        loads: whether this stage takes samples.
        call: the name of the engine's method, for errors.
        options: the options of the call, equal on all ranks.
        backend: the backend over all ranks of the engine.
        pipeline: the number of this rank's pipeline; the first and the last stage of a pipeline see the same samples.
        stage: the stage of this rank.
        batch_fn: converts an item of the iterator to (inputs, labels).
        shapes_vary: treat shapes between stages as varying, whatever the shapes of the inputs.
        remedy: what the caller can do about a missing iterator, for the error.

    Raises:
        DataFailed: this rank's iterator or batch function raised; the other ranks know of the failure.
        HeardFailure: the iterator or batch function of another rank raised.
        StateError: on every rank: an iterator ended early.
        ConfigError: on every rank: an iterator is missing or does not return pairs, the stages have different shapes,
            or the ranks make different calls.
    """
    taken, problem, kind, reason = [], "", "", ""
    failed: DataFailed | None = None
    if loads:
        try:
            taken = _take(iterator, num_micro_batches, batch_fn, remedy)
        except (StateError, ConfigError) as error:
            problem, kind = str(error), type(error).__name__
        except DataFailed as error:
            problem, reason, failed = str(error), _reason(error.error), error
    shapes = [[_shape(inputs), _shape(labels)] for inputs, labels in taken]
    shapes = shapes[:1] if all(each == shapes[0] for each in shapes) else shapes
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
    asked = f"{call} of {counted(num_micro_batches, 'micro-batch', 'micro-batches')}"
    asked += f" with {shown}" if shown else ""
    own = {"asked": asked, "pipeline": pipeline, "stage": stage, "shapes": shapes}
    own |= {"problem": problem, "kind": kind, "reason": reason}
    found = all_gather_values(own, backend=backend)
    ranks = dist.get_all_ranks_from_group(backend.group)
    if failed is not None:
        raise failed
    for rank, theirs in zip(ranks, found, strict=True):
        if theirs["asked"] != found[0]["asked"]:
            raise ConfigError(
                f"{call}: rank {ranks[0]} asks for {found[0]['asked']}, and rank {rank} for {theirs['asked']}; all "
                "ranks make the same call"
            )
    for rank, theirs in zip(ranks, found, strict=True):
        if theirs["problem"]:
            text = f"{call}: the data iterator of rank {rank} (stage {theirs['stage']}) {theirs['problem']}"
            if theirs["reason"]:
                raise HeardFailure(text, f"rank {rank} failed with {theirs['reason']}")
            raise _KINDS[theirs["kind"]](text)
    _compare(found, call)
    return Batch(taken, shapes_vary or any(len(theirs["shapes"]) > 1 for theirs in found))


def _take(
    iterator: Iterator[Any] | None, num_micro_batches: int, batch_fn: Callable[[Any], Any] | None, remedy: str
) -> list[tuple[Any, Any]]:
    if iterator is None:
        raise ConfigError(f"is missing; {remedy}")
    if not isinstance(iterator, Iterator):
        raise ConfigError(
            f"is a {type(iterator).__name__}, of which each call would take the first samples; pass iter(...) of it, "
            "kept between calls, or call set_dataloader(loader)"
        )
    taken: list[tuple[Any, Any]] = []
    for number in range(num_micro_batches):
        try:
            each = next(iterator)
            each = each if batch_fn is None else batch_fn(each)
        except StopIteration:
            raise StateError(
                f"ended after {number} of {counted(num_micro_batches, 'micro-batch', 'micro-batches')}; each call "
                f"takes gradient_accumulation_steps ({num_micro_batches}) of them, so wrap the loader in "
                "deepspeed.utils.RepeatingLoader, or stop the loop before"
            ) from None
        except Exception as error:
            raise DataFailed(number, error) from error
        if not isinstance(each, tuple | list) or len(each) != 2:
            found = f"{type(each).__name__} of {len(each)}" if isinstance(each, tuple | list) else type(each).__name__
            raise ConfigError(
                f"gave a {found}; a micro-batch is a pair (inputs, labels), so return one, or make one of it with "
                "engine.set_batch_fn"
            )
        taken.append((tree_map(_copied, each[0]), tree_map(_copied, each[1])))
    return taken


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _copied(leaf: Any) -> Any:
    """Copy a tensor to separate memory, pinned if the tensor is pinned; return any other value unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.device.type == "cpu" and leaf.is_pinned():
        return torch.empty_like(leaf, pin_memory=True).copy_(leaf)
    return leaf.clone()


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    return [_shape(each) for each in value] if isinstance(value, tuple | list) else None


def _compare(found: list[dict[str, Any]], call: str) -> None:
    """Raise ConfigError if the first and last stage of a pipeline take batches of different shapes; None fits any."""
    first: dict[int, dict[str, Any]] = {}
    for theirs in found:
        if not theirs["shapes"]:
            continue
        other = first.setdefault(theirs["pipeline"], theirs)
        if other["stage"] == theirs["stage"]:
            continue
        for number in range(max(len(other["shapes"]), len(theirs["shapes"]))):
            one, two = (each["shapes"][min(number, len(each["shapes"]) - 1)] for each in (other, theirs))
            for name, mine, yours in zip(("inputs", "labels"), one, two, strict=True):
                if mine is not None and yours is not None and mine != yours:
                    raise ConfigError(
                        f"{call}: micro-batch {number} has {name} of shape {mine} on stage {other['stage']} and "
                        f"{yours} on stage {theirs['stage']}; the first and the last stage take the same batches, so "
                        "give both an iterator over the same data in the same order"
                    )
