"""A whole decoder layer as one operator: against the torch reference, what it writes, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.ops import registry
from deepspeed.ops.quantizer import pack_weight
from deepspeed.ops.transformer import DecoderLayer, Linear, Norm, decoder_layer
from deepspeed.ops.transformer.decoder_layer import decoder_layer_reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-5}
FEATURES, INNER = 40, 72


@pytest.fixture(scope="module")
def ops():
    return registry.require("inference_core_ops")


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear_of(outs, cols, seed, bias):
    weight = numbers(outs, cols, seed=seed) * cols**-0.5
    return Linear(weight, numbers(outs, seed=seed + 20) * 0.1 if bias else None)


def norm_of(size, seed, bias):
    return Norm(1 + 0.1 * numbers(size, seed=seed), 0.1 * numbers(size, seed=seed + 20) if bias else None)


def layer_of(heads=4, kv_heads=2, head_dim=12, bias=False, head_norms=False, **words):
    """A layer in fp32; `bias` of products, and of layer norms."""
    gated, shifts = words.get("gated", True), bias and words.get("centered", False)
    return DecoderLayer(
        qkv=linear_of((heads + 2 * kv_heads) * head_dim, FEATURES, 1, bias),
        out=linear_of(FEATURES, heads * head_dim, 2, bias),
        up=linear_of(2 * INNER if gated else INNER, FEATURES, 3, bias),
        down=linear_of(FEATURES, INNER, 4, bias),
        norm_attention=norm_of(FEATURES, 5, shifts),
        **{"norm_mlp": norm_of(FEATURES, 6, shifts), **words},
        norm_query=norm_of(head_dim, 7, shifts) if head_norms else None,
        norm_key=norm_of(head_dim, 8, shifts) if head_norms else None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=1e-5,
        scale=head_dim**-0.5,
    )


def of_dtype(layer, dtype):
    """Weights in `dtype`; norms and biases are fp32, as callers give them."""
    weights = {name: Linear(getattr(layer, name).weight.to(dtype), getattr(layer, name).bias) for name in LINEARS}
    return replace(layer, **weights)


LINEARS = ("qkv", "out", "up", "down")


def packed(layer, bits, group_size, symmetric):
    made = {}
    for name in LINEARS:
        weight, bias = getattr(layer, name)
        made[name] = Linear(pack_weight(weight, bits, group_size, symmetric), bias)
    return replace(layer, **made)


def step_of(layer, rows, dtype, length=70, max_tokens=90, turned=8):
    """x, caches whose place behind `length` is nan, and angles."""
    x = numbers(rows, FEATURES, dtype=dtype, seed=9)
    shape = rows, layer.kv_heads, max_tokens, layer.head_dim
    caches = [numbers(*shape, dtype=dtype, seed=seed) for seed in (10, 11)]
    for cache in caches:
        cache[:, :, length:] = float("nan")
    angles = numbers(rows, turned // 2, seed=12)
    return x, *caches, length, angles.cos(), angles.sin()


def check(ops, layer, rows=2, dtype=torch.float32, starts=None, **words):
    x, keys, values, length, cos, sin = step_of(layer, rows, dtype, **words)
    others = keys.clone(), values.clone()
    wanted = decoder_layer_reference(x, *others, length, layer, starts, cos, sin)
    found = ops.decoder_layer(x, keys, values, length, starts, cos, sin, *layer.arguments)
    assert found.dtype == dtype
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit)
    for mine, theirs in zip((keys, values), others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit, equal_nan=True)
        assert mine[:, :, length].isfinite().all()
        assert mine[:, :, length + 1 :].isnan().all()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"centered": True, "bias": True, "gated": False, "activation": "gelu_tanh", "kv_heads": 4},
        {"head_norms": True, "heads": 6, "kv_heads": 2, "window": 33},
        {"head_norms": True, "centered": True, "bias": True, "layout": "by_group"},
        {"parallel": True, "norm_mlp": None, "interleaved": True, "gated": False, "activation": "relu"},
        {"parallel": True, "layout": "by_group", "kv_heads": 1, "activation": "gelu"},
        {"gated": False, "activation": "silu", "layout": "by_group", "kv_heads": 4},
    ],
    ids=lambda words: "-".join(words) or "llama",
)
def test_equals_the_reference(ops, words, rows, dtype):
    check(ops, of_dtype(layer_of(**words), dtype), rows, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric"), [(8, 0, True), (4, 0, True), (4, 4, False), (8, 8, False)]
)
def test_packed_weights(ops, bits, group_size, symmetric, dtype):
    check(ops, packed(layer_of(bias=True), bits, group_size, symmetric), 3, dtype)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 600])
def test_any_length(ops, length):
    check(ops, layer_of(), length=length, max_tokens=length + 2)


def test_the_first_token_that_is_seen(ops):
    starts = torch.tensor([0, 64, 70])
    check(ops, layer_of(), 3, starts=starts)
    check(ops, layer_of(window=5), 3, starts=starts)
    layer = layer_of()
    x, keys, values, length, cos, sin = step_of(layer, 3, torch.float32)
    keys[1, :, :64], values[1, :, :64] = float("nan"), float("nan")  # not read
    found = ops.decoder_layer(x, keys, values, length, starts, cos, sin, *layer.arguments)
    assert found.isfinite().all()


def test_caches_with_strides(ops):
    layer = layer_of()
    x, keys, values, length, cos, sin = step_of(layer, 2, torch.float32)
    wanted = ops.decoder_layer(x, keys.clone(), values.clone(), length, None, cos, sin, *layer.arguments)
    strided = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (keys, values)]
    found = ops.decoder_layer(x, *strided, length, None, cos, sin, *layer.arguments)
    assert torch.equal(found, wanted)
    assert strided[0][:, :, length].isfinite().all()


def test_without_a_rotary_embedding(ops):
    layer = layer_of(kv_heads=4)
    x, keys, values, length, _, _ = step_of(layer, 2, torch.float32)
    wanted = decoder_layer_reference(x, keys.clone(), values.clone(), length, layer)
    found = ops.decoder_layer(x, keys, values, length, None, None, None, *layer.arguments)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("words", [{}, {"centered": True, "bias": True, "gated": False, "activation": "gelu"}], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_the_halves_of_a_layer(ops, words, dtype):
    layer = of_dtype(layer_of(**words), dtype)
    x, keys, values, length, cos, sin = step_of(layer, 3, dtype)
    whole = ops.decoder_layer(x, keys.clone(), values.clone(), length, None, cos, sin, *layer.arguments)
    halfway = check_part(ops, replace(layer, part="attention"), x, keys, values, length, cos, sin)
    found = check_part(ops, replace(layer, part="mlp"), halfway, keys, values, length, cos, sin)
    torch.testing.assert_close(found, whole, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for part, given in (("attention", x), ("mlp", halfway)):
        without = replace(layer, part=part, adds_input=False)
        check_part(ops, without, given, keys, values, length, cos, sin)
    without = replace(layer, parallel=True, adds_input=False)
    check_part(ops, without, x, keys, values, length, cos, sin)


def check_part(ops, layer, x, keys, values, length, cos, sin):
    wanted = decoder_layer_reference(x, keys.clone(), values.clone(), length, layer, None, cos, sin)
    found = ops.decoder_layer(x, keys, values, length, None, cos, sin, *layer.arguments)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[x.dtype], atol=TOLERANCE[x.dtype])
    return found


def test_a_part_that_a_layer_has_not_is_refused():
    with pytest.raises(
        ConfigError, match="part: found 'mlp', but a layer has the parts whole, .* a parallel one whole"
    ):
        layer_of(parallel=True, part="mlp")
    with pytest.raises(ConfigError, match="adds_input: found False, but a whole layer in order needs its input twice"):
        layer_of(adds_input=False)


def test_more_threads_give_the_same(ops):
    layer = packed(layer_of(), 8, 0, symmetric=True)
    x, keys, values, length, cos, sin = step_of(layer, 4, torch.float32, length=700, max_tokens=701)
    found = []
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(ops.decoder_layer(x, keys, values, length, None, cos, sin, *layer.arguments))
    torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_refuses_by_name(ops):
    layer = layer_of()
    x, keys, values, length, cos, sin = step_of(layer, 2, torch.float32)
    good = [x, keys, values, length, None, cos, sin, *layer.arguments]

    def refused(match, **wrong):
        given = dict(zip(names, good, strict=True)) | wrong
        with pytest.raises(RuntimeError, match=f"decoder_layer: {match}"):
            ops.decoder_layer(*given.values())

    names = [argument.name for argument in ops.decoder_layer.default._schema.arguments]
    shape = list(layer.arguments[-3])
    refused("x: found dtype float16", x=x.half())
    refused(r"x: found shape \(17, 40\)", x=numbers(17, 40))
    refused("k_cache: found dtype bfloat16", k_cache=keys.bfloat16())
    refused(r"v_cache: found shape \(1, 2, 90, 12\)", v_cache=values[:1])
    refused("v_cache: found a tensor on meta", v_cache=values.to("meta"))
    refused("length: found 90, but it must be from 0 to 89", length=90)
    refused(r"starts\[1\]: found 71, but it must be from 0 to 70", starts=torch.tensor([0, 71]))
    refused("starts: found dtype int32", starts=torch.zeros(2, dtype=torch.int32))
    refused(r"sin: found shape \(2, 3\)", sin=sin[:, :3])
    refused("sin: found one of cos and sin", sin=None)
    refused(r"cos: found shape \(2, 7\)", cos=numbers(2, 7), sin=numbers(2, 7))
    refused(r"qkv: found shape \(95, 40\), but it must be of 96 outputs", qkv=layer.qkv.weight[:95])
    refused("out: found dtype bfloat16, but it must be dtype float32 as x has", out=layer.out.weight.bfloat16())
    refused(r"down: found shape \(40, 71\)", down=layer.down.weight[:, :71])
    refused(r"up_bias: found shape \(3\)", up_bias=torch.ones(3))
    refused("norm_mlp: found none", norm_mlp=None)
    refused("norm_key: found one norm", norm_query=torch.ones(12))
    refused("shape: found 3 numbers", shape=shape[:3])
    refused("shape: found 4 heads and 3 of keys", shape=[4, 3, *shape[2:]])
    refused("shape: found part 3, but it must be 0 to 2", shape=[*shape[:12], 3, 1])
    refused("shape: found part 1, but it must be 0", shape=[*shape[:4], 1, *shape[5:12], 1, 1])
    refused("shape: found activation 3", shape=[*shape[:8], 3, *shape[9:]])
    refused(
        "bits: found 5",
        qkv=torch.ones(96, 20, dtype=torch.int8),
        qkv_scales=torch.ones(96, 1),
        shape=[*shape[:10], 5, *shape[11:]],
    )


def test_opcheck(ops):
    for layer, dtype in (
        (layer_of(bias=True, centered=True), torch.float32),
        (packed(layer_of(), 4, 0, True), torch.bfloat16),
    ):
        x, keys, values, length, cos, sin = step_of(layer, 2, dtype, length=5, max_tokens=7)
        for cache in (keys, values):
            cache.nan_to_num_()
        arguments = (x, keys, values, length, torch.tensor([0, 2]), cos, sin, *layer.arguments)
        torch.library.opcheck(ops.decoder_layer.default, arguments)


def test_the_front_runs_the_operator_where_it_serves(ops, monkeypatch):
    layer = layer_of()

    def call(rows):
        x, keys, values, length, cos, sin = step_of(layer, rows, torch.float32)
        with torch.profiler.profile(acc_events=True) as profile:
            found = decoder_layer(x, keys, values, length, layer, None, cos, sin)
        return found, "ds_cpu::decoder_layer" in {event.key for event in profile.key_averages()}

    found, was_run = call(2)
    assert was_run
    assert not call(17)[1]
    monkeypatch.setenv("DS_OPS_DISABLE", "inference_core_ops")
    wanted, was_run = call(2)
    assert not was_run
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
