"""Of every operator: it fits its fake, serves the front in core, and compiles for a GPU as far as g++ can tell."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from deepspeed.ops import quantizer, registry, transformer
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.op_builder.toolchain import find_compiler

X, ROW, HEADS, TABLE = torch.randn(4, 6), torch.randn(6), torch.randn(2, 3, 1, 4), torch.randn(3, 2)
Q, PARAMS = torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 2)
CALLS = {
    "layer_norm": (X, ROW, None, 1e-5),
    "layer_norm_residual": (X, X + 1, None, ROW, 1e-5),
    "rms_norm": (X.bfloat16(), ROW, 1e-6),
    "rms_norm_residual": (X, X + 1, None, 1e-6),
    "gelu": (X.half(), True),
    "bias_gelu": (X, ROW, False),
    "rotary": (HEADS, TABLE, TABLE, False, 1),
    "quantize_groups": (X, 4, 4, False),
    "fake_quantize_groups": (X, 4, 3, True),
    "dequantize_groups": (Q, PARAMS, 4, 8, torch.float16),
    "dequantize_reduce": (Q[None], PARAMS[None], 4, 8, True, torch.bfloat16),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_fits_its_schema_and_its_fake(ops, name):
    operator = getattr(ops, name).default
    torch.library.opcheck(operator, CALLS[name], test_utils=("test_schema", "test_faketensor"))


def test_adam_fits_its_schema_and_its_fake(ops):
    lists = [[torch.randn(5)] for _ in range(4)]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "grad_scale": 1.0}
    modes = {"adam_w_mode": True, "bias_correction": True, "maximize": False}
    operator = ops.adam_step_.default
    arguments = (*lists, [torch.tensor(0.0)], [torch.randn(5).bfloat16()])
    torch.library.opcheck(operator, arguments, {**numbers, **modes}, test_utils=("test_schema", "test_faketensor"))


def test_a_fake_names_the_tensor_that_lies_elsewhere(ops):
    with pytest.raises(RuntimeError, match="ds_xpu::layer_norm: weight: found a tensor on cpu, but it must be on meta"):
        ops.layer_norm(X.to("meta"), ROW, None, 1e-5)


# ----- core's fronts -------------------------------------------------------------------------------------------------


def test_the_operators_serve_the_fronts(on_device, close):
    for op in ("fused_adam", "quantizer", "transformer_inference"):
        assert registry.kernel(op) is torch.ops.ds_xpu
        assert registry.resolve(op).source == "device"
    x = close.numbers(1024).view(8, 128)
    before = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            before[str(function)] = True
            return function(*args, **(kwargs or {}))

    with Watch():
        transformer.rms_norm(x)
        transformer.gelu(x)
        quantizer.dequantize(*quantizer.quantize(x, 8))
    called = {name for name in before if name.startswith("ds_xpu")}
    assert called == {f"ds_xpu.{name}.default" for name in ("rms_norm", "gelu", "quantize_groups", "dequantize_groups")}


def test_fused_adam_steps_as_torch_does(on_device, close):
    mine = [torch.nn.Parameter(close.numbers(numel)) for numel in (7, 1023)]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in mine]
    options = {"lr": 3e-2, "weight_decay": 0.1}
    optimizers = [FusedAdam(mine, **options), torch.optim.AdamW(theirs, foreach=False, **options)]
    for seed in range(5):
        for params, optimizer in zip((mine, theirs), optimizers, strict=True):
            for param in params:
                param.grad = close.numbers(param.numel(), seed=seed)
            optimizer.step()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


# ----- the library for a GPU -----------------------------------------------------------------------------------------


def builders():
    from ds_ext_xpu.op_builder import builders

    return builders()


@pytest.mark.parametrize("name", ["FusedAdamBuilder", "QuantizerBuilder", "InferenceBuilder"])
def test_the_sources_for_a_gpu_type_check(monkeypatch, name):
    """With the device header for GPUs, SYCL's headers and torch's stable ABI: all but what icpx adds."""
    kind = builders()[name]
    monkeypatch.setattr(kind, "toolchain", lambda self: find_compiler())
    spec = kind().describe()
    assert spec.stable_abi
    runtime = Path(os.environ["DS_SYCL_RUNTIME"])
    kept = [flag for flag in spec.compile_flags if flag.startswith(("-D", "-std=", "-fvisibility="))]
    folders = [option for path in (runtime / "include", *spec.system_include_paths) for option in ("-isystem", path)]
    warnings = ("-Wall", "-Wextra", "-Werror", "-DSYCL_DISABLE_FSYCL_SYCLHPP_WARNING")
    own = [f"-I{path}" for path in spec.include_paths]
    (source,) = spec.sources
    command = [*find_compiler().command, "-fsyntax-only", *warnings, *kept, *own, *map(str, folders), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
