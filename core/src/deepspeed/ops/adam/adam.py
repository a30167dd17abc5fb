"""Adam and AdamW: `FusedAdam`, `DeepSpeedCPUAdam`, their base class, and the torch reference `adam_step`.

Formulas (Kingma & Ba, arXiv 1412.6980; AdamW: Loshchilov & Hutter, arXiv 1711.05101), with gradient g and weight p:

    g <- g + wd * p                             only with adam_w_mode=False (L2)
    p <- p * (1 - lr * wd)                      only with adam_w_mode=True  (decoupled)
    m <- b1 * m + (1 - b1) * g                  v <- b2 * v + (1 - b2) * g^2
    p <- p - lr * (m / c1) / (sqrt(v / c2) + eps)
    c1 = 1 - b1^t, c2 = 1 - b2^t                c1 = c2 = 1 with bias_correction=False

`adam_step` is the reference of the operator `adam_step_` (see `AdamBase`), and runs if no extension has the operator.
`adam_step` uses torch's fused kernel if torch has one for the device and the tensors lie alike (`_fused_reads_right`),
otherwise torch chooses between `foreach` and a loop. Results are bit-equal to `torch.optim.Adam` / `AdamW` with the
same `fused` flag.
"""

import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from deepspeed._absent import absent_members
from deepspeed.errors import ConfigError
from deepspeed.ops.optimizer import (
    KernelOptimizer,
    check_not_sparse,
    check_options,
    host_numbers,
    new_step_count,
    state_dtype,
)

_Item = tuple[Tensor, Tensor, dict[str, Any]]  # parameter, gradient, state
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@functools.cache
def fused_kernel_works(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether torch's fused Adam runs on this device type. The test is one step on one element per process."""
    param = torch.zeros(1, device=device_type, dtype=dtype, requires_grad=True)
    param.grad = torch.zeros_like(param)
    try:
        torch.optim.AdamW([param], fused=True).step()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def create_state(param: Tensor, *, amsgrad: bool, state_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the state of one parameter with torch's names. `state_dtype=None` means the parameter's dtype."""
    state = {
        "step": new_step_count(),
        "exp_avg": torch.zeros_like(param, dtype=state_dtype, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(param, dtype=state_dtype, memory_format=torch.preserve_format),
    }
    if amsgrad:
        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
    return state


def adam_step(
    params: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any], grads: list[Tensor] | None = None
) -> None:
    """Update `params` in place from `grads`. An optimizer's `step` calls this per group, without autograd.

    `grads=None` means each parameter's `.grad`. `states[i]` belongs to `params[i]`. State tensors have the dtype of the
    parameter, or are fp32 for a half-precision parameter: the arithmetic is then fp32, and the result is rounded once
    into the parameter. `group` holds torch's keys, plus `bias_correction` and `adam_w_mode`.
    """
    same: list[_Item] = []
    wider: list[_Item] = []
    given = [param.grad for param in params] if grads is None else grads
    for param, grad, state in zip(params, given, states, strict=True):
        assert grad is not None
        check_not_sparse(grad, "Adam")
        (same if state["exp_avg"].dtype == param.dtype else wider).append((param, grad, state))
    # Fused and foreach kernels require lists of one device and dtype, so the kernel is chosen per list.
    for items in _by_kind(same):
        _run(items, group)
    for param, grad, state in wider:
        param_wide = param.to(state["exp_avg"].dtype)
        _run([(param_wide, grad.to(param_wide.dtype), state)], group)
        param.copy_(param_wide)


def _by_kind(items: list[_Item]) -> list[list[_Item]]:
    kinds: dict[tuple[torch.device, torch.dtype, bool], list[_Item]] = {}
    for item in items:
        kinds.setdefault((item[0].device, item[0].dtype, _fused_reads_right(item)), []).append(item)
    return list(kinds.values())


def _fused_reads_right(item: _Item) -> bool:
    """Return whether torch's fused kernel may take these tensors: each fills its memory, and all do in one order.

    On the host that kernel pairs elements by their place in memory, and checks no strides: a transposed weight with a
    contiguous gradient, or a `channels_last` weight with older moments, would get the steps of other elements; on a
    device it is an error.
    """
    param, grad, state = item
    tensors = [param, grad, *(state[name] for name in _MOMENTS if name in state)]
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    strides = param.stride()
    return torch.ops.aten.is_non_overlapping_and_dense(param) and all(one.stride() == strides for one in tensors)


def _run(items: list[_Item], group: dict[str, Any]) -> None:
    first = items[0][0]
    amsgrad = group.get("amsgrad", False)
    fused, foreach = _kernel_choice(items[0], group)
    where = first.device if fused or group.get("capturable", False) else torch.device("cpu")
    steps = [_step_tensor(state, where) for _, _, state in items]
    counted = steps
    if not group["bias_correction"]:
        # 1 - beta^t is exactly 1 at t = infinity in every torch kernel, so this disables the bias correction.
        torch._foreach_add_(steps, 1)
        counted = [torch.full_like(step, float("inf")) for step in steps]
    function = adamw if group["adam_w_mode"] else adam
    beta1, beta2 = group["betas"]
    function(
        [param for param, _, _ in items],
        [grad for _, grad, _ in items],
        [state["exp_avg"] for _, _, state in items],
        [state["exp_avg_sq"] for _, _, state in items],
        [state["max_exp_avg_sq"] for _, _, state in items] if amsgrad else [],
        counted,
        foreach=foreach,
        fused=fused,
        capturable=group.get("capturable", False),
        has_complex=first.is_complex(),
        amsgrad=amsgrad,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group.get("maximize", False),
    )


def _kernel_choice(item: _Item, group: dict[str, Any]) -> tuple[bool | None, bool | None]:
    """Return (fused, foreach) for torch: the group's values if it sets one, else fused if it works."""
    fused, foreach, param = group.get("fused"), group.get("foreach"), item[0]
    if not _fused_reads_right(item):
        return None, foreach
    if fused is None and foreach is None:
        # None, None leaves the choice between foreach and a loop to torch
        can_fuse = param.is_floating_point() and fused_kernel_works(param.device.type, param.dtype)
        fused = True if can_fuse else None
    return fused, foreach


def _step_tensor(state: dict[str, Any], where: torch.device) -> Tensor:
    """Return the step count on device `where`: fused kernels read it on the parameter's device, others on the host."""
    step = state["step"]
    if not isinstance(step, Tensor):  # old checkpoints hold a plain number
        step = state["step"] = torch.tensor(float(step), dtype=torch.float32, device=where)
    elif step.device != where:  # a checkpoint's step count may be on another device
        step = state["step"] = step.to(where)
    return step


class AdamBase(KernelOptimizer):
    """The base class of both optimizers. Its state dict is interchangeable with `torch.optim.Adam` and `AdamW`.

    The kernel is `adam_step_(params, grads, exp_avgs, exp_avg_sqs, steps, copies, *, lr, beta1, beta2, eps,
    weight_decay, adam_w_mode, bias_correction, maximize, grad_scale)`, from the accelerator's or the host's extension.
    torch handles `amsgrad`, `capturable` and a learning rate on a device.
    """

    operator: ClassVar[str] = "adam_step_"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

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
        check_options(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)
        # torch's keys come first and keep their meaning, so that torch can load a saved group
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

    def kernel_numbers(self, group: dict[str, Any]) -> dict[str, Any] | None:
        if group["differentiable"]:
            raise ConfigError("differentiable: found True, which is not supported here; use torch.optim.Adam for it")
        # with fused=False, or foreach set, the user requests one of torch's own loops
        wants_torch = group["foreach"] is not None or group["fused"] is False
        if wants_torch or group["amsgrad"] or group["capturable"]:
            return None
        beta1, beta2 = group["betas"]
        numbers = host_numbers(
            lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"]
        )
        if numbers is None:
            return None
        modes = {name: bool(group[name]) for name in ("adam_w_mode", "bias_correction", "maximize")}
        return {**numbers, **modes}

    def create_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return create_state(param, amsgrad=group["amsgrad"], state_dtype=state_dtype(param, group))

    def update_reference(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        adam_step(params, [self.state[param] for param in params], group, grads)


@absent_members("ops.adam.fused_adam:FusedAdam")
class FusedAdam(AdamBase):
    """Adam (`adam_w_mode=False`) or AdamW (the default), with the accelerator's op "fused_adam" or torch's kernels.

    The optimizer factory creates it for "Adam" and "AdamW"; users may create it too. The formulas are in the module
    docstring.

    Args:
        params: parameters, or param groups (other keys in a group are kept).
        bias_correction: divide m and v by 1 - beta^t.
        adam_w_mode: decoupled weight decay instead of L2.
        set_grad_none: `zero_grad()` sets gradients to None rather than to zero.

    Raises ConfigError for a value out of range, and for `amsgrad=True`, which DeepSpeed's FusedAdam does not support.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> optimizer = FusedAdam([weight], lr=0.5)
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    >>> weight.data
    tensor([ 0.5000, -1.5000])
    """

    kernel_op: ClassVar[str | None] = "fused_adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        check_options(amsgrad=amsgrad)
        if amsgrad:
            raise ConfigError(
                "amsgrad: found True, but FusedAdam has no AMSGrad; use DeepSpeedCPUAdam or torch.optim.AdamW"
            )
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adam_w_mode=adam_w_mode,
            set_grad_none=set_grad_none,
        )


@absent_members("ops.adam.cpu_adam:DeepSpeedCPUAdam")
class DeepSpeedCPUAdam(AdamBase):
    """AdamW (`adamw_mode=True`) or Adam on tensors in host memory.

    The optimizer factory creates it if the optimizer state is offloaded. Users and Accelerate create it too:
    `DeepSpeedCPUAdam(optimizer.param_groups, lr=..., weight_decay=..., adamw_mode=...)`. It uses the host extension's
    kernel "cpu_adam" if available, else torch's kernels. The formulas are in the module docstring.

    Args:
        model_params: parameters, or param groups (other keys in a group are kept, and override the arguments here).
        adamw_mode: decoupled weight decay instead of L2.
        fp32_optimizer_states: for half-precision parameters, keep m and v in fp32 and compute in fp32; False keeps
            them in the parameter's dtype.

    Raises ConfigError for a value out of range.
    """

    kernel_op: ClassVar[str | None] = "cpu_adam"

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_options(adamw_mode=adamw_mode)
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adamw_mode,
            fp32_optimizer_states=fp32_optimizer_states,
        )
