"""Stages 0 to 3 against plain data parallelism, and against each other, after 20 steps.

The references are written out here: in fp32 `DistributedDataParallel`, torch's AdamW and `clip_grad_norm_`; in bf16 a
bf16 model with fp32 masters in plain torch. Differences are relative to the largest element of a tensor:

    max |a - b| / max |b|

The model has sizes that no number of ranks divides, so that parameters are cut between ranks, and buckets that are
smaller than its largest parameters.
"""

import copy
import functools
from itertools import product

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero.fragments import safe_get_full_fp32_param
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 20
WORLDS = swept((1, 2, 3), lambda world: world == 3)
# among 3 ranks the average itself is rounded, as 1/3 is no bf16 number: the fp32 masters are those of 1 and 2
BF16_WORLDS = swept((1, 2, 3), lambda world: world == 2)
STAGES = (0, 1, 2, 3)
ACCUMULATIONS = (1, 4)
CLIPS = (0.0, 0.1)  # 0: off; at 0.1 every step is clipped (asserted)
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
VOCABULARY, WIDTH, TIME, BATCH = 29, 17, 6, 4


class Net(nn.Module):
    """Embedding, a residual block, a head; no parameter whose gradient is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BT, targets_BT):
        x_BTD = self.tokens(tokens_BT)
        x_BTD = x_BTD + self.down(F.gelu(self.up(self.norm(x_BTD))))
        return F.cross_entropy(self.head(x_BTD).flatten(0, 1).float(), targets_BT.flatten())


def create_net():
    torch.manual_seed(7)
    return Net()


def micro_batches(accumulation):
    """This rank's data: per step a list of (tokens, targets)."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    data = torch.randint(VOCABULARY, (NUM_STEPS, accumulation, 2, BATCH, TIME), generator=generator)
    return [[(tokens, targets) for tokens, targets in step] for step in data]


def train_ddp(accumulation, clip):
    """fp32 reference."""
    net = create_net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    losses, norms = [], []
    for step in micro_batches(accumulation):
        for index, (tokens, targets) in enumerate(step):
            model.require_backward_grad_sync = index == accumulation - 1  # what DDP.no_sync sets
            loss = model(tokens, targets)
            (loss / accumulation).backward()
            losses.append(loss.detach())
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip if clip else float("inf")))
        optimizer.step()
        optimizer.zero_grad()
    return result_of(losses, norms, net.parameters())


def train_masters(accumulation, clip):
    """bf16 reference: gradients of a bf16 model, summed and averaged in fp32, update fp32 masters."""
    net = create_net()
    masters = [param.detach().clone().requires_grad_() for param in net.parameters()]
    net.bfloat16()
    optimizer = torch.optim.AdamW(masters, **ADAMW)
    losses, norms = [], []
    for step in micro_batches(accumulation):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for tokens, targets in step:
            loss = net(tokens, targets)
            gradients = torch.autograd.grad(loss / accumulation, list(net.parameters()))
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad += gradient.float()
            losses.append(loss.detach())
        for master in masters:
            dist.all_reduce(master.grad)
            master.grad /= dist.get_world_size()
        norms.append(nn.utils.clip_grad_norm_(masters, clip if clip else float("inf")))
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(net.parameters(), masters, strict=True):
                param.copy_(master)
    return result_of(losses, norms, masters)


def train_engine(stage, accumulation, clip, keys):
    net = create_net()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 300,
            "stage3_param_persistence_threshold": 20,
        },
        "steps_per_print": 1_000_000,
        **copy.deepcopy(keys),
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    losses, norms = [], []
    for step in micro_batches(accumulation):
        for tokens, targets in step:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        norms.append(torch.as_tensor(engine.get_global_grad_norm()))
    assert engine.global_steps == NUM_STEPS
    masters = [safe_get_full_fp32_param(param) for param in net.parameters()]
    with deepspeed.zero.GatheredParameters(net.parameters()):
        weights = [param.detach().clone() for param in net.parameters()]
    for weight, master in zip(weights, masters, strict=True):
        assert torch.equal(weight, master.to(weight.dtype)), "the model's weights are the rounded masters"
    result = result_of(losses, norms, masters)
    engine.destroy()
    return result


def result_of(losses, norms, weights):
    return {
        "losses": torch.stack(losses).float(),
        "norms": torch.stack(norms).float(),
        "weights": [weight.detach().clone() for weight in weights],
    }


FP32 = {}
BF16 = {"bf16": {"enabled": True}}
BF16_SUMS_IN_FP32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS = {"fp32": FP32, "bf16": BF16, "bf16, sums in fp32": BF16_SUMS_IN_FP32}


def train_all_job(precision, accumulation, clip):
    """The results of every stage on this rank, by the stage or "reference"."""
    reference = train_ddp if precision == "fp32" else train_masters
    results = {"reference": reference(accumulation, clip)} if precision in ("fp32", "bf16") else {}
    for stage in STAGES:
        results[stage] = train_engine(stage, accumulation, clip, PRECISIONS[precision])
    return results


@functools.cache
def results_by_rank(world_size, precision, accumulation, clip):
    return run_ranks(world_size, train_all_job, precision, accumulation, clip, timeout_s=250)


def relative_difference(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def largest_difference(world_size, precision, accumulation, clip, stage, other):
    """Over all ranks, losses, norms and weights."""
    differences = [0.0]
    for results in results_by_rank(world_size, precision, accumulation, clip):
        found, expected = results[stage], results[other]
        differences += [relative_difference(found[name], expected[name]) for name in ("losses", "norms")]
        differences += [relative_difference(*pair) for pair in zip(found["weights"], expected["weights"], strict=True)]
    return max(differences)


every_world = pytest.mark.parametrize("world_size", WORLDS)
every_result = pytest.mark.parametrize(
    ("world_size", "precision"),
    swept(product((1, 2, 3), ("fp32", "bf16")), lambda *result: result in ((3, "fp32"), (2, "bf16"))),
)
#: the first as it comes, and both additions at once
every_step = pytest.mark.parametrize(
    ("accumulation", "clip"),
    swept(product(ACCUMULATIONS, CLIPS), lambda accumulation, clip: (accumulation > 1) == (clip > 0)),
)


@every_step
@pytest.mark.parametrize("stage", STAGES)
@every_world
def test_fp32_equals_ddp(world_size, stage, accumulation, clip):
    assert largest_difference(world_size, "fp32", accumulation, clip, stage, "reference") <= 1e-5


@every_step
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", BF16_WORLDS[:2])
def test_bf16_equals_fp32_masters(world_size, stage, accumulation, clip):
    assert largest_difference(world_size, "bf16", accumulation, clip, stage, "reference") <= 1e-2


@every_step
@pytest.mark.parametrize("stage", [1, 2, 3])
@every_world
def test_fp32_stages_agree(world_size, stage, accumulation, clip):
    assert largest_difference(world_size, "fp32", accumulation, clip, stage, 0) <= 1e-6


@pytest.mark.parametrize("clip", swept(CLIPS, lambda clip: clip == 0))
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", BF16_WORLDS)
def test_bf16_stages_agree(world_size, stage, clip):
    assert largest_difference(world_size, "bf16", 1, clip, stage, 0) <= 1e-6


@pytest.mark.parametrize("clip", swept(CLIPS, lambda clip: clip > 0))
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", BF16_WORLDS)
def test_bf16_stages_agree_when_sums_are_fp32(world_size, stage, clip):
    """Stages 2 and 3 add over ranks before they add over micro-batches: sums in bf16 are rounded in another order."""
    assert largest_difference(world_size, "bf16, sums in fp32", 4, clip, stage, 0) <= 1e-6


@every_step
@every_result
def test_ranks_end_with_the_same_weights_bit_for_bit(world_size, precision, accumulation, clip):
    first, *others = results_by_rank(world_size, precision, accumulation, clip)
    for other in others:
        for case in first:
            assert all(map(torch.equal, first[case]["weights"], other[case]["weights"])), case


@every_step
@every_result
def test_the_cases_are_what_they_claim(world_size, precision, accumulation, clip):
    """Every step is clipped where clipping is on, and training moved the weights."""
    start = [param.detach() for param in create_net().parameters()]
    for result in results_by_rank(world_size, precision, accumulation, clip)[0].values():
        assert clip == 0.0 or (result["norms"] > 2 * clip).all()
        assert all(relative_difference(*pair) > 1e-3 for pair in zip(result["weights"], start, strict=True))
