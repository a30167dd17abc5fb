"""The times of layers, for cutting a model into stages that take equally long. Called by `module.py`."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Protocol

import torch
from torch.nn import Module

from deepspeed.comm.values import all_gather_values

_NUM_RUNS = 3


class Timed(Protocol):
    """A layer."""

    module: Module | None

    def __call__(self, inputs: Any) -> Any:
        """Run it."""


def times_of_layers(layers: Sequence[Timed], inputs: Any) -> list[float]:
    """Seconds that a forward and a backward of each layer take on the first rank, the median of three. A collective.

    Args:
        layers: in order; each gets what the one before it returned.
        inputs: of the first.
    """
    seconds = []
    for layer in layers:
        runs = []
        for _ in range(_NUM_RUNS):
            start = time.perf_counter()
            outputs = layer(inputs)
            _backward(layer, inputs, outputs)
            runs.append(time.perf_counter() - start)
        seconds.append(median(runs))
        detached = tuple(each.detach().requires_grad_(each.requires_grad) for each in _as_tuple(outputs))
        inputs = detached if isinstance(outputs, tuple) else detached[0]
    return [float(each) for each in all_gather_values(seconds)[0]]


def _backward(layer: Timed, inputs: Any, outputs: Any) -> None:
    roots = [output for output in _as_tuple(outputs) if output.requires_grad]
    own = list(layer.module.parameters()) if layer.module is not None else []
    leaves = [tensor for tensor in [*_as_tuple(inputs), *own] if tensor.requires_grad]
    if roots:
        torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)
