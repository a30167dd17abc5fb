"""The layers of a pipeline. `LayerSpec` stores how to build a layer, so only the ranks of its stage build it.

`partition_balanced` cuts a list of layers into contiguous, non-empty parts; the heaviest part is as light as possible.
"""

import itertools
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import torch
from torch.nn import Module

from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError, counted

METHODS = ("parameters", "uniform", "type:REGEX", "profile")
_NUM_RUNS = 3  # runs of each layer to measure its time


class LayerSpec:
    """A module's class and its arguments.

        layers = [LayerSpec(torch.nn.Linear, 16, 64), LayerSpec(torch.nn.ReLU), LayerSpec(torch.nn.Linear, 64, 4)]

    Args:
        typename: a subclass of `torch.nn.Module`.
        *module_args: its positional arguments.
        **module_kwargs: its keyword arguments.

    Raises:
        ConfigError: `typename` is not a subclass of `torch.nn.Module`.
    """

    def __init__(self, typename: type[Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, Module)):
            raise ConfigError(f"{type(self).__name__}: found {typename!r}; give a subclass of torch.nn.Module")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.global_rank = -1

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *given])})"

    def build(self, log: bool = False) -> Module:
        """Build a new module; `log` is accepted for compatibility."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def num_parameters(self) -> int:
        """Return the number of trainable parameter elements; builds the module on the meta device."""
        with torch.device("meta"):
            module = self.build()
        return count_parameters(module)


class TiedLayerSpec(LayerSpec):
    """A layer that shares one module with all layers of the same key, in any stages.

    Every stage with such a layer holds a copy of the module. The copies start from the initial weights of the first of
    these stages. Gradients of all parameters are summed over the stages, so the copies stay equal.

    Args:
        key: the name of the shared module.
        typename: its class.
        *module_args: its positional arguments.
        forward_fn: called as `forward_fn(module, inputs)` instead of the module itself.
        tied_weight_attr: the shared tensors, for example "weight" or ["word.weight", "bias"]; they must exist. All
            other parameters of the module are shared, too.
        **module_kwargs: keyword arguments of the class.

    Raises:
        ConfigError: the key cannot be part of a parameter's name.
    """

    def __init__(
        self,
        key: str,
        typename: type[Module],
        *module_args: Any,
        forward_fn: Callable[[Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        if not isinstance(key, str) or not key or "." in key:
            raise ConfigError(f"TiedLayerSpec: found the key {key!r}; give a name without dots")
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def check(self, module: Module) -> None:
        """Raise ConfigError if the module lacks a tensor of `tied_weight_attr`."""
        for path in self.tied_weight_attr:
            found: Any = module
            for name in path.split("."):
                found = getattr(found, name, None)
            if not isinstance(found, torch.Tensor):
                has = ", ".join(name for name, _ in module.named_parameters()) or "none"
                raise ConfigError(
                    f"TiedLayerSpec({self.key!r}): {self.typename.__name__} has no tensor {path!r}; its parameters are "
                    f"{has}, so give one of them as tied_weight_attr"
                )


def count_parameters(module: Module) -> int:
    """Return the number of trainable parameter elements."""
    return sum(param.numel() for param in module.parameters() if param.requires_grad)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Cut `num_items` layers into parts of nearly equal length; the first parts are longer. Returns `num_parts` + 1
    numbers, from 0."""
    return partition_balanced([1] * num_items, num_parts)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Cut layers with these weights into parts, so that the heaviest part is as light as possible.

        >>> partition_balanced([4, 1, 1, 1, 1], num_parts=2)
        [0, 1, 5]

    Ties go to the cuts with the smallest sum of squares, then to the cuts with lighter last parts. Every part has at
    least one layer.

    Args:
        weights: the weight of each layer, 0 or more.
        num_parts: at most the number of layers.

    Returns:
        `num_parts` + 1 numbers: part i has the layers from number i up to, but without, number i + 1.

    Raises:
        ConfigError: there are more parts than layers.
    """
    if not 1 <= num_parts <= len(weights):
        raise ConfigError(
            f"pipeline: found {counted(num_parts, 'part')} for {counted(len(weights), 'layer')}; each part needs a "
            f"layer, so use 1 to {len(weights)}"
        )
    sums = [0, *itertools.accumulate(weights)]
    ends = range(1, len(sums))
    bounds = sorted({sums[stop] - sums[start] for stop in ends for start in range(stop)})
    bound = bounds[bisect_left(bounds, True, key=lambda each: _fits(sums, num_parts, each))]
    return _smoothest(sums, num_parts, bound)


def _fits(sums: Sequence[float], num_parts: int, bound: float) -> bool:
    """Whether parts of weight at most `bound` can cover all layers. Greedy: each part takes as many as fit."""
    start, num_layers = 0, len(sums) - 1
    for num_left in reversed(range(num_parts)):
        stop = start
        while stop < num_layers - num_left and sums[stop + 1] - sums[start] <= bound:
            stop += 1
        if stop == start:
            return False
        start = stop
    return start == num_layers


def _smoothest(sums: Sequence[float], num_parts: int, bound: float) -> list[int]:
    """Find the cuts with the smallest sum of squares among parts of at most `bound`, by dynamic programming."""
    num_layers = len(sums) - 1
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # by part: end -> (sum of squares, start)
    for part in range(1, num_parts + 1):
        found: dict[int, tuple[float, int]] = {}
        for start, (squares, _) in best[-1].items():
            for stop in range(start + 1, num_layers - (num_parts - part) + 1):
                weight = sums[stop] - sums[start]
                if weight > bound:
                    break
                if stop not in found or (squares + weight**2, -start) < (found[stop][0], -found[stop][1]):
                    found[stop] = (squares + weight**2, start)
        best.append(found)
    cuts = [num_layers]
    for found in reversed(best[1:]):
        cuts.append(found[cuts[-1]][1])
    return cuts[::-1]


def type_weights(method: str, names: Sequence[str]) -> list[int]:
    """Return 1 for each layer with a class name that matches the regex of "type:REGEX", ignoring case; else 0."""
    pattern = method.partition(":")[2]
    try:
        matcher = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"partition_method: found {method!r}, whose expression is wrong: {error}") from error
    return [int(matcher.search(name) is not None) for name in names]


def check_method(method: str) -> str:
    """Return the method in lower case; "type:REGEX" is returned unchanged.

    Raises:
        ConfigError: the method is unknown.
    """
    known = method.lower() if isinstance(method, str) else ""
    if known.startswith("type:"):
        return method
    if known not in METHODS:
        raise ConfigError(f"partition_method: found {method!r}; use one of {', '.join(METHODS)}")
    return known


class Timed(Protocol):
    """A layer to measure."""

    module: Module | None

    def __call__(self, inputs: Any) -> Any:
        """Run the layer."""


def times_of_layers(layers: Sequence[Timed], inputs: Any) -> list[float]:
    """Return the seconds for forward and backward of each layer on the first rank, the median of three. A collective.

    Args:
        layers: the layers in order; each gets the outputs of the previous layer.
        inputs: the inputs of the first layer.
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
