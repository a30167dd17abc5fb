"""What must be equal on all ranks before they reduce a gradient together: compared when an engine is built.

Ranks whose layouts differ would run different collectives, and wait for each other or mix up elements. So what the
layout follows from is compared, and a rank that differs is named in one error, raised on every rank. What a rank would
choose by itself is settled for all (`Holding.agree`). Called by `synchronize.py` and `holding.py`.
"""

import hashlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError
from deepspeed.zero.param_unit import shape_of


def check_same(facts: Mapping[str, str], group: ProcessGroup | None = None) -> None:
    """Compare texts with the other ranks, which give the same keys. A collective over `group`.

    Raises:
        ConfigError: on every rank, for the first key whose text differs; it names the ranks.
    """
    everything = _digest("".join(map(_digest, facts.values())))
    if len(set(all_gather_values(everything, group))) == 1:
        return
    by_rank = all_gather_values([_digest(text) for text in facts.values()], group)
    for (name, text), digests in zip(facts.items(), zip(*by_rank, strict=True), strict=True):
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ConfigError(
                f"initialize: {name} must be the same on all ranks, and {named_ranks(others)} "
                f"{'differs' if len(others) == 1 else 'differ'} from rank 0. This rank "
                f"({torch.distributed.get_rank(group)}) has: {textwrap.shorten(text, 200) or 'nothing'}. Build the "
                "same model and optimizer, and give the same configuration, on every rank"
            )


def described(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Names, shapes and dtypes as a text."""
    return ", ".join(f"{name} {tuple(shape_of(tensor))} {tensor.dtype}" for name, tensor in tensors)


def settings_of(group: Mapping[str, Any]) -> str:
    """A group of parameters of an optimizer without them: its learning rate and what else is a plain value."""
    shown = []
    for name, value in sorted(group.items()):
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if name != "params" and isinstance(plain, bool | int | float | str | tuple):
            shown.append(f"{name} {plain}")
    return ", ".join(shown)


def named_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
