"""A vendor's fused Adam that has DeepSpeed's function, called as the operator `adam_step_` of our front.

    multi_tensor_adam(chunk_size, noop_flag, [grads, params, exp_avgs, exp_avg_sqs],
                      lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)

updates lists of tensors that have one dtype and one step count, which is the number of the step being made; `mode` is 1
for AdamW and 0 for L2. It is what vendors' builders of `fused_adam` have given DeepSpeed's FusedAdam since 2020.
Called by `registry.py` for a loaded op without `adam_step_`. What the function lacks is done here, by torch: scaled or
negated gradients, gradients and weights in half precision, rounded copies.
"""

from typing import Any

import torch
from torch import Tensor

FUNCTION = "multi_tensor_adam"
CHUNK_SIZE = 2048 * 32  # elements per block, which kernels of this convention are tuned for


def adapt(loaded: Any) -> "MultiTensorAdam | None":
    """`loaded` with the operator `adam_step_`, or None when it has not the function."""
    return MultiTensorAdam(loaded) if hasattr(loaded, FUNCTION) else None


class MultiTensorAdam:
    """The loaded op of a vendor, with `adam_step_` beside what it has itself."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._flags: dict[torch.device, Tensor] = {}  # "an overflow was found": never, the engine looks before the step

    def __getattr__(self, name: str) -> Any:
        if name == "_loaded":  # while copy or pickle makes one without __init__
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
        """One step, as `AdamBase` describes it; moments are fp32."""
        scale = -grad_scale if maximize else grad_scale
        wide = [param.float() for param in params]  # the tensor itself where it is fp32
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
    """Number of the step being made -> indices of the parameters that make it. Counts it in `steps`.

    Without empty parameters: kernels of this convention launch what is pending at the last chunk of the last tensor,
    and an empty one has none.
    """
    found: dict[int, list[int]] = {}
    for index, (param, step) in enumerate(zip(params, steps, strict=True)):
        step.add_(1)
        if param.numel() > 0:
            found.setdefault(int(step), []).append(index)
    return found
