"""Forwards that are captured once for each kind of inputs and then replayed.

A small model's forward takes the host longer than the device: each of its kernels is launched by itself. A replay
launches all of them at once. What a graph reads and writes stays where it was when it was captured, so inputs are
copied to there, and outputs copied from there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from deepspeed.accelerator import get_accelerator
from deepspeed.config.inference import GRAPHS
from deepspeed.errors import ConfigError, first_line
from deepspeed.log import warn_once

#: Graphs that are kept; each holds the memory of one forward. Further kinds of inputs run without.
MAX_KINDS = 16
# Inputs of these types are part of the kind: a forward may take another path for another value.
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass
class _Captured:
    """A graph, what it reads, and what it writes."""

    graph: Any
    inputs: list[Tensor]
    outputs: list[Any]  # tensors among them are the graph's
    output_spec: Any


class GraphedForward:
    """Call it as the forward that it is given, without gradients.

    The first call with inputs of a kind runs the forward as it is, and captures it for the calls that follow. Of a kind
    are inputs with equal structure, shapes, dtypes and plain values. Inputs or outputs that are other objects than
    tensors and plain values are never captured: a cache of keys and values is changed by the host, too.

    Args:
        forward: reads no tensor's value on the host.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._kinds: dict[Any, _Captured | None] = {}  # None: not captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward's outputs; tensors are the caller's own.

        Raises:
            ConfigError: the forward does something that no graph can hold.
        """
        leaves, spec = tree_flatten((args, kwargs))
        kind = _kind_of(leaves, spec)
        if kind is None or (kind not in self._kinds and len(self._kinds) >= MAX_KINDS):
            return self._forward(*args, **kwargs)
        if kind not in self._kinds:
            outputs = self._forward(*args, **kwargs)
            self._kinds[kind] = self._capture(leaves, spec) if _is_plain(outputs) else None
            return outputs
        captured = self._kinds[kind]
        if captured is None:
            return self._forward(*args, **kwargs)
        given = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        for at, value in zip(captured.inputs, given, strict=True):
            at.copy_(value)
        get_accelerator().replay_graph(captured.graph)
        outputs = [each.clone() if isinstance(each, Tensor) else each for each in captured.outputs]
        return tree_unflatten(outputs, captured.output_spec)

    def _capture(self, leaves: list[Any], spec: Any) -> _Captured:
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(own, spec)
        accelerator = get_accelerator()
        graph = accelerator.create_graph()
        accelerator.synchronize()
        try:
            with accelerator.capture_to_graph(graph):
                outputs, output_spec = tree_flatten(self._forward(*args, **kwargs))
        except RuntimeError as error:
            raise ConfigError(
                f"{GRAPHS}: the forward cannot be captured: {first_line(error)}; it may read a tensor's value "
                f"on the host. Leave {GRAPHS} at false"
            ) from error
        return _Captured(graph, [each for each in own if isinstance(each, Tensor)], outputs, output_spec)


def graphed(forward: Callable[..., Any]) -> GraphedForward | None:
    """`forward` by graphs; None, and a warning, where the accelerator records none."""
    accelerator = get_accelerator()
    if accelerator.is_graph_supported():
        return GraphedForward(forward)
    warn_once(
        f"{GRAPHS}: found true, but the accelerator {accelerator.device_name()!r} records no graphs; forwards "
        "run without, with the same results"
    )
    return None


def _kind_of(leaves: list[Any], spec: Any) -> Any:
    """None: a leaf is another object, or a tensor elsewhere, that no graph can hold."""
    found: list[Any] = [str(spec)]
    on_accelerator = get_accelerator().on_accelerator
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not on_accelerator(leaf):
                return None
            found.append((leaf.shape, leaf.dtype, leaf.device))
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf), leaf))
        else:
            return None
    return tuple(found)


def _is_plain(outputs: Any) -> bool:
    return all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in tree_flatten(outputs)[0])
