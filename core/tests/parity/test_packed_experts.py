"""Experts' weights in few bits: a packed model gives what a model gives whose weights have the packed values (1e-4)."""

import copy
import pickle
from unittest import mock

import deepspeed
import pytest
import torch
import transformers
from deepspeed.errors import ConfigError, StateError
from deepspeed.inference import load_weights
from deepspeed.inference.quantized import PackedExperts
from deepspeed.inference.v2 import InferenceEngineV2
from deepspeed.ops.quantizer.packed import pack_weight, unpack_weight
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept

from .test_inference import COMMON, LLAMA, logits_of, tokens_of

SIZES = {**LLAMA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
# shared experts and the first layer are plain linears
DEEPSEEK = {**SIZES, **MLA, "n_routed_experts": 6, "first_k_dense_replace": 1, "num_key_value_heads": 6}
LLAMA4 = {"num_local_experts": 4, "intermediate_size": 40, "intermediate_size_mlp": 48, "num_experts_per_tok": 2}
DBRX = {
    "attn_config": {"kv_n_heads": 3, "rope_theta": 1e4, "clip_qkv": 8.0},
    "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
}
FAMILIES = {
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4, "intermediate_size": 40}),
    "qwen2_moe": ("Qwen2Moe", {**SIZES, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3Moe", SIZES),
    "olmoe": ("Olmoe", {**SIZES, "intermediate_size": 24}),
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, "n_group": 2, "topk_group": 2}),
    "gpt_oss": ("GptOss", {**SIZES, "num_local_experts": 6, "intermediate_size": 24}),  # biases, [in, out], own gate
    # [in, out], of every token; the second layer has no experts
    "llama4": ("Llama4", {**LLAMA, **LLAMA4, "moe_layers": [0]}),
    # products by themselves, of attention too
    "jetmoe": ("JetMoe", {**LLAMA, "num_local_experts": 4, "intermediate_size": 40, "kv_channels": 8}),
    # matrices one below the other, of a part
    "dbrx": ("Dbrx", {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64, **DBRX}),
}
#: of a class with other weights than gate_up_proj and down_proj: whether each is [in, out]
OWN_WEIGHTS = {
    "Llama4TextExperts": {"gate_up_proj": True, "down_proj": True},
    "JetMoeParallelExperts": {"weight": False},
    "DbrxExpertGLU": {"w1": False, "v1": False, "w2": True},
}
OTHERS = ("llama4", "jetmoe", "dbrx")
SCHEMES = {
    "int8": ({"dtype": torch.int8}, 8, True, False),
    "int4": ({"dtype": torch.int8, "quant": {"weight": {"num_bits": 4, "q_type": "asymmetric"}}}, 4, False, False),
    "fp8": ({"dtype": "fp8"}, 8, True, True),
}


def config_of(name):
    family, keys = FAMILIES[name]
    text = "Text" * (name == "llama4")
    return getattr(transformers, f"{family}{text}Config")(**COMMON, **keys)


def create(name):
    family, _ = FAMILIES[name]
    torch.manual_seed(0)
    config = config_of(name)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.05)
    return model.eval()


def own_weights(experts):
    found = [OWN_WEIGHTS[cls.__name__] for cls in type(experts).__mro__ if cls.__name__ in OWN_WEIGHTS]
    return found[0] if found else None


def weights_of(experts):
    """The names of the weights, and whether each is [in, out]."""
    return own_weights(experts) or dict.fromkeys(("gate_up_proj", "down_proj"), experts.is_transposed)


def experts_of(model):
    def is_one(each):
        return own_weights(each) or (hasattr(each, "down_proj") and not hasattr(each.down_proj, "weight"))

    return [each for each in model.modules() if is_one(each)]


@torch.no_grad()
def rounded(model, bits, symmetric, floating, groups=1):
    """The model with the values that its packed weights stand for: those of each expert by itself."""

    def value(weight):
        rows, cols = weight.shape
        size = cols // -(-groups // rows)
        return unpack_weight(pack_weight(weight.contiguous(), bits, size, symmetric, floating=floating))

    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is torch.nn.Linear and module is not head:
            module.weight.copy_(value(module.weight))
    for experts in experts_of(model):
        for name, is_transposed in weights_of(experts).items():
            param = getattr(experts, name)
            for each in param if param.dim() == 3 else param.unflatten(0, (experts.moe_num_experts, -1)):
                each.copy_(value(each.t()).t() if is_transposed else value(each))
    return model


def check(engine, wanted):
    torch.testing.assert_close(logits_of(engine, ""), logits_of(wanted, ""), atol=1e-4, rtol=1e-4)
    assert torch.equal(tokens_of(engine, do_sample=False), tokens_of(wanted, do_sample=False))


@pytest.mark.parametrize(
    ("name", "scheme"),
    swept(
        [(name, scheme) for name in FAMILIES for scheme in SCHEMES],
        lambda name, scheme: scheme == "int8" or name in ("mixtral", "gpt_oss"),
    ),
)
def test_packed_experts_give_what_their_values_give(name, scheme):
    keys, bits, symmetric, floating = SCHEMES[scheme]
    plain = create(name)
    engine = deepspeed.init_inference(copy.deepcopy(plain), **keys)
    assert experts_of(engine.module)
    for experts, former in zip(experts_of(engine.module), experts_of(plain), strict=True):
        assert isinstance(experts, type(former))
        for key in weights_of(former):
            weight = getattr(experts, key)
            assert weight.dtype == torch.int8
            assert weight.nbytes == getattr(former, key).numel() * bits // 8
    exact = logits_of(plain, "")
    wanted = rounded(plain, bits, symmetric, floating)
    assert not torch.equal(logits_of(wanted, ""), exact)
    check(engine, wanted)


def test_groups_are_those_of_one_expert():
    plain = create("mixtral")
    engine = deepspeed.init_inference(copy.deepcopy(plain), dtype=torch.int8, quantization_setting=96)
    experts = experts_of(engine.module)[0]
    assert experts.packed_weights["gate_up_proj"].group_size == 24  # 80 rows of 48, cut in two
    check(engine, rounded(plain, 8, True, False, groups=96))
    with pytest.raises(ConfigError, match=r"experts\.down_proj, whose weight is 48 x 40: 3 per row do not divide 40"):
        deepspeed.init_inference(create("mixtral"), dtype=torch.int8, quantization_setting=144)


def bytes_held(model):
    """Of all tensors that the modules hold, each memory once."""
    found = {}
    for module in model.modules():
        packed = list(getattr(module, "packed_weights", {}).values())
        beside = [each for one in packed for each in (one.data, one.scales, one.zeros) if each is not None]
        held = [each for each in vars(module).values() if isinstance(each, torch.Tensor)]
        for each in (*module.parameters(recurse=False), *module.buffers(recurse=False), *held, *beside):
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("injects", [False, True])
def test_no_weight_stays_in_full_precision(injects):
    plain = create("mixtral")
    whole = bytes_held(plain)
    linears = [each.weight.numel() for each in plain.modules() if type(each) is torch.nn.Linear]
    packed = sum(linears) - plain.lm_head.weight.numel()
    packed += sum(each.gate_up_proj.numel() + each.down_proj.numel() for each in experts_of(plain))
    engine = deepspeed.init_inference(plain, dtype=torch.int8, replace_with_kernel_inject=injects)
    tokens_of(engine, do_sample=False)
    scales = sum(
        4 * each.scales.numel() for one in engine.modules() for each in getattr(one, "packed_weights", {}).values()
    )
    assert bytes_held(engine.module) == whole - 3 * packed + scales


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_blocks_over_packed_experts(scheme):
    keys = SCHEMES[scheme][0]
    packed = deepspeed.init_inference(create("mixtral"), **keys)
    fused = deepspeed.init_inference(create("mixtral"), replace_with_kernel_inject=True, **keys)
    assert all("forward" in vars(layer) for layer in fused.module.model.layers)
    check(fused, packed)


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_continuous_batching_over_packed_experts(mode):
    quant = {"weight": {"num_bits": int(mode[3:])}}
    expected = deepspeed.init_inference(create("mixtral"), dtype=torch.int8, quant=quant)
    sizes = {"state_manager": {"memory_config": {"mode": "allocate", "size": 8}, "max_context": 32}}
    engine = InferenceEngineV2(create("mixtral"), {**sizes, "quantization": {"quantization_mode": mode}})
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([9, 3, 4, 8, 2])]
    found = engine.put([0, 1], prompts)
    for logits, tokens in zip(found, prompts, strict=True):
        torch.testing.assert_close(logits, expected(tokens[None]).logits[0, -1], atol=1e-4, rtol=1e-4)


def divided_job(name, injects):
    """Inner features that are cut over ranks have a scale per part, so they are rounded no worse than the whole."""
    exact = logits_of(create(name), "")
    whole = deepspeed.init_inference(create(name), dtype=torch.int8)
    divided = deepspeed.init_inference(create(name), dtype=torch.int8, mp_size=2, replace_with_kernel_inject=injects)
    assert all(isinstance(each, PackedExperts) for each in experts_of(divided.module))
    error = (logits_of(whole, "") - exact).abs().mean()
    assert 0 < (logits_of(divided, "") - exact).abs().mean() < 1.5 * error
    return tokens_of(divided, do_sample=False).tolist()


@pytest.mark.parametrize("injects", [False, True])
def test_packed_experts_of_a_divided_model(injects):
    first, second = run_ranks(2, divided_job, "mixtral", injects)
    assert first == second


def test_packed_experts_move_copy_and_no_state_dict_omits_them():
    model = create("mixtral")
    saved = model.state_dict()
    engine = deepspeed.init_inference(model, dtype=torch.int8)
    expected = logits_of(engine, "")
    with pytest.raises(StateError, match=r"^state_dict: .* init_inference packed into 8 bits"):
        engine.module.model.layers[0].mlp.experts.state_dict()
    with pytest.raises(StateError, match=r"^load_state_dict: .* load the weights before init_inference"):
        engine.module.model.layers[0].mlp.experts.load_state_dict(saved, strict=False)
    for other in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        assert torch.equal(logits_of(other, ""), expected)
    engine.module.bfloat16()
    experts = experts_of(engine.module)[0]
    assert "8 bits" in repr(experts)
    assert experts.packed_weights["down_proj"].scales.dtype == torch.float32
    engine.module.to("meta")
    for packed in experts.packed_weights.values():
        assert {each.device.type for each in (packed.data, packed.scales)} == {"meta"}
    assert experts.down_proj.device.type == "meta"


@pytest.mark.parametrize(("name", "tp"), [*((name, 1) for name in ("gpt_oss", *OTHERS)), ("mixtral", 2)])
def test_packed_experts_are_written_as_the_numbers_they_stand_for(name, tp, tmp_path):
    arguments = (name, tp, str(tmp_path / "exported"))
    run_ranks(tp, export_job, *arguments) if tp > 1 else export_job(*arguments)


def export_job(name, tp, path):
    plain = create(name)
    engine = deepspeed.init_inference(copy.deepcopy(plain), mp_size=tp, **SCHEMES["int4"][0])
    expected = logits_of(engine, "")
    engine.export(path)
    loaded = type(plain).from_pretrained(path)
    assert {param.dtype for param in loaded.parameters()} == {torch.float}
    torch.testing.assert_close(logits_of(loaded.eval(), ""), expected, atol=1e-4, rtol=1e-4)


def checkpoint_job(name, tp, checkpoint):
    family, _ = FAMILIES[name]
    expected = deepspeed.init_inference(create(name), mp_size=tp, dtype=torch.int8)
    with deepspeed.OnDevice(dtype=torch.float, device="meta"):
        empty = getattr(transformers, f"{family}ForCausalLM")(config_of(name)).eval()
    put, kept = load_weights._put, []

    def watched(model, values):
        kept.extend(value.dim() for value in values.values())
        put(model, values)

    with mock.patch.object(load_weights, "_put", watched):
        engine = deepspeed.init_inference(empty, mp_size=tp, dtype=torch.int8, checkpoint=checkpoint)
    assert max(kept) == 2  # no experts
    assert torch.equal(logits_of(engine, ""), logits_of(expected, ""))
    assert torch.equal(tokens_of(engine, do_sample=False), tokens_of(expected, do_sample=False))


@pytest.mark.parametrize(("name", "tp"), [*((name, 1) for name in ("qwen3_moe", "gpt_oss", *OTHERS)), ("mixtral", 2)])
def test_a_checkpoint_is_packed_as_it_is_read(name, tp, tmp_path):
    create(name).save_pretrained(tmp_path, max_shard_size="40KB")
    arguments = (name, tp, str(tmp_path / "model.safetensors.index.json"))
    run_ranks(tp, checkpoint_job, *arguments) if tp > 1 else checkpoint_job(*arguments)


def test_experts_in_a_list_are_linears():
    config = transformers.SwitchTransformersConfig(
        vocab_size=48, d_model=48, d_kv=8, d_ff=40, num_layers=2, num_heads=6, num_experts=4, expert_capacity=64,
        decoder_start_token_id=0, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.SwitchTransformersForConditionalGeneration(config).eval()
    engine = deepspeed.init_inference(copy.deepcopy(plain), dtype=torch.int8)
    wo = [module for path, module in engine.module.named_modules() if "experts" in path and path.endswith("wo")]
    assert len(wo) >= 4
    assert {each.weight.dtype for each in wo} == {torch.int8}
    wanted = rounded(plain, 8, True, False)
    torch.testing.assert_close(logits_of(engine, "t5"), logits_of(wanted, "t5"), atol=1e-4, rtol=1e-4)


def test_experts_of_another_form_are_named(capfd):
    model = create("mixtral")
    experts = experts_of(model)
    for each in experts:
        each.has_post_expert_norm = True  # as those of Muse Spark, whose norm is of each expert
    deepspeed.init_inference(model, dtype=torch.int8)
    assert "MixtralExperts (model.layers.0.mlp.experts) keep their weights" in capfd.readouterr().err
    assert {each.down_proj.dtype for each in experts} == {torch.float}


@torch.no_grad()
def test_llama4_reads_experts_that_have_tokens():
    """Each expert of the model gets every token, most of them times 0."""
    engine = deepspeed.init_inference(create("llama4"), dtype=torch.int8)
    experts = experts_of(engine.module)[0]
    with mock.patch.object(experts, "product", wraps=experts.product) as product:
        engine(torch.tensor([[5, 6, 7]]))
    assert [len(call.args[0]) for call in product.call_args_list] == [6, 6]  # of 3 tokens, which have 2 experts each
    rows = torch.zeros(8, 48)
    assert torch.equal(experts(rows), rows)


@pytest.mark.parametrize("name", ["mixtral", *OTHERS])
def test_experts_are_packed_once(name, capfd):
    first = deepspeed.init_inference(create(name), dtype=torch.int8)
    expected = logits_of(first, "")
    again = deepspeed.init_inference(first.module, dtype=torch.int8)
    assert torch.equal(logits_of(again, ""), expected)
    assert "keep their weights" not in capfd.readouterr().err


@pytest.mark.parametrize("name", OTHERS)
def test_experts_of_other_forms_move_and_copy(name):
    engine = deepspeed.init_inference(create(name), dtype=torch.int8)
    expected = logits_of(engine, "")
    for other in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        assert torch.equal(logits_of(other, ""), expected)
    with pytest.raises(StateError, match=r"^state_dict: .* init_inference packed into 8 bits"):
        engine.module.state_dict()
    engine.module.to("meta")
    for experts in experts_of(engine.module):
        assert {packed.data.device.type for packed in experts.packed_weights.values()} == {"meta"}
