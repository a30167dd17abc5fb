"""`CheckOverflow`: whether a gradient of any rank has an infinity or a NaN. For training loops of one's own.

The engine does not need it: the norm of all gradients says it too. It is DeepSpeed's class of `runtime.utils`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.parallel.expert_params import is_moe_param


def has_inf_or_nan(tensor: Tensor) -> bool:
    """Whether an element of `tensor` is infinite or no number; the host waits for its device."""
    return not bool(torch.isfinite(tensor).all())


class CheckOverflow:
    """Looks for infinities and NaNs in gradients, on the ranks that make one step together.

    Args:
        param_groups: lists of parameters, which `check` looks at.
        mpu: Megatron's; its model-parallel ranks answer together.
        zero_reduce_scatter: gradients are divided over ranks, so that all ranks of the job answer together.
        deepspeed: an engine; with pipeline parallelism all ranks of the job answer together.
    """

    def __init__(
        self,
        param_groups: Iterable[Iterable[Tensor]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu = mpu
        self.params: list[Tensor] | None = None
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed
        self.has_moe_params = False
        if param_groups:
            self._take(param_groups)

    def check(self, param_groups: Iterable[Iterable[Tensor]] | None = None) -> bool:
        """Whether a gradient of `param_groups`, or else of those of the constructor, has overflowed; a collective."""
        if param_groups is not None:
            self._take(param_groups)
        return self.has_overflow(self.params or [], has_moe_params=self.has_moe_params)

    def has_overflow(self, params: Sequence[Tensor], has_moe_params: bool | None = None) -> bool:
        """Whether a gradient of `params` has overflowed on a rank that answers with this one; a collective.

        Args:
            has_moe_params: experts are among them, whose ranks answer together: all of the job. None: as in the
                parameters of the constructor.
        """
        has_experts = self.has_moe_params if has_moe_params is None else has_moe_params
        return self._any(self.has_overflow_serial(params), has_experts=has_experts)

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of `params` has overflowed on this rank."""
        return any(param.grad is not None and has_inf_or_nan(param.grad) for param in params)

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """Whether one of these norms is -1, DeepSpeed's sign of an overflow; a collective, if `reduce_overflow`."""
        mine = any(norm == -1 for norm in norm_group)
        return self._any(mine, has_experts=self.has_moe_params) if reduce_overflow else mine

    def _take(self, param_groups: Iterable[Iterable[Tensor]]) -> None:
        self.params = [param for group in param_groups for param in group]
        self.has_moe_params = any(map(is_moe_param, self.params))

    def _any(self, mine: bool, *, has_experts: bool) -> bool:
        """Whether a rank that answers with this one says yes."""
        in_pipeline = self.deepspeed is not None and getattr(self.deepspeed, "pipeline_parallelism", False)
        group: ProcessGroup | None = None  # all ranks
        if not (has_experts or self.zero_reduce_scatter or in_pipeline):
            if self.mpu is None:
                return mine
            group = self.mpu.get_model_parallel_group()
        flag = torch.tensor([float(mine)], device=get_accelerator().current_device_name())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())
