"""Layers that store their weight in few bits: what they keep, what they compute, what a state dict takes."""

import copy
import io

import pytest
import torch
from deepspeed.config.inference import GroupWiseQuantConfig
from deepspeed.errors import ConfigError, StateError
from deepspeed.inference.quantization.layers import QuantizedEmbedding, QuantizedLinear
from deepspeed.ops.quantizer.layers import WeightToStore, await_values, store_layers
from torch import nn

ROWS, COLS, GROUP = 24, 32, 8
FLOATING = "floating"  # in the place of `symmetric`
FORMS = [(bits, dim, symmetric) for bits in (8, 4) for dim in (1, 0) for symmetric in (True, False)]
FORMS += [(bits, dim, FLOATING) for bits in (8, 6) for dim in (1, 0)]


def section(bits=8, dim=1, symmetric=False, group=GROUP):
    kind = {"floating": True} if symmetric == FLOATING else {"symmetric": symmetric}
    return GroupWiseQuantConfig(num_bits=bits, group_size=group, group_dim=dim, **kind)


def grouped(weight, dim):
    """[groups, GROUP], by plain torch."""
    return (weight if dim == 1 else weight.t()).reshape(-1, GROUP)


def bound_of(weight, bits, dim, symmetric):
    """How far each element of the stored weight may be from the weight's, by plain torch."""
    groups = grouped(weight.float(), dim)
    if symmetric == FLOATING:
        largest, relative, below = {8: (448, 2**-4, 2**-10), 6: (28, 2**-3, 2**-5)}[bits]
        least = below * groups.abs().amax(1, keepdim=True) / largest
        scale = 2 * torch.maximum(relative * groups.abs(), least)
    elif symmetric:
        scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    else:
        scale = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / (2**bits - 1)
    turned = scale.expand_as(groups).reshape(weight.shape if dim == 1 else weight.t().shape)
    return (turned if dim == 1 else turned.t()) / 2


def stored(layer, *form):
    store_layers([WeightToStore("layer", layer, "weight", section(*form), "key")])
    return layer


@pytest.mark.parametrize(("bits", "dim", "symmetric"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_computes_with_the_weight_that_is_stored(bits, dim, symmetric, dtype):
    plain = nn.Linear(COLS, ROWS, dtype=dtype)
    layer = stored(copy.deepcopy(plain), bits, dim, symmetric)
    bound = bound_of(plain.weight.detach(), bits, dim, symmetric)
    assert torch.equal(layer.dequantized(), layer.dequantized(torch.float32).to(dtype))
    off = (layer.dequantized(torch.float32) - plain.weight.float()).abs()
    assert bool((off <= bound * 1.001 + 1e-6).all())
    for rows in (1, 40):  # of x: few go to a kernel, where there is one
        x = torch.randn(rows, COLS, dtype=dtype)
        wanted = nn.functional.linear(x.float(), layer.dequantized(torch.float32), plain.bias.float())
        # a weight rounded to bf16 is off by 2^-9 of itself, and the sum once more
        tolerance = 1e-5 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(layer(x).float(), wanted.detach(), atol=tolerance, rtol=tolerance)
        assert layer(x).dtype == dtype


@pytest.mark.parametrize(("bits", "dim", "symmetric"), FORMS)
def test_an_embedding_gives_rows_of_the_weight_that_is_stored(bits, dim, symmetric):
    layer = stored(nn.Embedding(ROWS, COLS, padding_idx=0), bits, dim, symmetric)
    ids = torch.tensor([[3, 0, 23], [3, 7, 1]])
    assert torch.equal(layer(ids), nn.functional.embedding(ids, layer.dequantized()))
    assert layer(ids[:0]).shape == (0, 3, COLS)
    assert layer.to(torch.bfloat16)(ids).dtype == torch.bfloat16


@pytest.mark.parametrize(("bits", "dim", "symmetric"), FORMS)
def test_weights_take_few_bits(bits, dim, symmetric):
    layer = stored(nn.Linear(COLS, ROWS, bias=False), bits, dim, symmetric)
    kept = sum(each.nbytes for each in (*layer.parameters(), *layer.buffers()))
    params = ROWS * COLS // GROUP * 4 * (1 if symmetric else 2)
    assert ROWS * COLS * bits // 8 + params <= kept <= ROWS * COLS * bits // 8 + params + 32 + 15  # header and filling


def test_a_layer_of_deepspeeds_signature_leaves_the_other_as_it_is():
    plain = nn.Linear(COLS, ROWS)
    before = plain.weight.clone()
    keys = {"num_bits": 8, "group_size": GROUP, "group_dim": 1, "symmetric": True}
    layer = QuantizedLinear(keys, plain)
    assert torch.equal(plain.weight, before)
    assert type(plain) is nn.Linear
    assert layer.bias is plain.bias
    assert isinstance(QuantizedEmbedding(keys, nn.Embedding(ROWS, COLS)), nn.Embedding)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_brings_the_stored_weight_back_bit_for_bit(assign):
    saved = stored(nn.Linear(COLS, ROWS), 4)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    other = stored(nn.Linear(COLS, ROWS), 4)
    other.load_state_dict(torch.load(file), assign=assign)
    x = torch.randn(3, COLS)
    assert torch.equal(other(x), saved(x))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        nn.Linear(COLS, ROWS).load_state_dict(saved.state_dict())
    for differs in ({"bits": 8}, {"symmetric": True}, {"dim": 0}, {"group": 16}, {"bits": 8, "symmetric": FLOATING}):
        layer = nn.Linear(COLS, ROWS)
        store_layers([WeightToStore("layer", layer, "weight", section(**{"bits": 4, **differs}), "key")])
        with pytest.raises(
            RuntimeError, match=r"weight: found a weight stored otherwise: .* instead of .*; give the sett"
        ):
            layer.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_without_values_takes_them_from_a_checkpoint(device, assign):
    plain = nn.Linear(COLS, ROWS)
    layer = nn.Linear(COLS, ROWS, device=device)
    await_values(layer, section(4), "key", allocates=False)
    assert layer.weight.device.type == "meta"
    if device == "meta":
        layer.bias = nn.Parameter(torch.empty(ROWS))
    with pytest.raises(StateError, match="load one, or make the model without it and use .*post_init_quant"):
        layer(torch.randn(1, COLS))
    layer.load_state_dict(plain.state_dict(), assign=assign)
    x = torch.randn(3, COLS)
    assert torch.equal(layer(x), stored(plain, 4)(x))


def test_wrong_weights_are_named():
    layer = stored(nn.Linear(COLS, ROWS, bias=False), 4)
    before = layer.weight.clone()
    with pytest.raises(
        RuntimeError, match=r"weight: found torch.float32 of shape \(3, 3\), and the weight has the shape \(24, 32\)"
    ):
        layer.load_state_dict({"weight": torch.ones(3, 3)})
    with pytest.raises(ConfigError, match=r"weight: found torch.float32 of shape \(3, 3\)"):
        layer.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ConfigError, match="no weight that deepspeed.inference.quantization stored"):
        layer.weight = nn.Parameter(torch.ones(64, dtype=torch.int8), requires_grad=False)
    assert torch.equal(layer.weight, before)


def test_a_gradient_reaches_what_comes_before_and_the_bias_not_the_weight():
    layer = stored(nn.Linear(COLS, ROWS), 8)
    x = torch.randn(2, COLS, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantized().sum(0).expand(2, -1))
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
