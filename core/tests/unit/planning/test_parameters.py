"""Parameters and activations of each family, beside transformers' models of the same config."""

import json

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.planning import Mesh, ModelShape, Training, count_parameters, read_shape
from deepspeed.planning.memory import rank_model
from deepspeed.testing.tiers import swept

SMALL = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
#: family: (config class, model class, keys)
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 100},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SMALL),
    "opt": ("OPTConfig", "OPTForCausalLM", {**SMALL, "ffn_dim": 80, "word_embed_proj_dim": 48, "pad_token_id": 1}),
    "bert": ("BertConfig", "BertForMaskedLM", {**SMALL, "tie_word_embeddings": True}),
}
#: measured activations; experts run another way on one rank
DENSE = ["llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt"]
BATCH, LENGTH = 2, 32
NO_DROPOUT = ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout")


def config_of(family):
    transformers = pytest.importorskip("transformers")
    config_class, model_class, keys = FAMILIES[family]
    config = getattr(transformers, config_class)(**{"bos_token_id": 1, "eos_token_id": 2, **keys}, use_cache=False)
    for name in NO_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config._attn_implementation = "sdpa"
    return config, getattr(transformers, model_class)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family, tmp_path):
    config, model_class = config_of(family)
    with torch.device("meta"):
        model = model_class(config)
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string(use_diff=False))
    shape = read_shape(path)
    found = rank_model(shape, Mesh(), Training(sequence=1), 0).params
    if family != "bert":  # transformers has a pooler-free BERT whose token types are one parameter as here
        assert sorted(param.numel for param in found) == sorted(param.numel() for param in model.parameters())
    assert count_parameters(shape) == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("family", swept(DENSE, lambda family: family in ("llama", "opt")))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_torch_saves(family, dtype):
    config, model_class = config_of(family)
    torch.manual_seed(0)
    model = model_class(config).to(dtype).train()
    known = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept = {}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(2, 100, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del loss
    precision = "fp32" if dtype == torch.float32 else "bf16"
    training = Training(micro_batch=BATCH, sequence=LENGTH, precision=precision)
    model = rank_model(read_shape(config.to_dict()), Mesh(), training, 0)
    planned = model.constant + sum(block.profile.saved for block, _ in model.parts)
    assert planned == pytest.approx(measured, rel=0.03)


def test_a_plain_description():
    shape = read_shape({"layers": 2, "hidden_size": 8, "heads": 2, "vocab_size": 10, "intermediate_size": 16})
    assert shape == ModelShape(layers=2, hidden_size=8, heads=2, vocab_size=10, intermediate_size=16)
    assert count_parameters(shape) == 2 * 10 * 8 + 2 * (4 * 64 + 3 * 8 * 16 + 2 * 8) + 8


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"model_type": "mamba"}, '"mamba"; known are bert, gpt2'),
        ({"layers": 2}, "hidden_size, heads, vocab_size missing"),
        ({"layers": 2, "width": 3}, "found the fields width"),
        ({"layers": 2, "hidden_size": 8, "heads": 3, "kv_heads": 2, "vocab_size": 9}, "3 query heads and 2 key"),
        ({"layers": 0, "hidden_size": 8, "heads": 2, "vocab_size": 9}, "layers must be a positive integer, found 0"),
    ],
)
def test_what_cannot_be_read_is_named(found, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=message):
        read_shape(path)
