"""Training with the host kernels against training on their torch references (`DS_OPS_DISABLE=all`), and both mixed by
way of a checkpoint. Without a compiler the references are all there is: then losses must be the same.

Differences are relative to the largest element of a tensor, max |a - b| / max |b|.
"""

import contextlib
import os
from itertools import product

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.engine.start_line import start_line
from deepspeed.ops import registry
from deepspeed.ops.adam import FusedAdam
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from deepspeed.testing.tiers import swept
from deepspeed.zero.fragments import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

NUM_STEPS = 20
STAGES = (0, 1, 2)
OPTIMIZERS = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2},
    "Lion": {"lr": 1e-4, "weight_decay": 0.1},
    "Lamb": {"lr": 1e-3, "weight_decay": 0.1},
}
# config name -> the op that the engine's optimizer asks for, and a state that it keeps
OPS = {
    "AdamW": ("fused_adam", "exp_avg_sq"),
    "Adagrad": ("cpu_adagrad", "sum"),
    "Lion": ("fused_lion", "exp_avg"),
    "Lamb": ("fused_lamb", "exp_avg_sq"),
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


@contextlib.contextmanager
def ops(enabled):
    """Kernels, or their references only; the registry looks at the variable at each use."""
    before = os.environ.pop(registry.VARIABLE, None)
    if not enabled:
        os.environ[registry.VARIABLE] = "all"
    try:
        yield
    finally:
        os.environ.pop(registry.VARIABLE, None)
        if before is not None:
            os.environ[registry.VARIABLE] = before


def create_engine(optimizer, precision, stage):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Embedding(29, 17), nn.LayerNorm(17), nn.Linear(17, 51), nn.GELU(), nn.Linear(51, 29))
    return make_engine(
        net,
        stage,
        gradient_clipping=0.5,
        optimizer={"type": optimizer, "params": OPTIMIZERS[optimizer]},
        zero_optimization={"reduce_bucket_size": 500},
        zero_allow_untested_optimizer=True,
        **PRECISIONS[precision],
    )


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(29, (4, 6), generator=generator)
        loss = F.cross_entropy(engine(tokens).flatten(0, 1).float(), tokens.flip(1).flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def outcome(engine, losses, state):
    found = [losses]
    for param in engine.module.parameters():
        found += [safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, state)]
    return found


def difference(ours, wanted):
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(ours, wanted, strict=True))


def compare(optimizer, precision, stage):
    op, state = OPS[optimizer]
    found = {}
    for enabled in (True, False):
        with ops(enabled):
            assert (registry.kernel(op) is not None) == enabled, registry.resolve(op).why()
            engine = create_engine(optimizer, precision, stage)
            found[enabled] = outcome(engine, train(engine, 0, NUM_STEPS), state)
            engine.destroy()
    return difference(found[True], found[False])


@pytest.mark.parametrize(
    ("optimizer", "stage"), swept(product(OPTIMIZERS, STAGES), lambda name, stage: stage == 2 or name == "AdamW")
)
def test_fp32_is_the_same_to_a_millionth(optimizer, stage):
    assert max(run_ranks(2, compare, optimizer, "fp32", stage)) <= 1e-6


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    swept(product(["AdamW", "Lion"], ["bf16", "fp16"]), lambda *case: case in (("AdamW", "bf16"), ("Lion", "fp16"))),
)
def test_low_precision_is_the_same_to_a_millionth(optimizer, precision):
    assert max(run_ranks(2, compare, optimizer, precision, 2)) <= 1e-6


def resume(first, folder, precision, stage):
    """10 steps with kernels or without, saved; 10 more the other way, against 20 with kernels."""
    with ops(True):
        engine = create_engine("AdamW", precision, stage)
        wanted = outcome(engine, train(engine, 0, NUM_STEPS)[10:], "exp_avg")
        engine.destroy()
    with ops(first):
        engine = create_engine("AdamW", precision, stage)
        train(engine, 0, 10)
        engine.save_checkpoint(folder)
        engine.destroy()
    with ops(not first):
        engine = create_engine("AdamW", precision, stage)
        engine.load_checkpoint(folder)
        found = outcome(engine, train(engine, 10, NUM_STEPS), "exp_avg")
        engine.destroy()
    return difference(found, wanted)


@pytest.mark.parametrize(
    ("first", "stage", "precision"),
    swept(
        product(["kernels", "references"], STAGES, ["fp32", "bf16"]),
        lambda *case: case in (("kernels", 0, "fp32"), ("references", 1, "fp32"), ("kernels", 2, "bf16")),
    ),
)
def test_a_checkpoint_goes_from_one_to_the_other(first, stage, precision, tmp_path):
    assert max(run_ranks(2, resume, first == "kernels", str(tmp_path), precision, stage)) <= 1e-6


# ---- ranks that differ --------------------------------------------------------------------------------------------


def one_rank_lacks_kernel(precision, stage):
    """Rank 1 has only the reference; returns what it trained, how far that is from kernels everywhere, and the start
    line."""
    found = {}
    for enabled in (True, dist.get_rank() != 1):
        with ops(enabled):
            engine = create_engine("AdamW", precision, stage)
            line = start_line(engine)
            found[len(found)] = outcome(engine, train(engine, 0, 5), "exp_avg_sq")[1:]
            engine.destroy()
    return found[1], difference(found[1], found[0]), line


@pytest.mark.parametrize(
    ("stage", "precision"),
    swept(product(STAGES, ["fp32", "bf16"]), lambda stage, precision: (stage == 2) is (precision == "bf16")),
)
def test_one_rank_without_the_kernel_trains_with_the_others(stage, precision):
    (one, one_difference, line), (other, other_difference, other_line) = run_ranks(
        2, one_rank_lacks_kernel, precision, stage
    )
    assert line == other_line
    assert "FusedAdam on torch's operators" in line
    assert max(one_difference, other_difference) <= 1e-6
    assert all(map(torch.equal, one, other)), "replicas stay equal bit for bit"


def an_optimizer_in_two_engines():
    """Whether it steps with its kernel in each: rank 1 has only the reference in the first."""
    net = nn.Linear(8, 8)
    optimizer = FusedAdam(net.parameters())
    uses = []
    for enabled in (dist.get_rank() != 1, True):
        with ops(enabled):
            config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
            engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
            uses.append(optimizer.uses_kernel)
            engine.destroy()
    return uses


def test_an_optimizer_gets_its_kernel_back_in_the_next_engine():
    assert run_ranks(2, an_optimizer_in_two_engines) == [[False, True], [False, True]]
