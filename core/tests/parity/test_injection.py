"""Fused blocks in the place of transformers' layers: equal logits and tokens, for every family of the table."""

from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError, StateError
from deepspeed.inference.generate import cache_argument, static_cache
from deepspeed.inference.injection import Injected, inject
from deepspeed.inference.injection.policies import POLICIES
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import Tensor

VOCAB = 61
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
_CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 5}
_FALCON = {"hidden_size": 32, "vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}


@dataclass(frozen=True)
class Family:
    """A model class of transformers and the words of its configuration."""

    model: str
    config: str
    sizes: dict[str, Any] = field(hash=False)


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt2 scaled by layer": Family("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt-neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            **{key: _SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id")},
            **{"num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, "window_size": 5},
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "gpt-j": Family("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    "gpt-neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES),
    "gpt-neox in order": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SIZES, "use_parallel_residual": False}),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "activation_function": "relu"},
    ),
    "opt, norm after": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0},
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "llama, scaled rotary": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_GROUPED, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "llama, biases": Family("LlamaForCausalLM", "LlamaConfig", {**_SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 5}),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, **_CAPPED, "head_dim": 8}),
    "gemma2, no caps": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_GROUPED, "head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **{**_GROUPED, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 4},
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "phi": Family("PhiForCausalLM", "PhiConfig", _SIZES),
    "phi, norms of heads": Family("PhiForCausalLM", "PhiConfig", {**_SIZES, "qk_layernorm": True}),
    "falcon": Family("FalconForCausalLM", "FalconConfig", _FALCON),
    "falcon grouped": Family(
        "FalconForCausalLM", "FalconConfig", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "falcon with alibi": Family(
        "FalconForCausalLM", "FalconConfig", {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False}
    ),
}
_ENCODER = {**_SIZES, "type_vocab_size": 2}
ENCODERS = {
    "bert": Family("BertForSequenceClassification", "BertConfig", _ENCODER),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", _ENCODER),
    "distilbert": Family(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
    ),
}


def make_model(family: Family, **words: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.sizes, **words)
    model = getattr(transformers, family.model)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that are not 0 and 1, logits that are far apart
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def padded_batch() -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :4], mask[2, :2] = 0, 0
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


def largest_difference(found: Tensor, wanted: Tensor, mask: Tensor) -> float:
    return float((found - wanted)[mask.bool()].abs().max()) if found.dim() == 3 else float((found - wanted).abs().max())


_EAGER_ONLY = ("gpt-neo", "gpt-j", "bloom", "gemma2", "gemma2, no caps")


@pytest.mark.parametrize(
    ("name", "attention"),
    swept(
        [(name, kind) for name in FAMILIES for kind in ("sdpa", "eager") if kind == "eager" or name not in _EAGER_ONLY],
        lambda name, kind: kind == "sdpa" or name in (*_EAGER_ONLY, "mistral"),
    ),
)
def test_logits_and_tokens_are_those_of_the_plain_model(name: str, attention: str) -> None:
    if attention == "eager" and name == "falcon with alibi":
        pytest.skip("its layers run their own forward")
    model, batch = make_model(FAMILIES[name], attn_implementation=attention), padded_batch()
    values = {key: value.clone() for key, value in model.state_dict().items()}
    alone = batch["input_ids"][:1]
    with torch.no_grad():
        logits = model(**batch).logits
    greedy = model.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=7)
    without_mask = model.generate(alone, max_new_tokens=12, do_sample=False)
    torch.manual_seed(3)
    sampled = model.generate(**batch, max_new_tokens=12, do_sample=True, top_k=20)
    beams = model.generate(**batch, max_new_tokens=6, num_beams=3)

    injected = inject(model, max_out_tokens=32)
    assert_all_fused(injected)
    with torch.no_grad():
        assert largest_difference(model(**batch).logits, logits, batch["attention_mask"]) < 1e-4
    assert torch.equal(model.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=7), greedy)
    assert torch.equal(model.generate(alone, max_new_tokens=12, do_sample=False), without_mask)
    torch.manual_seed(3)
    assert torch.equal(model.generate(**batch, max_new_tokens=12, do_sample=True, top_k=20), sampled)
    assert torch.equal(model.generate(**batch, max_new_tokens=6, num_beams=3), beams)

    assert_same_state(model, values)
    assert injected.restore() is model
    assert_same_state(model, values)


def assert_all_fused(injected: Injected) -> None:
    """Both layers are replaced, and they and the output layer fail if they run their own forward."""
    assert len(injected.replaced) == 2, injected.left
    for module in injected.model.modules():
        if "forward" in vars(module):
            module.forward.original = None


def assert_same_state(model: Any, values: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert list(found) == list(values)
    assert all(torch.equal(found[key], value) for key, value in values.items())


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_give_the_outputs_of_the_plain_model(name: str) -> None:
    model, batch = make_model(ENCODERS[name]), padded_batch()
    with torch.no_grad():
        wanted = model(**batch, output_hidden_states=True)
        injected = inject(model)
        assert_all_fused(injected)
        found = model(**batch, output_hidden_states=True)
    assert largest_difference(found.logits, wanted.logits, batch["attention_mask"]) < 1e-4
    for mine, theirs in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert largest_difference(mine, theirs, batch["attention_mask"]) < 1e-4


def test_calls_that_the_fused_block_does_not_serve_run_the_layers_own_forward() -> None:
    model, batch = make_model(FAMILIES["llama"], attn_implementation="eager"), padded_batch()
    wanted = model(**batch, labels=batch["input_ids"], output_attentions=True)
    wanted.loss.backward()
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    model.zero_grad()
    inject(model)
    found = model(**batch, labels=batch["input_ids"], output_attentions=True)
    found.loss.backward()
    assert torch.equal(model.model.layers[0].self_attn.k_proj.weight.grad, gradient)
    with torch.no_grad():
        attentions = model(**batch, output_attentions=True).attentions
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(attentions, wanted.attentions, strict=True))


def test_falcon_with_alibi_and_eager_attention_is_its_own() -> None:
    model, batch = make_model(FAMILIES["falcon with alibi"], attn_implementation="eager"), padded_batch()
    with torch.no_grad():
        wanted = model(**batch).logits
        inject(model)
        assert torch.equal(model(**batch).logits, wanted)


def test_weights_are_not_held_twice_and_follow_updates_and_casts() -> None:
    model, batch = make_model(FAMILIES["llama"]), padded_batch()
    num_bytes = sum(p.untyped_storage().nbytes() for p in model.parameters())
    block = model.get_submodule(inject(model).replaced[0])
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == num_bytes
    fused = block.forward
    for linear in (fused.qkv, fused.out, fused.up, fused.down):
        assert linear.weight.untyped_storage().data_ptr() in storages
    plain = make_model(FAMILIES["llama"])
    with torch.no_grad():
        for one in (model, plain):
            one.model.layers[0].self_attn.v_proj.weight.mul_(3)
        assert largest_difference(model(**batch).logits, plain(**batch).logits, batch["attention_mask"]) < 1e-4
        model.bfloat16()
        model(**batch)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert fused.qkv.weight.dtype == torch.bfloat16
    assert fused.qkv.weight.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("path", ["q_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "o_proj.bias"])
def test_a_parameter_that_gets_other_memory_is_used(path: str) -> None:
    models, batch = [make_model(FAMILIES["llama, biases"]) for _ in range(2)], padded_batch()
    inject(models[0])
    with torch.no_grad():
        before = models[0](**batch).logits
        for model in models:
            param = model.model.layers[0].self_attn.get_parameter(path)
            param.data = 2 * param.data + 0.5
        found, wanted = (model(**batch).logits for model in models)
    assert largest_difference(wanted, before, batch["attention_mask"]) > 1e-3 or path == "k_proj.bias"
    assert largest_difference(found, wanted, batch["attention_mask"]) < 1e-4
    assert_same_state(models[0], models[1].state_dict())


def add_adapter(model: Any) -> Any:
    import peft

    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["v_proj", "up_proj"], init_lora_weights=False))


def replace_norm(model: Any) -> Any:
    layer = model.model.layers[0]
    layer.post_attention_layernorm = torch.nn.Identity()
    return model


def replace_mlp(model: Any) -> Any:
    model.model.layers[1].mlp = torch.nn.Identity()
    return model


def add_hook(model: Any) -> Any:
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _, __, output: output + 1)
    return model


def add_hook_before_attention(model: Any) -> Any:
    def halve(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] / 2 + 1}

    model.model.layers[0].self_attn.register_forward_pre_hook(halve, with_kwargs=True)
    return model


def replace_forward(model: Any) -> Any:
    linear = model.model.layers[0].mlp.down_proj
    linear.forward = lambda x: torch.nn.functional.linear(x, linear.weight) * 2
    return model


def test_outputs_that_transformers_captures_leave_the_blocks_fused() -> None:
    model, batch = make_model(FAMILIES["llama"], attn_implementation="eager"), padded_batch()
    injected = inject(model)
    with torch.no_grad():
        wanted = model(**batch, output_attentions=True).logits
        assert_all_fused(injected)
        found = model(**batch, output_hidden_states=True).logits
    assert largest_difference(found, wanted, batch["attention_mask"]) < 1e-4


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "change", [add_adapter, replace_norm, replace_mlp, add_hook, add_hook_before_attention, replace_forward]
)
def test_what_is_replaced_or_hooked_after_injection_counts(change: Any) -> None:
    batch, models = padded_batch(), [make_model(FAMILIES["llama"]) for _ in range(2)]
    inject(models[0], max_out_tokens=32)
    with torch.no_grad():
        before = models[0](**batch).logits
    models = [change(model).eval() for model in models]
    with torch.no_grad():
        found, wanted = (model(**batch).logits for model in models)
    assert largest_difference(wanted, before, batch["attention_mask"]) > 1e-3
    assert largest_difference(found, wanted, batch["attention_mask"]) < 1e-4
    tokens = [model.generate(**batch, max_new_tokens=6, do_sample=False) for model in models]
    assert torch.equal(*tokens)


def _cache_argument(model: Any) -> str:
    name = cache_argument(type(model).forward)
    assert name is not None
    return name


def test_a_cache_of_the_callers_is_used() -> None:
    from transformers import DynamicCache

    model, batch = make_model(FAMILIES["qwen2"]), padded_batch()
    wanted = model.generate(**batch, max_new_tokens=4, do_sample=False)
    inject(model, max_out_tokens=1)
    cache = DynamicCache()
    given: dict[str, Any] = {_cache_argument(model): cache}
    found = model.generate(**batch, max_new_tokens=4, do_sample=False, **given)
    assert torch.equal(found, wanted)
    assert cache.get_seq_length() == wanted.shape[1] - 1


def test_too_many_tokens_name_both_numbers() -> None:
    model, batch = make_model(FAMILIES["gpt2"]), padded_batch()
    inject(model, max_out_tokens=16)
    assert model.generate(**batch, max_new_tokens=7, min_new_tokens=7).shape[1] == 16
    with pytest.raises(ConfigError, match="prompt of 9 tokens .* length of 17, but max_out_tokens is 16"):
        model.generate(**batch, max_new_tokens=8)
    given = {_cache_argument(model): static_cache(16)}
    with torch.no_grad():
        model(**batch, **given)
        with pytest.raises(ConfigError, match="needs 18 tokens.* max_out_tokens = 16"):
            model(batch["input_ids"], **given)


def test_unknown_models_are_left_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    injected = inject(model)
    assert injected.model is model
    assert injected.replaced == ()


def test_a_rotary_table_that_is_elsewhere_leaves_the_layers_their_own() -> None:
    model = make_model(FAMILIES["gpt-j"])
    layers = model.transformer.h
    if hasattr(layers[0].attn, "embed_positions"):  # since 5.24 the model has it
        for layer in layers:
            del layer.attn.embed_positions
    else:
        replace_signatures(layers, "hidden_states", "attention_mask")
    injected = inject(model)
    assert injected.replaced == ()
    assert "'position_embeddings'" in injected.left["transformer.h.0"]


def replace_signatures(layers: Any, *names: str) -> None:
    """Give layers a class that differs by the names of its forward's arguments; policies know it by its own name."""
    own = type(layers[0])

    def forward(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    words = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
    made = type(own.__name__, (own,), words)
    for layer in layers:
        layer.__class__ = made


@pytest.mark.parametrize("name", ["hidden_states", "attention_mask", "alibi"])
def test_an_argument_that_a_layer_calls_otherwise_leaves_the_layer_its_own(name: str) -> None:
    model = make_model(FAMILIES["bloom"])
    names = ["hidden_states", "alibi", "attention_mask"]
    names[names.index(name)] = "renamed"
    replace_signatures(model.transformer.h, *names)
    injected = inject(model)
    assert injected.replaced == ()
    assert injected.left["transformer.h.1"].startswith(f"its forward has no argument {name!r}, only")


def test_a_tensor_of_an_unknown_name_is_for_the_layers_own_forward() -> None:
    model, hidden = make_model(FAMILIES["llama"]), torch.zeros(1, 3, 32)
    injected = inject(model)
    block = model.model.layers[0].forward
    assert injected.replaced
    calls: list[dict[str, Any]] = []
    block.original = lambda *_, **kwargs: calls.append(kwargs)
    angles = model.model.rotary_emb(hidden, torch.arange(3).unsqueeze(0))
    with torch.no_grad():
        assert block(hidden, position_embeddings=angles).shape == hidden.shape
        assert not calls
        block(hidden, position_embeddings=angles, renamed_mask=torch.ones(3))
    assert len(calls) == 1


def test_what_does_not_fit_is_left_and_named() -> None:
    model = make_model(FAMILIES["llama"])
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: None)
    injected = inject(model)
    assert injected.replaced == ("model.layers.0",)
    assert "hooks" in injected.left["model.layers.1"]
    with pytest.raises(StateError, match="injected already"):
        inject(model)


def test_a_policy_of_the_callers() -> None:
    class Layer(type(make_model(FAMILIES["llama"]).model.layers[0])):  # type: ignore[misc]
        pass

    model, batch = make_model(FAMILIES["llama"]), padded_batch()
    for layer in model.model.layers:
        layer.__class__ = Layer
    assert inject(model).replaced == ()
    (known,) = POLICIES["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]
    with pytest.raises(ConfigError, match=r"model.layers.0 \(Layer\): its policy names 'mlp.fc1', and LlamaMLP"):
        inject(model, policies={Layer: replace(known, up=("mlp.fc1",))})
    with torch.no_grad():
        wanted = model(**batch).logits
        assert_all_fused(inject(model, policies={Layer: known}))
        assert largest_difference(model(**batch).logits, wanted, batch["attention_mask"]) < 1e-4


def divided_job(name: str, world_size: int) -> tuple[float, bool]:
    family = (FAMILIES | ENCODERS)[name]
    plain, batch = make_model(family), padded_batch()
    divided = deepspeed.tp_model_init(make_model(family), tp_size=world_size, dtype=torch.float32)
    injected = inject(divided, max_out_tokens=32)
    assert_all_fused(injected)
    with torch.no_grad():
        wanted = plain(**batch).logits
        worst = largest_difference(divided(**batch).logits, wanted, batch["attention_mask"])
    if name in ENCODERS:
        return worst, True
    words = {**batch, "max_new_tokens": 8, "do_sample": False}
    return worst, torch.equal(divided.generate(**words), plain.generate(**words))


_DIVIDED = (
    "gpt2",
    "gpt-neox",
    "bloom",
    "llama",
    "qwen3",
    "falcon",
    "falcon with alibi",
    "gpt-neo",
    "gpt-j",
    "opt",
    "gemma",
    "gemma2",
    "gemma3",
    "mixtral",
    "bert",
)
_IN_EVERY_RUN = {
    ("gemma", 2),
    ("gemma2", 2),
    ("gemma3", 2),
    ("mixtral", 2),
    ("mixtral", 3),
    ("llama", 2),
    ("gpt2", 3),
    ("bloom", 3),
    ("falcon", 2),
    ("bert", 3),
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    swept([(name, size) for name in _DIVIDED for size in (2, 3)], lambda *case: case in _IN_EVERY_RUN),
)
def test_a_divided_model_gives_the_tokens_of_the_whole_one(name: str, world_size: int) -> None:
    for worst, has_equal_tokens in run_ranks(world_size, divided_job, name, world_size):
        assert worst < 1e-4
        assert has_equal_tokens


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_an_injected_model_saves_as_the_plain_one(name: str, tmp_path: Path) -> None:
    model, batch = make_model(FAMILIES[name]), padded_batch()
    values = {key: value.clone() for key, value in model.state_dict().items()}
    inject(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert_same_state(loaded, values)
    with torch.no_grad():
        assert largest_difference(model(**batch).logits, loaded(**batch).logits, batch["attention_mask"]) < 1e-4
