"""Number formats: in each dtype that the device claims to support, forward and backward give the host's results.

Operators are compared with fp64 on the host. The unit is the unit in the last place (ULP): `eps` of the dtype times the
magnitude of the summands, or of the result if nothing is summed. fp32 arithmetic stays within the limits. TF32 products
and half-precision sums do not.
"""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.testing import requirements

_MAKERS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def test_supported_dtypes_agree_with_the_flags(accelerator: DeepSpeedAccelerator) -> None:
    dtypes = accelerator.supported_dtypes()
    assert torch.float32 in dtypes
    assert all(dtype.is_floating_point for dtype in dtypes)
    assert (torch.bfloat16 in dtypes) == accelerator.is_bf16_supported()
    assert (torch.float16 in dtypes) == accelerator.is_fp16_supported()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_computes_as_on_the_host(
    accelerator: DeepSpeedAccelerator, device: torch.device, dtype: torch.dtype
) -> None:
    requirements.dtype(dtype).check()
    accelerator.prepare_dtype(dtype)
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(33, 17).to(dtype), torch.randn(5, 33).to(dtype)
    found = _gradients(layer.to(device), x.to(device))
    wanted = _gradients(layer.float().cpu(), x.float())
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float().cpu(), other, rtol=_TOLERANCE[dtype], atol=_TOLERANCE[dtype])


class _Operator(NamedTuple):
    """A function of a matrix [64, 256], its maximum error in ULP in fp32, and the magnitude of its summands."""

    call: Callable[[torch.Tensor], torch.Tensor]
    limit: float
    magnitude: Callable[[torch.Tensor], torch.Tensor]


_SIDE = 256  # number of terms of a sum
_OPERATORS = {
    "product": _Operator(lambda x: x @ x.t(), 16, lambda x: x.abs() @ x.abs().t()),
    "sum": _Operator(lambda x: x.sum(1), 8, lambda x: x.abs().sum(1)),
    "exp": _Operator(torch.exp, 4, torch.exp),
    "tanh": _Operator(torch.tanh, 4, lambda x: torch.tanh(x).abs()),
    "gelu": _Operator(torch.nn.functional.gelu, 4, torch.abs),
    "softmax": _Operator(lambda x: x.softmax(1), 8, lambda x: x.softmax(1)),
    "log softmax": _Operator(lambda x: x.log_softmax(1), 4, lambda x: x.log_softmax(1).abs()),
    "layer norm": _Operator(lambda x: torch.nn.functional.layer_norm(x, (_SIDE,)), 8, lambda x: x.abs() + 1),
    "rsqrt": _Operator(lambda x: x.square().add(1).rsqrt(), 4, lambda x: x.square().add(1).rsqrt()),
}
_LIMIT_OF_HALF = 2.0  # the result is rounded once, from fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", _OPERATORS)
def test_operators_are_right_to_a_few_ulp(device: torch.device, name: str, dtype: torch.dtype) -> None:
    requirements.dtype(dtype).check()
    operator = _OPERATORS[name]
    x = torch.randn(64, _SIDE, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, again = (operator.call(x.to(device)).cpu() for _ in range(2))
    assert torch.equal(found, again), f"{name} in {dtype} gives other bits when it is called again"
    off = ulps_off(found, operator.call(x.double()), operator.magnitude(x.double()))
    limit = operator.limit if dtype is torch.float32 else _LIMIT_OF_HALF
    assert off <= limit, f"{name} in {dtype} is {off:.1f} ULP off, and at most {limit:g} are right"


def ulps_off(found: torch.Tensor, wanted: torch.Tensor, magnitude: torch.Tensor) -> float:
    """Return the maximum error of `found` in ULP of its dtype; inf if it contains nan.

    Args:
        found: the device's result, copied to the host.
        wanted: the fp64 result.
        magnitude: the magnitude of each element's summands; clamped to the smallest normal number or more.
    """
    limits = torch.finfo(found.dtype)
    off = (found.double() - wanted).abs() / (magnitude.clamp(min=limits.tiny) * limits.eps)
    return float(off.nan_to_num(nan=float("inf")).max())


def _gradients(layer: torch.nn.Linear, x: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    y = layer(x)
    torch.nn.functional.gelu(y).square().mean().backward()
    assert layer.weight.grad is not None
    return [y.detach(), layer.weight.grad.clone()]


@requirements.bf16
def test_autocast_computes_in_bf16(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    x = torch.ones(4, 4, device=device)
    with torch.autocast(accelerator.device_name(), dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32


def test_amp_is_a_module_of_torch_or_none(accelerator: DeepSpeedAccelerator) -> None:
    module = accelerator.amp()
    assert module is None or hasattr(module, "autocast")


def test_triton_is_there_if_it_is_promised(accelerator: DeepSpeedAccelerator) -> None:
    if accelerator.is_triton_supported() or accelerator.prefer_triton_grouped_mm():
        assert importlib.util.find_spec("triton") is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_groups(accelerator: DeepSpeedAccelerator, device: torch.device, dtype: torch.dtype) -> None:
    if not accelerator.is_grouped_mm_supported():
        pytest.skip("grouped products: is_grouped_mm_supported() is False")
    if dtype not in accelerator.supported_dtypes():
        pytest.skip(f"the device does not train in {dtype}")
    generator = torch.Generator().manual_seed(0)
    rows, matrices = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((12, 16), (3, 16, 32)))
    ends = torch.tensor([5, 5, 12], dtype=torch.int32)  # the second group has no rows
    found = torch._grouped_mm(rows.to(device), matrices.to(device), offs=ends.to(device)).float().cpu()
    wanted = torch.cat([rows[:5].float() @ matrices[0].float(), rows[5:].float() @ matrices[2].float()])
    torch.testing.assert_close(found, wanted, rtol=_TOLERANCE[dtype], atol=_TOLERANCE[dtype])


@pytest.mark.parametrize("name", _MAKERS)
def test_constructors_of_old_scripts(accelerator: DeepSpeedAccelerator, device: torch.device, name: str) -> None:
    has_fp64 = accelerator.is_fp64_supported()
    try:
        made = getattr(accelerator, name)([1, 0, 3])
    except TypeError as error:
        if _MAKERS[name] == torch.float64 and not has_fp64:
            pytest.skip(f"the device has no float64: {error}")
        raise
    assert made.dtype == _MAKERS[name]
    assert made.device == device
    assert made.tolist() == [1, 0, 3]
