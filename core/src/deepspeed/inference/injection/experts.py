"""The experts of a layer as two grouped products, in the place of a loop over experts.

As `moe.stacked`, whose product it is; the weights stay the module's own. Shape legend: N tokens, K experts of a token,
E experts, H features, F inner features of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import ConfigError
from deepspeed.moe.stacked import grouped_linear
from deepspeed.tensor_parallel.experts import ranks_of_experts
from deepspeed.tensor_parallel.ranks import sum_over

_CLASSES = ("MixtralExperts",)


class FusedExperts:
    """Call it as the module that has the router and the experts.

    Args:
        module: its `gate` gives (logits, weights, indices), [N, K]; its `experts` have `gate_up_proj`, [E, 2 F, H], and
            `down_proj`, [E, H, F].
        activation: of the gate.

    Raises:
        ConfigError: the experts are of another kind, or have hooks that are not those of their division.
    """

    def __init__(self, module: Any, activation: Callable[[Tensor], Tensor]) -> None:
        self.router: nn.Module = module.gate
        self.experts: Any = module.experts
        self.activation = activation
        self.ranks = ranks_of_experts(self.experts)
        if type(self.experts).__name__ not in _CLASSES:
            raise ConfigError(f"its experts are {type(self.experts).__name__}; {', '.join(_CLASSES)} are fused")
        hooks = len(self.experts._forward_hooks) + len(self.experts._forward_pre_hooks)
        if hooks != (0 if self.ranks is None else 2) or self.router._forward_hooks or self.router._forward_pre_hooks:
            raise ConfigError("its router or its experts have forward hooks, which a fused layer would not call")

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        rows_NH = x.reshape(-1, x.shape[-1])
        _, weights_NK, index_NK = self.router(rows_NH)
        experts = index_NK.reshape(-1)
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=len(self.experts.down_proj)).tolist()
        tokens = order // index_NK.shape[1]
        gate, up = grouped_linear(rows_NH[tokens], self.experts.gate_up_proj, counts).chunk(2, -1)
        rows = grouped_linear(self.activation(gate).mul_(up), self.experts.down_proj, counts)
        rows = rows * weights_NK.reshape(-1)[order].unsqueeze(-1)
        total = torch.zeros_like(rows_NH).index_add_(0, tokens, rows.to(x.dtype))
        return (total if self.ranks is None else sum_over(total, self.ranks)).view_as(x)
