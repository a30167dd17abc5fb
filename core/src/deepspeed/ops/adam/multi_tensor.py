"""Adapts a vendor's fused Adam with DeepSpeed's function `multi_tensor_adam` to the operator `adam_step_`.

    multi_tensor_adam(chunk_size, noop_flag, [grads, params, exp_avgs, exp_avg_sqs],
                      lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)

updates lists of tensors of one dtype and one step count; `step` is the number of the current step, starting at 1, and
`mode` is 1 for AdamW and 0 for L2. Vendors' `fused_adam` builders have provided this function since 2020. `registry.py`
uses the adapter for a loaded op without `adam_step_`. The adapter does in torch what the function lacks: scaled or
negated gradients, half-precision gradients and weights, rounded copies.
"""

from typing import Any

import torch
from torch import Tensor

FUNCTION = "multi_tensor_adam"
CHUNK_SIZE = 2048 * 32  # elements per block; vendors' kernels are tuned for this size


def adapt(loaded: Any) -> "MultiTensorAdam | None":
    """Return `loaded` with the operator `adam_step_` added, or None if it lacks `multi_tensor_adam`."""
    return MultiTensorAdam(loaded) if hasattr(loaded, FUNCTION) else None


class MultiTensorAdam:
    """A vendor's loaded op, with `adam_step_` in addition to its own attributes."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._flags: dict[torch.device, Tensor] = {}  # overflow flags, always 0: the engine checks before the step

    def __getattr__(self, name: str) -> Any:
        if name == "_loaded":  # copy or pickle creates an instance without __init__
            raise AttributeError(name)
        return getattr(self._loaded, name)

    def adam_step_(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        copies: list[Tensor],
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        adam_w_mode: bool,
        bias_correction: bool,
        maximize: bool,
        grad_scale: float,
    ) -> None:
        """Make one step, as `AdamBase` describes it, with fp32 moments."""
        scale = -grad_scale if maximize else grad_scale
        wide = [param.float() for param in params]  # the tensor itself if it is fp32
        wide_grads = [grad.float() if scale == 1.0 else grad.float() * scale for grad in grads]
        for number, indices in _by_number(params, steps).items():
            lists = [[each[index] for index in indices] for each in (wide_grads, wide, exp_avgs, exp_avg_sqs)]
            numbers = (lr, beta1, beta2, eps, number, int(adam_w_mode), int(bias_correction), weight_decay)
            self._loaded.multi_tensor_adam(CHUNK_SIZE, self._flag(wide[indices[0]].device), lists, *numbers)
        for param, updated in zip(params, wide, strict=True):
            if param is not updated:
                param.copy_(updated)
        for copy, updated in zip(copies, wide, strict=bool(copies)):
            copy.copy_(updated)

    def _flag(self, device: torch.device) -> Tensor:
        if device not in self._flags:
            self._flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._flags[device]


def _by_number(params: list[Tensor], steps: list[Tensor]) -> dict[int, list[int]]:
    """Increment `steps`, and return step number -> indices of the parameters that make this step.

    Empty parameters are left out: vendors' kernels launch pending work at the last chunk of the last tensor, and an
    empty tensor has no chunk.
    """
    found: dict[int, list[int]] = {}
    for index, (param, step) in enumerate(zip(params, steps, strict=True)):
        step.add_(1)
        if param.numel() > 0:
            found.setdefault(int(step), []).append(index)
    return found
