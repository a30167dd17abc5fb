"""A complete decoder layer for the newest token of each sequence, so that a generation step is one call per layer.

    h = norm(x);  q, k, v = heads of h w_qkv^T;  q, k = rotary(norm(q)), rotary(norm(k));  write k, v to the cache
    a = attention(q, cache) w_out^T
    sequential:   t = x + a;      y = t + mlp(norm(t))
    parallel:     y = (a + mlp(norm(x))) + x                    without `norm_mlp`, both halves share one norm
    mlp(h):       activation(h w_up^T) w_down^T, or gated: (activation(gate) * up) w_down^T

With tensor parallelism (arXiv 1909.08053, section 3), each half is a call with the rank's heads and columns. The sum of
the results over the ranks is t, then y; only one rank adds x or t.

Norms, rotary embedding, attention and products are defined in the other files of this package. Each uses fp32
arithmetic, rounded once to x's dtype. Shape legend: B sequences, C features, D head size, R rotated elements of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed.errors import ConfigError
from deepspeed.ops.operators import operator_for
from deepspeed.ops.quantizer.packed import PackedWeight, packed_linear_reference
from deepspeed.ops.transformer.decode_attention import decode_attention_reference
from deepspeed.ops.transformer.norm import layer_norm_reference, rms_norm_reference
from deepspeed.ops.transformer.rotary import apply_rotary_reference

OP = "inference_core_ops"
MOST_ROWS = 16  #: maximum number of sequences of a kernel
# name -> number for the operator; relu is not available for a gate
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
PARTS = ("whole", "attention", "mlp")  #: the index is the number for the operator
_DTYPES = (torch.float32, torch.bfloat16)


class Linear(NamedTuple):
    """A linear layer: weight (out, in), plain or packed, and bias (out,)."""

    weight: Tensor | PackedWeight
    bias: Tensor | None = None


class Norm(NamedTuple):
    """A norm's weight and bias."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class DecoderLayer:
    """`DecoderLayer` holds the weights, sizes and switches of one layer. It is created once per generation.

    Fields:
        qkv: the projection to queries, keys and values: (heads + 2 kv_heads) D outputs.
        out, up, down: the output projection of attention, and the MLP; if gated, `up` has gate and up concatenated.
        norm_attention, norm_mlp: the norms before the halves of the layer.
        norm_query, norm_key: the norms of each head before the rotary embedding, both or none.
        layout: order of the outputs of `qkv`: "by_part" has all queries, then all keys, then all values; "by_group" has
            queries, key and value of each key-value head.
        centered: norms are layer norms, else RMS norms.
        interleaved: which elements the rotary embedding pairs, see `rotary.py`.
        window: number of tokens that a query attends to, including itself; None: all tokens up to it.
        part: "attention" is x + a, "mlp" is x + mlp(norm_mlp(x)); only for a sequential layer.
        adds_input: False omits x from the result, for a part or a parallel layer.

    Raises:
        ConfigError: packed weights have different bits, a norm is missing or has a bias that it cannot have, a value
            is unknown, or the layer has no such part.
    """

    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    norm_attention: Norm
    norm_mlp: Norm | None
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    activation: str = "silu"
    gated: bool = True
    parallel: bool = False
    centered: bool = False
    interleaved: bool = False
    layout: Literal["by_part", "by_group"] = "by_part"
    window: int | None = None
    norm_query: Norm | None = None
    norm_key: Norm | None = None
    part: Literal["whole", "attention", "mlp"] = "whole"
    adds_input: bool = True

    def __post_init__(self) -> None:
        known = [name for name in ACTIVATIONS if not (self.gated and name == "relu")]
        if self.activation not in known:
            raise ConfigError(f"activation: found {self.activation!r}, but it must be one of {', '.join(known)}")
        packed = [each.weight for each in self.linears if isinstance(each.weight, PackedWeight)]
        for what in ("bits", "input_bits"):
            if len(found := {getattr(each, what) for each in packed}) > 1:
                raise ConfigError(
                    f"linear layers: found weights of {sorted(found)} {what}, but they must have the same"
                )
        if any(each.floating for each in packed):
            raise ConfigError("linear layers: found a floating packed weight, which no kernel reads; pack integers")
        if self.norm_mlp is None and not self.parallel:
            raise ConfigError("norm_mlp: found None, but it must be given where the halves are not parallel")
        norms = (self.norm_attention, self.norm_mlp, self.norm_query, self.norm_key)
        if not self.centered and any(norm is not None and norm.bias is not None for norm in norms):
            raise ConfigError("norms: found a bias, but an RMS norm has none; give centered=True for layer norms")
        if self.part not in PARTS or (self.parallel and self.part != "whole"):
            raise ConfigError(
                f"part: found {self.part!r}, but a layer has the parts {', '.join(PARTS)}, a parallel one whole"
            )
        if not self.adds_input and not self.parallel and self.part == "whole":
            raise ConfigError("adds_input: found False, but a whole layer in order needs its input twice; give part")
        if (self.norm_query is None) != (self.norm_key is None):
            raise ConfigError("norm_query, norm_key: found one of them, but they must be given together")

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The linear layers in the order of use."""
        return self.qkv, self.out, self.up, self.down

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The operator's arguments that describe the layer; they follow the arguments of the step."""
        given: list[Any] = []
        bits, input_bits = 0, 16
        for weight, bias in self.linears:
            if isinstance(weight, PackedWeight):
                given += [weight.data, weight.scales, weight.zeros, bias]
                bits, input_bits = weight.bits, weight.input_bits
            else:
                given += [weight, None, None, bias]
        for norm in (self.norm_attention, self.norm_mlp, self.norm_query, self.norm_key):
            given += [None, None] if norm is None else list(norm)
        switches = (self.layout == "by_group", self.parallel, self.centered, self.interleaved, self.gated)
        numbers = [*map(int, switches), ACTIVATIONS[self.activation], self.window or 0, bits, input_bits]
        numbers += [PARTS.index(self.part), int(self.adds_input)]
        return (*given, [self.heads, self.kv_heads, self.head_dim, *numbers], self.eps, self.scale)

    def map(self, change: Any) -> "DecoderLayer":
        """Return a copy of the layer with `change` applied to every tensor and packed weight."""

        def changed(value: Any) -> Any:
            if not isinstance(value, Linear | Norm):
                return value
            weight: Any = change(value[0])
            return type(value)(weight, None if value[1] is None else change(value[1]))

        return DecoderLayer(**{each.name: changed(getattr(self, each.name)) for each in fields(self)})


def decoder_layer(
    x: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    length: int,
    layer: DecoderLayer,
    starts: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """Compute the layer for one new token of each sequence, and write the token's key and value to the cache.

    Operator: `decoder_layer(x, k_cache, v_cache, length, starts, cos, sin, <weights>, shape, eps, scale)`, see
    `DecoderLayer.arguments`. It is called for up to `MOST_ROWS` sequences in fp32 and bf16.

    Args:
        x: (B, C).
        k_cache, v_cache: (B, kv_heads, max_tokens, D) in x's dtype; the last dimension must be contiguous.
        length: number of tokens in the cache before the new token, which gets index `length`.
        starts: int64 (B,), index of the first token that a sequence attends to, at most `length`; None: 0.
        cos, sin: fp32 (B, R / 2) for the positions of the new tokens; None: no rotary embedding.

    Returns:
        (B, C) in x's dtype.

    Raises:
        RuntimeError: raised by the operator or torch for shapes and dtypes that do not fit.
    """
    if (kernel := decoder_layer_operator(x)) is not None:
        return kernel(x, k_cache, v_cache, length, starts, cos, sin, *layer.arguments)
    return decoder_layer_reference(x, k_cache, v_cache, length, layer, starts, cos, sin)


def decoder_layer_operator(x: Tensor) -> Any:
    """Return the operator for x's shape and dtype, or None."""
    if x.dtype not in _DTYPES or x.shape[0] > MOST_ROWS:
        return None
    found = operator_for(OP, "decoder_layer", x)
    return None if found is None else found.default  # type: ignore[attr-defined]


def decoder_layer_reference(
    x: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    length: int,
    layer: DecoderLayer,
    starts: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """The torch reference of `decoder_layer`. Tests compare kernels with it."""
    residual = x if layer.adds_input else torch.zeros_like(x)
    if layer.part == "mlp":
        assert layer.norm_mlp is not None
        return _mlp(_normed(x, layer.norm_mlp, layer), layer) + residual
    normed = _normed(x, layer.norm_attention, layer)
    query, key, value = _heads_of(_product(normed, layer.qkv), layer)
    if layer.norm_query is not None and layer.norm_key is not None:
        query, key = _normed(query, layer.norm_query, layer), _normed(key, layer.norm_key, layer)
    if cos is not None and sin is not None:
        query, key = (
            apply_rotary_reference(each.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1), layer.interleaved, 1)[:, 0]
            for each in (query, key)
        )
    k_cache[:, :, length], v_cache[:, :, length] = key, value
    firsts = [0] * x.shape[0] if starts is None else starts.tolist()
    rows = []
    for row, first in enumerate(firsts):
        keys, values = (cache[row : row + 1, :, first : length + 1] for cache in (k_cache, v_cache))
        count = torch.tensor([length + 1 - first], device=x.device)
        one = query[row : row + 1].unsqueeze(2)
        rows.append(decode_attention_reference(one, keys, values, count, layer.scale, window=layer.window).flatten(1))
    attended = _product(torch.cat(rows), layer.out)
    if layer.parallel:
        halfway = normed if layer.norm_mlp is None else _normed(x, layer.norm_mlp, layer)
        return (attended + _mlp(halfway, layer)) + residual
    if layer.part == "attention":
        return attended + residual
    assert layer.norm_mlp is not None
    total = attended + x
    return _mlp(_normed(total, layer.norm_mlp, layer), layer) + total


def _normed(x: Tensor, norm: Norm, layer: DecoderLayer) -> Tensor:
    if layer.centered:
        return layer_norm_reference(x, norm.weight, norm.bias, layer.eps)
    return rms_norm_reference(x, norm.weight, layer.eps)


def _product(x: Tensor, linear: Linear) -> Tensor:
    if isinstance(linear.weight, PackedWeight):
        return packed_linear_reference(x, linear.weight, linear.bias)
    return F.linear(x, linear.weight, None if linear.bias is None else linear.bias.to(x.dtype))


def _heads_of(qkv: Tensor, layer: DecoderLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B, heads, D), keys (B, kv_heads, D) and values (B, kv_heads, D)."""
    heads = qkv.unflatten(-1, (-1, layer.head_dim))
    if layer.layout == "by_part":
        query, key, value = heads.split((layer.heads, layer.kv_heads, layer.kv_heads), 1)
        return query, key, value
    groups = heads.unflatten(1, (layer.kv_heads, -1))
    return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]


def _mlp(x: Tensor, layer: DecoderLayer) -> Tensor:
    wide = _product(x, layer.up)
    gate, *others = wide.chunk(2, -1) if layer.gated else (wide,)
    activated = _ACTIVATE[layer.activation](gate.float())
    for up in others:
        activated = activated * up.float()
    return _product(activated.to(x.dtype), layer.down)


_ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
