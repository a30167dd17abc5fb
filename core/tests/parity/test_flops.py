"""Operations that the flops profiler counts, beside formulas written by hand from each model's configuration."""

import pytest
import torch
import transformers
from deepspeed.profiling.flops_profiler import get_model_profile

B, S, D, L, H, F, V = 2, 24, 48, 3, 4, 112, 160  # batch, positions, hidden, layers, heads, feed-forward, vocabulary
KV = 2  # heads of keys and values, where a family has fewer
T = B * S  # tokens


def attention(queries=S, keys=S, width=D):
    """Scores and their product with the values, in multiply-accumulates."""
    return 2 * B * queries * keys * width


def dense(feed_forward, heads_of_keys=H, matrices=2):
    """A decoder's layers: projections, attention, feed-forward of two or three matrices; then the vocabulary."""
    width = D * heads_of_keys // H
    layer = T * (2 * D * D + 2 * D * width + matrices * D * feed_forward) + attention()
    return L * layer + T * D * V


def gated(**kwargs):
    return dense(F, matrices=3, **kwargs)


LLAMA = {
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": KV,
    "vocab_size": V,
    "head_dim": D // H,
}
BERT = {
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "vocab_size": V,
}
PATCHES = 16
T5_INNER = H * 16

# family -> (class, configuration, multiply-accumulates by hand)
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": D, "n_layer": L, "n_head": H, "vocab_size": V}, dense(4 * D)),
    "gpt_neox": ("GPTNeoXForCausalLM", BERT, dense(F)),
    "opt": (
        "OPTForCausalLM",
        {**LLAMA, "ffn_dim": F, "word_embed_proj_dim": D, "max_position_embeddings": 64},
        dense(F),
    ),
    "phi": ("PhiForCausalLM", {**BERT, "num_key_value_heads": H}, dense(F)),
    "llama": ("LlamaForCausalLM", LLAMA, gated(heads_of_keys=KV)),
    "mistral": ("MistralForCausalLM", LLAMA, gated(heads_of_keys=KV)),
    "qwen2": ("Qwen2ForCausalLM", LLAMA, gated(heads_of_keys=KV)),
    "mixtral": (
        "MixtralForCausalLM",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        gated(heads_of_keys=KV) + L * T * (3 * D * F + D * 4),  # the second expert, and the gate
    ),
    "bert": ("BertForMaskedLM", BERT, dense(F) + T * D * D),
    "vit": (
        "ViTForImageClassification",
        {**BERT, "image_size": 32, "patch_size": 8, "num_channels": 3},
        B * PATCHES * D * 3 * 64
        + L * (B * (PATCHES + 1) * (4 * D * D + 2 * D * F) + attention(PATCHES + 1, PATCHES + 1))
        + B * D * 2,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": D, "d_kv": 16, "d_ff": F, "num_layers": L, "num_heads": H, "vocab_size": V},
        L * (T * (4 * D * T5_INNER + 2 * D * F) + attention(width=T5_INNER))
        + L * (T * (8 * D * T5_INNER + 2 * D * F) + 2 * attention(width=T5_INNER))
        + T * D * V,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_operations_are_those_of_a_formula(family):
    name, keys, macs = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**keys))
    tokens = torch.randint(3, V, (B, S))
    inputs = {"input_ids": tokens}
    if family == "t5":
        inputs["decoder_input_ids"] = tokens
    if family == "vit":
        inputs = {"pixel_values": torch.randn(B, 3, 32, 32)}
    flops, counted, params = get_model_profile(model, kwargs=inputs, print_profile=False, as_string=False)
    assert counted == pytest.approx(macs, rel=0.01)
    assert flops == 2 * counted
    assert params == sum(param.numel() for param in model.parameters())
