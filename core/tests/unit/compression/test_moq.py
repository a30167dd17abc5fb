"""Eigenvalues beside an exact Hessian, and the older quantizer beside what DeepSpeed 0.19.6 answers."""

import pytest
import torch
from deepspeed.compression.moq import MixtureOfQuantization, Rounding
from deepspeed.config.compression import BitsParams
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.ops.quantizer.groups import fake_quantize
from deepspeed.runtime.eigenvalue import Eigenvalue
from deepspeed.runtime.quantize import Quantizer
from torch import nn


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


def exact(model, x, number):
    """The eigenvalue, largest in size, of a layer's block of the Hessian of the loss."""
    layer = model.layers[number]

    def loss(weight, bias):
        values = {f"layers.{number}.weight": weight, f"layers.{number}.bias": bias}
        return torch.func.functional_call(model, values, (x,)).square().mean()

    blocks = torch.autograd.functional.hessian(loss, (layer.weight, layer.bias))
    rows = [
        torch.cat([block.reshape(numel, -1) for block in row], 1) for row, numel in zip(blocks, (9, 3), strict=True)
    ]
    values = torch.linalg.eigvalsh(torch.cat(rows))
    return values[values.abs().argmax()].item()


@pytest.fixture
def bent():
    """A model whose gradients have a graph, and its inputs."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(5, 3)
    params = list(model.parameters())
    grads = torch.autograd.grad(model(x).square().mean(), params, create_graph=True)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    yield model, x
    model.zero_grad()


def test_eigenvalues_are_those_of_the_exact_hessian(bent):
    model, x = bent
    expected = [exact(model, x, number) for number in (0, 1)]
    estimate = Eigenvalue(layer_name="layers", max_iter=500, tol=1e-6)
    for layer, value in zip(model.layers, expected, strict=True):
        params = list(layer.parameters())
        assert estimate.largest([param.grad for param in params], params) == pytest.approx(value, rel=1e-3)
    highest = max(abs(value) for value in expected)
    found = estimate.compute_eigenvalue(model)
    assert found == {
        id(layer.weight): (pytest.approx(abs(value) / highest, rel=1e-3), number)
        for number, (layer, value) in enumerate(zip(model.layers, expected, strict=True))
    }


def test_what_is_not_finite_counts_as_the_largest():
    estimate = Eigenvalue()
    assert estimate.post_process([1.0, float("nan"), 4.0, -2.0]) == [0.25, 1.0, 1.0, 0.5]
    assert estimate.post_process([float("nan"), float("inf")]) == [1.0, 1.0]
    assert estimate.post_process([0.0, 0.0]) == [1.0, 1.0]


def test_layers_that_are_not_there_are_named():
    model = Layers()
    with pytest.raises(ConfigError, match=r"eigenvalue.layer_name: found 'nothing'"):
        Eigenvalue(layer_name="nothing").get_layers(model)
    with pytest.raises(ConfigError, match=r"eigenvalue.layer_num: found 3 for 2 layers in 'layers'"):
        Eigenvalue(layer_name="layers", layer_num=3).get_layers(model)
    assert Eigenvalue(layer_name="layers", layer_num=1).get_layers(model) == [model.layers[0]]
    assert Eigenvalue(layer_name="layers").compute_eigenvalue(model) == {}


def parameter(start=8, target=5, period=2):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(4, 4))
    param.start_bits, param.target_bits, param.q_period = start, target, period
    return param


def test_bits_and_periods_are_deepspeeds():
    param, quantizer = parameter(), Quantizer()
    found = []
    for _ in range(9):
        quantizer.quantize([[param]], False, False)
        found.append((param.start_bits, param.q_period))
    assert found == [(8, 2), (7, 4), (7, 4), (6, 8), (6, 8), (6, 8), (6, 8), (5, 16), (5, 16)]
    assert not quantizer.any_precision_switch()


def test_an_eigenvalue_stretches_the_period():
    param, quantizer = parameter(), Quantizer(q_eigenvalue=True)
    assert quantizer.any_precision_switch()
    for _ in range(2):
        quantizer.quantize([[param]], False, True, {id(param): (1.0, 3)})
    assert (param.start_bits, param.q_period) == (7, 20)
    assert quantizer.any_precision_switch()


@pytest.mark.parametrize("kind", [0, 1, "symmetric", "asymmetric"])
def test_values_are_rounded_in_place(kind):
    param, quantizer = parameter(4, 4), Quantizer(q_groups=2, q_type=kind)
    expected = fake_quantize(param, 2, 4, symmetric=kind in (0, "symmetric"))
    bias = nn.Parameter(torch.randn(4))
    before = bias.detach().clone()
    bias.start_bits = 4
    quantizer.quantize([[param, bias]], False, False)
    torch.testing.assert_close(param.detach(), expected)
    torch.testing.assert_close(bias.detach(), before)


def test_values_are_deepspeeds():
    """The first rows that DeepSpeed 0.19.6 gives."""
    rows = {
        4: [-1.2086968421936035, -1.2086968421936035, -0.3021742105484009, -0.3021742105484009],
        3: [-1.4101462364196777, -1.4101462364196777, 0.0, -0.7050731182098389],
        2: [-1.1868278980255127, -1.1868278980255127, 0.0, 0.0],
        1: [-0.8668261766433716, -0.8668261766433716, -0.8668261766433716, -0.8668261766433716],
    }
    for bits, row in rows.items():
        param = parameter(bits, bits)
        Quantizer(q_groups=2, q_type="symmetric", q_rounding="nearest").quantize([[param]], False, False)
        torch.testing.assert_close(param.detach()[0], torch.tensor(row))


def test_a_skipped_step_rounds_nothing():
    param, quantizer = parameter(4, 4), Quantizer()
    before = param.detach().clone()
    quantizer.quantize([[param]], True, False)
    torch.testing.assert_close(param.detach(), before)
    assert quantizer.qsteps == 0


def test_few_bits_and_mixed_values():
    for bits, count in ((2, 3), (1, 2)):
        param = parameter(bits, bits)
        Quantizer().quantize([[param]], False, False)
        assert len(param.detach().unique()) == count
    param, quantizer = parameter(4, 4), Quantizer(q_mixed_fp16=True, q_change_ratio=0.25)
    before = param.detach().clone()
    quantizer.quantize([[param]], False, False)
    torch.testing.assert_close(param.detach(), 0.75 * before + 0.25 * fake_quantize(before, 1, 4))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("qsteps", "3", "moq.qsteps: found a str"),
        ("quantize_real_ratio", None, "moq.quantize_real_ratio: found a NoneType"),
        ("bits", [1], "moq.bits: found a list"),
        ("bits", {"weight": (99, 1, 1.0)}, r"moq.bits: found \(99, 1, 1.0\) for 'weight'"),
        ("bits", {"weight": (8, "1", 1.0)}, "moq.bits: found .* for 'weight'"),
        ("bits", {"other": (8, 1, 1.0)}, "moq: found no bits of weight"),
        ("eigenvalues", 1, "moq.eigenvalues: found a int"),
    ],
)
def test_a_state_that_no_run_has_written_changes_nothing(key, value, words):
    layer = nn.Linear(4, 4)
    bits = BitsParams(start_bits=8, target_bits=4, quantization_period=2)
    rounding = Rounding("quantize_training", 0, {"weight": bits}, {"q_groups": 1})
    moq = MixtureOfQuantization(rounding, layer, {id(layer.weight)}, lambda: None, None, lambda values: values)
    state = moq.state_dict()
    moq.check_state_dict(state)
    with pytest.raises(CheckpointError, match=words):
        moq.check_state_dict({**state, key: value})
    assert moq.state_dict() == state
