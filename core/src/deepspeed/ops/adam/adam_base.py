"""What both Adam fronts share."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.adam.adam_step import adam_step, create_state
from deepspeed.ops.reference_optimizer import ReferenceOptimizer, check_betas, check_not_negative, state_dtype


class AdamBase(ReferenceOptimizer):
    """Adam whose state dictionary can be exchanged with `torch.optim.Adam` and `torch.optim.AdamW`."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        **options: Any,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        # torch's own keys first, so that a saved group means the same there
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            **options,
        }
        super().__init__(params, defaults)

    def update_params(self, params: list[Tensor], group: dict[str, Any]) -> None:
        if group["differentiable"]:
            raise ConfigError("differentiable: found True, which is not supported here; use torch.optim.Adam for it")
        adam_step(params, [self._state_of(param, group) for param in params], group)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            state.update(create_state(param, amsgrad=group["amsgrad"], state_dtype=state_dtype(param, group)))
        return state
