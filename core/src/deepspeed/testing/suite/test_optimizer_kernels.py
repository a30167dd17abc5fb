"""Optimizer kernels against their torch reference on the host, for several dtypes, sizes and tensors per call.

Both sides use the same optimizer class of `deepspeed.ops`: one with the kernel, one on host copies with kernels
disabled by `DS_OPS_DISABLE=all`. Parameters and states are compared after three steps: fp32 to 1e-5, and half precision
to one unit in the last place, because ties may round differently. Kernels keep their states in fp32. So half-precision
parameters are tested only with optimizers that also do so, and otherwise as the copies of a one-pass step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.optimizer import OnePass, step_kernel
from deepspeed.ops.registry import OPS, VARIABLE
from deepspeed.testing import requirements

_SIZES = (0, 1, 7, 1023, 65537)
_STEPS = 3
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class _Case(NamedTuple):
    """An optimizer with its op and its options."""

    op: str
    make: Callable[..., Any]
    options: dict[str, Any]


_CASES = {
    "fused_adam": _Case("fused_adam", FusedAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "fused_adam-l2": _Case("fused_adam", FusedAdam, {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}),
    "fused_adam-raw": _Case("fused_adam", FusedAdam, {"lr": 1e-2, "bias_correction": False}),
    "fused_lamb": _Case("fused_lamb", FusedLamb, {"lr": 1e-2, "weight_decay": 0.1}),
    "fused_lion": _Case("fused_lion", FusedLion, {"lr": 1e-2, "weight_decay": 0.1}),
    "cpu_adam": _Case("cpu_adam", DeepSpeedCPUAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "cpu_adagrad": _Case("cpu_adagrad", DeepSpeedCPUAdagrad, {"lr": 1e-2}),
    "cpu_lion": _Case("cpu_lion", DeepSpeedCPULion, {"lr": 1e-2, "weight_decay": 0.1}),
}


_HALF = (torch.bfloat16, torch.float16)
_PARAMETERS = [
    pytest.param(case, dtype, id=f"{case}-{str(dtype).removeprefix('torch.')}")
    for case, chosen in _CASES.items()
    for dtype in (torch.float32, *(_HALF if OPS[chosen.op].on_host else ()))
]


def _numbers(generator: torch.Generator, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return one tensor of each size. Each tensor starts at the second element of its storage, so it is unaligned."""
    return [torch.randn(numel + 1, generator=generator).to(dtype)[1:] for numel in _SIZES]


def _moved(tensors: list[torch.Tensor], where: str) -> list[torch.Tensor]:
    """Return copies on the device `where`, also unaligned."""
    made = [torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=where)[1:] for tensor in tensors]
    return [copy.copy_(tensor) for copy, tensor in zip(made, tensors, strict=True)]


def _home(op: str) -> str:
    return "cpu" if OPS[op].on_host else get_accelerator().current_device_name()


def _assert_close(found: torch.Tensor, wanted: torch.Tensor, what: str, tolerance: float | None = None) -> None:
    assert found.dtype == wanted.dtype, what
    limit = _TOLERANCE[found.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(
        found.cpu().float(), wanted.float(), rtol=limit, atol=min(limit, 1e-4), msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize(("case", "dtype"), _PARAMETERS)
def test_optimizer_kernel_equals_its_reference(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _CASES[case]
    requirements.op(chosen.op).check()
    generator = torch.Generator().manual_seed(1)
    values = _numbers(generator, dtype)
    gradients = [_numbers(generator, dtype) for _ in range(_STEPS)]
    found = _train(chosen, values, gradients, _home(chosen.op))
    monkeypatch.setenv(VARIABLE, "all")
    wanted = _train(chosen, values, gradients, "cpu")
    _compare(found, wanted)


def _train(
    case: _Case, values: list[torch.Tensor], gradients: list[list[torch.Tensor]], where: str
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    params = [torch.nn.Parameter(value) for value in _moved(values, where)]
    optimizer = case.make(params, **case.options)
    kernel = step_kernel(optimizer.kernel_op, optimizer.operator)
    assert kernel is None or kernel.takes(params), "the kernel would not be called"
    for step in gradients:
        for param, gradient in zip(params, _moved(step, where), strict=True):
            param.grad = gradient
        optimizer.step()
    return [param.detach() for param in params], [optimizer.state[param] for param in params]


def _compare(
    found: tuple[list[torch.Tensor], list[dict[str, Any]]], wanted: tuple[list[torch.Tensor], list[dict[str, Any]]]
) -> None:
    for numel, one, other in zip(_SIZES, found[0], wanted[0], strict=True):
        _assert_close(one, other, f"parameter of {numel} elements")
    for numel, state, reference in zip(_SIZES, found[1], wanted[1], strict=True):
        for name, value in reference.items():
            _assert_close(state[name], value, f"{name} of {numel} elements")


@pytest.mark.parametrize("dtype", _HALF, ids=str)
@pytest.mark.parametrize("case", [name for name, case in _CASES.items() if case.make is not DeepSpeedCPUAdagrad])
def test_one_pass_writes_half_weights_beside_fp32_masters(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = _CASES[case]
    requirements.op(chosen.op).check()
    generator = torch.Generator().manual_seed(2)
    values, gradients = _numbers(generator, torch.float32), _numbers(generator, dtype)
    where, scale = _home(chosen.op), 0.25
    masters = [torch.nn.Parameter(value) for value in _moved(values, where)]
    copies = [torch.empty_like(master, dtype=dtype) for master in masters]
    optimizer = chosen.make(masters, **chosen.options)
    if not optimizer.takes_one_pass:
        pytest.skip(f"{chosen.op}: the front takes no one-pass step of these tensors")
    optimizer.step(one_pass=OnePass([_moved(gradients, where)], [copies], scale))
    scaled = [[gradient.float() * scale for gradient in gradients]]
    monkeypatch.setenv(VARIABLE, "all")
    wanted, _ = _train(chosen, values, scaled, "cpu")
    for numel, master, copy, reference in zip(_SIZES, masters, copies, wanted, strict=True):
        _assert_close(master.detach(), reference, f"master of {numel} elements")
        assert torch.equal(copy, master.detach().to(dtype)), f"weight of {numel} elements"
