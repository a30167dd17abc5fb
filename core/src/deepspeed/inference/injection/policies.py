"""Tables of policies: the paths and layout of the parts of each family's transformer layer, and the parts of a causal
model before and after its layers. The module holds only data.

A layer's class is looked up by its qualified name, so no model library is imported. A family whose layers depend on the
configuration has several policies; the first one whose `when` holds is used. Paths are attributes of the layer.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

Layout = Literal["separate", "by_part", "by_head", "grouped"]
Placement = Literal["pre", "post", "parallel"]


@dataclass(frozen=True)
class InjectionPolicy:
    """One kind of transformer layer.

    Args:
        attention: the attention module, which has `layer_index` and `head_dim`.
        qkv: the query, key and value linears, or one linear for all three; the paths include `attention.`.
        out, up, down: the linear after attention, the first linear of the MLP (two with a gate), and the last one.
        experts: the module that replaces the MLP, with `gate` and `experts` like in Mixtral; `up` and `down` are then
            empty. "": none.
        norm_attention, norm_mlp: norms before (placement "pre", "parallel") or after ("post") the halves of the layer.
            In a parallel layer without `norm_mlp`, both halves get the same normed input.
        activation: module or function between `up` and `down`; with a gate, it is applied to the gate.
        placement: "pre" x + f(norm(x)), "post" norm(x + f(x)), "parallel" x + attention(norm(x)) + mlp(norm(x)).
        layout: outputs of a single `qkv`: "by_part" [3, heads, D], "by_head" [heads, 3, D],
            "grouped" [kv_heads, heads of a group + 2, D].
        head_dim, layer_index: attributes of the attention module.
        scale: attribute of the attention module or a number; "": D^-0.5.
        rotary: "halves" uses `position_embeddings`, cosines and sines (arXiv 2104.09864, in Llama's layout); "pairs"
            uses sines and cosines (like GPT-J) from the table at `rotary_table`, or else from `position_embeddings`;
            "": none. The rotation is partial if the table is narrower than D.
        norm_attention_out, norm_mlp_out: norms of the output of a half, before the sum (placement "pre"); "": none.
        softcap: attribute c of the attention module; scores s become c tanh(s / c), unless c is None; "": no cap.
        norm_query, norm_key: norms of every head before the rotary embedding; omitted if the module lacks them.
        alibi: "added" to the scores, from the argument `alibi` (arXiv 2108.12409); "in_mask": part of it; "": none.
        local: (attribute, value, window). If that attribute of the attention module has the value, the layer sees only
            the number of tokens in the attribute `window` of `config`; the mask does not include this window.
        is_causal: whether attention is causal if no mask is given.
        returns: "tensor", or "pair" with None for the attention weights.
        when: conditions (path from the layer, value), all of which must hold.
    """

    attention: str
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    norm_attention: str
    norm_mlp: str
    activation: str
    experts: str = ""
    placement: Placement = "pre"
    layout: Layout = "separate"
    head_dim: str = "head_dim"
    layer_index: str = "layer_idx"
    scale: str | float = ""
    rotary: Literal["", "halves", "pairs"] = ""
    rotary_table: str = ""
    norm_attention_out: str = ""
    norm_mlp_out: str = ""
    softcap: str = ""
    norm_query: str = ""
    norm_key: str = ""
    alibi: Literal["", "added", "in_mask"] = ""
    local: tuple[str, Any, str] | None = None
    is_causal: bool = True
    returns: Literal["tensor", "pair"] = "tensor"
    when: tuple[tuple[str, Any], ...] = ()


_GPT2 = InjectionPolicy(
    attention="attn",
    qkv=("attn.c_attn",),
    layout="by_part",
    out="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    norm_attention="ln_1",
    norm_mlp="ln_2",
    activation="mlp.act",
    scale="scaling",
)
_GPT_NEO = replace(
    _GPT2,
    attention="attn.attention",
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    layout="separate",
    out="attn.attention.out_proj",
    scale=1.0,
    layer_index="layer_id",
    local=("attention_type", "local", "window_size"),
    returns="pair",
)
_GPT_J = InjectionPolicy(
    attention="attn",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    out="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
    norm_attention="ln_1",
    norm_mlp="",
    activation="mlp.act",
    placement="parallel",
    rotary="pairs",
    rotary_table="attn.embed_positions",
    returns="pair",
)
# since transformers 5.24 the model, not the layer, holds the table
_GPT_J_NEW = replace(_GPT_J, rotary_table="", returns="tensor", when=(("attn.embed_positions", None),))
_GPT_NEOX = InjectionPolicy(
    attention="attention",
    qkv=("attention.query_key_value",),
    layout="by_head",
    head_dim="head_size",
    out="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    norm_attention="input_layernorm",
    norm_mlp="post_attention_layernorm",
    activation="mlp.act",
    rotary="halves",
    when=(("use_parallel_residual", False),),
)
_OPT = InjectionPolicy(
    attention="self_attn",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    norm_attention="self_attn_layer_norm",
    norm_mlp="final_layer_norm",
    activation="activation_fn",
    when=(("do_layer_norm_before", True),),
)
_BLOOM = replace(
    _GPT_NEOX,
    attention="self_attention",
    qkv=("self_attention.query_key_value",),
    head_dim="head_dim",
    out="self_attention.dense",
    activation="mlp.gelu_impl",
    rotary="",
    alibi="added",
    returns="pair",
    when=(("apply_residual_connection_post_layernorm", False), ("self_attention.slow_but_exact", False)),
)
_BERT = InjectionPolicy(
    attention="attention.self",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    head_dim="attention_head_size",
    out="attention.output.dense",
    up=("intermediate.dense",),
    down="output.dense",
    norm_attention="attention.output.LayerNorm",
    norm_mlp="output.LayerNorm",
    activation="intermediate.intermediate_act_fn",
    placement="post",
    is_causal=False,
    when=(("is_decoder", False),),
)
_DISTILBERT = InjectionPolicy(
    attention="attention",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    head_dim="attention_head_size",
    layer_index="",
    out="attention.out_lin",
    up=("ffn.lin1",),
    down="ffn.lin2",
    norm_attention="sa_layer_norm",
    norm_mlp="output_layer_norm",
    activation="ffn.activation",
    placement="post",
    is_causal=False,
)
_LLAMA = InjectionPolicy(
    attention="self_attn",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    norm_attention="input_layernorm",
    norm_mlp="post_attention_layernorm",
    activation="mlp.act_fn",
    rotary="halves",
)
_MIXTRAL = replace(_LLAMA, up=(), down="", activation="mlp.experts.act_fn", experts="mlp")
_GEMMA2 = replace(
    _LLAMA,
    norm_mlp="pre_feedforward_layernorm",
    norm_attention_out="post_attention_layernorm",
    norm_mlp_out="post_feedforward_layernorm",
    softcap="attn_logit_softcapping",
    scale="scaling",
)
_GEMMA3 = replace(
    _GEMMA2,
    norm_query="self_attn.q_norm",
    norm_key="self_attn.k_norm",
    when=(("self_attn.is_causal", True),),  # not text embedding models
)
_QWEN3 = replace(_LLAMA, norm_query="self_attn.q_norm", norm_key="self_attn.k_norm")
_PHI = replace(
    _LLAMA,
    out="self_attn.dense",
    up=("mlp.fc1",),
    down="mlp.fc2",
    norm_mlp="",
    activation="mlp.activation_fn",
    placement="parallel",
    norm_query="self_attn.q_layernorm",
    norm_key="self_attn.k_layernorm",
)
_FALCON = replace(
    _BLOOM,
    activation="mlp.act",
    rotary="halves",
    alibi="in_mask",
    placement="parallel",
    norm_mlp="",
    layout="grouped",
    when=(("config.new_decoder_architecture", False), ("config.parallel_attn", True), ("config.multi_query", True)),
)
_FALCON_NEW = replace(
    _FALCON,
    when=(
        ("config.new_decoder_architecture", True),
        ("config.parallel_attn", True),
        ("config.num_ln_in_parallel_attn", 1),
    ),
)

POLICIES: dict[str, tuple[InjectionPolicy, ...]] = {
    "transformers.models.gpt2.modeling_gpt2.GPT2Block": (_GPT2,),
    "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoBlock": (_GPT_NEO,),
    "transformers.models.gptj.modeling_gptj.GPTJBlock": (_GPT_J_NEW, _GPT_J),
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer": (
        _GPT_NEOX,
        replace(_GPT_NEOX, placement="parallel", when=(("use_parallel_residual", True),)),
    ),
    "transformers.models.opt.modeling_opt.OPTDecoderLayer": (
        _OPT,
        replace(_OPT, placement="post", when=(("do_layer_norm_before", False),)),
    ),
    "transformers.models.bloom.modeling_bloom.BloomBlock": (_BLOOM,),
    "transformers.models.bert.modeling_bert.BertLayer": (_BERT,),
    "transformers.models.roberta.modeling_roberta.RobertaLayer": (_BERT,),
    "transformers.models.distilbert.modeling_distilbert.TransformerBlock": (_DISTILBERT,),
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": (_LLAMA,),
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": (_LLAMA,),
    "transformers.models.gemma.modeling_gemma.GemmaDecoderLayer": (_LLAMA,),
    "transformers.models.gemma2.modeling_gemma2.Gemma2DecoderLayer": (_GEMMA2,),
    "transformers.models.gemma3.modeling_gemma3.Gemma3DecoderLayer": (_GEMMA3,),
    "transformers.models.mixtral.modeling_mixtral.MixtralDecoderLayer": (_MIXTRAL,),
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": (_LLAMA,),
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": (_QWEN3,),
    "transformers.models.phi.modeling_phi.PhiDecoderLayer": (_PHI,),
    "transformers.models.falcon.modeling_falcon.FalconDecoderLayer": (
        _FALCON,
        _FALCON_NEW,
        replace(
            _FALCON_NEW,
            norm_attention="ln_attn",
            norm_mlp="ln_mlp",
            when=(*_FALCON_NEW.when[:2], ("config.num_ln_in_parallel_attn", 2)),
        ),
        replace(_FALCON, layout="by_head", when=(*_FALCON.when[:2], ("config.multi_query", False))),
        replace(
            _FALCON,
            placement="pre",
            norm_mlp="post_attention_layernorm",
            layout="by_head",
            when=(
                ("config.new_decoder_architecture", False),
                ("config.parallel_attn", False),
                ("config.multi_query", False),
            ),
        ),
    ),
}


@dataclass(frozen=True)
class DecoderPolicy:
    """A policy names the parts of a causal model before and after its layers. Paths are attributes of the model.

    Args:
        layers: the list of layers.
        embedding: the token embedding.
        norm: the norm after the last layer; the attribute may be None.
        positions: a position embedding that is added to the token embedding; "": none.
        first_position: row of `positions` for position 0.
        rotary: the module that computes `position_embeddings`, unless the layers have tables; "": none.
        project_in, project_out: linears between the embedding and the layers, and after the norm, if the model has
            them.
        softcap: path of c; logits x become c tanh(x / c), unless c is None; "": no cap.
        when: conditions (path, value), all of which must hold.
    """

    layers: str
    embedding: str
    norm: str
    positions: str = ""
    first_position: int = 0
    rotary: str = ""
    project_in: str = ""
    project_out: str = ""
    softcap: str = ""
    when: tuple[tuple[str, Any], ...] = ()


_OF_GPT2 = DecoderPolicy("transformer.h", "transformer.wte", "transformer.ln_f", positions="transformer.wpe")
_OF_LLAMA = DecoderPolicy("model.layers", "model.embed_tokens", "model.norm", rotary="model.rotary_emb")

#: qualified name of the causal model's class -> policy; other models compute tokens by their own forward
DECODERS: dict[str, DecoderPolicy] = {
    "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel": _OF_GPT2,
    "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoForCausalLM": _OF_GPT2,
    "transformers.models.gptj.modeling_gptj.GPTJForCausalLM": replace(
        _OF_GPT2, positions="", rotary="transformer.rotary_emb"
    ),
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM": DecoderPolicy(
        "gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", rotary="gpt_neox.rotary_emb"
    ),
    "transformers.models.opt.modeling_opt.OPTForCausalLM": DecoderPolicy(
        "model.decoder.layers",
        "model.decoder.embed_tokens",
        "model.decoder.final_layer_norm",
        positions="model.decoder.embed_positions",
        first_position=2,
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
    ),
    "transformers.models.llama.modeling_llama.LlamaForCausalLM": _OF_LLAMA,
    "transformers.models.mistral.modeling_mistral.MistralForCausalLM": _OF_LLAMA,
    "transformers.models.gemma.modeling_gemma.GemmaForCausalLM": _OF_LLAMA,
    "transformers.models.gemma2.modeling_gemma2.Gemma2ForCausalLM": replace(
        _OF_LLAMA, softcap="config.final_logit_softcapping"
    ),
    "transformers.models.mixtral.modeling_mixtral.MixtralForCausalLM": _OF_LLAMA,
    "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM": _OF_LLAMA,
    "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM": _OF_LLAMA,
    "transformers.models.phi.modeling_phi.PhiForCausalLM": replace(_OF_LLAMA, norm="model.final_layernorm"),
    "transformers.models.falcon.modeling_falcon.FalconForCausalLM": DecoderPolicy(
        "transformer.h",
        "transformer.word_embeddings",
        "transformer.ln_f",
        rotary="transformer.rotary_emb",
        when=(("config.alibi", False),),
    ),
}
