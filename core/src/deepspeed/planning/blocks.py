"""The operations of transformers' models as tapes: embedding, one layer, and the head with the loss.

Each function records the operations of the model's code in transformers 5 under eager torch, with an attention kernel
that saves no scores (sdpa, flash). A fused norm or MLP saves less. The linear part follows Korthikanti et al. (arXiv
2205.05198, section 4); the rest is what torch actually saves: `docs/explanation/memory-and-traffic.md` has the sums,
and a test compares them with `saved_tensors_hooks`.
"""

from dataclasses import dataclass

from deepspeed.planning.shape import ModelShape, Share
from deepspeed.planning.tape import Profile, Tape, Value

_FP32 = 4


@dataclass(frozen=True, slots=True)
class Param:
    """This rank's part of a parameter. `is_expert`: only ranks with the same experts share it."""

    name: str
    numel: int
    is_expert: bool = False

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether Muon orthogonalizes it; AdamW updates all others (`mark_muon_parameters`)."""
        return ".layers." in self.name and self.name.endswith("weight") and "norm" not in self.name


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """The parameters of a block, in module order, and the profile of its tape."""

    params: tuple[Param, ...]
    profile: Profile


class _Writer:
    """Records operations with parameters on a tape."""

    def __init__(self, shape: ModelShape, share: Share, itemsize: int) -> None:
        self.shape, self.share = shape, share
        self.tape = Tape(itemsize)
        self.itemsize = itemsize
        self.params: list[Param] = []

    def param(self, name: str, numel: int, *, is_expert: bool = False) -> str:
        self.params.append(Param(name, numel, is_expert))
        return self.tape.parameter(name, numel * self.itemsize)

    def linear(self, name: str, x: Value, inputs: int, outputs: int, *, bias: bool = False) -> Value:
        """Record a linear layer, [..., inputs] -> [..., outputs], which saves x."""
        names = [self.param(f"{name}.weight", inputs * outputs)]
        if bias:
            names.append(self.param(f"{name}.bias", outputs))
        return self.tape.operation(x.numel // inputs * outputs, [x], saved=[x], parameters=names)

    def norm(self, name: str, x: Value, width: int) -> Value:
        """Record transformers' RMSNorm, which computes in fp32, or torch's LayerNorm."""
        tape, rows = self.tape, x.numel // width
        weight = self.param(f"{name}.weight", width)
        if self.shape.norm == "layer":
            bias = self.param(f"{name}.bias", width)
            return tape.operation(x.numel, [x], saved=[x], saved_extra=2 * _FP32 * rows, parameters=[weight, bias])
        wide = x if self.itemsize == _FP32 else tape.operation(x.numel, [x], itemsize=_FP32)
        full = _FP32 * x.numel
        square = tape.operation(x.numel, [wide], saved=[wide], temporary=full, itemsize=_FP32)
        scale = tape.operation(rows, [square], saves_output=True, temporary=0, itemsize=_FP32)
        tape.drop(square)
        scaled = tape.operation(x.numel, [wide, scale], saved=[wide, scale], temporary=full, itemsize=_FP32)
        if self.itemsize != _FP32:
            narrow = tape.operation(x.numel, [scaled])
            tape.drop(scaled)
            scaled = narrow
        return tape.operation(x.numel, [scaled], saved=[scaled], temporary=scaled.num_bytes, parameters=[weight])

    def activation(self, x: Value) -> Value:
        tape, kind = self.tape, self.shape.activation
        if kind == "relu":
            y = tape.operation(x.numel, [x], saves_output=True)
            tape.drop(x)
            return y
        if kind != "gelu_new":
            return tape.operation(x.numel, [x], saved=[x])
        cube = tape.operation(x.numel, [x], saved=[x], temporary=x.num_bytes)
        inner = tape.operation(x.numel, [x, cube])
        tanh = tape.operation(x.numel, [inner], saves_output=True)
        tape.drop(cube, inner)
        half = tape.operation(x.numel, [x])
        one_more = tape.operation(x.numel, [tanh], passes=True)
        return tape.operation(x.numel, [half, one_more], saved=[half, one_more])

    def sum(self, x: Value, y: Value) -> Value:
        """Record a residual sum."""
        return self.tape.operation(x.numel, [x, y], passes=True)

    def dropout(self, x: Value) -> Value:
        """Record dropout, whose mask takes a byte per element, like torch's on devices."""
        if not self.shape.dropout:
            return x
        y = self.tape.operation(x.numel, [x], saved_extra=x.numel)
        self.tape.drop(x)
        return y

    def rotated(self, x: Value) -> Value:
        if not self.shape.rotary:
            return x
        half = x.num_bytes // 2
        y = self.tape.operation(x.numel, [x], temporary=2 * x.num_bytes + half, forward_temporary=2 * x.num_bytes)
        self.tape.drop(x)
        return y

    def sent(self, x: Value) -> Value:
        """Record an all-to-all of `sp` ranks: from parts of the sequence to parts of the heads, or back."""
        y = self.tape.operation(x.numel, [x], temporary=2 * x.num_bytes, forward_temporary=2 * x.num_bytes)
        self.tape.drop(x)
        return y


def layer(shape: ModelShape, share: Share, itemsize: int) -> PlannedBlock:
    """Return one transformer layer. `itemsize`: bytes per element of activations, weights and their gradients."""
    writer = _Writer(shape, share, itemsize)
    tape, width = writer.tape, shape.hidden_size
    x = tape.input(share.tokens * width)
    if shape.post_norm:
        middle = writer.norm("attention.norm", writer.sum(x, _attention(writer, x)), width)
        y = writer.norm("mlp.norm", writer.sum(middle, _mlp(writer, middle)), width)
    elif shape.parallel:
        attended = _attention(writer, writer.norm("input_layernorm", x, width))
        inner = _mlp(writer, writer.norm("post_attention_layernorm", x, width))
        y = writer.sum(writer.sum(inner, attended), x)
    else:
        middle = writer.sum(x, _attention(writer, writer.norm("input_layernorm", x, width)))
        y = writer.sum(middle, _mlp(writer, writer.norm("post_attention_layernorm", middle, width)))
    return _finished(writer, y)


def embedding(shape: ModelShape, share: Share, itemsize: int) -> PlannedBlock:
    """Return the embeddings of tokens, and of positions and token types if the model has them."""
    writer = _Writer(shape, share, itemsize)
    tape, numel = writer.tape, share.tokens * shape.hidden_size
    sources = [("embed_tokens", share.vocab)]
    sources += [("embed_positions", shape.positions)] if shape.positions else []
    sources += [("token_types", shape.token_types)] if shape.token_types else []
    total: Value | None = None
    for name, rows in sources:
        tokens = tape.input(share.tokens, needs_gradient=False, itemsize=8)
        weight = writer.param(f"{name}.weight", rows * shape.hidden_size)
        y = tape.operation(numel, [], parameters=[weight], saved_extra=tokens.num_bytes if total is None else 0)
        if share.vocab < shape.vocab_size and total is None:  # rows of other ranks are masked
            y = tape.operation(numel, [y], saved_extra=share.tokens)
        total = y if total is None else writer.sum(total, y)
    assert total is not None
    if shape.post_norm:
        total = writer.norm("embed_norm", total, shape.hidden_size)
    return _finished(writer, writer.dropout(total))


def head(shape: ModelShape, share: Share, itemsize: int) -> PlannedBlock:
    """Return the last norm, the logits and the loss, which transformers computes in fp32 from whole logits."""
    writer = _Writer(shape, share, itemsize)
    tape, width, vocab = writer.tape, shape.hidden_size, shape.vocab_size
    x = tape.input(share.tokens * width)
    hidden = writer.norm("norm", x, width) if shape.final_norm else x
    if shape.head_transform:
        dense = writer.linear("head.dense", hidden, width, width, bias=True)
        hidden = writer.norm("head.norm", writer.activation(dense), width)
    if shape.tied:
        weight = tape.parameter("embed_tokens.weight", share.vocab * width * itemsize)
        bias = [writer.param("lm_head.bias", share.vocab)] if shape.head_bias else []
        logits = tape.operation(share.tokens * share.vocab, [hidden], saved=[hidden], parameters=[weight, *bias])
    else:
        logits = writer.linear("lm_head", hidden, width, share.vocab, bias=shape.head_bias)
    if share.vocab < vocab:  # the gather temporarily needs the padded and the gathered parts
        part, whole = logits.num_bytes, share.tokens * vocab * itemsize
        gathered = tape.operation(share.tokens * vocab, [logits], forward_temporary=part + whole)
        tape.drop(logits)
        logits = gathered
    wide = logits if itemsize == _FP32 else tape.operation(logits.numel, [logits], itemsize=_FP32)
    chances = tape.operation(logits.numel, [wide], saves_output=True, itemsize=_FP32)
    tape.drop(logits)
    if wide is not logits:
        tape.drop(wide)
    loss = tape.operation(1, [chances], saved_extra=share.tokens * 8, itemsize=_FP32)
    return _finished(writer, loss)


def _finished(writer: _Writer, output: Value) -> PlannedBlock:
    return PlannedBlock(tuple(writer.params), writer.tape.profile(output))


def _attention(writer: _Writer, x: Value) -> Value:
    shape, share, tape = writer.shape, writer.share, writer.tape
    width, queries, keys = shape.hidden_size, share.query_size, share.kv_size
    sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    if shape.fused_qkv:
        name = "attention.qkv"
        fused = writer.linear(name, x, width, queries + 2 * keys, bias=shape.qkv_bias)
        if shape.rotary:
            parts = [tape.operation(share.tokens * size, [fused]) for size in (queries, keys)]
            q, k = parts
            v = tape.operation(share.tokens * keys, [fused], in_place=True)
        else:  # views of the fused output
            q, k, v = (tape.operation(share.tokens * size, [fused], in_place=True) for size in sizes.values())
    else:
        q, k, v = (
            writer.linear(f"self_attn.{name}", x, width, size, bias=shape.qkv_bias) for name, size in sizes.items()
        )
        if shape.qk_norm:
            q = writer.norm("self_attn.q_norm", q, shape.head_dim)
            k = writer.norm("self_attn.k_norm", k, shape.head_dim)
        q, k = writer.rotated(q), writer.rotated(k)
    if share.sp > 1:
        q, k, v = writer.sent(q), writer.sent(k), writer.sent(v)
    rows = share.tokens * queries // shape.head_dim
    context = tape.operation(
        q.numel, [q, k, v], saved=[q, k, v], saves_output=True, saved_extra=_FP32 * rows, temporary=2 * q.num_bytes
    )
    if share.sp > 1:
        context = writer.sent(context)
    elif shape.rotary_share < 1:  # queries are concatenated from two parts, and the kernel's output gets their layout
        context = tape.operation(context.numel, [context])
    return writer.dropout(writer.linear("self_attn.o_proj", context, queries, width, bias=shape.out_bias))


def _mlp(writer: _Writer, x: Value) -> Value:
    shape, share = writer.shape, writer.share
    if shape.experts:
        return _experts(writer, x)
    return writer.dropout(_dense(writer, "mlp", x, share.inner))


def _dense(writer: _Writer, name: str, x: Value, inner: int) -> Value:
    shape, tape, width = writer.shape, writer.tape, writer.shape.hidden_size
    if not shape.gated:
        up = writer.activation(writer.linear(f"{name}.up_proj", x, width, inner, bias=shape.mlp_bias))
        return writer.linear(f"{name}.down_proj", up, inner, width, bias=shape.mlp_bias)
    gate = writer.activation(writer.linear(f"{name}.gate_proj", x, width, inner, bias=shape.mlp_bias))
    up = writer.linear(f"{name}.up_proj", x, width, inner, bias=shape.mlp_bias)
    product = tape.operation(up.numel, [gate, up], saved=[gate, up])
    return writer.linear(f"{name}.down_proj", product, inner, width, bias=shape.mlp_bias)


def _experts(writer: _Writer, x: Value) -> Value:
    """Record router, sort by expert and grouped products (`moe/dispatch.py`), for ranks that receive what they send."""
    shape, share, tape, width = writer.shape, writer.share, writer.tape, writer.shape.hidden_size
    rows, inner = share.tokens * shape.experts_per_token, share.inner
    scores = writer.linear("mlp.gate", x, width, shape.experts)
    chances = tape.operation(share.tokens * shape.experts, [scores], saves_output=True, itemsize=_FP32)
    tape.drop(scores)
    weights = tape.operation(rows, [chances], saved_extra=12 * rows, itemsize=_FP32)
    sorted_rows = tape.operation(rows * width, [x], saved_extra=16 * rows)
    if share.ep > 1:
        received = tape.operation(rows * width, [sorted_rows])
        tape.drop(sorted_rows)
        sorted_rows = received
        if share.experts > 1:
            by_expert = tape.operation(rows * width, [sorted_rows], saved_extra=8 * rows)
            tape.drop(sorted_rows)
            sorted_rows = by_expert
    up_name = writer.param("mlp.experts.gate_up_proj", 2 * share.experts * inner * width, is_expert=True)
    down_name = writer.param("mlp.experts.down_proj", share.experts * inner * width, is_expert=True)
    both = tape.operation(2 * rows * inner, [sorted_rows], saved=[sorted_rows], parameters=[up_name])
    gate = tape.operation(rows * inner, [both], in_place=True, passes=True)
    up = tape.operation(rows * inner, [both], in_place=True)  # its backward concatenates both gradients
    activated = tape.operation(rows * inner, [gate], saved=[gate])
    product = tape.operation(rows * inner, [activated, up], saved=[activated, up])
    out = tape.operation(rows * width, [product], saved=[product], parameters=[down_name])
    if share.ep > 1:
        steps = 2 if share.experts > 1 else 1
        for _ in range(steps):
            back = tape.operation(rows * width, [out], saved_extra=8 * rows if steps == 2 else 0)
            tape.drop(out)
            out = back
    placed = tape.operation(rows * width, [out], saved=[out], saved_extra=8 * rows)  # index_copy saves its source
    mixed = tape.operation(x.numel, [weights, placed], saved=[weights, placed])
    if shape.shared_intermediate_size:
        mixed = writer.sum(mixed, _dense(writer, "mlp.shared_expert", x, share.shared_inner))
    return mixed
