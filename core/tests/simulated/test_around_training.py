"""What a run does beside training, on simulated devices: host kernels, timers, loaders, single values, the launcher."""

import json
import os
import subprocess
from itertools import product

import pytest
import torch
import torch.distributed as dist
from deepspeed.testing.models import make_engine
from deepspeed.testing.tiers import swept
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)

OFFLOAD = {"device": "cpu", "pin_memory": True}


def create_engine(**config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
    return make_engine(model, optimizer={"type": "AdamW", "params": {"lr": 0.02}}, **config)


def steps(engine, number):
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for _ in range(number):
        x = torch.randn(4, 6, generator=generator).to(engine.device, dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# ----- kernels of the host extension ---------------------------------------------------------------------------------


def train_with_kernels(offload, bf16, disabled):
    from deepspeed.ops import registry

    os.environ["DS_OPS_DISABLE"] = disabled
    section = {"stage": 2, **({"offload_optimizer": OFFLOAD} if offload else {})}
    engine = create_engine(zero_optimization=section, bf16={"enabled": bf16})
    losses = steps(engine, 3)
    engine.destroy()
    used = registry.resolve("cpu_adam").source
    os.environ["DS_OPS_DISABLE"] = "all"
    return losses, used


@pytest.mark.parametrize(
    ("offload", "bf16"), swept(product((False, True), (False, True)), lambda offload, bf16: offload is bf16)
)
def test_kernels_of_the_host_serve_what_lies_there_and_nothing_else(sim_ranks, offload, bf16):
    reference, _ = sim_ranks(train_with_kernels, offload, bf16, "all")[0]
    losses, source = sim_ranks(train_with_kernels, offload, bf16, "")[0]
    assert source == "host"
    assert losses == pytest.approx(reference, rel=2e-2 if bf16 else 1e-6)


# ----- timers, memory, loaders ---------------------------------------------------------------------------------------


def train_observed():
    engine = create_engine(
        wall_clock_breakdown=True,
        memory_breakdown=True,
        steps_per_print=1,
        comms_logger={"enabled": True},
        zero_optimization={"stage": 1},
    )
    losses = steps(engine, 2)
    engine.timers("mine").start()
    steps(engine, 1)
    engine.timers("mine").stop()
    elapsed_ms = engine.timers("mine").elapsed()
    engine.destroy()
    return losses, elapsed_ms


def test_timers_measure_by_events(sim_ranks):
    for losses, elapsed_ms in sim_ranks(train_observed):
        assert len(losses) == 2
        assert 0 < elapsed_ms < 60_000


def load():
    engine = create_engine()
    dataset = torch.arange(32.0).view(16, 2)
    batch = next(iter(engine.deepspeed_io(dataset)))
    pinned = torch.is_tensor(batch) and batch.is_pinned()
    engine.destroy()
    return pinned


@pytest.mark.filterwarnings("default")
def test_a_loader_pins_its_batches(sim_ranks):
    assert sim_ranks(load) == [True, True]


# ----- single values -------------------------------------------------------------------------------------------------


def look(section):
    engine = create_engine(zero_optimization=section, bf16={"enabled": True})
    steps(engine, 1)
    weight = engine.module[0].weight
    x = torch.ones(4, 6, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).float().square().mean())
    grad = safe_get_full_grad(weight)
    master = safe_get_full_fp32_param(weight)
    moment = safe_get_full_optimizer_state(weight, "exp_avg")
    devices = {str(tensor.device) for tensor in (grad, master, moment)}
    safe_set_full_fp32_param(weight, torch.full_like(master, 0.25))
    set_to = weight.detach().float().cpu().unique().tolist()
    answer = [tensor.cpu().tolist() for tensor in (grad, master, moment)]
    engine.destroy()
    return answer, set_to, devices


@pytest.mark.parametrize("stage", [1, 2])
def test_single_values_are_read_and_set(sim_ranks, stage):
    here, set_to, devices = sim_ranks(look, {"stage": stage})[1]
    offloaded, *_ = sim_ranks(look, {"stage": stage, "offload_optimizer": OFFLOAD})[1]
    assert set_to == [0.25]
    assert here == offloaded
    assert devices == {"sim:1"}


# ----- real processes ------------------------------------------------------------------------------------------------

SCRIPT = """
import argparse, json, os
import deepspeed, torch
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
engine, *_ = deepspeed.initialize(args, model=torch.nn.Linear(4, 1))
loss = engine(torch.ones(2, 4, device=engine.device)).mean()
engine.backward(loss)
engine.step()
told = {"device": str(engine.device), "library": torch.distributed.get_backend(), "loss": loss.item()}
with open(f"{os.environ['RANK']}.json", "w") as file:
    json.dump(told, file)
"""


def launch(python, installed, folder):
    (folder / "train.py").write_text(SCRIPT)
    (folder / "config.json").write_text(
        json.dumps({"train_batch_size": 4, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}})
    )
    command = "from deepspeed.launcher.runner import main; main()"
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [python, "-c", command, "train.py", "--deepspeed", "--deepspeed_config", "config.json"],
        cwd=folder,
        env={**kept, **installed, "DS_ACCELERATOR": "sim", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_launcher_starts_a_rank_per_device(python, installed, tmp_path):
    ended = launch(python, installed, tmp_path)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [rank["device"] for rank in told] == ["sim:0", "sim:1"]
    assert {rank["library"] for rank in told} == {"simccl"}
    assert told[0]["loss"] == told[1]["loss"]
