"""Experts divided over ranks against one process that has all of them and dispatches by GShard's masks, for 20 steps.

The reference is written out here: einsum over masks [T, E, C] (arXiv 2006.16668, algorithm 1 and equation 1), plain
torch AdamW and `clip_grad_norm_`. It sees the tokens of all ranks, and dispatches those of each by themselves, as
capacity is one of a rank's tokens.

Shape legend: T tokens, E experts, C capacity, H width.
"""

import copy
import math

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.experts import ExpertMLP, StackedExperts
from deepspeed.moe.layer import MoE
from deepspeed.parallel import groups
from deepspeed.parallel.model_part import part_held
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from deepspeed.zero.fragments import safe_get_full_fp32_param
from torch import nn

NUM_STEPS, BATCH, TIME, WIDTH, EXPERTS = 20, 3, 5, 8, 4
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
LOSS_SCALE = 0.05  # of the gates' losses
CLIP = 0.5


# ---- the reference -------------------------------------------------------------------------------------------------


def masks(logits_TE, k, capacity):
    """Combine weights [T, E, C], the balance loss, and choices by expert before any is dropped."""
    num_tokens, num_experts = logits_TE.shape
    gates_TE = logits_TE.softmax(-1)
    chosen = [F.one_hot(index, num_experts) for index in gates_TE.topk(k, dim=1).indices.unbind(1)]
    counts_E = sum(chosen).sum(0)
    if k <= 2:
        share_E = chosen[0].float().mean(0)
    else:
        share_E = counts_E / (k * num_tokens)
    loss = num_experts * (gates_TE.mean(0) * share_E).sum()
    combine_TEC = torch.zeros(num_tokens, num_experts, capacity)
    weights, places, before_E = [], [], torch.zeros(num_experts, dtype=torch.int64)
    for mask_TE in chosen:
        if k <= 2:
            place_TE = mask_TE.cumsum(0) - 1 + before_E
        else:  # by probability, among all choices of an expert
            mask_all_TE = sum(chosen)
            order = (gates_TE.detach() * mask_all_TE).argsort(dim=0, descending=True, stable=True)
            place_TE = torch.empty_like(order).scatter(0, order, torch.arange(num_tokens)[:, None].expand_as(order))
        before_E = before_E + mask_TE.sum(0)
        mask_TE = mask_TE * (place_TE < capacity)
        weights.append((gates_TE * mask_TE).sum(1))
        places.append((mask_TE, place_TE))
    total = sum(weights).clamp(min=torch.finfo(torch.float32).eps) if k > 1 else 1.0
    for weight_T, (mask_TE, place_TE) in zip(weights, places, strict=True):
        place_TC = F.one_hot((place_TE * mask_TE).sum(1).clamp(max=capacity - 1), capacity).float()
        combine_TEC = combine_TEC + torch.einsum("te,tc->tec", (weight_T / total)[:, None] * mask_TE, place_TC)
    return combine_TEC, loss, counts_E


class EinsumMoE(nn.Module):
    """`MoE` of copies of one expert, with its names and arguments."""

    def __init__(self, moe):
        super().__init__()
        gate, experts = moe.deepspeed_moe.gate, moe.deepspeed_moe.experts
        self.k, self.factor, self.least, self.drops = gate.k, gate.capacity_factor, gate.min_capacity, gate.drop_tokens
        self.deepspeed_moe = nn.Module()
        self.deepspeed_moe.gate = nn.Module()
        self.deepspeed_moe.gate.wg = copy.deepcopy(gate.wg)
        self.deepspeed_moe.experts = nn.Module()
        self.deepspeed_moe.experts.deepspeed_experts = copy.deepcopy(getattr(experts, "deepspeed_experts", None))
        if isinstance(experts, StackedExperts):
            self.deepspeed_moe.experts.up, self.deepspeed_moe.experts.down = map(copy.deepcopy, experts.parameters())
        if moe.use_residual:
            self.mlp, self.coefficient = copy.deepcopy(moe.mlp), copy.deepcopy(moe.coefficient)
        self.use_residual = moe.use_residual

    def forward(self, x):
        x_TH = x.reshape(-1, x.shape[-1])
        num_experts = len(self.deepspeed_moe.gate.wg.weight)
        capacity = max(math.ceil(self.k * len(x_TH) / num_experts * self.factor), self.least)
        logits_TE = self.deepspeed_moe.gate.wg(x_TH)
        combine_TEC, loss, counts_E = masks(logits_TE, self.k, capacity if self.drops else len(x_TH))
        rows_ECH = torch.einsum("tec,th->ech", (combine_TEC != 0).float(), x_TH)
        experts = self.deepspeed_moe.experts
        if experts.deepspeed_experts is None:
            inner_ECF = F.gelu(torch.einsum("ech,efh->ecf", rows_ECH, experts.up))
            out_ECH = torch.einsum("ecf,ehf->ech", inner_ECF, experts.down)
        else:
            parts = zip(experts.deepspeed_experts, rows_ECH, strict=True)
            out_ECH = torch.stack([expert(rows) for expert, rows in parts])
        y = torch.einsum("tec,ech->th", combine_TEC, out_ECH).view_as(x)
        if self.use_residual:
            share = self.coefficient(x).softmax(-1)
            y = y * share[..., :1] + self.mlp(x) * share[..., 1:]
        return y, loss, counts_E


# ---- numbers of one layer --------------------------------------------------------------------------------------------


def expert():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def layer(stacked=False, **arguments):
    arguments = {"k": 1, "use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 1, **arguments}
    torch.manual_seed(3)
    return MoE(WIDTH, (lambda: ExpertMLP(WIDTH, 2 * WIDTH)) if stacked else expert, EXPERTS, **arguments)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_layer_has_the_numbers_of_the_masks(k, drops, residual):
    moe = layer(k=k, capacity_factor=0.7, drop_tokens=drops, use_residual=residual)
    plain = EinsumMoE(moe)
    x = torch.randn(4, 9, WIDTH)
    results = []
    for model in (moe, plain):
        x_own = x.clone().requires_grad_()
        y, loss, counts = model(x_own)
        (y.square().sum() + loss).backward()
        results.append(
            (y.detach(), loss.detach(), counts, x_own.grad, {n: p.grad for n, p in model.named_parameters()})
        )
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    kept = moe.deepspeed_moe.gate(x.view(-1, WIDTH)).kept
    assert bool(kept.all()) is not drops


def peak_bytes(model, num_tokens):
    """Most memory that a forward and backward held beyond what was there before, from torch's record of allocations."""
    x = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(2))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as record:
        y, loss, _ = model(x)
        (y.square().sum() + loss).backward()
    held = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("stacked", [False, True])
def test_memory_is_linear_in_tokens(stacked):
    """Masks are not: the measure would show it."""
    moe = layer(k=2, stacked=stacked)

    def growth(model):
        """How many times as much the second doubling of the tokens adds as the first one."""
        small, middle, large = (peak_bytes(model, num_tokens) for num_tokens in (512, 1024, 2048))
        return (large - middle) / (middle - small)

    assert growth(moe) == pytest.approx(2, rel=0.05)
    assert growth(EinsumMoE(moe)) > 3.5


# ---- training on ranks -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([layer(**arguments), layer(**{**arguments, "use_residual": False})])
        self.last = nn.Linear(WIDTH, 1)
        self.checkpoints = False

    def forward(self, x):
        x = torch.tanh(self.first(x))
        losses = 0.0
        for each in self.layers:
            if self.checkpoints:
                y, loss, _ = deepspeed.checkpointing.checkpoint(each, x)
            else:
                y, loss, _ = each(x)
            x, losses = x + y, losses + loss
        return F.softplus(self.last(x)).square().mean() + LOSS_SCALE * losses


def create_net(**arguments):
    torch.manual_seed(5)
    return Net(**arguments)


def create_reference(arguments):
    net = create_net(**{**arguments, "ep_size": 1})
    net.layers = nn.ModuleList(EinsumMoE(each) for each in net.layers)
    return net


def samples(step, rank, micro_step):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro_step)
    return torch.randn(BATCH, TIME, WIDTH, generator=generator)


def train_reference(world, arguments, accumulation=1):
    net = create_reference(arguments)
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        parts = [net(samples(step, rank, micro)) for micro in range(accumulation) for rank in range(world)]
        optimizer.zero_grad()
        (sum(parts) / len(parts)).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), CLIP).item())
        optimizer.step()
        losses.append(torch.stack(parts).detach().view(accumulation, world))
    assert max(norms) > CLIP  # steps are clipped
    return losses, norms, {name: param.detach() for name, param in net.named_parameters()}


def train_job(stage, arguments, accumulation, checkpoints, tp_size=1, bf16=False):
    mesh = groups.set_mesh({"tp": tp_size})
    net = create_net(**arguments)
    net.checkpoints = checkpoints
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50, "stage3_param_persistence_threshold": 10},
    }
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for micro in range(accumulation):
            loss = engine(samples(step, mesh.rank("dp"), micro).to(torch.bfloat16 if bf16 else torch.float32))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm()))
    weights = {}
    for name, param in engine.module.named_parameters():
        part = part_held(param)
        weights[part.name if part else name] = safe_get_full_fp32_param(param).clone()
    engine.destroy()
    return losses, norms, weights


def check(world, stage, arguments, accumulation=1, checkpoints=False, tp_size=1):
    losses, norms, weights = train_reference(world // tp_size, arguments, accumulation)
    found = run_ranks(world, train_job, stage, arguments, accumulation, checkpoints, tp_size)
    expected = torch.cat(losses)  # [steps * accumulation, world]
    seen = set()
    for rank, (own_losses, own_norms, own_weights) in enumerate(found):
        torch.testing.assert_close(torch.tensor(own_losses), expected[:, rank // tp_size], rtol=1e-5, atol=1e-6)
        assert own_norms == pytest.approx(norms, rel=1e-4)
        for name, weight in own_weights.items():
            difference = (weight - weights[name]).abs().max() / weights[name].abs().max()
            assert difference < 1e-5, (name, difference)
            seen.add(name)
    assert seen == set(weights)


TIGHT = {"capacity_factor": 0.8}
SHAPES = {
    "k1": {"k": 1, **TIGHT},
    "k2": {"k": 2, **TIGHT},
    "k1-all": {"k": 1, "drop_tokens": False},
    "k2-all-residual": {"k": 2, "drop_tokens": False, "use_residual": True},
    "k1-residual": {"k": 1, "use_residual": True, **TIGHT},
    "k3": {"k": 3, **TIGHT},
    "k2-stacked": {"k": 2, "stacked": True, **TIGHT},
}


@pytest.mark.parametrize("shape", swept(SHAPES, lambda shape: shape in ("k1", "k2-all-residual", "k3", "k2-stacked")))
def test_experts_over_two_ranks(shape):
    check(2, 0, {"ep_size": 2, **SHAPES[shape]})


@pytest.mark.parametrize("shape", swept(SHAPES, lambda shape: shape in ("k2", "k1-all")))
def test_experts_over_four_ranks(shape):
    check(4, 1, {"ep_size": 4, **SHAPES[shape]})


@pytest.mark.parametrize(
    ("stage", "shape", "accumulation", "checkpoints"),
    swept(
        [
            (0, "k2", 2, False),
            (1, "k1", 1, False),
            (2, "k2-all-residual", 1, True),
            (3, "k2", 1, False),
            (3, "k2-stacked", 1, False),
            (3, "k1", 2, True),
        ],
        lambda *case: case != (3, "k2", 1, False),
    ),
)
def test_two_copies_of_experts_over_two_ranks(stage, shape, accumulation, checkpoints):
    check(4, stage, {"ep_size": 2, **SHAPES[shape]}, accumulation, checkpoints)


@pytest.mark.parametrize("stage", swept((0, 1, 3), lambda stage: stage == 1))
@pytest.mark.parametrize("shape", ["k2-stacked"])
def test_tensor_parallel_ranks_hold_the_same_experts(stage, shape):
    """Layers here are whole on both tensor-parallel ranks: the norm counts each once."""
    check(4, stage, {"ep_size": 2, **SHAPES[shape]}, tp_size=2)


def plain_bf16(world, arguments):
    """Losses and master weights of one process: a bf16 model, gradients of each rank in bf16, AdamW in fp32."""
    net = create_net(**{**arguments, "ep_size": 1})
    masters = {name: param.detach().clone().requires_grad_() for name, param in net.named_parameters()}
    net.bfloat16()
    optimizer = torch.optim.AdamW(masters.values(), **ADAMW)
    losses = []
    for step in range(NUM_STEPS):
        parts = []
        for rank in range(world):
            loss = net(samples(step, rank, 0).bfloat16())
            loss.backward()
            parts.append(loss.item())
            for name, param in net.named_parameters():
                grad, master, param.grad = param.grad.float() / world, masters[name], None
                master.grad = grad if rank == 0 else master.grad + grad
        nn.utils.clip_grad_norm_(masters.values(), CLIP)
        optimizer.step()
        with torch.no_grad():
            for name, param in net.named_parameters():
                param.copy_(masters[name])
        losses.append(parts)
    return torch.tensor(losses), {name: master.detach() for name, master in masters.items()}


def distance(weights, others):
    return sum((weights[name] - other).square().sum().item() for name, other in others.items()) ** 0.5


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_is_as_exact_as_plain_bf16(stage):
    """Beside bf16 in one process: far nearer to it than that is to fp32, though rows of two ranks are summed as one."""
    arguments = {"k": 2, "drop_tokens": False, "stacked": True}
    losses, plain = plain_bf16(2, arguments)
    exact = train_reference(2, arguments)[2]
    found = run_ranks(2, train_job, stage, {**arguments, "ep_size": 2}, 1, False, 1, True)
    own = {name: weight for _, _, weights in found for name, weight in weights.items()}
    own_losses = torch.tensor([theirs for theirs, _, _ in found]).T
    torch.testing.assert_close(own_losses, losses, rtol=0, atol=2**-7)  # one unit of bf16 from 1 on
    assert distance(own, plain) < 0.1 * distance(plain, exact)
