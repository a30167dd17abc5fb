"""The dtype of buffers: as the model came, unless `data_types.buffer_dtype` says otherwise.

Rotary frequencies, score corrections and counters lose digits that matter in 16 bits, so that a low precision of the
weights is none of theirs. Called by `engine/build.py`, when the weights have their dtype.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from deepspeed.config.base import AUTO
from deepspeed.precision.policy import cast_floating


def cast_buffers(
    module: Module, dtype: torch.dtype | None, kept: Iterable[str], model_dtype: torch.dtype | None
) -> None:
    """Cast the floating buffers of a model.

    Args:
        dtype: that they get; None: they stay.
        kept: "auto", or regular expressions for whole parts of the names of buffers that stay.
        model_dtype: of the weights, to find what "auto" means; None: their own.
    """
    if dtype is not None:
        patterns = _patterns_of(module, model_dtype) if kept == AUTO else list(kept)
        stays = re.compile("|".join(rf"(^|\.)({pattern})($|\.)" for pattern in patterns)) if patterns else None
        named = module.named_buffers()
        cast_floating((buffer for name, buffer in named if stays is None or not stays.search(name)), dtype)
    for part in module.modules():
        if isinstance(part, _NormBase):
            _follow_weights(part)


def _patterns_of(module: Module, model_dtype: torch.dtype | None) -> list[str]:
    """What models of transformers declare, wherever they are in `module`."""
    names = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * (model_dtype == torch.float16)
    return sorted({pattern for part in module.modules() for name in names for pattern in _declared(part, name)})


def _declared(part: Module, name: str) -> Iterator[str]:
    yield from getattr(part, name, None) or ()


def _follow_weights(norm: _NormBase) -> None:
    """torch computes a batch norm only where weights and running statistics have one dtype."""
    weight: Tensor | None = norm.weight
    if weight is not None:
        cast_floating(norm.buffers(recurse=False), weight.dtype)
