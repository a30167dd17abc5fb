"""Experts, sequences, stages and layers divided in one model, beside one rank with the whole model, for 20 steps.

The model is a small GPT whose feed-forward layers are mixtures of experts: attention over divided sequences and heads
(Ulysses, tensor parallelism), experts over ranks, each of them divided over tensor-parallel ranks or not, and stages.
"""

from dataclasses import dataclass, field

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.moe.experts import ExpertMLP
from deepspeed.moe.layer import MoE
from deepspeed.parallel import groups
from deepspeed.parallel.model_part import part_held
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero.fragments import safe_get_full_fp32_param
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY, WIDTH, HEADS, EXPERTS, LENGTH, BATCH = 11, 8, 4, 4, 6, 2
STEPS, MICROS, SEED, CLIP, AUX = 20, 2, 7, 0.5, 0.05
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-3}
SPECS = [
    {"patterns": [r".*\.(q|k|v)\.weight"], "partition_type": "column"},
    {"patterns": [r".*\.o\.weight"], "partition_type": "row"},
]


@dataclass(frozen=True)
class Case:
    """sizes: of the mesh; divides: whether experts are divided over tensor-parallel ranks."""

    sizes: dict[str, int]
    ep: int = 1
    divides: bool = False
    stage: int = 0
    kind: str = "single"
    sparse_ends: bool = False
    world: int = field(init=False)

    def __post_init__(self):
        world = 1
        for size in self.sizes.values():
            world *= size
        object.__setattr__(self, "world", world)

    def size(self, axis):
        return self.sizes.get(axis, 1)

    def __str__(self):
        words = [f"{axis}{size}" for axis, size in self.sizes.items()]
        words += [f"ep{self.ep}", f"stage{self.stage}", self.kind, "divided" if self.divides else "whole"]
        return "-".join([*words, *(["sparse"] if self.sparse_ends else [])])


class Start(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens):
        return self.embed(tokens), torch.zeros((), device=tokens.device, requires_grad=True)


class Attention(nn.Module):
    """`sp`: ranks that share a sequence."""

    def __init__(self, sp):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        group = groups._get_sequence_parallel_group() if sp > 1 else None
        self.attend = self.local if group is None else DistributedAttention(self.local, group, 2, 1)

    @staticmethod
    def local(q, k, v):
        return scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True).transpose(
            1, 2
        )

    def forward(self, x_and_loss):
        x, loss = x_and_loss
        y = self.norm(x)
        heads = [layer(y).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.q, self.k, self.v)]
        return x + self.o(self.attend(*heads).flatten(2)), loss


def single():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def gated():
    return ExpertMLP(WIDTH, 2 * WIDTH, "silu", gated=True)


KINDS = {"single": single, "gated": gated}


class Mixture(nn.Module):
    """`parts`: of the sequence and the batch, each of which is routed by itself, as each on its rank is."""

    def __init__(self, kind, parts=(1, 1), ep=1, divides=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.parts = parts
        self.moe = MoE(
            WIDTH,
            KINDS[kind],
            EXPERTS,
            ep_size=ep,
            k=2,
            capacity_factor=0.9,
            min_capacity=1,
            top2_2nd_expert_sampling=False,
            enable_expert_tensor_parallelism=divides,
        )

    def forward(self, x_and_loss):
        x, loss = x_and_loss
        batches, tokens = self.parts
        rows = []
        for row in self.norm(x).chunk(batches):
            outputs = [self.moe(part) for part in row.chunk(tokens, dim=1)]
            rows.append(torch.cat([output for output, _, _ in outputs], dim=1))
            loss = loss + sum(own for _, own, _ in outputs) / (batches * tokens)
        return x + torch.cat(rows), loss


class End(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x_and_loss):
        x, loss = x_and_loss
        return self.head(self.norm(x)), loss


def layers(case, parts=None):
    """`parts`: for the reference, which is whole."""
    mixture = (case.kind, parts or (1, 1), 1 if parts else case.ep, case.divides)
    blocks = [LayerSpec(Attention, 1 if parts else case.size("sp")), LayerSpec(Mixture, *mixture)]
    if case.sparse_ends:  # experts in the last stage alone
        return [LayerSpec(Start), blocks[0], blocks[0], *blocks, LayerSpec(End)]
    return [LayerSpec(Start), *blocks, *blocks, LayerSpec(End)]


def loss_fn(outputs, labels):
    logits, loss = outputs
    return cross_entropy(logits.flatten(0, 1), labels.flatten()) + AUX * loss


def batches(dp_rank):
    generator = torch.Generator().manual_seed(100 + dp_rank)
    for _ in range(STEPS * MICROS):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        yield tokens, tokens.roll(1, 1)


def reference(case):
    """Losses, norms, and weights by the names of PipelineModule."""
    modules = []
    for index, spec in enumerate(layers(case, parts=(case.size("dp"), case.size("sp")))):
        torch.manual_seed(SEED + index)
        modules.append(spec.build())
    model = nn.Sequential(*modules)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    data = [batches(rank) for rank in range(case.size("dp"))]
    losses, norms = [], []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(MICROS):
            tokens, labels = (torch.cat(each) for each in zip(*map(next, data), strict=True))
            loss = loss_fn(model(tokens), labels) / MICROS
            loss.backward()
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    assert max(norms) > CLIP
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


def train_job(case):
    mesh = groups.set_mesh(case.sizes)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
    }
    if case.size("tp") > 1:
        config["tensor_parallel"] = {"autotp_size": case.size("tp"), "partition_config": {"layer_specs": SPECS}}
    model = PipelineModule(
        layers(case), num_stages=case.size("pp"), loss_fn=loss_fn, seed_layers=True, base_seed=SEED,
        partition_method="uniform",
    )  # fmt: skip
    engine = deepspeed.initialize(model=model, config=config)[0]
    data = (
        [tensor.chunk(case.size("sp"), dim=1)[mesh.rank("sp")] for tensor in each] for each in batches(mesh.rank("dp"))
    )
    ends = engine.is_first_stage() or engine.is_last_stage()
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(engine.train_batch(data if ends else None).item())
        norms.append(float(engine.get_global_grad_norm()))
    weights = {}
    for name, param in engine.module.named_parameters():
        part = part_held(param)
        weights[part.name if part and part.name else name] = safe_get_full_fp32_param(param).clone()
    engine.destroy()
    return losses, norms, weights


def check(case):
    losses, norms, whole = reference(case)
    seen = set()
    for own_losses, own_norms, own in run_ranks(case.world, train_job, case):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-4)
        for name, value in own.items():
            torch.testing.assert_close(value, whole[name], atol=1e-5, rtol=1e-5, msg=name)
            seen.add(name)
    assert seen == set(whole)


COVERING = [
    Case({"pp": 2, "dp": 2}, ep=2, stage=1, kind="gated"),
    Case({"pp": 2, "dp": 2}, ep=2, sparse_ends=True),
    Case({"dp": 2, "tp": 2}, ep=2, divides=True, stage=1),
    Case({"dp": 2, "tp": 2}, ep=2, divides=True, stage=3, kind="gated"),
    Case({"sp": 2, "tp": 2}, ep=2, divides=False, stage=2),
    Case({"pp": 2, "sp": 2}, ep=2, stage=0),
]


@pytest.mark.parametrize("case", swept(COVERING, lambda case: not case.divides or case.stage == 3), ids=str)
def test_products_learn_what_the_whole_model_learns(case):
    check(case)


def wide_experts_job(case):
    """Every rank is told, also those of the stage that has no experts."""
    groups.set_mesh({"pp": 1, "dp": case.world})  # where the experts are made; the engine's mesh has stages
    model = PipelineModule(layers(case), num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    groups.set_mesh(case.sizes)
    with pytest.raises(ConfigError, match=r"expert parallel size: found 4, but dp x sp has 2 ranks; give a divisor"):
        deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": BATCH})


def test_experts_over_more_ranks_than_a_stage_has():
    run_ranks(4, wide_experts_job, Case({"pp": 2, "dp": 2}, ep=4, sparse_ends=True))
