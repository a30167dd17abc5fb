"""What may be saved: only what `torch.load(weights_only=True)` will give back.

Checkpoints are loaded without running code from them, so an object that only a full pickle can carry could be saved but
never loaded again. It is refused at the first save, not at the resume a week later.

Allowed: tensors, numbers, strings, bytes, None, torch dtypes, devices and sizes; in dicts, OrderedDicts, Counters,
lists, tuples and sets; and whatever the user admitted through `torch.serialization.add_safe_globals`. Turned into an
equal plain value: numpy scalars, defaultdicts, and tensors that carry Python attributes. Refused: everything else.
"""

import collections
import io
import operator
import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed.checkpoint.consolidate_files import DEEPSPEED_CLASSES
from deepspeed.errors import ConfigError
from deepspeed.zero.pending_tensor import PendingTensor

_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size}
)
_MAPPINGS = frozenset({dict, collections.OrderedDict, collections.Counter, collections.defaultdict})
_SHOWN = 5  # offending places in one message


def make_loadable(state: Any, name: str) -> Any:
    """`state` with only values that load again; the very same object when nothing had to change.

    Called before a file is written. `name` is how messages call the whole ("client_state"). `ConfigError` names each
    place that cannot be saved, with its type and what to store in its place.
    """
    walk = _Walk()
    result = walk.visit(state, name)
    if walk.refused:
        more = f" and {len(walk.refused) - _SHOWN} more" if len(walk.refused) > _SHOWN else ""
        raise ConfigError(
            f"{'; '.join(walk.refused[:_SHOWN])}{more}: such objects cannot be loaded again, because checkpoints are "
            "loaded with weights_only=True. Store plain values in their place (for example vars(args), value.item(), "
            "torch.from_numpy(array), str(path)), or admit the type with torch.serialization.add_safe_globals, also "
            "where you load."
        )
    return result


class _Walk:
    """One pass over a state; collects what must be refused."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._done: dict[int, Any] = {}  # id of a container -> its result: shared containers stay shared, cycles end

    def visit(self, value: Any, place: str) -> Any:
        kind = type(value)
        if kind in _ATOMS or kind is PendingTensor:
            return value
        if kind in (Tensor, torch.nn.Parameter):
            bare = kind is Tensor and not value.requires_grad and not value.__dict__
            return value if bare else value.detach()  # attributes of a tensor may be anything, also hooks
        if isinstance(value, np.generic):
            return self.visit(value.item(), place)
        if kind in _MAPPINGS or kind in (list, tuple, set):
            if id(value) not in self._done:
                self._done[id(value)] = value
                self._done[id(value)] = self._container(value, place)
            return self._done[id(value)]
        if not _loads_again(value):
            self.refused.append(f"{place} is a {kind.__module__}.{kind.__qualname__}")
        return value

    def _container(self, value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return self._mapping(value, place)
        if isinstance(value, set):
            plain = {self.visit(item, f"an item of {place}") for item in value}
            return plain if any(isinstance(item, np.generic) for item in value) else value
        items = [self.visit(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return value if all(map(operator.is_, items, value)) else type(value)(items)

    def _mapping(self, value: dict[Any, Any], place: str) -> Any:
        attributes = getattr(value, "__dict__", {})  # a module's `state_dict()` has `_metadata` there
        if attributes:
            self.visit(attributes, f"{place}.__dict__")
        keys = [self.visit(key, f"the key {key!r} of {place}") for key in value]
        items = [self.visit(item, f"{place}[{key!r}]") for key, item in value.items()]
        plain = type(value) is not collections.defaultdict
        if plain and all(map(operator.is_, keys, value)) and all(map(operator.is_, items, value.values())):
            return value
        changed: dict[Any, Any] = type(value)() if plain else {}
        changed.update(dict(zip(keys, items, strict=True)))
        if attributes:
            changed.__dict__.update(attributes)
        return changed


def _loads_again(value: Any) -> bool:
    """Whether one object of an unusual type survives a save and a `weights_only` load here and now."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        with torch.serialization.safe_globals(DEEPSPEED_CLASSES):
            torch.load(buffer, map_location="cpu", weights_only=True)
    except (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError):
        return False
    return True
