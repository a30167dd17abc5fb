"""Training on divided sequences equals plain torch on one rank with whole ones, at every stage and with data ranks."""

from dataclasses import dataclass, replace
from functools import cache, partial

import deepspeed
import pytest
import torch
from deepspeed.parallel import groups
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import tiny_gpt
from deepspeed.testing.tiers import swept
from deepspeed.zero.fragments import safe_get_full_fp32_param
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

NUM_STEPS, TOKENS, VOCABULARY = 20, 12, 64
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-3}  # eps: key biases have a gradient of rounding noise only


@dataclass(frozen=True)
class Case:
    sp: int
    dp: int = 1
    stage: int = 0
    num_heads: int = 4
    accumulation: int = 1
    clip: float = 0.0
    bf16: bool = False
    recomputes: bool = False
    tied: bool = False

    @property
    def reference(self):
        """The same training on one rank."""
        return replace(self, sp=1, stage=0, recomputes=False)


CASES = [
    Case(sp=2, stage=0, tied=True, clip=0.5),
    Case(sp=2, stage=1, accumulation=2, recomputes=True),
    Case(sp=2, stage=2, clip=0.5, accumulation=2),
    Case(sp=3, stage=2, num_heads=4, recomputes=True),
    Case(sp=3, stage=3, num_heads=4, clip=0.5),
    Case(sp=2, dp=2, stage=3, accumulation=2, clip=0.5, recomputes=True),
    Case(sp=2, dp=2, stage=1),
]
#: each stage, 2 and 3 parts, copies, and each way to train
IN_EVERY_RUN = [case for case in CASES if case not in (CASES[3], CASES[-1])]


class Attention(torch.nn.Module):
    """That of a GPT block over this rank's tokens."""

    def __init__(self, whole, group):
        super().__init__()
        self.qkv, self.out, self.num_heads = whole.qkv, whole.out, whole.num_heads
        self.distributed = DistributedAttention(self.attend, group, scatter_idx=2, gather_idx=1)

    @staticmethod
    def attend(q, k, v):
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def forward(self, x_BTD):
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, self.num_heads, -1).unbind(2)
        return self.out(self.distributed(q, k, v).reshape(B, T, D))


class Model(torch.nn.Module):
    """tiny_gpt with the positions as an input."""

    def __init__(self, case, group=None):
        super().__init__()
        torch.manual_seed(0)
        self.gpt = tiny_gpt(num_heads=case.num_heads, sequence_length=TOKENS, tie_embeddings=case.tied)
        self.recomputes = case.recomputes
        if group is not None:
            for block in self.gpt.blocks:
                block.attention = Attention(block.attention, group)

    def forward(self, tokens, positions, labels):
        x = self.gpt.tokens(tokens) + self.gpt.positions(positions)
        for block in self.gpt.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.recomputes else block(x)
        logits = self.gpt.head(self.gpt.norm(x)).float()
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(number, rank, micro_step):
    """[2, T] tokens, positions and next tokens; the first ones are ignored, up to more than a part of the sequence."""
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(number * 31 + rank))
    tokens = (tokens + micro_step) % VOCABULARY
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    labels[:, : number % 8] = -100
    return tokens, torch.arange(TOKENS).expand(2, -1), labels


@cache
def plain(case):
    """Losses and weights of plain torch on one rank."""
    model = Model(case)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for step in range(NUM_STEPS):
        micro_losses = [
            model(*batch(step, rank, micro_step)) for rank in range(case.dp) for micro_step in range(case.accumulation)
        ]
        loss = torch.stack(micro_losses).mean()
        loss.backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: weight.detach().clone() for name, weight in model.named_parameters()}


def train_job(case):
    """Losses and weights of this rank's engine, the former averaged over the data ranks."""
    mesh = groups.set_mesh({"dp": case.dp, "sp": case.sp})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "bf16": {"enabled": case.bf16},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {
            "stage": case.stage,
            "reduce_bucket_size": 3000,
            "stage3_param_persistence_threshold": 0,
        },
    }
    engine, *_ = deepspeed.initialize(model=Model(case, mesh.group("sp")), config=config)
    sp_rank, group = engine.mesh.rank("sp"), engine.mesh.group("sp")
    losses = []
    for step in range(NUM_STEPS):
        of_step = []
        for micro_step in range(case.accumulation):
            whole = batch(step, engine.mesh.rank("dp"), micro_step)
            inputs = [tensor.chunk(case.sp, dim=1)[sp_rank] for tensor in whole]
            loss = mean_over_sequence(engine(*inputs), (inputs[-1] != -100).sum(), group)
            engine.backward(loss)
            engine.step()
            of_step.append(loss.detach().float())
        mean = torch.stack(of_step).mean()
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item() / (case.dp * case.sp))
    weights = {}
    for name, param in engine.module.named_parameters():
        weights[name] = safe_get_full_fp32_param(param).clone()
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("case", swept(CASES, IN_EVERY_RUN.__contains__), ids=str)
def test_losses_and_weights_after_20_steps(case):
    expected_losses, expected = plain(case.reference)
    for losses, weights in run_ranks(case.sp * case.dp, train_job, case):
        assert losses == pytest.approx(expected_losses, abs=1e-5)
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(weights[name], value, rtol=0, atol=1e-5), name


def plain_bf16(case, num_parts):
    """Losses and master weights of plain torch on one rank: a bf16 model, and AdamW on fp32 master weights.

    Weights meet the tokens of each of `num_parts` parts of the sequence by themselves, as on as many ranks.
    """
    model = Model(case).bfloat16()
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.forward = partial(in_parts, module.forward, num_parts)
    masters = [param.detach().float().requires_grad_() for param in Model(case).parameters()]
    with torch.no_grad():
        for param, master in zip(model.parameters(), masters, strict=True):
            param.copy_(master)
    optimizer = torch.optim.AdamW(masters, **ADAMW)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(*batch(step, 0, 0))
        loss.backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, case.clip)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
        losses.append(loss.item())
    return losses, {name: master.detach() for (name, _), master in zip(model.named_parameters(), masters, strict=True)}


def in_parts(forward, num_parts, x_BT):
    return torch.cat([forward(part) for part in x_BT.chunk(num_parts, dim=1)], dim=1)


def distance(weights, others):
    return sum((weights[name] - other).square().sum().item() for name, other in others.items()) ** 0.5


def test_bf16_is_as_exact_as_plain_bf16():
    """Beside bf16 on one rank, which sums over tokens at once or in parts; and no further from fp32 than that."""
    case = Case(sp=2, dp=1, stage=2, bf16=True, clip=0.5)
    runs = [plain_bf16(case.reference, num_parts) for num_parts in (1, case.sp)]
    exact_losses, exact = plain(replace(case.reference, bf16=False))
    noise = max(abs(loss - other) for losses, _ in runs for loss, other in zip(losses, exact_losses, strict=True))
    assert 1e-4 < noise < 1e-3
    for own_losses, own in run_ranks(2, train_job, case):
        for loss, *others in zip(own_losses, *(losses for losses, _ in runs), strict=True):
            assert min(abs(loss - other) for other in others) <= noise
        assert distance(own, exact) < 1.25 * distance(runs[0][1], exact)
