"""gelu and bias-gelu: the operators against torch's own in fp64."""

import pytest
import torch
import torch.nn.functional as F
from deepspeed.ops import registry
from deepspeed.ops.transformer import bias_gelu, gelu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = {False: "none", True: "tanh"}
# absolute error before rounding to the dtype, as [Note: one polynomial for gelu] gives it, and relative from rounding
ABSOLUTE = {torch.float32: 1e-6, torch.bfloat16: 1e-5, torch.float16: 2e-6}
RELATIVE = {torch.float32: 3e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(scope="module")
def ops():
    return registry.require("transformer_inference")


def misaligned(*shape, dtype=torch.float32, seed=0):
    """Random numbers that begin one element into their storage."""
    numel = torch.Size(shape).numel()
    return (torch.randn(numel + 1, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)[1:].view(shape)


def close(found, wide, tanh):
    """`found` equals gelu of `wide` (fp64)."""
    wanted = F.gelu(wide, approximate=FORMS[tanh])
    error = (found.double() - wanted).abs()
    # fp16 rounds what is below 2^-14 to multiples of 2^-24
    assert bool((error <= ABSOLUTE[found.dtype] + RELATIVE[found.dtype] * 1.01 * wanted.abs()).all()), error.max()


@pytest.mark.parametrize("count", [0, 1, 7, 1023, 65537])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tanh", FORMS)
def test_equals_the_reference(ops, count, dtype, tanh):
    x = misaligned(count, dtype=dtype)
    found = ops.gelu(x, tanh)
    assert (found.shape, found.dtype) == (x.shape, dtype)
    close(found, x.double(), tanh)
    for bias_dtype in (dtype, torch.float32):
        rows, bias = x.expand(3, count), misaligned(count, dtype=bias_dtype, seed=1)
        total = rows.float() + bias.float()  # as the operator adds
        close(ops.bias_gelu(rows, bias, tanh), total.double(), tanh)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tanh", FORMS)
def test_is_close_everywhere(ops, dtype, tanh):
    close(
        ops.gelu(torch.linspace(-12, 12, 200_001).to(dtype), tanh),
        torch.linspace(-12, 12, 200_001).to(dtype).double(),
        tanh,
    )
    largest = torch.finfo(dtype).max
    ends = torch.tensor([largest, -largest, 1e4, -1e4, 0.0, -0.0] * 11, dtype=dtype)
    assert torch.equal(ops.gelu(ends, tanh), ends.clamp_min(0))
    special = ops.gelu(torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype).repeat(33), tanh)
    assert special[0].isnan()
    assert special[1] == float("inf")
    assert special[2].isnan()  # -inf * 0, as torch's


def test_accepts_non_contiguous_tensors(ops):
    base = misaligned(6, 8, 10)
    bias = misaligned(20)[::2]
    for x in (base.transpose(0, 1), base[::2], base[:, :1].expand(6, 8, 10)):
        close(ops.gelu(x, False), x.double(), False)
        close(ops.bias_gelu(x, bias, True), (x + bias).double(), True)
        assert ops.gelu(x, True).is_contiguous()


def test_refuses_by_name(ops):
    x = torch.ones(2, 5)

    def refused(match, op, *args):
        with pytest.raises(RuntimeError, match=f"{op}: {match}"):
            getattr(ops, op)(*args)

    for op, args in (("gelu", (False,)), ("bias_gelu", (torch.ones(5), False))):
        refused("x: found dtype float64", op, x.double(), *args)
        refused("x: found a sparse tensor", op, x.to_sparse(), *args)
    refused(
        r"bias: found shape \(4\), but it must be \(5\), the last dimension of x", "bias_gelu", x, torch.ones(4), False
    )
    refused("bias: found dtype int32", "bias_gelu", x, torch.ones(5, dtype=torch.int32), False)
    refused("bias: found a tensor on meta", "bias_gelu", x, torch.ones(5, device="meta"), False)
    refused("x: found a tensor without dimensions", "bias_gelu", torch.tensor(1.0), torch.ones(1), False)


def test_opcheck(ops):
    x, bias = misaligned(3, 17, dtype=torch.bfloat16), misaligned(17)
    torch.library.opcheck(ops.gelu.default, (x, True))
    torch.library.opcheck(ops.gelu.default, (x.t(), False))
    torch.library.opcheck(ops.bias_gelu.default, (x, bias, False))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_fronts_run_these_operators_and_compile(ops, monkeypatch, approximate):
    def block(x, bias):
        return gelu(bias_gelu(x, bias, approximate), approximate)

    arguments = misaligned(4, 33), misaligned(33)
    with torch.profiler.profile(acc_events=True) as profile:
        found = block(*arguments)
    assert {"ds_cpu::gelu", "ds_cpu::bias_gelu"} <= {event.key for event in profile.key_averages()}
    assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(*arguments), found)
    monkeypatch.setenv("DS_OPS_DISABLE", "transformer_inference")
    torch.testing.assert_close(found, block(*arguments), rtol=1e-6, atol=2e-6)
