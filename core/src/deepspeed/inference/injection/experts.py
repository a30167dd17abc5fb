"""The experts of a layer as two grouped products, in the place of a loop over experts.

As `moe.stacked`, whose product it is; the weights stay the module's own. Shape legend: N tokens, K experts of a token,
E experts, H features, F inner features of this rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from deepspeed.errors import ConfigError
from deepspeed.inference.packed_experts import PackedExperts
from deepspeed.moe.stacked import grouped_linear
from deepspeed.ops.experts import by_expert
from deepspeed.ops.quantizer.layers import StoredExperts
from deepspeed.tensor_parallel.divide import ranks_of_experts
from deepspeed.tensor_parallel.ranks import sum_over

_CLASSES = ("MixtralExperts",)


class FusedExperts:
    """Call it as the module that has the router and the experts.

    Args:
        module: its `gate` gives (logits, weights, indices), [N, K]; its `experts` have `gate_up_proj`, [E, 2 F, H], and
            `down_proj`, [E, H, F], plain or packed.
        activation: of the gate.

    Raises:
        ConfigError: the experts are of another kind, or have hooks that are not those of their division.
    """

    def __init__(self, module: Any, activation: Callable[[Tensor], Tensor]) -> None:
        self.router: nn.Module = module.gate
        self.experts: Any = module.experts
        self.activation = activation
        is_converted = isinstance(self.experts, PackedExperts | StoredExperts)
        self.num_experts: int = self.experts.num_held if is_converted else len(self.experts.down_proj)
        self.ranks = ranks_of_experts(self.experts)
        name = (self.experts.original if is_converted else type(self.experts)).__name__
        if name not in _CLASSES:
            raise ConfigError(f"its experts are {name}; {', '.join(_CLASSES)} are fused")
        hooks = len(self.experts._forward_hooks) + len(self.experts._forward_pre_hooks)
        if hooks != (0 if self.ranks is None else 2) or self.router._forward_hooks or self.router._forward_pre_hooks:
            raise ConfigError("its router or its experts have forward hooks, which a fused layer would not call")

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        _, weights_NK, index_NK = self.router(x.reshape(-1, x.shape[-1]))
        total = by_expert(x, index_NK, weights_NK, self.num_experts, self._run)
        return total if self.ranks is None else sum_over(total, self.ranks)

    def _run(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        gate, up = self._product(rows, "gate_up_proj", counts).chunk(2, -1)
        return self._product(self.activation(gate).mul_(up), "down_proj", counts)

    def _product(self, rows: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        if isinstance(self.experts, PackedExperts | StoredExperts):
            return self.experts.product(rows, name, counts)
        return grouped_linear(rows, getattr(self.experts, name), counts)
