"""The building blocks over the vendor's operators against core's references, on the stand-in."""

import itertools

import pytest
import torch
from deepspeed.ops import transformer
from deepspeed.ops.transformer import apply_rotary, bias_gelu, gelu, rms_norm, rms_norm_residual, rotary_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = ((1,), (7,), (3, 1023), (2, 3, 65))
NORMS = {
    "layer_norm": ("npu_layer_norm_eval",),
    "layer_norm_residual": ("npu_layer_norm_eval",),
    "rms_norm": ("npu_rms_norm",),
    "rms_norm_residual": ("npu_add_rms_norm", "npu_rms_norm"),
}


def on_both(front, inputs, **options):
    """(result on the device by operator, result on the host by reference, what was called)."""
    import torch_npu.operators

    torch_npu.operators.calls.clear()
    device = front(*(None if x is None else x.to("npu") for x in inputs), **options)
    called = dict(torch_npu.operators.calls)
    host = front(*inputs, **options)
    if not isinstance(host, tuple):
        device, host = (device,), (host,)
    return [(x.is_contiguous(), x.cpu()) for x in device], host, called


def assert_same(results):
    device, host, called = results
    for (contiguous, found), wanted in zip(device, host, strict=True):
        assert contiguous
        tolerance = TOLERANCE[wanted.dtype]
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    return called


def each(cases):
    """One result per case, a function of this file by name and its arguments: they share a call of the rank."""
    return [globals()[name](*arguments) for name, *arguments in cases]


def norm(name, dtype, shape, weights):
    torch.manual_seed(0)
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weights = dtype if weights == "x" else weights
    weight = None if weights is None else torch.randn(shape[-1]).to(weights)
    bias = None if weights is None else torch.randn(shape[-1]).to(weights)
    front = getattr(transformer, name)
    inputs = [x, *([residual] if "residual" in name else []), weight, *([bias] if "layer" in name else [])]
    return on_both(front, inputs)


@pytest.mark.parametrize("name", NORMS)
def test_norms(npu, name):
    cases = [("norm", name, *case) for case in itertools.product(DTYPES, SHAPES, (None, "x", torch.float32))]
    for case, results in zip(cases, npu(each, cases)[0], strict=True):
        called = assert_same(results)
        assert sum(called.get(operator, 0) for operator in NORMS[name]) == 1, case


def gelus(dtype, approximate, bias_dtype):
    torch.manual_seed(0)
    x, bias = torch.randn(5, 33).to(dtype) * 3, torch.randn(33).to(bias_dtype)
    return on_both(gelu, [x], approximate=approximate), on_both(bias_gelu, [x, bias], approximate=approximate)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(npu, approximate):
    cases = [("gelus", dtype, approximate, bias) for dtype in DTYPES for bias in (dtype, torch.float32)]
    for both in npu(each, cases)[0]:
        for results in both:
            assert assert_same(results) == {"npu_gelu": 1}


def turned(dtype, shape, num_turned, interleaved, seq_dim, batched):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    positions = torch.arange(shape[seq_dim])
    if batched:
        positions = torch.stack([positions + index for index in range(shape[0])])
    cos, sin = rotary_table(positions, num_turned)
    return on_both(apply_rotary, [x, cos, sin], interleaved=interleaved, seq_dim=seq_dim)


@pytest.mark.parametrize("seq_dim", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(npu, interleaved, seq_dim):
    cases = [("turned", dtype, (2, 3, 5, 8), num, interleaved, seq_dim, False) for dtype in DTYPES for num in (8, 6)]
    for results in npu(each, cases)[0]:
        assert assert_same(results) == {"npu_rotary_mul": 1}


def test_rotary_of_positions_that_differ_within_the_batch(npu):
    for seq_dim in (1, 2):
        shape = (2, 4, 3, 8)
        assert assert_same(npu(turned, torch.float32, shape, 8, False, seq_dim, True)[0]) == {"npu_rotary_mul": 1}
        assert assert_same(npu(turned, torch.float32, shape, 8, True, seq_dim, True)[0]) == {}


@pytest.mark.parametrize(
    ("shape", "interleaved"),
    [((1, 2, 1, 896), False), ((1, 2, 1000, 2), False), ((1000, 2, 1, 2), False), ((40, 2, 25, 2), True)],
)
def test_shapes_that_the_vendor_excludes_run_on_the_reference(npu, shape, interleaved):
    called = assert_same(npu(turned, torch.float32, shape, shape[-1], interleaved, 1, False)[0])
    assert called == {}


def at_the_edges():
    """Empty tensors, strided ones, a gradient that is wanted, tensors of the host, meta tensors."""
    import torch_npu.operators

    torch_npu.operators.calls.clear()
    told = {"empty": [tuple(x.shape) for x in rms_norm_residual(*(torch.ones(0, 4, device="npu") for _ in range(2)))]}
    told["calls for empty"] = dict(torch_npu.operators.calls)
    strided = torch.randn(4, 6, device="npu").t()
    told["strided"] = torch.equal(gelu(strided).cpu(), gelu(strided.contiguous()).cpu())
    told["scalar"] = gelu(torch.tensor(1.0, device="npu")).item()
    torch_npu.operators.calls.clear()
    x = torch.randn(2, 4, device="npu", requires_grad=True)
    rms_norm(x).sum().backward()
    told["gradient"] = x.grad is not None, dict(torch_npu.operators.calls)
    operators = torch.ops.ds_npu
    x = torch.empty(2, 4, device="meta", dtype=torch.half)
    meta = operators.rms_norm_residual(x, x, None, 1e-6)
    told["meta"] = [(tuple(x.shape), x.dtype) for x in meta]
    try:
        operators.rms_norm(x, torch.ones(4), 1e-6)
    except RuntimeError as error:
        told["beside meta"] = str(error)
    try:
        operators.gelu(torch.ones(2), False)
    except NotImplementedError as error:
        told["host"] = str(error).splitlines()[0]
    return told


def test_edges(npu):
    (told,) = npu(at_the_edges)
    assert told["empty"] == [(0, 4), (0, 4)]
    assert told["calls for empty"] == {}
    assert told["strided"]
    assert told["scalar"] == pytest.approx(0.8413447)
    assert told["gradient"] == (True, {})
    assert told["meta"] == [((2, 4), torch.half)] * 2
    wanted = "ds_npu::rms_norm: weight: found a tensor on cpu, but it must be on meta as x is"
    assert told["beside meta"] == wanted
    assert "ds_npu::gelu" in told["host"]


def compiled():
    import torch_npu.operators

    def block(x, weight):
        return gelu(rms_norm(x, weight))

    x, weight = torch.randn(2, 8, device="npu"), torch.randn(8, device="npu")
    eager = block(x, weight)
    torch_npu.operators.calls.clear()
    result = torch.compile(block, backend="eager", fullgraph=True)(x, weight)
    return torch.equal(result.cpu(), eager.cpu()), dict(torch_npu.operators.calls)


def test_a_compiled_function_calls_them_in_one_graph(npu):
    ((equal, called),) = npu(compiled)
    assert equal
    assert called == {"npu_rms_norm": 1, "npu_gelu": 1}
