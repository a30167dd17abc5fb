"""The inputs of a divided model are checked to be equal on all ranks, and per-head inputs are cut to a rank's heads."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError
from deepspeed.tensor_parallel.plans import Rule
from deepspeed.tensor_parallel.ranges import HeadShare
from deepspeed.tensor_parallel.ranks import TensorRanks

_PER_HEAD = ("alibi", "attention_mask")
_NUM_CHECKED = 2  # forwards: a wrong loader is wrong from the first on


def check_first_inputs(model: nn.Module, ranks: TensorRanks) -> None:
    """Compare the inputs of the first forwards over the ranks, which are to get the same samples.

    Then a forward raises `ConfigError` on every rank if they differ.
    """
    left = _NUM_CHECKED

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal left
        if left == 0:
            return
        left -= 1
        digests = all_gather_values(_digest([*args, *kwargs.values()]), backend=ranks.backend)
        if any(theirs != digests[0] for theirs in digests):
            other = next(rank for rank, theirs in enumerate(digests) if theirs != digests[0])
            raise ConfigError(
                f"tensor parallelism: ranks 0 and {other} of a group of {ranks.world_size} got different inputs; ranks "
                "that hold the parts of one model need the same samples. Shard the data over the data-parallel ranks "
                "only (engine.mesh.rank('dp') of engine.mesh.size('dp')), with equal seeds on tensor-parallel ranks"
            )

    model.register_forward_pre_hook(check, with_kwargs=True)


def _digest(values: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(values):
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        if tensor.numel():
            flat = tensor.detach().to("cpu").contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in containers of any nesting."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def cut_inputs_of_all_heads(model: nn.Module, path: str, share: HeadShare) -> None:
    """Give modules at `path` their own heads of the keyword arguments `alibi` and `attention_mask`."""
    at = Rule(path, None)  # type: ignore[arg-type]
    for name, module in model.named_modules():
        if at.matches(name):
            module.register_forward_pre_hook(_Cut(share), with_kwargs=True)


class _Cut:
    def __init__(self, share: HeadShare) -> None:
        self.share = share

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cut = {name: self._own(kwargs[name]) for name in _PER_HEAD if isinstance(kwargs.get(name), Tensor)}
        return args, {**kwargs, **cut}

    def _own(self, values: Tensor) -> Tensor:
        """[B, H, ...] or [B x H, ...] -> this rank's heads; other shapes have no heads."""
        num_heads, own = self.share.num_heads, slice(*self.share.queries)
        if values.dim() == 4:
            return values[:, own] if values.shape[1] == num_heads else values
        return values.unflatten(0, (-1, num_heads))[:, own].flatten(0, 1)
