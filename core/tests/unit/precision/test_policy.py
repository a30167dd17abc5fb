"""What each number format does to inputs, losses, modules and steps."""

import math
from collections import namedtuple

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once
from deepspeed.precision import BF16, FP16, Autocast, Precision
from deepspeed.precision.policy import DynamicLossScaler, LossScaler, cast_buffers
from deepspeed.runtime import torch_autocast
from torch import nn


@pytest.mark.parametrize("clip_norm", [0.5, 5.0, 1e9])
@pytest.mark.parametrize("scale", [1.0, 256.0])
def test_the_factor_unscales_and_clips_as_torch_does(clip_norm, scale):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (7,))]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    scaled = [param.grad * scale for param in params]
    scaled_norm = float(torch.cat([grad.reshape(-1) for grad in scaled]).norm())
    norm = nn.utils.clip_grad_norm_(params, clip_norm)
    precision = FP16(LossScaler(scale), clip_norm=clip_norm)
    verdict = precision.verdict(scaled_norm)
    assert verdict.applies
    assert verdict.norm == pytest.approx(float(norm))
    for param, grad in zip(params, scaled):
        torch.testing.assert_close(grad * verdict.grad_scale, param.grad)


def test_without_clipping_only_the_loss_scale_counts():
    assert Precision().verdict(1e9).grad_scale == 1.0
    assert FP16(LossScaler(8.0)).verdict(1e9).grad_scale == 1 / 8


def test_a_zero_norm_is_harmless():
    assert Precision(clip_norm=1.0).verdict(0.0).grad_scale == 1.0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_overflow_is_judged_by_those_who_check(norm):
    assert not FP16(LossScaler(8.0), clip_norm=1.0).verdict(norm).applies
    assert not BF16(checks_overflow=True).verdict(norm).applies
    for precision in (Precision(), BF16()):
        assert precision.verdict(norm).applies, "as documented, fp32 and bf16 make the step"


def test_a_norm_that_is_not_finite_clips_to_what_it_is():
    for precision in (Precision(clip_norm=1.0), BF16(clip_norm=1.0)):
        assert math.isnan(precision.verdict(math.nan).grad_scale)
        assert precision.verdict(math.inf).grad_scale == 0.0


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("norm", [0.0, 1e-7, 0.3, 0.5, 7.0, 1e30, math.inf, math.nan])
def test_a_norm_on_a_device_is_judged_alike_and_not_read(norm, clip_norm, capsys):
    precision = BF16(clip_norm=clip_norm)
    expected = precision.verdict(norm)
    warn_once.cache_clear()
    capsys.readouterr()
    verdict = precision.verdict(torch.tensor(norm))
    assert verdict.applies
    assert isinstance(verdict.norm, torch.Tensor)
    assert isinstance(verdict.grad_scale, torch.Tensor if clip_norm else float)
    torch.testing.assert_close(torch.tensor(float(verdict.norm)), torch.tensor(norm), equal_nan=True)
    scales = torch.tensor([float(verdict.grad_scale), expected.grad_scale])
    torch.testing.assert_close(scales[0], scales[1], equal_nan=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("norm", [2.0, math.inf, math.nan])
def test_a_norm_that_decides_over_the_step_is_read(norm):
    for precision in (FP16(LossScaler(8.0), clip_norm=0.1), BF16(checks_overflow=True)):
        verdict, expected = precision.verdict(torch.tensor(norm)), precision.verdict(norm)
        assert (verdict.applies, verdict.grad_scale) == (expected.applies, expected.grad_scale)
        assert type(verdict.norm) is float


def test_a_step_that_loses_the_weights_is_told_once(capsys):
    warn_once.cache_clear()
    precision = BF16()
    for _ in range(3):
        precision.verdict(math.nan)
    (line,) = capsys.readouterr().err.splitlines()
    assert "norm of the gradients is nan" in line
    assert "check_grad_overflow" in line


def test_the_scale_learns_from_the_verdict():
    precision = FP16(DynamicLossScaler(16, hysteresis=1))
    precision.after_step(precision.verdict(math.inf))
    assert (precision.loss_scaler.loss_scale, precision.loss_scaler.overflow) == (8.0, True)
    precision.after_step(precision.verdict(1.0))
    assert precision.loss_scaler.overflow is False


Pair = namedtuple("Pair", "x mask")


def test_fp16_casts_floating_inputs_of_any_nesting():
    x, ids, mask = torch.ones(2), torch.arange(2), torch.tensor([True])
    precision = FP16(LossScaler(1.0), auto_cast=True)
    args, kwargs = precision.cast_inputs(
        (x, [ids, {"a": x.double()}], Pair(x, mask), "text"), {"b": (x.bfloat16(), None)}
    )
    assert args[0].dtype is torch.float16
    assert args[1][0] is ids
    assert args[1][1]["a"].dtype is torch.float16
    assert isinstance(args[2], Pair)
    assert (args[2].x.dtype, args[2].mask.dtype) == (torch.float16, torch.bool)
    assert args[3] == "text"
    assert kwargs["b"][0].dtype is torch.float16
    assert kwargs["b"][1] is None


@pytest.mark.parametrize("precision", [Precision(), BF16(), FP16(LossScaler(1.0))])
def test_others_leave_inputs_as_they_are(precision):
    args, kwargs = (torch.ones(2),), {"a": torch.ones(1)}
    cast_args, cast_kwargs = precision.cast_inputs(args, kwargs)
    assert cast_args[0] is args[0]
    assert cast_kwargs["a"] is kwargs["a"]


def test_a_gradient_flows_through_the_cast():
    x = torch.ones(2, requires_grad=True)
    (half,), _ = FP16(LossScaler(1.0), auto_cast=True).cast_inputs((x,), {})
    half.sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_a_module_is_cast_with_its_frozen_parameters_and_without_its_buffers():
    module = nn.Linear(3, 3)
    module.weight.requires_grad = False
    module.register_buffer("angles", torch.ones(3))
    BF16().cast_params(module)
    assert {tensor.dtype for tensor in module.parameters()} == {torch.bfloat16}
    assert module.angles.dtype is torch.float32
    Precision().cast_params(module)
    assert module.weight.dtype is torch.bfloat16


class Router(nn.Module):
    """As transformers declares what must not be cast."""

    _keep_in_fp32_modules_strict = ("score_correction",)
    _keep_in_fp32_modules = ["router"]  # noqa: RUF012 - as theirs

    def __init__(self):
        super().__init__()
        self.router = nn.Module()
        self.router.register_buffer("scale", torch.ones(2))
        self.register_buffer("score_correction", torch.ones(2))
        self.register_buffer("score_correction_2", torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("precise", torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("dtype", "kept", "model_dtype", "stays"),
    [
        (None, "auto", torch.bfloat16, "router.scale score_correction score_correction_2 precise"),
        (torch.bfloat16, "auto", torch.bfloat16, "score_correction"),
        (torch.float16, "auto", torch.float16, "score_correction router.scale"),
        (torch.bfloat16, [], torch.bfloat16, ""),
        (torch.bfloat16, ["score_.*"], None, "score_correction score_correction_2"),
        (torch.bfloat16, ["scale", "precise"], None, "router.scale precise"),
    ],
)
def test_which_buffers_stay_as_they_came(dtype, kept, model_dtype, stays):
    model = nn.Sequential(Router())
    before = {name: buffer.dtype for name, buffer in model.named_buffers()}
    cast_buffers(model, dtype, kept, model_dtype)
    for name, buffer in model.named_buffers():
        is_cast = before[name].is_floating_point and name.removeprefix("0.") not in stays.split()
        assert buffer.dtype == (dtype if is_cast else before[name]), name


def test_statistics_of_a_batch_norm_follow_its_weights():
    norm, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)
    model = nn.Sequential(norm, plain)
    BF16().cast_params(model)
    cast_buffers(model, None, "auto", torch.bfloat16)
    assert (norm.running_mean.dtype, norm.running_var.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (norm.num_batches_tracked.dtype, plain.running_mean.dtype) == (torch.int64, torch.float32)
    assert model(torch.randn(4, 3, dtype=torch.bfloat16)).dtype is torch.bfloat16


def orthogonal(layer):
    return nn.utils.parametrizations.orthogonal(layer, orthogonal_map="matrix_exp")


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm, orthogonal])
def test_what_torch_computes_weights_with_follows_them(wrap):
    model = nn.Sequential(wrap(nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0].register_buffer("angles", torch.ones(3))
    BF16().cast_params(model)
    cast_buffers(model, None, "auto", torch.bfloat16)
    stays = [name for name, buffer in model.named_buffers() if buffer.dtype is torch.float32]
    assert stays == ["0.angles"]
    model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert all(param.grad.dtype is torch.bfloat16 for param in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype_and_keeps_the_parameters(dtype):
    layer = nn.Linear(2, 2)
    precision = Autocast("cpu", dtype, loss_scaler=DynamicLossScaler(4.0) if dtype is torch.float16 else None)
    with precision.forward_context():
        assert layer(torch.ones(1, 2)).dtype is dtype
    assert layer(torch.ones(1, 2)).dtype is torch.float32
    assert layer.weight.dtype is torch.float32
    assert precision.checks_overflow is (dtype is torch.float16)
    assert precision.scale(torch.tensor(1.0)).item() == (4.0 if dtype is torch.float16 else 1.0)


def test_others_have_no_context():
    with BF16().forward_context():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


def test_the_context_of_the_forward_for_other_parts(make_engine):
    assert "torch.nn.Linear" in torch_autocast.get_default_autocast_lower_precision_modules()
    for keys, dtype in (({}, torch.float32), ({"torch_autocast": {"enabled": True}}, torch.bfloat16)):
        engine = make_engine(nn.Linear(4, 2), **keys)
        with torch_autocast.autocast_if_enabled(engine):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    with pytest.raises(ConfigError, match=r"get_comm_dtype: a type of communication for each parameter is not in"):
        torch_autocast.get_comm_dtype(engine.module.weight)
