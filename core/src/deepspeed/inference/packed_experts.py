"""Experts whose weights are packed as those of linears are: all experts of a layer in one packed weight.

`experts_form` says which modules have experts and how they keep them. Such a module becomes one of `PackedExperts` in
place, so that its name, hooks and marks stay. Packed, a weight is (E out, in): groups never reach over an expert, since
they lie in rows.

Shape legend: T tokens, K experts of a token, N rows, E experts, H width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.ops.experts import (
    ConvertedExperts,
    by_expert,
    converted_class,
    is_experts,
    is_transposed,
    names_of_weights,
    run_experts,
    run_sorted,
)
from deepspeed.ops.quantizer.packed import PackedWeight, packed_grouped_linear
from deepspeed.tensor_parallel.layers import HoldsPacked


class PackedExperts(ConvertedExperts, HoldsPacked):
    """A module that holds packed weights of experts; `pack_experts` makes one."""

    prefix = "Packed"
    num_held: int  # E
    is_transposed_of: Mapping[str, bool]

    def product(self, rows: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        """Multiply the first `counts[0]` rows with the first expert's weight, and so on."""
        return packed_grouped_linear(rows, self.packed_weights[name], counts, getattr(self, f"{name}_bias", None))

    def bytes_of(self, name: str) -> Tensor:
        """Return the packed bytes, [E, out, bytes of a row] where the parameter has one expert at each index."""
        packed = self.packed_weights[name]
        if self.get_parameter(name).dim() == 2:
            return packed.data
        return packed.data.view(self.num_held, packed.shape[0] // self.num_held, packed.data.shape[1])

    def numbers_of(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the numbers that a packed weight stands for, in the shape that the module's weight had."""
        numbers = super().numbers_of(name, dtype)
        stacked = numbers.view(self.num_held, -1, numbers.shape[1])
        if self.is_transposed_of[name]:
            stacked = stacked.transpose(1, 2).contiguous()
        return stacked.flatten(0, 1) if self.get_parameter(name).dim() == 2 else stacked

    def extra_repr(self) -> str:
        def shown(name: str, packed: PackedWeight) -> str:
            return f"{name}: {self.num_held} of {packed.shape[1]} -> {packed.shape[0] // self.num_held}, {packed.form}"

        return "; ".join(shown(*each) for each in self.packed_weights.items())


class RoutedExperts(PackedExperts):
    """Experts that get tokens, and for each token its experts and their weights, as `ops.experts` says."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]; index and weights are [T, K]."""
        return run_experts(self, self.product, self.num_held, hidden_states, top_k_index, top_k_weights)


class EveryTokensExperts(PackedExperts):
    """Experts of Llama 4, each of which gets every token, times its weight: 0 for experts that it does not go to."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[E T, H] -> [E T, H]. Rows of zeros give zeros, and are left out."""
        used_N = hidden_states.any(dim=-1)
        counts = used_N.view(self.num_held, -1).sum(dim=1).tolist()
        output = torch.zeros_like(hidden_states)
        output[used_N] = run_sorted(self, self.product, hidden_states[used_N], counts)
        return output


class SortedProducts(PackedExperts):
    """One product of JetMoe: the weights of all experts for rows that are sorted by expert."""

    def forward(self, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
        """[N, in] -> [N, out], with `expert_size` rows of each expert."""
        return self.product(inputs, "weight", expert_size)


class ExpertsOfPart(ConvertedExperts):
    """Experts of DBRX, whose part `mlp` holds the weights, and an activation for the gate."""

    prefix = "Packed"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]; index and weights are [T, K]."""
        held: Any = self.mlp

        def run(rows_NH: Tensor, counts: Sequence[int]) -> Tensor:
            gate, up = held.product(rows_NH, "w1", counts), held.product(rows_NH, "v1", counts)
            output: Tensor = held.product(held.activation_fn(gate) * up, "w2", counts)
            return output

        return by_expert(hidden_states, top_k_index, top_k_weights, held.num_held, run)


@dataclass(frozen=True)
class ExpertsForm:
    """`ExpertsForm` says how a module of experts keeps its weights, and which class the module gets when packed.

    Fields:
        base: the module gets a class derived from this one.
        is_transposed: by the name of each weight: [E, in, out], or [E in, out], rather than [E, out, in].
        part: the name of the submodule that holds the weights; "": the module itself.
    """

    base: type[ConvertedExperts]
    is_transposed: Mapping[str, bool]
    part: str = ""

    def holder(self, module: nn.Module) -> nn.Module:
        """Return what holds the weights."""
        return module.get_submodule(self.part)


#: by the name of the class, since core does not need transformers
_FORMS = {
    "llama4.modeling_llama4.Llama4TextExperts": ExpertsForm(
        EveryTokensExperts, {"gate_up_proj": True, "down_proj": True}
    ),
    "jetmoe.modeling_jetmoe.JetMoeParallelExperts": ExpertsForm(SortedProducts, {"weight": False}),
    "dbrx.modeling_dbrx.DbrxExperts": ExpertsForm(ExpertsOfPart, {"w1": False, "v1": False, "w2": True}, "mlp"),
}


def experts_form(module: nn.Module) -> ExpertsForm | None:
    """Return how a module keeps experts; None: it has none that are packed."""
    if is_experts(module):
        return ExpertsForm(RoutedExperts, dict.fromkeys(names_of_weights(module), is_transposed(module)))
    cls = type(module)
    return _FORMS.get(f"{cls.__module__}.{cls.__qualname__}".removeprefix("transformers.models."))


def pack_experts(module: nn.Module, form: ExpertsForm, num_experts: int, packed: dict[str, PackedWeight]) -> None:
    """Let experts compute with packed weights, in place."""
    holder = form.holder(module)
    if holder is not module:
        module.__class__ = converted_class(form.base, type(module))
    holder.__class__ = converted_class(form.base if holder is module else PackedExperts, type(holder))
    assert isinstance(holder, PackedExperts)
    holder.num_held, holder.is_transposed_of = num_experts, form.is_transposed
    holder.hold_packed(packed)
