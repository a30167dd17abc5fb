"""`TensorPlan` describes how each layer of a model is divided. This file has tables for the families of transformers.

Placements are DTensor's. They give the dim along which a linear layer's [out, in] weight is divided: `Shard(0)` is
column-parallel, `Shard(1)` row-parallel, `Replicate()` whole. `Along` gives the contents of that dim (features, heads,
fused query, key and value), which determine where it may be cut.
"""

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from deepspeed.errors import ConfigError


class Along(enum.Enum):
    """`Along` names the contents of a weight's divided dim."""

    FEATURES = "features"
    QUERIES = "query heads"
    KEYS = "key and value heads"
    QKV_BLOCKS = "all query heads, all key heads, all value heads"
    QKV_GROUPS = "per key head its query heads, itself, its value head"


@dataclass(frozen=True)
class Rule:
    """`Rule` describes how to divide the modules at the paths that it matches.

    Args:
        path: the end of the module's path; "*" matches any one name.
        weight: the placement of its weight, as an [out, in] matrix. For an embedding, Shard(1) divides its features.
        along: the contents of the divided dim.
        blocks: only for features: the sizes of fused blocks, or the number of equal blocks; each is divided separately.
        gathers: gather the output of a column-parallel layer.
        experts: the module has stacked experts of transformers, divided along their inner features.
        sums_gradient: a whole parameter between divided layers; each rank has a part of its gradient, to be summed.
    """

    path: str
    weight: Placement
    along: Along = Along.FEATURES
    blocks: int | tuple[int, ...] = 1
    gathers: bool = False
    experts: bool = False
    sums_gradient: bool = False

    def matches(self, path: str) -> bool:
        """Whether this rule matches the module at `path`."""
        words = "".join("[^.]+" if part == "*" else re.escape(part) for part in re.split(r"(\*)", self.path))
        return re.search(rf"(^|\.){words}$", path) is not None


@dataclass(frozen=True)
class TensorPlan:
    """`TensorPlan` describes which layers of a model are divided. Legend: H query heads, G key and value heads.

    Args:
        name: the name for errors.
        rules: the first rule that matches a module is used.
        heads: returns (H, G) from the model's config; None: there is no attention.
        has_alibi: attention has the inputs `alibi` and `attention_mask` in the shape [batch x H, ...].
        stack: end of the path of the list of layers in which the sequence can be divided; all their linear layers must
            be in attention and feed-forward modules that get `hidden_states`; "": none.
        counts_in_config: attention reads its numbers of heads from `self.config`, so it gets its own config.
    """

    name: str
    rules: tuple[Rule, ...]
    heads: Callable[[Any], tuple[int, int]] | None = None
    has_alibi: bool = False
    stack: str = ""
    counts_in_config: bool = False

    def rule_for(self, path: str) -> Rule | None:
        """Return the first rule that matches the module at `path`, or None."""
        return next((rule for rule in self.rules if rule.matches(path)), None)


def column(paths: str, along: Along = Along.FEATURES, **options: Any) -> tuple[Rule, ...]:
    """Return the rules of column-parallel layers; `paths` are separated by spaces."""
    return tuple(Rule(path, Shard(0), along, **options) for path in paths.split())


def row(paths: str, along: Along = Along.FEATURES) -> tuple[Rule, ...]:
    """Return the rules of row-parallel layers; `paths` are separated by spaces."""
    return tuple(Rule(path, Shard(1), along) for path in paths.split())


def partial_gradient(paths: str) -> tuple[Rule, ...]:
    """Return the rules of whole modules between divided layers, such as a norm of each head."""
    return tuple(Rule(path, Replicate(), sums_gradient=True) for path in paths.split())


def heads_of_config(config: Any) -> tuple[int, int]:
    """Return (H, G) from a transformers config."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    num_heads = int(config.num_attention_heads)
    return num_heads, int(getattr(config, "num_key_value_heads", None) or num_heads)


def heads_of_model(model: Any) -> Callable[[Any], tuple[int, int]] | None:
    """Return `heads_of_config` if the model's config has numbers of heads, else None."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return heads_of_config if isinstance(getattr(config, "num_attention_heads", None), int) else None


def _heads_of_falcon(config: Any) -> tuple[int, int]:
    num_heads = int(config.num_attention_heads)
    if config.new_decoder_architecture:
        return num_heads, int(config.num_kv_heads)
    return num_heads, 1 if config.multi_query else num_heads


def _attention(prefix: str, query: str, keys: str, output: str) -> tuple[Rule, ...]:
    """Return the rules of attention with separate query, key and value weights."""
    return (
        *column(f"{prefix}{query}", Along.QUERIES),
        *column(" ".join(f"{prefix}{key}" for key in keys.split()), Along.KEYS),
        *row(output, Along.QUERIES),
    )


_NORMS_OF_HEADS = partial_gradient("self_attn.q_norm self_attn.k_norm self_attn.q_layernorm self_attn.k_layernorm")
_LLAMA_ATTENTION = (
    *_attention("self_attn.", "q_proj", "k_proj v_proj", "self_attn.o_proj"),
    *_NORMS_OF_HEADS,
)
_LLAMA = (
    *_LLAMA_ATTENTION,
    *column("mlp.gate_proj mlp.up_proj"),
    *row("mlp.down_proj"),
)
_MIXTRAL = (*_LLAMA_ATTENTION, *column("mlp.experts", experts=True))
_PHI = (
    *_attention("self_attn.", "q_proj", "k_proj v_proj", "self_attn.dense"),
    *_NORMS_OF_HEADS,
    *column("mlp.fc1"),
    *row("mlp.fc2"),
)
_PHI3 = (
    *column("self_attn.qkv_proj", Along.QKV_BLOCKS),
    *row("self_attn.o_proj", Along.QUERIES),
    *column("mlp.gate_up_proj", blocks=2),
    *row("mlp.down_proj"),
)
_GPT2 = (
    *column("attn.c_attn", Along.QKV_BLOCKS),
    *row("attn.c_proj", Along.QUERIES),
    *column("mlp.c_fc"),
    *row("mlp.c_proj"),
)
_GPT_NEOX = (
    *column("attention.query_key_value", Along.QKV_GROUPS),
    *row("attention.dense", Along.QUERIES),
    *column("mlp.dense_h_to_4h"),
    *row("mlp.dense_4h_to_h"),
)
_BLOOM = (
    *column("self_attention.query_key_value", Along.QKV_GROUPS),
    *row("self_attention.dense", Along.QUERIES),
    *column("mlp.dense_h_to_4h"),
    *row("mlp.dense_4h_to_h"),
)
_OPT = (
    *_attention("self_attn.", "q_proj", "k_proj v_proj", "self_attn.out_proj"),
    *column("fc1"),
    *row("fc2"),
)
_T5 = (
    *_attention("SelfAttention.", "q", "k v", "SelfAttention.o"),
    *_attention("EncDecAttention.", "q", "k v", "EncDecAttention.o"),
    Rule("relative_attention_bias", Shard(1), Along.QUERIES),
    *column("DenseReluDense.wi DenseReluDense.wi_0 DenseReluDense.wi_1"),
    *row("DenseReluDense.wo"),
)
_BERT = (
    *_attention("self.", "query", "key value", "attention.output.dense"),
    *row("crossattention.output.dense", Along.QUERIES),
    *column("intermediate.dense"),
    *row("output.dense"),
)


def _falcon(config: Any) -> TensorPlan:
    along = Along.QKV_BLOCKS if config.multi_query and not config.new_decoder_architecture else Along.QKV_GROUPS
    rules = (*column("self_attention.query_key_value", along), *_BLOOM[1:])
    return TensorPlan("falcon", rules, _heads_of_falcon, has_alibi=True)


def _table(name: str, rules: Iterable[Rule], **options: Any) -> Callable[[Any], TensorPlan]:
    plan = TensorPlan(name, tuple(rules), heads_of_config, **options)
    return lambda _: plan


#: by transformers' `model_type`, a function from the config to the plan
PLANS: Mapping[str, Callable[[Any], TensorPlan]] = {
    **{
        name: _table(name, _LLAMA, stack="layers")
        for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
    },
    "mixtral": _table("mixtral", _MIXTRAL),
    "phi": _table("phi", _PHI, stack="layers"),
    "phi3": _table("phi3", _PHI3, stack="layers", counts_in_config=True),
    "gpt2": _table("gpt2", _GPT2),
    "gpt_neox": _table("gpt_neox", _GPT_NEOX),
    "bloom": _table("bloom", _BLOOM, has_alibi=True),
    "falcon": _falcon,
    "opt": _table("opt", _OPT),
    **{name: _table(name, _T5) for name in ("t5", "mt5")},
    **{name: _table(name, _BERT) for name in ("bert", "roberta")},
}


def preset_plan(name: str, config: Any) -> TensorPlan:
    """Return the plan that `tensor_parallel.preset_model` names.

    Args:
        config: the model's config, with its numbers of heads.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in PLANS:
        raise ConfigError(
            f"tensor_parallel.preset_model: found {name!r}; the presets are {', '.join(sorted(PLANS))}. Omit it to "
            "have the plan chosen by the model, or describe the layers in tensor_parallel.partition_config"
        )
    return PLANS[name](config)
