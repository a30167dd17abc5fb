"""A checkpoint of experts that are divided over ranks loads where others divide them, and training goes on."""

import deepspeed
import pytest
import torch
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.checkpoint.convert import convert
from deepspeed.moe.experts import ExpertMLP
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.parallel import groups
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept

STEPS = 2


def linear_expert():
    return torch.nn.Linear(8, 8)


def stacked_expert():
    return ExpertMLP(8, 12)


class Centered(torch.nn.Module):
    """An expert with a mean of its own from the start on, and a counter without dimensions. Both are replaced."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("mean", torch.rand(8))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        if self.training and len(x):
            self.mean, self.count = self.mean.lerp(x.detach().mean(0).to(self.mean.dtype), 0.2), self.count + 1
        return self.linear(x - self.mean) * (1 + 0.1 * self.count)


class Tied(torch.nn.Module):
    """An expert whose two layers share a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


EXPERTS = {
    "copies": linear_expert,
    "stacked": stacked_expert,
    "tensor-parallel": stacked_expert,
    "buffers": Centered,
    "tied": Tied,
}


class Net(torch.nn.Module):
    """Every rank trains on the same samples, so that the number of ranks changes no loss."""

    def __init__(self, expert, ep_size):
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(6, 8)
        self.moe = MoE(
            8,
            EXPERTS[expert],
            4,
            ep_size=ep_size,
            k=2,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
            enable_expert_tensor_parallelism=expert == "tensor-parallel",
        )
        self.last = torch.nn.Linear(8, 1)

    def forward(self, x):
        hidden, loss, _ = self.moe(self.first(x.to(self.first.weight.dtype)))
        return self.last(hidden).square().mean() + 0.01 * loss


def make_engine(expert, ep_size, stage, dtype, tp_size=1):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        "gradient_clipping": 0.5,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    groups.set_mesh({"tp": tp_size})
    model = Net(expert, ep_size)
    param_groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters())})
    return deepspeed.initialize(model=model, model_parameters=param_groups, config=config)[0]


def train(engine, first):
    losses = []
    for step in range(first, first + STEPS):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save_job(folder, *args):
    deepspeed.init_distributed()
    engine = make_engine(*args)
    train(engine, 0)
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()


def resume_job(folder, *args):
    deepspeed.init_distributed()
    engine = make_engine(*args)
    if folder is None:
        train(engine, 0)
    else:
        with torch.no_grad():
            for param in engine.module.parameters():
                param.zero_()
        engine.load_checkpoint(folder)
    losses = train(engine, STEPS)
    engine.destroy()
    return losses


COVERING = [
    # experts; of the save and of the load: ranks, ep_size, stage; dtype
    ("copies", (2, 2, 0), (1, 1, 0), "fp32"),
    ("copies", (2, 2, 1), (2, 2, 1), "bf16"),
    ("stacked", (4, 2, 2), (2, 2, 3), "fp32"),
    ("stacked", (2, 2, 3), (1, 1, 1), "bf16"),
    ("copies", (1, 1, 2), (2, 2, 3), "fp32"),
    ("stacked", (4, 4, 1), (2, 2, 0), "fp32"),
    ("copies", (4, 4, 3), (4, 2, 3), "fp32"),
    ("buffers", (2, 2, 0), (1, 1, 0), "fp32"),
    ("buffers", (2, 2, 1), (2, 2, 1), "fp32"),
    ("buffers", (1, 1, 2), (2, 2, 3), "fp32"),
    ("buffers", (2, 2, 3), (2, 1, 2), "fp32"),
    ("tied", (2, 2, 1), (1, 1, 0), "fp32"),
    ("tied", (2, 2, 0), (2, 2, 3), "fp32"),
]
PLACES = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]
EVERY = [
    pytest.param(expert, (*source, saved), (*target, loaded), "fp32", marks=pytest.mark.sweep)
    for expert in EXPERTS
    for source in PLACES
    for target in PLACES
    for saved, loaded in ((0, 3), (1, 2), (2, 0), (3, 1), (3, 3))
]


@pytest.mark.parametrize(("expert", "source", "target", "dtype"), [*COVERING, *EVERY])
def test_experts_resume_on_other_ranks(tmp_path, expert, source, target, dtype):
    run_ranks(source[0], save_job, tmp_path, expert, *source[1:], dtype)
    unbroken = run_ranks(1, resume_job, None, expert, 1, 0, dtype)[0]
    for losses in run_ranks(target[0], resume_job, tmp_path, expert, *target[1:], dtype):
        assert losses == pytest.approx(unbroken, rel=1e-5 if dtype == "fp32" else 2e-2)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((4, 2, 1, "fp32", 2), (1, 1, 0, "fp32", 1)),
        ((2, 2, 3, "fp32", 1), (2, 1, 2, "fp32", 2)),
    ],
)
def test_experts_over_tensor_parallel_ranks_resume_elsewhere(tmp_path, source, target):
    """(ranks, ep_size, stage, dtype, tp_size) of the save and of the load."""
    run_ranks(source[0], save_job, tmp_path, "tensor-parallel", *source[1:])
    unbroken = run_ranks(1, resume_job, None, "tensor-parallel", 1, 0, "fp32")[0]
    for losses in run_ranks(target[0], resume_job, tmp_path, "tensor-parallel", *target[1:]):
        assert losses == pytest.approx(unbroken, rel=1e-5)


CONSOLIDATED = [("copies", 2, 2, 1, "bf16"), ("stacked", 4, 2, 3, "fp32"), ("copies", 4, 4, 0, "bf16")]
CONSOLIDATED += [("buffers", 2, 2, stage, "fp32") for stage in (0, 2, 3)]
CONSOLIDATED += [("tied", 2, 2, stage, "fp32") for stage in (1, 3)]
ALL = [
    (expert, *place, stage, dtype)
    for expert in EXPERTS
    for place in PLACES[2:]
    for stage in range(4)
    for dtype in ("fp32", "bf16")
]


@pytest.mark.parametrize(("expert", "world", "ep", "stage", "dtype"), swept(ALL, lambda *case: case in CONSOLIDATED))
def test_fp32_weights_of_divided_experts_are_whole(tmp_path, expert, world, ep, stage, dtype):
    run_ranks(world, save_job, tmp_path / "divided", expert, ep, stage, dtype)
    run_ranks(1, save_job, tmp_path / "whole", expert, 1, stage, dtype)
    found, expected = (get_fp32_state_dict_from_zero_checkpoint(tmp_path / name, "a") for name in ("divided", "whole"))
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():  # in bf16 gradients are rounded before they are averaged
        tolerance = 1e-6 if dtype == "fp32" else 1e-2
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


JOINED = [
    ("copies", (2, 2, 1), "universal", (1, 1, 2)),
    ("stacked", (4, 2, 3), "universal", (2, 2, 3)),
    ("stacked", (2, 2, 0), "dcp", (2, 2, 1)),
    ("buffers", (2, 2, 1), "universal", (2, 2, 0)),
]


@pytest.mark.parametrize(("expert", "source", "form", "target"), JOINED)
def test_what_is_joined_of_divided_experts_trains_on(tmp_path, expert, source, form, target):
    run_ranks(source[0], save_job, tmp_path / "saved", expert, *source[1:], "fp32")
    convert(tmp_path / "saved", tmp_path / "joined", form)
    unbroken = run_ranks(1, resume_job, None, expert, 1, 0, "fp32")[0]
    for losses in run_ranks(target[0], resume_job, tmp_path / "joined", expert, *target[1:], "fp32"):
        assert losses == pytest.approx(unbroken, rel=1e-5)
