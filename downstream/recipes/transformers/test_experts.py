"""Mixtures of experts of transformers on two ranks that route differently, against one process that sees all samples:
under ZeRO-3 with their experts as leaf modules, and with the experts divided over the ranks (AutoEP).
"""

import re

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import transformers
from deepspeed.errors import ConfigError
from deepspeed.parallel.model_part import part_held
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero.fragments import safe_get_full_fp32_param
from torch import nn

NUM_STEPS, BATCH, TIME, VOCABULARY = 20, 2, 6, 40
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
CLIP = 1.0
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "intermediate_size": 24, "num_experts_per_tok": 2, "initializer_range": 0.2},
}
#: without key biases: their gradients are near 0, and Adam makes whole steps of the rounding noise
FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "qkv_bias": False},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8, "norm_topk_prob": True},
    "DeepseekV3": {
        **{"n_routed_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
        **{"qk_nope_head_dim": 4, "v_head_dim": 8},
    },
    "DeepseekV2": {
        **{"n_routed_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 1},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    },
    "Olmoe": {"num_experts": 4, "output_router_logits": True},
    "Phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "attention_bias": False, "sliding_window": 4},
    "GraniteMoe": {"num_local_experts": 4},
}
#: what a user names in zero_optimization.leaf_module
LEAF_CLASSES = {
    "Mixtral": "MixtralSparseMoeBlock",
    "Qwen2Moe": "Qwen2MoeSparseMoeBlock",
    "Qwen3Moe": "Qwen3MoeSparseMoeBlock",
    "DeepseekV3": "DeepseekV3MoE",
    "DeepseekV2": "DeepseekV2Moe",
    "Olmoe": "OlmoeSparseMoeBlock",
    "Phimoe": "PhimoeSparseMoeBlock",
    "GptOss": "GptOssMLP",
    "GraniteMoe": "GraniteMoeMoE",
}


def create(family):
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def samples(step, rank):
    """Each rank reads its own half of the vocabulary."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(VOCABULARY // 2, (BATCH, TIME), generator=generator) + rank * VOCABULARY // 2


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def reference(family, world):
    model = create(family)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        parts = [loss_of(model, samples(step, rank)) for rank in range(world)]
        optimizer.zero_grad()
        (sum(parts) / world).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append([part.item() for part in parts])
    assert max(norms) > CLIP
    return losses, norms, dict(model.named_parameters())


def train_job(family, config):
    model = create(family)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    base = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": CLIP}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config={**base, **config})[0]
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = loss_of(engine, samples(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    weights = {}
    for name, param in engine.module.named_parameters():
        part = part_held(param)
        rows = part.ranges[0] if part else None
        weights[name] = rows, safe_get_full_fp32_param(param).clone()
    engine.destroy()
    return losses, norms, weights


def check(family, config, world=2):
    losses, norms, whole = reference(family, world)
    found = run_ranks(world, train_job, family, config)
    for rank, (own_losses, own_norms, own_weights) in enumerate(found):
        assert own_losses == pytest.approx([each[rank] for each in losses], rel=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-4)
        for name, (_, weight) in own_weights.items():
            expected = whole[name].detach()
            assert (weight - expected).abs().max() <= 1e-5 * expected.abs().max(), name
    return found


def zero(stage, **keys):
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10, **keys}}


@pytest.mark.parametrize("family", swept(FAMILIES, {"Mixtral", "DeepseekV3", "GptOss"}.__contains__))
def test_blocks_of_experts_as_leaf_modules(family):
    check(family, zero(3, leaf_module={"classes": [LEAF_CLASSES[family]]}))


@pytest.mark.parametrize(
    ("family", "stage"),
    swept([(family, stage) for family in FAMILIES for stage in (0, 1, 2, 3)], lambda family, stage: stage == 3),
)
def test_divided_experts(family, stage):
    found = check(family, {"expert_parallel": {"enabled": True, "autoep_size": 2}, **zero(stage)})
    rows = [{name: rows for name, (rows, _) in weights.items() if rows} for _, _, weights in found]
    assert set(rows[0].values()) == {(0, 2)}
    assert set(rows[1].values()) == {(2, 4)}
    assert all(".experts." in name for name in rows[0])


def refused_job(size, keys, model):
    config = {"train_batch_size": 4, "expert_parallel": {"enabled": True, "autoep_size": size, **keys}}
    model = create(model) if model else nn.Linear(2, 2)
    with pytest.raises(ConfigError) as refused:
        deepspeed.initialize(model=model, config=config)
    return str(refused.value)


@pytest.mark.parametrize(
    ("message", "size", "keys", "model"),
    [
        (r"expert parallel size: found 4, but dp x sp has 2 ranks", 4, {}, "Mixtral"),
        (r"autoep_size: found 3, and model.layers.0.mlp.experts has 4 experts; give a divisor", 3, {}, "Mixtral"),
        (r"expert_parallel: found no experts in Linear", 2, {}, None),
        (
            r"found no experts in MixtralForCausalLM whose names match 'layers.9'",
            2,
            {"moe_layer_pattern": "layers.9"},
            "Mixtral",
        ),
        (r"expert_parallel.top_k: found 3, which is not in this version", 2, {"top_k": 3}, "Mixtral"),
    ],
)
def test_what_cannot_be_divided(message, size, keys, model):
    for found in run_ranks(2, refused_job, size, keys, model):
        assert re.search(message, found), found
