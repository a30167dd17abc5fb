"""Experts whose weights are packed as those of linears are: all experts of a layer in one packed weight.

transformers keeps them in two parameters, [E, out, in] or [E, in, out], which `moe.divide.is_experts` recognizes. A
module of them becomes one of `PackedExperts` in place, so that its name, hooks and marks stay; its class stays a base.
Packed, a weight is (E out, in): groups never reach over an expert, since they lie in rows.

Shape legend: T tokens, K experts of a token, N rows, E experts, H width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.moe.divide import inner_of, is_experts, up_name
from deepspeed.ops.quantizer.packed import PackedWeight, packed_grouped_linear
from deepspeed.tensor_parallel.layers import HoldsPacked

_DOWN = "down_proj"


class PackedExperts(HoldsPacked):
    """What the classes of packed experts have in common; `pack_experts` makes one."""

    is_transposed: bool
    #: of transformers
    original: type[nn.Module]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]; index and weights are [T, K]."""
        inner: Callable[[Tensor], Tensor] = inner_of(self)

        def run(rows_NH: Tensor, counts: Sequence[int]) -> Tensor:
            return self.product(inner(self.product(rows_NH, up_name(self), counts)), _DOWN, counts)

        num_experts = len(self.get_parameter(_DOWN))
        return by_expert(hidden_states, top_k_index, top_k_weights, num_experts, run)

    def product(self, rows: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        """One of the two products: of the first `counts[0]` rows with the first expert's weight, and so on."""
        return packed_grouped_linear(rows, self.packed_weights[name], counts, getattr(self, f"{name}_bias", None))

    def bytes_of(self, name: str) -> Tensor:
        """The packed bytes, with one expert's at each index."""
        packed = self.packed_weights[name]
        num_experts = len(self.get_parameter(name))
        return packed.data.view(num_experts, packed.shape[0] // num_experts, packed.data.shape[1])

    def numbers_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """What a packed weight stands for, as the module had it."""
        numbers = super().numbers_of(name, dtype)
        stacked = numbers.view(len(self.get_parameter(name)), -1, numbers.shape[1])
        return stacked.transpose(1, 2).contiguous() if self.is_transposed else stacked

    def extra_repr(self) -> str:
        def shown(name: str, packed: PackedWeight) -> str:
            num_experts = len(self.get_parameter(name))
            return f"{name}: {num_experts} of {packed.shape[1]} -> {packed.shape[0] // num_experts}, {packed.form}"

        return "; ".join(shown(*each) for each in self.packed_weights.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self.original,), self.__getstate__()


def names_of_experts(module: nn.Module) -> tuple[str, ...]:
    """Of the two weights; none where it has no experts of a form that is packed."""
    return (up_name(module), _DOWN) if is_experts(module) else ()


def pack_experts(module: nn.Module, packed: dict[str, PackedWeight]) -> None:
    """Let experts compute with packed weights, in place."""
    is_transposed = bool(getattr(module, "is_transposed", False))
    module.__class__ = _packed_class(type(module))
    assert isinstance(module, PackedExperts)
    module.is_transposed = is_transposed
    module.hold_packed(packed)


def by_expert(
    x: Tensor, index_TK: Tensor, weights_TK: Tensor, num_experts: int, run: Callable[[Tensor, Sequence[int]], Tensor]
) -> Tensor:
    """The weighted sum of what the experts of each token give, [..., H] -> [..., H].

    Args:
        index_TK: the experts; E and above are of no expert, a mark of transformers' for tokens that go nowhere.
        run: rows sorted by expert, and how many each has -> what the experts give.
    """
    rows_TH = x.reshape(-1, x.shape[-1])
    experts = index_TK.reshape(-1)
    counts = experts.bincount(minlength=num_experts)[:num_experts].tolist()
    order = experts.argsort(stable=True)[: sum(counts)]
    tokens = order // index_TK.shape[-1]
    rows_NH = run(rows_TH[tokens], counts) * weights_TK.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(rows_TH).index_add_(0, tokens, rows_NH.to(x.dtype)).view_as(x)


_CLASSES: dict[type[nn.Module], type[PackedExperts]] = {}


def _packed_class(original: type[nn.Module]) -> type[PackedExperts]:
    if original not in _CLASSES:
        _CLASSES[original] = type(f"Packed{original.__name__}", (PackedExperts, original), {"original": original})
    return _CLASSES[original]


def _empty(original: type[nn.Module]) -> PackedExperts:
    """For copies, which get what it has afterwards."""
    cls = _packed_class(original)
    return cls.__new__(cls)
