"""`deepspeed.linear` beside plain torch: products, gradients, what trains, what is stored, and what is refused."""

import copy
import io
import math

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.errors import ConfigError, StateError
from deepspeed.linear import (
    Init,
    LoRAConfig,
    LoRAOptimizedLinear,
    OptimizedLinear,
    QuantizationConfig,
    QuantizedLinear,
    QuantizedParameter,
    init_lora,
)
from deepspeed.ops.quantizer.packed import pack_weight, unpack_weight
from deepspeed.testing.distributed import run_ranks
from torch import nn

IN, OUT, RANK = 48, 24, 4
LORA = LoRAConfig(lora_r=RANK, lora_alpha=6.0)
STORED = {"plain": None, "8 bits": QuantizationConfig(group_size=20), "6 bits": QuantizationConfig(q_bits=6)}


def rounded(weight, config):
    """What a stored weight stands for: groups are the largest divisor of a row that is not above `group_size`."""
    size = 16 if config.group_size == 20 else IN
    return unpack_weight(pack_weight(weight.float(), config.q_bits, size, floating=True), weight.dtype)


def make(config, lora=LORA, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return OptimizedLinear(IN, OUT, bias=bias, lora_config=lora, quantization_config=config, dtype=dtype)


def test_the_class_follows_from_the_configurations():
    assert type(OptimizedLinear(IN, OUT)) is nn.Linear
    assert OptimizedLinear(IN, OUT).weight.dtype == torch.bfloat16

    class Mine(nn.Linear):
        pass

    assert type(OptimizedLinear(IN, OUT, linear_cls=Mine)) is Mine
    assert type(OptimizedLinear(IN, OUT, quantization_config=QuantizationConfig())) is QuantizedLinear
    assert type(OptimizedLinear(IN, OUT, lora_config=LORA)) is LoRAOptimizedLinear
    both = OptimizedLinear(IN, OUT, lora_config=LORA, quantization_config=QuantizationConfig())
    assert isinstance(both, LoRAOptimizedLinear)
    assert isinstance(both.weight, QuantizedParameter)


@pytest.mark.parametrize("kind", STORED)
def test_outputs_and_gradients_are_those_of_the_formula(kind):
    layer, config = make(STORED[kind]), STORED[kind]
    torch.manual_seed(0)
    weight, bias = nn.Linear(IN, OUT).state_dict().values()
    weight = weight if config is None else rounded(weight, config)
    assert torch.equal(layer.full_weight(), weight)
    assert torch.equal(layer.bias, bias)
    first, second = layer.lora_weight_1.weight, layer.lora_weight_2.weight
    assert (first.shape, second.shape) == ((RANK, IN), (OUT, RANK))
    assert bool((second == 0).all())
    assert 0.5 / math.sqrt(IN) < first.abs().max() <= 1 / math.sqrt(IN)
    assert {name for name, param in layer.named_parameters() if param.requires_grad} == {
        *("lora_weight_1.weight", "lora_weight_2.weight")
    }
    with torch.no_grad():
        second.normal_()
    x = torch.randn(5, IN, requires_grad=True)
    ours = layer(x)
    grads = torch.autograd.grad(ours.square().sum(), (x, first, second))
    a, b = (each.detach().clone().requires_grad_() for each in (first, second))
    wanted = F.linear(x, weight, bias) + 6.0 / RANK * (x @ a.t()) @ b.t()
    torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted.square().sum(), (x, a, b)), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(layer.linear_without_F_linear(x, weight) + bias, layer.product(x))
    layer.disable()
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias))
    layer.init_lora()
    assert layer.lora_weight_1 is None


def test_no_wide_weight_is_kept_for_the_backward_pass():
    layer = make(STORED["8 bits"])
    kept = []
    x = torch.randn(5, IN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: kept.append(saved.numel()) or saved, lambda saved: saved
    ):
        layer.product(x).sum().backward()
    assert sum(kept) < IN * OUT


@pytest.mark.parametrize("bits", [8, 6])
def test_a_quantized_linear_takes_plain_weights_and_stores_few_bytes(bits):
    config = QuantizationConfig(q_bits=bits, group_size=16)
    layer = QuantizedLinear(IN, OUT, bias=True, quantization_config=config, dtype=torch.float32)
    plain = nn.Linear(IN, OUT)
    layer.load_state_dict(plain.state_dict())
    wanted = unpack_weight(pack_weight(plain.weight.detach(), bits, 16, floating=True))
    assert torch.equal(layer.weight.dequantized(), wanted)
    assert layer.weight.nbytes <= IN * OUT * bits // 8 + IN * OUT // 16 * 4 + 48
    x = torch.randn(3, IN)
    torch.testing.assert_close(layer(x), F.linear(x, wanted, plain.bias))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = QuantizedLinear(IN, OUT, bias=True, quantization_config=config, dtype=torch.float32)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), layer(x))
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, QuantizedParameter)
    assert torch.equal(twin(x), layer(x))
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert isinstance(layer.weight, QuantizedParameter)


def test_a_quantized_parameter_moves_as_it_is():
    weight = torch.randn(OUT, IN)
    stored = QuantizedParameter(weight, quantization_config=QuantizationConfig(group_size=16))
    wanted = unpack_weight(pack_weight(weight, 8, 16, floating=True))
    assert not stored.requires_grad
    assert torch.equal(stored.dequantized(), wanted)
    assert torch.equal(stored.to("cpu").dequantized(), wanted)
    assert stored.to(torch.bfloat16).dequantized().dtype == torch.bfloat16
    stored.offload()
    assert stored.device.type == "cpu"
    stored.offload(revert=True)
    assert torch.equal(stored.dequantized().cpu(), wanted)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, eos_token_id=None)).eval()


@pytest.mark.parametrize("kind", STORED)
def test_a_model_of_transformers_is_read_within_init(kind, tmp_path):
    plain = llama()
    plain.save_pretrained(tmp_path)
    lora = LoRAConfig(lora_r=RANK, target_mods=["q_proj", "down_proj"])
    before = nn.Linear.__init__
    with Init(lora_config=lora, quant_config=STORED[kind]):
        model = type(plain).from_pretrained(tmp_path).eval()
    assert nn.Linear.__init__ is before
    init_lora(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRAOptimizedLinear)}
    assert len(layers) == 15
    adapted = {name for name, module in layers.items() if module.lora_weight_1 is not None}
    assert adapted == {name for name in layers if name.endswith(("q_proj", "down_proj"))}
    assert not any(param.requires_grad for each in layers.values() for param in each.parameters(recurse=False))
    with torch.no_grad():
        for name, module in layers.items():
            plain.get_submodule(name).weight.copy_(module.full_weight())
        tokens = torch.arange(12).view(2, 6)
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, atol=1e-5, rtol=1e-5)


def training_job(kind, stage):
    def model():
        torch.manual_seed(3)
        layers = [make(STORED[kind]), nn.GELU(), OptimizedLinear(OUT, IN, lora_config=LORA, dtype=torch.float32)]
        return nn.Sequential(*layers)

    def batches():
        generator = torch.Generator().manual_seed(1)
        return [torch.randn(2, IN, generator=generator) for _ in range(4)]

    def loss_of(net, x):
        return (net(x) - x.flip(-1)).square().mean()

    plain = model()
    optimizer = torch.optim.AdamW([each for each in plain.parameters() if each.requires_grad], lr=1e-2)
    config = {"train_batch_size": 2 * torch.distributed.get_world_size(), "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    config["gradient_clipping"] = 0
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    net = model()
    engine = deepspeed.initialize(
        model=net, config=config, model_parameters=[p for p in net.parameters() if p.requires_grad]
    )[0]
    for x in batches():
        wanted = loss_of(plain, x)
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of(engine, x)
        torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
        engine.backward(loss)
        engine.step()
    return wanted.item()


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adapters_train_as_in_plain_torch(kind, stage):
    first, second = run_ranks(2, training_job, kind, stage)
    assert first == second


def test_init_ends_where_its_context_does():
    init = Init()
    with init:
        with pytest.raises(StateError, match="entered already"), init:
            pass
        assert isinstance(nn.Linear(4, 4), LoRAOptimizedLinear)
    assert type(nn.Linear(4, 4)) is nn.Linear
    with init:  # one after the other is fine
        assert isinstance(nn.Linear(4, 4), LoRAOptimizedLinear)
    assert type(nn.Linear(4, 4)) is nn.Linear


def test_targets_that_no_layer_has_are_an_error():
    with Init(LoRAConfig(lora_r=2, target_mods=["q_porj"])):
        model = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "v_proj": nn.Linear(4, 4)})
    with pytest.raises(ConfigError, match=r"target_mods: found \['q_porj'\].*the ends are q_proj, v_proj"):
        init_lora(model)
    init_lora(nn.Linear(4, 4))  # no such layers: nothing to do


def test_what_cannot_be_is_refused_with_the_way():
    for words, match in [
        ({"base_weight_sharding": 2}, r'base_weight_sharding: found 2.*"zero_optimization": \{"stage": 3\}'),
        ({"offload": True}, r'offload True.*"offload_param"'),
        ({"offload_ratio": 0.5}, r"offload_ratio 0.5"),
        ({"lora_r": 0}, r"lora_r: found 0"),
        ({"lora_r": "8"}, r"lora_r: found '8', but the rank must be a whole number"),
        ({"lora_r": True}, r"lora_r: found True, but the rank must be a whole number"),
        ({"lora_alpha": None}, r"lora_alpha: found None; give a number"),
        ({"target_mods": "q_proj"}, r"target_mods: found 'q_proj'; give a list of names, such as \['q_proj'\]"),
        ({"target_mods": None}, r"target_mods: found None; give a list of names"),
    ]:
        with pytest.raises(ConfigError, match=match):
            LoRAConfig(**words)
    for words, match in [
        ({"q_bits": 12}, r"q_bits 12 and mantissa_bits 3, but layers store .*FP_Quantize"),
        ({"mantissa_bits": 2}, r"q_bits 8 and mantissa_bits 2"),
        ({"q_dtype": torch.int8}, r"q_dtype: found torch.int8"),
        ({"q_bits": 6, "group_size": 2}, r"group_size: found 2 for a layer of 48 inputs"),
        ({"group_size": 0}, r"group_size: found 0, but a group has a whole number >= 1 of elements"),
        ({"group_size": "64"}, r"group_size: found '64', but a group"),
        ({"q_bits": [8]}, r"q_bits: found \[8\]; give a whole number"),
    ]:
        with pytest.raises(ConfigError, match=match):
            OptimizedLinear(IN, OUT, quantization_config=QuantizationConfig(**words))
    with pytest.raises(ConfigError, match="requires_grad; a stored weight is frozen"):
        QuantizedParameter(torch.randn(OUT, IN), requires_grad=True)
    with pytest.raises(ConfigError, match=r"found shape \(3,\)"):
        QuantizedParameter(torch.randn(3))
    with pytest.raises(ConfigError, match="linear_cls Bilinear"):
        LoRAOptimizedLinear(IN, OUT, linear_cls=nn.Bilinear)
