"""Layers that compress themselves, beside torch's own layers and `torch.nn.utils.prune`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from deepspeed.compression.basic_layer import (
    BNLayer_Compress,
    Conv2dLayer_Compress,
    Embedding_Compress,
    LinearLayer_Compress,
    compressed,
    restored,
)
from deepspeed.compression.quantizers import SymQuantizer
from deepspeed.errors import ConfigError
from deepspeed.ops.muon import Muon, mark_muon_parameters
from torch import nn
from torch.nn.utils import prune


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def linear():
    layer = nn.Linear(8, 6)
    return layer, compressed(copy.deepcopy(layer))


def switch_on(layer, *names):
    for name in names:
        setattr(layer, f"{name}_enabled", True)
    return layer


@pytest.mark.parametrize(
    ("plain", "kind", "x"),
    [
        (nn.Linear(4, 3), LinearLayer_Compress, torch.randn(2, 4)),
        (nn.Linear(4, 3, bias=False), LinearLayer_Compress, torch.randn(2, 4)),
        (nn.Embedding(5, 3), Embedding_Compress, torch.tensor([[1, 4]])),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), Conv2dLayer_Compress, torch.randn(2, 2, 5, 5)),
        (nn.BatchNorm2d(2), BNLayer_Compress, torch.randn(2, 2, 5, 5)),
    ],
)
def test_a_layer_with_nothing_enabled_is_the_ordinary_one(plain, kind, x):
    expected = copy.deepcopy(plain)(x)
    names = list(plain.state_dict())
    layer = compressed(plain)
    assert type(layer) is kind
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    assert list(layer.state_dict()) == names
    assert type(restored(layer)) is kind.__mro__[1 if kind is BNLayer_Compress else 2]


def test_it_can_be_made_by_its_own_name():
    layer = LinearLayer_Compress(4, 3, bias=False)
    layer.enable_weight_quantization(8, 8, 1, True, "symmetric", 1)
    assert layer(torch.ones(1, 4)).shape == (1, 3)


def test_weights_are_quantized_in_the_forward_and_learn_as_unrounded():
    plain, layer = linear()
    layer.enable_weight_quantization(4, 4, 1, True, "symmetric", 2)
    switch_on(layer, "weight_quantization")
    x = torch.randn(5, 8)
    rounded = SymQuantizer.apply(plain.weight, 4, None, None, 2)
    expected = F.linear(x, rounded, plain.bias)
    torch.testing.assert_close(layer(x), expected)
    layer(x).square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    layer.fix_weight_quantization()
    torch.testing.assert_close(layer.weight, rounded)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.9])
def test_sparse_l1_is_torchs_pruning(ratio):
    plain, layer = linear()
    prune.l1_unstructured(plain, "weight", amount=1 - ratio)
    layer.enable_sparse_pruning(ratio, "l1")
    switch_on(layer, "sparse_pruning")
    x = torch.randn(5, 8)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0)
    layer(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight_orig.grad)
    layer.fix_sparse_pruning_helper()
    torch.testing.assert_close(layer.weight, plain.weight)


def test_row_l1_is_torchs_structured_pruning():
    plain, layer = linear()
    prune.ln_structured(plain, "weight", amount=0.5, n=1, dim=0)
    kept = plain.weight_mask[:, 0]
    layer.enable_row_pruning(0.5, "l1")
    switch_on(layer, "row_pruning")
    x = torch.randn(5, 8)
    torch.testing.assert_close(layer(x), F.linear(x, plain.weight, plain.bias * kept), rtol=0, atol=0)
    mask = layer.fix_row_col_pruning_helper(dim_reduction=True)
    torch.testing.assert_close(mask.flatten(), kept)
    assert layer.weight.shape == (3, 8)
    torch.testing.assert_close(layer(x), F.linear(x, plain.weight, plain.bias)[:, kept.bool()])


def test_channel_l1_is_torchs_structured_pruning():
    plain = nn.Conv2d(2, 4, 3)
    layer = compressed(copy.deepcopy(plain))
    prune.ln_structured(plain, "weight", amount=0.5, n=1, dim=0)
    layer.enable_channel_pruning(0.5, "l1")
    switch_on(layer, "channel_pruning")
    x = torch.randn(2, 2, 5, 5)
    kept = plain.weight_mask[:, 0, 0, 0]
    torch.testing.assert_close(layer(x), F.conv2d(x, plain.weight, plain.bias * kept))


@pytest.mark.parametrize("kind", ["sparse", "row", "head", "channel"])
def test_scores_begin_as_magnitudes_and_learn(kind):
    layer = compressed(nn.Conv2d(2, 4, 3) if kind == "channel" else nn.Linear(8, 4))
    x = torch.randn(2, 2, 5, 5) if kind == "channel" else torch.randn(5, 8)
    heads = {"num_heads": 4} if kind == "head" else {}
    getattr(layer, f"enable_{kind}_pruning")(0.5, "topk", **heads)
    switch_on(layer, f"{kind}_pruning")
    scores = layer.head_pruning_scores if kind == "head" else getattr(layer, f"{kind}_mask_scores")
    assert layer.get_mask(kind).sum() == scores.numel() / 2
    layer(x).square().sum().backward()
    assert scores.grad.abs().sum() > 0
    with torch.no_grad():
        scores.copy_(-scores)
    assert layer.get_mask(kind).flatten()[scores.flatten().argmax()] == 1


@pytest.mark.parametrize("kind", ["sparse", "row", "head", "channel"])
def test_muon_leaves_scores_to_adam_whatever_their_shape(kind):
    layer = compressed(nn.Conv2d(2, 4, 3) if kind == "channel" else nn.Linear(8, 4))
    getattr(layer, f"enable_{kind}_pruning")(0.5, "topk", **({"num_heads": 4} if kind == "head" else {}))
    mark_muon_parameters(layer)
    matrices, rest = Muon(layer.parameters()).param_groups
    assert [param is layer.weight for param in matrices["params"]] == [True]
    assert len(rest["params"]) == 2, "scores and bias"


def test_the_gradient_of_a_score_is_that_of_the_mask():
    layer = compressed(nn.Linear(4, 3, bias=False))
    layer.enable_sparse_pruning(0.5, "topk")
    switch_on(layer, "sparse_pruning")
    x = torch.randn(5, 4)
    mask = layer.get_mask("sparse").detach().requires_grad_()
    F.linear(x, layer.weight.detach() * mask).square().sum().backward()
    layer(x).square().sum().backward()
    torch.testing.assert_close(layer.sparse_mask_scores.grad, mask.grad)


def test_heads_go_with_their_columns_and_the_rows_before():
    value, output = compressed(nn.Linear(6, 8)), compressed(nn.Linear(8, 6))
    output.enable_head_pruning(0.5, "topk", 4)
    switch_on(output, "head_pruning")
    x = torch.randn(5, 6)
    expected = output(value(x))
    mask = output.fix_head_pruning_helper(dim_reduction=True)
    value.fix_head_pruning_helper(mask, 4, dim_reduction=True)
    assert (value.weight.shape, output.weight.shape) == ((4, 6), (6, 4))
    torch.testing.assert_close(output(value(x)), expected)


@pytest.mark.parametrize("calibration", ["static", "dynamic"])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_inputs_are_quantized(calibration, kind):
    plain, layer = linear()
    layer.enable_activation_quantization(8, kind, calibration)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(layer(x), plain(x))
    switch_on(layer, "activation_quantization")
    assert not torch.equal(layer(x), plain(x))
    torch.testing.assert_close(layer(x), plain(x), atol=0.05, rtol=0)
    assert type(restored(layer)) is LinearLayer_Compress
    if calibration == "dynamic":  # a token's range is its own
        x[0, 0] *= 1000
        torch.testing.assert_close(layer(x)[1:], plain(x)[1:], atol=0.05, rtol=0)


def test_pruned_channels_are_zeros_after_the_batch_norm_too():
    conv, norm = compressed(nn.Conv2d(2, 4, 3)), compressed(nn.BatchNorm2d(4))
    nn.init.ones_(norm.bias)
    conv.enable_channel_pruning(0.5, "topk")
    norm.pruned_before, conv.tells_mask = (conv,), True
    switch_on(conv, "channel_pruning")
    x = torch.randn(3, 2, 5, 5)
    y = norm(conv(x))
    assert [bool(y[:, channel].any()) for channel in range(4)] == conv.get_mask("channel").flatten().bool().tolist()
    y.square().sum().backward()
    copy.deepcopy(nn.Sequential(conv, norm))
    mask = conv.fix_channel_pruning_helper(dim_reduction=True)
    norm.fix_channel_pruning_helper(mask)
    conv.eval(), norm.eval()
    assert (conv.out_channels, norm.num_features, norm.running_mean.shape) == (2, 2, (2,))
    assert type(restored(norm)) is nn.BatchNorm2d


def test_scores_and_masks_are_in_the_state_dict():
    _, layer = linear()
    layer.enable_sparse_pruning(0.5, "topk")
    layer.enable_row_pruning(0.5, "l1")
    assert [*layer.state_dict()] == ["weight", "bias", "sparse_mask_scores", "row_pruning_mask"]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda layer: layer.enable_weight_quantization(8, 8, 1, True, "symmetric", 5), r"quantize_groups: found 5"),
        (lambda layer: layer.enable_sparse_pruning(0.5, "l2"), r"method: found 'l2'; choose 'l1' or 'topk'"),
        (lambda layer: layer.enable_head_pruning(0.5, "topk", 3), r"num_heads: found 3 for 8 inputs"),
        (lambda layer: layer.enable_head_pruning(0.5, "l1", 4), r"head_pruning method: found 'l1'"),
        (lambda layer: layer.get_mask("row"), r"get_mask: asked for 'row', but enabled are none"),
        (lambda layer: layer.fix_row_col_pruning_helper(torch.ones(5, 1)), r"found a layer of 8 inputs"),
    ],
)
def test_what_does_not_fit_is_named(act, message):
    with pytest.raises(ConfigError, match=message):
        act(linear()[1])
