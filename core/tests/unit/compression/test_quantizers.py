"""Rounding with gradients that pass through, beside torch's own fake quantization."""

import pytest
import torch
from deepspeed.compression.quantizers import (
    AsymQuantizer,
    BinaryQuantizer,
    QuantAct,
    SymQuantizer,
    TernaryQuantizer,
    TopKBinarizer,
    WeightQuantizer,
)
from deepspeed.errors import ConfigError


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.randn(6, 8, requires_grad=True)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_symmetric_is_torchs_fake_quantization(weight, bits):
    top = 2 ** (bits - 1) - 1
    scale = (weight.detach().abs().max() / top).item()
    expected = torch.fake_quantize_per_tensor_affine(weight.detach(), scale, 0, -top, top)
    torch.testing.assert_close(SymQuantizer.apply(weight, bits, None, None, 1), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_are_torchs_channels(weight, bits):
    top = 2 ** (bits - 1) - 1
    scales = weight.detach().abs().amax(1) / top
    zeros = torch.zeros(6, dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(weight.detach(), scales, zeros, 0, -top, top)
    torch.testing.assert_close(SymQuantizer.apply(weight, bits, None, None, 6), expected)


def test_asymmetric_covers_minimum_to_maximum(weight):
    rounded = AsymQuantizer.apply(weight + 5, 4, None, None, 1).detach()
    assert len(rounded.unique()) <= 16
    torch.testing.assert_close(torch.stack(rounded.aminmax()), torch.stack((weight.detach() + 5).aminmax()))


@pytest.mark.parametrize("kind", [SymQuantizer, AsymQuantizer, TernaryQuantizer, BinaryQuantizer])
def test_the_gradient_passes_through(weight, kind):
    slope = torch.randn_like(weight)
    (kind.apply(weight, 4, None, None, 2) * slope).sum().backward()
    torch.testing.assert_close(weight.grad, slope)


def test_ternary_has_three_values_and_binary_two(weight):
    sizes = weight.detach().abs()
    kept = sizes > 0.7 * sizes.mean()
    expected = weight.detach().sign() * kept * sizes[kept].mean()
    torch.testing.assert_close(TernaryQuantizer.apply(weight, 2, None, None, 1).detach(), expected)
    torch.testing.assert_close(
        BinaryQuantizer.apply(weight, 1, None, None, 1).detach(), weight.detach().sign() * sizes.mean()
    )


def test_a_range_from_outside_is_refused(weight):
    with pytest.raises(ConfigError, match=r"min_value, max_value: found -1.0 and 1.0; .+ QuantAct"):
        SymQuantizer.apply(weight, 8, -1.0, 1.0, 1)


def test_the_highest_scores_are_kept_and_get_the_gradient_of_the_mask():
    scores = torch.tensor([3.0, 1.0, 2.0, 0.0], requires_grad=True)
    mask = TopKBinarizer.apply(scores, 0.5, False)
    assert mask.tolist() == [1, 0, 1, 0]
    (mask * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert scores.grad.tolist() == [1, 2, 3, 4]
    assert TopKBinarizer.apply(scores, 0.9, True).tolist() == [1, 0, 0, 0]  # sigmoid(2) = 0.88


def test_bits_get_fewer_by_the_period():
    quantizer = WeightQuantizer(8, 5, 10)
    found = []
    for step in (0, 9, 10, 29, 30, 1000):
        quantizer.move_to(step)
        found.append(quantizer.num_bits)
    assert found == [8, 8, 7, 6, 5, 5]


def test_mixed_values_pass_from_the_weight_to_the_rounded_one(weight):
    quantizer = WeightQuantizer(4, 4, 1, mixed_ratio=0.25)
    rounded = SymQuantizer.apply(weight, 4, None, None, 1)
    for step, share in ((0, 0.0), (1, 0.25), (4, 1.0), (9, 1.0)):
        quantizer.move_to(step)
        torch.testing.assert_close(quantizer(weight), weight + share * (rounded - weight))


@pytest.mark.parametrize("options", [{"symmetric": False}, {"stochastic": True}])
def test_two_bits_are_symmetric_and_to_nearest(options):
    with pytest.raises(ConfigError, match=r"target_bits: found 2 with .+; 1 and 2 bits are symmetric"):
        WeightQuantizer(8, 2, 1, **options)


@pytest.mark.parametrize("mode", ["symmetric", "asymmetric"])
def test_a_static_range_follows_the_inputs_in_training_alone(mode):
    act = QuantAct(act_range_momentum=0.9, quant_mode=mode)
    act(torch.tensor([-1.0, 2.0]), 8)
    assert act.x_min_max.tolist() == [-1, 2]
    act(torch.tensor([0.0, 12.0]), 8)
    torch.testing.assert_close(act.x_min_max, torch.tensor([-0.9, 3.0]))
    act.eval()
    cut = act(torch.tensor([100.0, 0.0, 1.0]), 8)
    torch.testing.assert_close(act.x_min_max, torch.tensor([-0.9, 3.0]))
    torch.testing.assert_close(cut, torch.tensor([3.0, 0.0, 1.0]), atol=0.02, rtol=0)
    restored = QuantAct()
    restored.load_state_dict(act.state_dict())
    torch.testing.assert_close(restored.x_min_max, act.x_min_max)


def test_a_static_range_is_torchs_fake_quantization():
    act = QuantAct().eval()
    act.x_min_max.copy_(torch.tensor([-1.0, 2.54]))
    x = torch.randn(4, 5, requires_grad=True)
    found = act(x, 8)
    expected = torch.fake_quantize_per_tensor_affine(x.detach(), 0.02, 0, -127, 127)
    torch.testing.assert_close(found.detach(), expected)
    found.sum().backward()
    torch.testing.assert_close(x.grad, (x.detach().abs() <= 2.55).float())
