"""Experts whose weights are packed as those of linears are: all experts of a layer in one packed weight.

`ops.experts` says what a module of them is. It becomes one of `PackedExperts` in place, so that its name, hooks and
marks stay. Packed, a weight is (E out, in): groups never reach over an expert, since they lie in rows.

Shape legend: T tokens, K experts of a token, E experts, H width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepspeed.ops.experts import DOWN, ConvertedExperts, converted_class, is_transposed, run_experts
from deepspeed.ops.quantizer.packed import PackedWeight, packed_grouped_linear
from deepspeed.tensor_parallel.layers import HoldsPacked


class PackedExperts(ConvertedExperts, HoldsPacked):
    """What the classes of packed experts have in common; `pack_experts` makes one."""

    prefix = "Packed"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]; index and weights are [T, K]."""
        return run_experts(self, self.product, self.num_held, hidden_states, top_k_index, top_k_weights)

    @property
    def num_held(self) -> int:
        """How many experts there are."""
        return len(self.get_parameter(DOWN))

    def product(self, rows: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        """One of the two products: of the first `counts[0]` rows with the first expert's weight, and so on."""
        return packed_grouped_linear(rows, self.packed_weights[name], counts, getattr(self, f"{name}_bias", None))

    def bytes_of(self, name: str) -> Tensor:
        """The packed bytes, with one expert's at each index."""
        packed = self.packed_weights[name]
        return packed.data.view(self.num_held, packed.shape[0] // self.num_held, packed.data.shape[1])

    def numbers_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """What a packed weight stands for, as the module had it."""
        numbers = super().numbers_of(name, dtype)
        stacked = numbers.view(self.num_held, -1, numbers.shape[1])
        return stacked.transpose(1, 2).contiguous() if is_transposed(self) else stacked

    def extra_repr(self) -> str:
        def shown(name: str, packed: PackedWeight) -> str:
            return f"{name}: {self.num_held} of {packed.shape[1]} -> {packed.shape[0] // self.num_held}, {packed.form}"

        return "; ".join(shown(*each) for each in self.packed_weights.items())


def pack_experts(module: nn.Module, packed: dict[str, PackedWeight]) -> None:
    """Let experts compute with packed weights, in place."""
    module.__class__ = converted_class(PackedExperts, type(module))
    assert isinstance(module, PackedExperts)
    module.hold_packed(packed)
