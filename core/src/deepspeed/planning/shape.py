"""`ModelShape` holds the model's sizes for a plan, read from transformers' `config.json` or from a plain description.

The module does not import transformers: a hub file and a dict are read the same way.

`Mesh` holds the number of ranks along each axis. `Share` holds the first rank's share of a model and a micro-batch. If
sizes do not divide evenly, the first ranks hold one head, feature or token more, so the first rank has the most.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepspeed.errors import ConfigError, counted
from deepspeed.tensor_parallel.ranges import HeadShare, share_heads, spread


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer. Sizes are numbers of elements.

    Args:
        layers: transformer layers.
        hidden_size: width between them.
        heads: query heads of a layer.
        vocab_size: size of the vocabulary.
        kv_heads: key and value heads; default: `heads`.
        head_dim: width of a head; default: hidden_size / heads.
        intermediate_size: inner width of the MLP, or of one expert; default: 4 x hidden_size.
        tied: whether embedding and output layer are one parameter.
        gated: whether the MLP has a gate: act(gate(x)) * up(x).
        activation: activation of the MLP: "silu", "gelu", "gelu_new" or "relu".
        norm: "rms" (a weight) or "layer" (weight and bias).
        rotary: whether queries and keys are rotated by their positions.
        rotary_share: part of a head that is rotated.
        positions: rows of a learned position embedding; 0: none.
        token_types: rows of an embedding of token types (BERT); 0: none.
        qkv_bias, out_bias, mlp_bias: whether these layers have biases.
        head_bias: whether the output layer has one.
        fused_qkv: whether query, key and value are one layer.
        qk_norm: whether there is a norm of each query and key head.
        parallel: attention and MLP read the same residual, each through its own norm (GPT-NeoX).
        post_norm: norms follow the residual sums (BERT).
        final_norm: whether a norm precedes the output layer.
        head_transform: whether a layer and a norm precede the output layer (BERT).
        dropout: whether embeddings and the outputs of attention and MLP pass a dropout.
        is_causal_lm: whether the loss uses shifted tokens.
        experts: number of experts per layer; 0: dense layers.
        experts_per_token: number of experts that each token uses.
        shared_intermediate_size: inner width of an expert that every token uses; 0: none.
        parameters: total number of parameters, if given; it replaces the computed sum in reports.
        family: transformers' model type, or "plain".
    """

    layers: int
    hidden_size: int
    heads: int
    vocab_size: int
    kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    tied: bool = False
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_new", "relu"] = "silu"
    norm: Literal["rms", "layer"] = "rms"
    rotary: bool = True
    rotary_share: float = 1.0
    positions: int = 0
    token_types: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    fused_qkv: bool = False
    qk_norm: bool = False
    parallel: bool = False
    post_norm: bool = False
    final_norm: bool = True
    head_transform: bool = False
    dropout: bool = False
    is_causal_lm: bool = True
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate_size: int = 0
    parameters: int | None = None
    family: str = "plain"

    def __post_init__(self) -> None:
        defaults = {
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim or self.hidden_size // max(self.heads, 1),
            "intermediate_size": self.intermediate_size or 4 * self.hidden_size,
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        for name in ("layers", "hidden_size", "heads", "vocab_size", "kv_heads", "head_dim", "intermediate_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"model description: {name} must be a positive integer, found {value!r}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model description: found {self.heads} query heads and {self.kv_heads} key and value heads; the first "
                "must be a multiple of the second"
            )
        if bool(self.experts) != bool(self.experts_per_token) or self.experts_per_token > self.experts:
            raise ConfigError(
                f"model description: found experts {self.experts} and experts_per_token {self.experts_per_token}; give "
                "both, the second at most the first"
            )

    @property
    def query_size(self) -> int:
        """The number of features of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The number of features of all key heads; the value heads have the same."""
        return self.kv_heads * self.head_dim


#: field of `ModelShape` -> names in transformers' configs; the first one that exists is used
_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
}
_LAYER_NORM: dict[str, Any] = {"norm": "layer", "gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True}

#: model type -> fields that are the same for all models of the family
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "gpt2": {**_LAYER_NORM, "rotary": False, "fused_qkv": True, "activation": "gelu_new"},
    "gpt_neox": {**_LAYER_NORM, "fused_qkv": True, "activation": "gelu"},
    "opt": {**_LAYER_NORM, "rotary": False, "activation": "relu"},
    "bert": {
        **_LAYER_NORM,
        **{"rotary": False, "activation": "gelu", "post_norm": True, "final_norm": False, "head_transform": True},
        **{"head_bias": True, "is_causal_lm": False},
    },
}
#: transformers' defaults of `tie_word_embeddings`
_TIED = {"gpt2": True, "opt": True, "bert": True}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_new", "relu": "relu"}


def read_shape(source: ModelShape | Mapping[str, Any] | str | Path) -> ModelShape:
    """Return the shape of a model.

    Args:
        source: a file or a dict with transformers' config (it has `model_type`), or with a plain description, which has
            the fields of `ModelShape`.

    Raises:
        ConfigError: the file cannot be read, a family or field is unknown, or a field is missing.
    """
    if isinstance(source, ModelShape):
        return source
    if isinstance(source, Mapping):
        return _from_mapping(source, "model description")
    path = Path(source)
    try:
        found = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give a config.json of transformers, its folder, or a plain "
            "description"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected an object with the fields of a model, found {type(found).__name__}")
    return _from_mapping(found, str(path))


def _from_mapping(found: Mapping[str, Any], where: str) -> ModelShape:
    if "model_type" in found:
        return _from_config(found, where)
    known = {each.name for each in dataclasses.fields(ModelShape)} - {"family"}
    if unknown := set(found) - known:
        raise ConfigError(
            f"{where}: found the fields {', '.join(sorted(unknown))}, which a description does not have; it has "
            f"{', '.join(sorted(known))}. A file of transformers has model_type"
        )
    if missing := [name for name in ("layers", "hidden_size", "heads", "vocab_size") if name not in found]:
        raise ConfigError(f"{where}: {', '.join(missing)} missing; a description needs at least these")
    return ModelShape(**found)


def _from_config(found: Mapping[str, Any], where: str) -> ModelShape:
    family = str(found["model_type"])
    if family not in _FAMILIES:
        raise ConfigError(
            f'{where}: found model_type "{family}"; known are {", ".join(sorted(_FAMILIES))}. Give a plain description '
            "of it instead: layers, hidden_size, heads, vocab_size and so on"
        )
    fields: dict[str, Any] = {"family": family, **_FAMILIES[family]}
    for name, candidates in _NAMES.items():
        value = next((found[each] for each in candidates if found.get(each) is not None), None)
        if value is not None:
            fields[name] = value
    if missing := [name for name in ("layers", "hidden_size", "heads", "vocab_size") if name not in fields]:
        raise ConfigError(f"{where}: {', '.join('/'.join(_NAMES[name]) for name in missing)} missing")
    fields["tied"] = bool(found.get("tie_word_embeddings", _TIED.get(family, False)))
    activation = str(next((found[k] for k in ("hidden_act", "activation_function") if k in found), ""))
    if activation and activation not in _ACTIVATIONS:
        raise ConfigError(f'{where}: found the activation "{activation}"; known are {", ".join(sorted(_ACTIVATIONS))}')
    if activation:
        fields["activation"] = _ACTIVATIONS[activation]
    fields.update(_OWN.get(family, lambda _: {})(found))
    return ModelShape(**fields)


def _llama(found: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(found.get("attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(found.get("mlp_bias", False))}


def _mixtral(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"experts": found.get("num_local_experts", 8), "experts_per_token": found.get("num_experts_per_tok", 2)}


def _qwen3(found: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(found.get("attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias, "head_dim": found.get("head_dim") or 128}


def _qwen3_moe(found: Mapping[str, Any]) -> dict[str, Any]:
    if found.get("mlp_only_layers") or found.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("qwen3_moe: found dense layers between those of experts; plan it as a plain description")
    return {
        **_qwen3(found),
        "head_dim": found.get("head_dim") or 0,
        "experts": found.get("num_experts", found.get("num_local_experts", 128)),
        "experts_per_token": found.get("num_experts_per_tok", 8),
        "intermediate_size": found.get("moe_intermediate_size", 768),
    }


def _gpt2(found: Mapping[str, Any]) -> dict[str, Any]:
    rates = [found.get(name, 0.1) for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop")]
    return {"positions": found.get("n_positions", 1024), "dropout": any(rates)}


def _gpt_neox(found: Mapping[str, Any]) -> dict[str, Any]:
    if not found.get("use_parallel_residual", True):
        raise ConfigError("gpt_neox: found use_parallel_residual false; plan it as a plain description")
    rope = found.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", found.get("partial_rotary_factor", found.get("rotary_pct", 0.25)))
    bias = bool(found.get("attention_bias", True))
    rates = [found.get(name, 0.0) for name in ("hidden_dropout", "attention_dropout")]
    return {
        **{"parallel": True, "rotary_share": share, "qkv_bias": bias, "out_bias": bias},
        "dropout": any(rates),
    }


def _opt(found: Mapping[str, Any]) -> dict[str, Any]:
    if found.get("word_embed_proj_dim", found.get("hidden_size")) != found.get("hidden_size"):
        raise ConfigError("opt: found word_embed_proj_dim other than hidden_size; plan it as a plain description")
    if not found.get("do_layer_norm_before", True):
        raise ConfigError("opt: found do_layer_norm_before false; plan it as a plain description")
    bias = bool(found.get("enable_bias", True))
    positions = found.get("max_position_embeddings", 2048) + 2  # OPT's position embedding has an offset of 2
    return {
        **{"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias, "positions": positions},
        "dropout": bool(found.get("dropout", 0.1)),
    }


def _bert(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "positions": found.get("max_position_embeddings", 512),
        "token_types": found.get("type_vocab_size", 2),
        "dropout": bool(found.get("hidden_dropout_prob", 0.1)),
    }


_OWN = {
    **{"llama": _llama, "mixtral": _mixtral, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe},
    **{"gpt2": _gpt2, "gpt_neox": _gpt_neox, "opt": _opt, "bert": _bert},
}


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The number of ranks along each axis. Experts are divided over `ep` of the dp x sp ranks."""

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return self.pp * self.dp * self.sp * self.tp

    @property
    def replicas(self) -> int:
        """The number of ranks that average a gradient; ZeRO shards over these ranks."""
        return self.dp * self.sp

    def __str__(self) -> str:
        axes = {"pp": self.pp, "dp": self.dp, "sp": self.sp, "tp": self.tp, "ep": self.ep}
        return " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "one rank"


@dataclass(frozen=True, kw_only=True)
class Share:
    """`Share` holds the sizes of one rank's computation, in elements.

    batch, length: sequences per micro-batch, and tokens per sequence on this rank.
    query_size, kv_size: features of the query heads, and of the key heads, on this tensor-parallel rank.
    inner, shared_inner: inner width of the MLP or of one expert, and of the shared expert.
    vocab: number of tokens whose embedding and logits the rank holds.
    experts: number of experts on the rank.
    sp, tp, ep: number of ranks along these axes.
    """

    batch: int
    length: int
    query_size: int
    kv_size: int
    inner: int
    shared_inner: int
    vocab: int
    experts: int
    sp: int
    tp: int
    ep: int

    @property
    def tokens(self) -> int:
        """The number of tokens per micro-batch on this rank."""
        return self.batch * self.length


def share_of(shape: ModelShape, mesh: Mesh, batch: int, sequence: int) -> Share:
    """Return the share of the first rank.

    Raises:
        ConfigError: there are fewer heads than tensor-parallel ranks.
    """
    heads = first_heads(shape, mesh.tp)
    is_divided = not shape.experts  # experts are divided over ep, not over tp
    return Share(
        batch=batch,
        length=math.ceil(sequence / mesh.sp),
        query_size=heads.num_queries * shape.head_dim,
        kv_size=heads.num_keys * shape.head_dim,
        inner=_first(shape.intermediate_size, mesh.tp) if is_divided else shape.intermediate_size,
        shared_inner=_first(shape.shared_intermediate_size, mesh.tp),
        vocab=_first(shape.vocab_size, mesh.tp) if mesh.pp == 1 else shape.vocab_size,  # not divided in a pipeline
        experts=shape.experts // mesh.ep,
        sp=mesh.sp,
        tp=mesh.tp,
        ep=mesh.ep,
    )


def first_heads(shape: ModelShape, tp: int) -> HeadShare:
    """Return the heads of the first tensor-parallel rank."""
    return share_heads(shape.heads, shape.kv_heads, tp, f"{shape.family}, tp {tp}")[0]


def why_not(shape: ModelShape, mesh: Mesh, sequence: int) -> str | None:
    """Return why the mesh cannot divide the model; None if it can."""
    if shape.layers < mesh.pp:
        return f"pp {mesh.pp}: {counted(shape.layers, 'layer')}"
    if shape.heads < mesh.tp or shape.intermediate_size < mesh.tp:
        return f"tp {mesh.tp}: {counted(shape.heads, 'head')}"
    if sequence % mesh.sp or shape.heads // mesh.tp < mesh.sp:
        heads = counted(shape.heads // mesh.tp, "head")
        return f"sp {mesh.sp}: {counted(sequence, 'token')}, {heads} of a tensor-parallel rank"
    if mesh.sp > 1 and (shape.heads // mesh.tp) % mesh.sp:
        return f"sp {mesh.sp}: {counted(shape.heads // mesh.tp, 'head')}, which cannot be shared evenly"
    if mesh.ep > 1 and (not shape.experts or shape.experts % mesh.ep or mesh.replicas % mesh.ep):
        return f"ep {mesh.ep}: {counted(shape.experts, 'expert')}, dp x sp {mesh.replicas}"
    return None


def _first(total: int, parts: int) -> int:
    start, stop = spread(total, parts)[0]
    return stop - start
