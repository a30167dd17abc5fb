"""`FusedLora`: the LoRA layers of a model, whose product is added to the base weights while tokens are generated.

LoRA (arXiv 2106.09685): a layer computes x W^T + s x A^T B^T, so that W + s B A in place of W gives the same outputs
with one product instead of three. What is added is taken away by putting the former weights back, bit by bit: in bf16
a subtraction would leave a rounding error in the frozen weights every time.
"""

from typing import Any

from torch import Tensor
from torch.nn import Module

from deepspeed.errors import StateError


class FusedLora:
    """Fuses all LoRA layers of `module`, and puts their base weights back.

    Known are the layers of PEFT (`merge`, `unmerge`, `get_base_layer`) and those of DeepSpeed-Chat
    (`fuse_lora_weight`, `unfuse_lora_weight`, `weight`). Adapters that were merged or disabled by the user stay so.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._fused: list[tuple[Module, list[tuple[Tensor, Tensor]]]] = []

    @property
    def is_fused(self) -> bool:
        return bool(self._fused)

    def refusal(self, name: str) -> StateError | None:
        """Return the error for `name`, which cannot be done now; None if it can."""
        if not self._fused:
            return None
        return StateError(f"{name}: LoRA is fused into the base weights; call train() or unfuse_lora_weight() first")

    def fuse(self) -> None:
        """Add the products. Memory holds a copy of the base weights of these layers until `unfuse`."""
        if self._fused:
            return
        for layer in self._module.modules():
            if not _is_lora(layer) or _is_fused(layer):
                continue
            params = [param for param in _base(layer).parameters(recurse=False) if not _is_of_adapter(layer, param)]
            before: list[tuple[Tensor, Tensor]] = [(param, param.detach().clone()) for param in params]
            _call(layer, "merge", "fuse_lora_weight")
            self._fused.append((layer, before))

    def unfuse(self) -> None:
        """Put the former base weights back."""
        fused, self._fused = self._fused, []
        for layer, before in fused:
            _call(layer, "unmerge", "unfuse_lora_weight")
            for param, value in before:
                param.data.copy_(value)


def _is_lora(module: Module) -> bool:
    is_peft = all(hasattr(module, name) for name in ("merge", "unmerge", "get_base_layer", "merged"))
    return is_peft or all(hasattr(module, name) for name in ("fuse_lora_weight", "unfuse_lora_weight", "weight"))


def _is_fused(layer: Any) -> bool:
    if hasattr(layer, "merged"):
        return bool(layer.merged) or bool(getattr(layer, "disable_adapters", False))
    return bool(getattr(layer, "fuse_lora", False))


def _base(layer: Any) -> Module:
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def _is_of_adapter(layer: Any, param: Tensor) -> bool:
    """Whether a parameter of a DeepSpeed-Chat layer, which is base and adapter in one, is one of the adapter's."""
    return any(param is getattr(layer, name, None) for name in ("lora_right_weight", "lora_left_weight"))


def _call(layer: Any, *names: str) -> None:
    next(getattr(layer, name) for name in names if hasattr(layer, name))()
