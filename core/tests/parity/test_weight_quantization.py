"""`weight_quantization` on models: both ways give the same weights, on one rank and sharded over two.

Outputs of both ways are equal bit for bit, and those of the plain model with the weights that are stored. How far these
are from the weights before is a matter of the layers: unit/ops/test_stored_layers.py.
"""

import copy
import ctypes
import gc
import pickle
import re
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.inference.quantization.layers import QuantizedEmbedding, QuantizedLinear
from deepspeed.inference.quantization.quantization import _init_group_wise_weight_quantization
from deepspeed.inference.quantization.quantization_context import QuantizationContext
from deepspeed.ops.quantizer.layers import StoredLayer
from deepspeed.ops.quantizer.stored_form import StoredForm
from deepspeed.testing.distributed import run_ranks
from torch import nn

KEYS = {"num_bits": 4, "group_size": 16, "group_dim": 1, "symmetric": False}
INITIAL = {"weight_quantization": {"quantized_initialization": KEYS}}
WIDE = {"weight_quantization": {"quantized_initialization": {"num_bits": 4, "group_size": 64}}}
SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "eos_token_id": None},
}


def after(**patterns):
    return {"weight_quantization": {"post_init_quant": patterns}}


def llama(**keys):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **keys)).eval()


def mixtral(**keys):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, **keys)).eval()


def gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssForCausalLM(GptOssConfig(**sizes, pad_token_id=0)).eval()


def fill(plain, stored):
    """The plain model with the weights that are stored."""
    for name, module in stored.named_modules():
        for weight in module.forms if isinstance(module, StoredLayer) else ():
            plain.get_submodule(name).get_parameter(weight).copy_(module.dequantized(name=weight))


def prompt():
    return torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_only_the_layers_that_a_pattern_names_are_stored():
    model = llama()
    keys = {"mlp": KEYS, "self_attn.q_proj": {**KEYS, "num_bits": 8}}
    plain = copy.deepcopy(model)
    assert _init_group_wise_weight_quantization(model, after(**keys)) is model
    kinds = {name.split(".", 3)[-1]: type(module) for name, module in model.named_modules()}
    assert {name for name, kind in kinds.items() if kind is QuantizedLinear} == {
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")
    }
    fill(plain, model)
    torch.testing.assert_close(model(prompt()).logits, plain(prompt()).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("create", "tied"), [(llama, True), (llama, False), (mixtral, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_stored_as_they_load_are_those_stored_afterwards(create, tied, dtype, tmp_path):
    from transformers import AutoModelForCausalLM

    create(tie_word_embeddings=tied).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    later = _init_group_wise_weight_quantization(plain, after(model=KEYS, lm_head=KEYS))
    with QuantizationContext(INITIAL):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    assert type(model.model.embed_tokens) is QuantizedEmbedding
    assert {name for name, each in model.named_parameters() if each.dim() == 3} == set()
    for one in (model, later):
        assert (one.lm_head.weight is one.model.embed_tokens.weight) == tied
    assert torch.equal(model(prompt()).logits, later(prompt()).logits)
    assert nn.Linear(2, 2).weight.dtype == torch.float32  # the context is over


@torch.no_grad()
def test_linear_layers_of_gpt2_are_stored():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64)).eval()
    for dim in (0, 1):
        done = _init_group_wise_weight_quantization(copy.deepcopy(model), after(mlp={**KEYS, "group_dim": dim}))
        plain = copy.deepcopy(model)
        fill(plain, done)
        torch.testing.assert_close(done(prompt()).logits, plain(prompt()).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dim", [1, 0])
@pytest.mark.parametrize("create", [mixtral, gpt_oss])
def test_experts_are_stored(create, dim):
    plain = create()
    done = _init_group_wise_weight_quantization(copy.deepcopy(plain), after(mlp={**KEYS, "group_dim": dim}))
    for layer, former in zip(done.model.layers, plain.model.layers, strict=True):
        experts, whole = layer.mlp.experts, former.mlp.experts
        assert isinstance(experts, type(whole))
        for name in ("gate_up_proj", "down_proj"):
            numel = getattr(whole, name).numel()  # 4 bits, and a scale and a minimum for 16 of them
            assert numel <= getattr(experts, name).nbytes <= numel + 64
    before = plain(prompt()).logits
    fill(plain, done)
    wanted = plain(prompt()).logits
    assert not torch.equal(wanted, before)
    for each in (done, copy.deepcopy(done), pickle.loads(pickle.dumps(done))):
        torch.testing.assert_close(each(prompt()).logits, wanted, atol=1e-5, rtol=1e-5)
        tokens = [one.generate(prompt(), max_new_tokens=4, do_sample=False) for one in (each, plain)]
        assert torch.equal(*tokens)
    again = create()
    _init_group_wise_weight_quantization(again, after(mlp={**KEYS, "group_dim": dim}))
    again.load_state_dict(done.state_dict())
    assert torch.equal(again(prompt()).logits, done(prompt()).logits)


@torch.no_grad()
def test_one_of_two_weights_of_experts_is_stored():
    plain = mixtral()
    done = _init_group_wise_weight_quantization(copy.deepcopy(plain), after(**{"experts.down_proj": KEYS}))
    assert {module.gate_up_proj.dtype for module in done.modules() if hasattr(module, "gate_up_proj")} == {torch.float}
    assert "down_proj: 4 x 32 x 64, 4 bits, asymmetric, groups of 16" in repr(done)
    fill(plain, done)
    torch.testing.assert_close(done(prompt()).logits, plain(prompt()).logits, atol=1e-5, rtol=1e-5)
    fused = deepspeed.init_inference(done, dtype=torch.float, replace_with_kernel_inject=True)
    assert all("forward" in vars(layer) for layer in fused.module.model.layers)
    torch.testing.assert_close(fused(prompt()).logits, plain(prompt()).logits, atol=1e-5, rtol=1e-5)
    wrong = after(**{"experts.down_proj": {**KEYS, "group_size": 24}})
    with pytest.raises(ConfigError, match=r"found 24 for model.layers.0.mlp.experts.down_proj, .* is 32 x 64: .* 64"):
        _init_group_wise_weight_quantization(plain, wrong)


@torch.no_grad()
@pytest.mark.parametrize("injects", [False, True])
@pytest.mark.parametrize(("create", "dtype"), [(llama, torch.float), (mixtral, torch.float), (mixtral, torch.int8)])
def test_init_inference_leaves_stored_layers_as_they_are(injects, create, dtype):
    model = _init_group_wise_weight_quantization(create(), after(layers=KEYS))
    wanted = model(prompt()).logits
    engine = deepspeed.init_inference(model, dtype=dtype, replace_with_kernel_inject=injects)
    torch.testing.assert_close(engine(prompt()).logits, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["quantized_initialization", "post_init_quant"])
def test_the_keys_of_init_inference_name_the_section_that_does_it(name):
    with pytest.raises(ConfigError, match=rf"quant\.weight\.{name}: .*use weight_quantization"):
        deepspeed.init_inference(llama(), dtype=torch.int8, quant={"weight": {name: {"fc": KEYS}}})


def own_bytes():
    """Of this process, without pages of files, as those of a checkpoint are mapped, and without freed memory."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def peak_job(folder):
    """(peak of own bytes above those before, bytes of the model) of a load, as seen around each weight."""
    from transformers import LlamaForCausalLM

    results = []
    pack = StoredForm.pack
    for _ in range(2):  # the first has also read libraries
        gc.collect()
        before = own_bytes()
        seen = []

        def watched(form, weight):
            seen.append(own_bytes() - before)
            stored = pack(form, weight)
            seen.append(own_bytes() - before)
            return stored

        with pytest.MonkeyPatch.context() as patch, QuantizationContext(WIDE):
            patch.setattr(StoredForm, "pack", watched)
            model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)  # of fp32: nothing stays mapped
        results.append((max(seen), sum(each.nbytes for each in model.parameters()), len(seen) // 2))
        del model
    return results[1]


def test_the_whole_model_never_exists_while_it_loads(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SIZES, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "vocab_size": 1024}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    plain.save_pretrained(tmp_path, max_shard_size="40MB")
    peak, kept, num_layers = run_ranks(1, peak_job, str(tmp_path))[0]
    whole = plain.num_parameters() * 2
    assert num_layers == 6 * 7 + 2
    assert kept < plain.num_parameters() * (4 + 2 * 32 / 64) / 8 * 1.01  # bits; a scale and a minimum for 64 of them
    two_weights = 2 * 2 * 768 * 3072  # the one that is being stored, and room for the allocator
    assert 0.9 * kept < peak < kept + two_weights < 0.4 * whole, (peak, kept, whole)


def engine_config(stage, dtype, **more):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {"train_batch_size": 2, "zero_optimization": zero, "bf16": {"enabled": dtype is torch.bfloat16}, **more}


def kept_bytes(module):
    """Of this rank's shards."""
    return sum(getattr(each, "ds_tensor", each).nbytes for each in module.parameters())


def check_saved(engine, wanted, folder, dtype):
    """`save_16bit_model` writes what a plain model loads: the numbers that stored weights stand for."""
    assert engine.save_16bit_model(str(folder))
    saved = torch.load(folder / "pytorch_model.bin")
    assert {value.dtype for value in saved.values()} == {dtype}
    loaded = type(wanted)(wanted.config).eval().to(dtype)
    loaded.load_state_dict(saved)
    for name, module in wanted.named_modules():
        for weight in module.forms if isinstance(module, StoredLayer) else ():
            assert torch.equal(loaded.get_submodule(name).get_parameter(weight), module.dequantized(name=weight)), name
    # the numbers are rounded to bf16 in the file, and not by the stored layers
    atol = 1e-5 if dtype is torch.float32 else 2**-6
    torch.testing.assert_close(loaded(prompt()).logits, wanted(prompt()).logits, atol=atol, rtol=2**-6)


def whole_job(folder, keys):
    model = llama()
    wanted = _init_group_wise_weight_quantization(copy.deepcopy(model), after(model=keys))
    config = engine_config(0, torch.float32, **after(model=keys))
    engine = deepspeed.initialize(model=_init_group_wise_weight_quantization(model, config), config=config)[0]
    engine.module.eval()
    check_saved(engine, wanted, Path(folder), torch.float32)
    return wanted.model.layers[0].mlp.up_proj.form.bits


@pytest.mark.parametrize("bits", [8, 6])
def test_weights_with_an_exponent_are_stored_and_saved_as_numbers(bits, tmp_path):
    keys = {"num_bits": bits, "group_size": 32, "floating": True}
    assert run_ranks(2, whole_job, str(tmp_path), keys) == [bits, bits]


def stage3_job(folder, dtype, offloads):
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    patterns = after(model=KEYS, lm_head=KEYS)
    wanted = _init_group_wise_weight_quantization(copy.deepcopy(plain), patterns)
    results = []
    for way in (INITIAL, patterns):
        config = engine_config(3, dtype, **way)
        if offloads:
            config["zero_optimization"]["offload_param"] = {"device": "cpu"}
        of_transformers = HfDeepSpeedConfig(config)  # from_pretrained enters zero.Init
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        if way is patterns:
            model = _init_group_wise_weight_quantization(model, config)
        engine = deepspeed.initialize(model=model, config=config)[0]
        engine.module.eval()
        assert torch.equal(engine(prompt()).logits, wanted(prompt()).logits)
        tokens = [
            each.generate(prompt(), max_new_tokens=4, do_sample=False, **keys)
            for each, keys in ((engine.module, {"synced_gpus": True}), (wanted, {}))
        ]
        assert torch.equal(*tokens)
        check_saved(engine, wanted, Path(folder) / "saved", dtype)
        results.append((kept_bytes(engine.module), sum(each.nbytes for each in wanted.parameters())))
        engine.destroy()
        del of_transformers
    return results


@pytest.mark.parametrize(
    ("create", "num_ranks", "dtype", "offloads"),
    [
        *((llama, 2, torch.float32, False), (llama, 1, torch.bfloat16, False), (llama, 2, torch.bfloat16, True)),
        (mixtral, 2, torch.bfloat16, False),
    ],
)
def test_stage_3_shards_and_gathers_stored_weights(create, num_ranks, dtype, offloads, tmp_path):
    create().save_pretrained(tmp_path)
    for results in run_ranks(num_ranks, stage3_job, str(tmp_path), dtype, offloads):
        for kept, whole in results:
            assert whole / num_ranks <= kept <= whole / num_ranks + 256 * num_ranks  # shards are filled up


def wrong_engines_job():
    found = []
    for config, stores in (
        (engine_config(0, torch.float32, **INITIAL), False),
        (engine_config(0, torch.float32, **after(**{"0": KEYS})), False),
        (engine_config(0, torch.float32, **after(**{"0": KEYS}), optimizer={"type": "Adam"}), True),
    ):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        if stores:
            _init_group_wise_weight_quantization(model, config)
        with pytest.raises(ConfigError) as error:
            deepspeed.initialize(model=model, config=config)
        found.append(str(error.value))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    engine = deepspeed.initialize(model=model, config=engine_config(3, torch.float32))[0]
    with pytest.raises(ConfigError) as error:
        _init_group_wise_weight_quantization(engine.module, after(**{"0": KEYS}))
    return [*found, str(error.value)]


def test_engines_that_cannot_be_are_refused():
    messages = run_ranks(1, wrong_engines_job)[0]
    for message, words in zip(
        messages,
        (
            "quantized_initialization: found no layer of Sequential with a stored weight; make and load the model",
            "post_init_quant: found no layer of Sequential with a stored weight; call deepspeed.inference.quantization",
            "post_init_quant: found an optimizer, and weights that are stored in few bits have no gradient; remove",
            "post_init_quant.0: found 0 in an engine, which has sharded its weight; call .*before deepspeed.initialize",
        ),
        strict=True,
    ):
        assert re.search(words, message), message


WRONG = [
    ({"fc": {**KEYS, "num_bits": 3}}, r"post_init_quant\.fc\.num_bits: found 3; allowed: 4 or 6 or 8"),
    ({"fc": {**KEYS, "num_bits": 6}}, r"post_init_quant\.fc\.num_bits: bits: found 6, but it must be 8 or 4"),
    ({"fc": {**KEYS, "floating": True}}, r"fc\.num_bits: bits: found 4, but it must be 8 or 6 where floating"),
    ({"fc": {**KEYS, "group_dim": 2}}, r"post_init_quant\.fc\.group_dim: found 2; allowed: 0 or 1"),
    ({"fc": {**KEYS, "group_size": 0}}, r"post_init_quant\.fc\.group_size: found 0; allowed: an integer >= 1"),
    ({"fc": {**KEYS, "bits": 4}}, r"post_init_quant\.fc\.bits"),
    ({"fc": 4}, r"post_init_quant\.fc: found 4; allowed: an object"),
    (
        {"fc": {**KEYS, "group_size": 24}},
        r"fc\.group_size: found 24 for fc1, whose weight is 48 x 32: with group_dim 1 it must divide 32 and be even.*; "
        "for example 8, 16, 32",
    ),
    ({"fc": {**KEYS, "group_dim": 0, "group_size": 32}}, r"found 32 for fc1, .* group_dim 0 it must divide 48"),
    (
        {"fc3": KEYS},
        r"found 'fc3', which is part of no name of a linear or embedding layer; the model has embed, fc1, f",
    ),
    ({"norm": KEYS}, r"found 'norm', .* layer \(but of LayerNorm\); the model has"),
    ({"fc": KEYS, "fc1": {**KEYS, "num_bits": 8}}, r"'fc' and 'fc1' both name fc1, and differ; write longer parts"),
    ({"bag": KEYS}, r"post_init_quant.bag: found bag with max_norm.*leave it out"),
    ({}, "post_init_quant: found no pattern; write"),
]


def small_model(device=None):
    layers = {"embed": nn.Embedding(48, 32), "fc1": nn.Linear(32, 48), "fc2": nn.Linear(48, 32)}
    return nn.ModuleDict({**layers, "norm": nn.LayerNorm(32), "bag": nn.Embedding(48, 32, max_norm=1.0)}).to(device)


@pytest.mark.parametrize(("patterns", "words"), WRONG)
def test_wrong_settings_are_named_and_change_nothing(patterns, words):
    model = small_model()
    with pytest.raises(ConfigError, match=words):
        _init_group_wise_weight_quantization(model, after(**patterns))
    assert not any(isinstance(module, QuantizedLinear | QuantizedEmbedding) for module in model.modules())


def test_a_context_that_would_do_nothing_and_layers_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="quantized_initialization: is not in the configuration.*; write"):
        QuantizationContext(after(fc=KEYS))
    with (
        QuantizationContext(INITIAL),
        pytest.raises(ConfigError, match=r"found 16 for a Linear, whose weight is 3 x 5"),
    ):
        nn.Linear(5, 3)
    with pytest.raises(ConfigError, match="found fc1 on the meta device, where it has no values; load"):
        _init_group_wise_weight_quantization(small_model("meta"), after(fc=KEYS))
