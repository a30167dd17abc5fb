"""Products of bf16 and fp16 matrices through fp32: torch's operators, replaced, beside exact products rounded once."""

import subprocess
import sys

import pytest
import torch
from deepspeed.ops import registry
from ds_ext_cpu import half_matmul

DTYPES = [torch.bfloat16, torch.float16]
BATCHED = {"bmm", "baddbmm"}


@pytest.fixture(scope="module", autouse=True)
def enabled():
    """The op, on for both dtypes while this file's tests run."""
    op = registry.require(half_matmul.OP)
    before = [dtype for dtype in DTYPES if op.is_half_matmul_enabled(dtype)]
    for dtype in DTYPES:
        op.enable_half_matmul(dtype, True)
    yield op
    for dtype in DTYPES:
        op.enable_half_matmul(dtype, dtype in before)


def numbers(*sizes, dtype, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(found, exact):
    """`exact` in fp64 differs by the rounding to the dtype, half a unit in the last place, and that of fp32 sums."""
    eps = torch.finfo(found.dtype).eps
    scale = exact.abs().max().item()
    error = (found.double() - exact).abs()
    assert torch.all(error <= exact.abs() * eps / 2 + scale * 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 8, 33])
@pytest.mark.parametrize("layout", ["plain", "left_transposed", "right_transposed", "strided"])
def test_mm(dtype, rows, layout):
    left, right = numbers(rows, 40, dtype=dtype), numbers(40, 24, dtype=dtype, seed=1)
    if layout == "left_transposed":
        left = left.t().contiguous().t()
    elif layout == "right_transposed":
        right = right.t().contiguous().t()
    elif layout == "strided":
        left, right = numbers(rows, 80, dtype=dtype)[:, ::2], numbers(80, 48, dtype=dtype, seed=1)[::2, ::2]
    exact = left.double() @ right.double()
    found = torch.mm(left, right)
    assert found.is_contiguous()
    assert_rounded_once(found, exact)
    out = torch.empty(rows, 24, dtype=dtype)
    assert torch.mm(left, right, out=out) is out
    assert torch.equal(out, found)
    narrow = torch.zeros(rows, 30, dtype=dtype)
    torch.mm(left, right, out=narrow[:, 3:27])
    assert torch.equal(narrow[:, 3:27], found)
    assert not narrow[:, :3].any()
    assert not narrow[:, 27:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", ["full", "row", "scalar"])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2), (0, 1)])
@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_products_with_a_term(dtype, added, beta, alpha, name):
    batch = (3,) if name in BATCHED else ()
    left, right = numbers(*batch, 9, 16, dtype=dtype), numbers(*batch, 16, 12, dtype=dtype, seed=1)
    term = numbers(
        *{"full": (*batch, 9, 12), "row": (12,), "scalar": (1,) * (len(batch) + 2)}[added], dtype=dtype, seed=2
    )
    exact = beta * term.double() + alpha * (left.double() @ right.double())
    operator = getattr(torch, name)
    found = operator(term, left, right, beta=beta, alpha=alpha)
    assert_rounded_once(found, exact)
    out = torch.empty_like(found)
    operator(term, left, right, beta=beta, alpha=alpha, out=out)
    assert torch.equal(out, found)
    if added == "full":
        same = term.clone()
        assert getattr(same, f"{name}_")(left, right, beta=beta, alpha=alpha) is same
        assert torch.equal(same, found)
        operator(term, left, right, beta=beta, alpha=alpha, out=term)
        assert torch.equal(term, found)


def test_a_term_that_counts_for_nothing_may_be_nan():
    left, right = numbers(9, 16, dtype=torch.bfloat16), numbers(16, 12, dtype=torch.bfloat16)
    nan = torch.full((9, 12), float("nan"), dtype=torch.bfloat16)
    assert torch.equal(torch.addmm(nan, left, right, beta=0), torch.mm(left, right))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bmm(dtype):
    left, right = numbers(5, 9, 16, dtype=dtype), numbers(5, 12, 16, dtype=dtype, seed=1).transpose(1, 2)
    found = torch.bmm(left, right)
    assert_rounded_once(found, left.double() @ right.double())
    out = torch.empty_like(found)
    torch.bmm(left, right, out=out)
    assert torch.equal(out, found)


# fp32 copies of over 32 MiB: of the right operand, of the left one, and of a batch
@pytest.mark.parametrize(("rows", "inner", "columns"), [(16, 2048, 5000), (5000, 2048, 16), (40, 400_000, 30)])
def test_blocks(rows, inner, columns):
    left, right = numbers(rows, inner, dtype=torch.bfloat16), numbers(inner, columns, dtype=torch.bfloat16, seed=1)
    term = numbers(rows, columns, dtype=torch.bfloat16, seed=2)
    exact = left.double() @ right.double()
    assert_rounded_once(torch.mm(left, right), exact)
    assert_rounded_once(torch.addmm(term, left, right), exact + term.double())


def test_blocks_of_a_batch():
    left, right = numbers(40, 16, 20_000, dtype=torch.bfloat16), numbers(40, 20_000, 16, dtype=torch.bfloat16, seed=1)
    assert_rounded_once(torch.bmm(left, right), left.double() @ right.double())


def test_empty_matrices_and_errors_are_torchs():
    half = {"dtype": torch.bfloat16}
    assert torch.mm(torch.empty(9, 0, **half), torch.empty(0, 4, **half)).eq(0).all()
    assert torch.bmm(torch.empty(0, 9, 3, **half), torch.empty(0, 3, 4, **half)).shape == (0, 9, 4)
    left, right = torch.ones(9, 8, **half), torch.ones(8, 4, **half)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(left, left)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(left, right.float())
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(left, right, out=torch.empty(9, 4))
    with pytest.raises(RuntimeError, match="must be a matrix|2D|matrices"):
        torch.mm(left, right[0])
    with pytest.raises(RuntimeError, match="expand"):
        torch.addmm(torch.ones(5, **half), left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_other_dtypes_stay_with_torch(dtype, enabled):
    left, right = numbers(16, 40, dtype=torch.float32).to(dtype), numbers(40, 24, dtype=torch.float32).to(dtype)
    on = torch.mm(left, right), torch.addmm(right[:1, :1], left, right), torch.bmm(left[None], right[None])
    for half in DTYPES:
        enabled.enable_half_matmul(half, False)
    off = torch.mm(left, right), torch.addmm(right[:1, :1], left, right), torch.bmm(left[None], right[None])
    for half in DTYPES:
        enabled.enable_half_matmul(half, True)
    assert all(torch.equal(one, other) for one, other in zip(on, off, strict=True))
    with pytest.raises((ValueError, RuntimeError), match="bfloat16 and float16"):
        enabled.enable_half_matmul(dtype, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, "causal", "float", "bool"])
def test_gradients_of_attention_and_linear_layers(dtype, mask):
    layer = torch.nn.Linear(32, 32)
    hidden = numbers(2, 16, 32, dtype=torch.float32)
    added = numbers(16, 16, dtype=torch.float32, seed=3)

    def gradients(kind):
        weights = layer.weight.detach().to(kind).requires_grad_()
        bias = layer.bias.detach().to(kind).requires_grad_()
        states = torch.nn.functional.linear(hidden.to(kind), weights, bias)
        heads = states.view(2, 16, 4, 8).transpose(1, 2)
        masks = {"float": added.to(kind), "bool": added > -1}
        out = torch.nn.functional.scaled_dot_product_attention(
            heads, heads, heads, attn_mask=masks.get(mask), is_causal=mask == "causal"
        )
        (out * out).sum().backward()
        return weights.grad, bias.grad

    for found, exact in zip(gradients(dtype), gradients(torch.float64), strict=True):
        assert found.dtype == dtype
        assert (found - exact).abs().max() < 8 * torch.finfo(dtype).eps * exact.abs().max()


def test_no_word_of_torchs_about_its_kernels():
    script = (
        "import torch; from ds_ext_cpu.op_builder import HalfMatmulBuilder\n"
        "HalfMatmulBuilder().load().enable_half_matmul(torch.bfloat16, True)\n"
        "print(torch.ones(16, 16, dtype=torch.bfloat16).mm(torch.ones(16, 16, dtype=torch.bfloat16))[0, 0].item())\n"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("16.0\n", "", 0)


@pytest.mark.parametrize(
    ("has", "is_fast"),
    [
        ({"_is_avx512_supported"}, False),  # oneDNN emulates
        ({"_is_avx512_supported", "_is_avx512_bf16_supported"}, True),
        ({"_is_avx512_supported", "_is_amx_tile_supported"}, True),
        (set(), True),  # not an x86 processor, or one whose AVX2 knows bf16: what oneDNN says counts
    ],
)
def test_avx_512_alone_is_not_enough_for_bf16(monkeypatch, has, is_fast):
    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name in has)
    monkeypatch.setitem(half_matmul._QUESTIONS, torch.bfloat16, "yes")
    monkeypatch.setattr(torch.ops.mkldnn, "yes", lambda: True, raising=False)
    assert half_matmul.is_fast(torch.bfloat16) == is_fast


@pytest.mark.parametrize("is_fast", [True, False])
def test_prepare_where_the_processor_lacks_instructions(enabled, monkeypatch, is_fast):
    monkeypatch.setattr(half_matmul, "is_fast", lambda dtype: is_fast or dtype == torch.float32)
    enabled.enable_half_matmul(torch.float16, False)
    half_matmul.prepare(torch.float32)
    assert not enabled.is_half_matmul_enabled(torch.float16)
    half_matmul.prepare(torch.float16)
    assert enabled.is_half_matmul_enabled(torch.float16) != is_fast
    enabled.enable_half_matmul(torch.float16, True)


def test_without_the_kernel_a_warning_says_what_it_costs(enabled, monkeypatch, caplog):
    monkeypatch.setattr(half_matmul, "is_fast", lambda dtype: False)
    monkeypatch.setenv("DS_OPS_DISABLE", "half_matmul")
    enabled.enable_half_matmul(torch.bfloat16, False)
    half_matmul.prepare(torch.bfloat16)
    assert not enabled.is_half_matmul_enabled(torch.bfloat16)
    assert "no instructions for bfloat16" in caplog.text
    assert "disabled by DS_OPS_DISABLE" in caplog.text
    enabled.enable_half_matmul(torch.bfloat16, True)
