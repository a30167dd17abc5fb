"""`safe_get_*` and `safe_set_*` of a model that is divided over ranks: whole values, equal to those of plain torch."""

import copy
from types import SimpleNamespace

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.parallel.model_part import ModelPart, mark_part, part_held
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from torch import nn

WIDTH, TOKENS, HEADS, SIZE, WIDE = 8, 11, 4, 3, 13
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}


class Model(nn.Module):
    """One block between a tied embedding and output layer; its one key head is held by several ranks."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=1)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.attention = nn.Module()
        self.attention.q_proj = nn.Linear(WIDTH, HEADS * SIZE)
        self.attention.k_proj, self.attention.v_proj = nn.Linear(WIDTH, SIZE), nn.Linear(WIDTH, SIZE)
        self.attention.o_proj = nn.Linear(HEADS * SIZE, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDTH))
        self.unused = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDTH))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        x = self.embedding(tokens)
        of = self.attention
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (of.q_proj, of.k_proj, of.v_proj))
        y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        x = x + of.o_proj(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x + self.mlp(x)).flatten(0, 1).float(), tokens.flatten())


def build():
    torch.manual_seed(3)
    return Model()


def sample(dp_rank):
    return torch.randint(0, TOKENS, (2, 5), generator=torch.Generator().manual_seed(dp_rank))


def value_for(param, seed):
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) / 10


def access_job(tp, stage):
    """Weights, gradients and states as plain torch has them; then both are given others, and take a step."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": float("inf"),
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "tensor_parallel": {"autotp_size": tp},
    }
    whole = build()
    optimizer = torch.optim.AdamW(whole.parameters(), **ADAM)
    engine = deepspeed.initialize(model=build(), config=config)[0]
    pairs = dict(zip(engine.module.parameters(), whole.named_parameters(), strict=True))
    num_divided = sum(part_held(param) is not None for param in pairs)

    def compare(get, values):
        for param, (name, _) in pairs.items():
            found, expected = get(param), values[name]
            assert (found is None) is (expected is None), name
            if found is not None:
                assert found.shape == expected.shape, name
                torch.testing.assert_close(
                    found, expected, msg=lambda text, name=name: f"{name}: {text}", rtol=1e-5, atol=1e-6
                )

    for step in range(2):
        compare(safe_get_full_fp32_param, dict(whole.named_parameters()))
        engine.backward(engine(sample(engine.mesh.rank("dp"))))
        dp = engine.mesh.size("dp")
        (sum(whole(sample(dp_rank)) for dp_rank in range(dp)) / dp).backward()
        compare(safe_get_full_grad, {name: param.grad for name, param in whole.named_parameters()})
        if step == 1:
            for seed, (param, (name, plain)) in enumerate(pairs.items()):
                value = value_for(plain, seed)
                if not name.startswith("unused"):
                    safe_set_full_grad(param, value)
                    assert torch.equal(safe_get_full_grad(param), value)
                    plain.grad = value.clone()
                    safe_set_full_optimizer_state(param, value.abs(), "exp_avg_sq")
                    optimizer.state[plain]["exp_avg_sq"] = value.abs()
                safe_set_full_fp32_param(param, value)
                assert torch.equal(safe_get_full_fp32_param(param), value)
                plain.data = value.clone()
        engine.step()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm.item(), rel=1e-5)
    compare(safe_get_full_fp32_param, dict(whole.named_parameters()))
    states = {name: optimizer.state[param].get("exp_avg") for name, param in whole.named_parameters()}
    compare(lambda param: safe_get_full_optimizer_state(param, "exp_avg"), states)
    for param in pairs:
        part = part_held(param)
        own = getattr(param, "ds_numel", param.numel())
        assert part is None or own == part.own_shape.numel()
        assert safe_get_local_fp32_param(param).numel() <= own
    wrong = next(param for param in pairs if part_held(param) is not None)
    own_shape = part_held(wrong).own_shape
    with pytest.raises(ValueError, match="safe_set_full_fp32_param: found a value of shape .* has .* as a whole"):
        safe_set_full_fp32_param(wrong, torch.zeros(own_shape))
    engine.destroy()
    return num_divided


CASES = [(world, tp, stage) for world, tp in ((2, 2), (3, 3), (4, 2)) for stage in (0, 1, 2, 3)]
IN_EVERY_RUN = [(3, 3, 0), (4, 2, 2), (4, 2, 3)]


@pytest.mark.parametrize(("world", "tp", "stage"), swept(CASES, lambda *case: case in IN_EVERY_RUN))
def test_values_are_those_of_the_whole_model(world, tp, stage):
    assert set(run_ranks(world, access_job, tp, stage)) == {14}


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts_job(stage):
    """An expert that one rank has is a parameter of its own; a stack of experts over ranks is whole."""
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=4, ep_size=2, k=1, min_capacity=8)
    model = nn.Sequential(first, layer)
    model.forward = lambda x: layer(first(x))[0].square().mean()
    stacked = nn.Parameter(torch.arange(8.0).view(4, 2)[2 * dist.get_rank() :][:2].clone())
    stacked.allreduce, stacked.group_name = False, "ep_size_2"
    start = 2 * dist.get_rank()
    mark_part(stacked, ModelPart(torch.Size([4, 2]), 0, ((start, start + 2),), "stacked"), over="ep")
    layer.register_parameter("stacked", stacked)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": float("inf"),
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    before = copy.deepcopy({name: param.detach() for name, param in model.named_parameters()})
    engine = deepspeed.initialize(model=model, config=config)[0]
    for name, param in model.named_parameters():
        expected = torch.arange(8.0).view(4, 2) if param is stacked else before[name]
        assert torch.equal(safe_get_full_fp32_param(param), expected), name
    assert safe_get_full_grad(stacked) is None
    safe_set_full_fp32_param(stacked, torch.arange(8.0, 16.0).view(4, 2))
    assert torch.equal(safe_get_full_fp32_param(stacked), torch.arange(8.0, 16.0).view(4, 2))
    assert torch.equal(stacked.detach(), torch.arange(8.0, 16.0).view(4, 2)[start : start + 2])
    engine.destroy()


@pytest.mark.parametrize("stage", swept([0, 2], lambda stage: stage == 2))
def test_experts(stage):
    run_ranks(2, experts_job, stage)
