"""Master weights, optimizer states and reduced gradients in swap files, against the same training without offload.

Differences are relative to the largest element of a tensor, max |a - b| / max |b|, over losses, norms, master weights
and moments after 20 steps: 1e-6 in fp32.
"""

import errno
import functools
import gc
import os
import shutil
import tempfile
import weakref
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import CommError, ConfigError
from deepspeed.optim import create_optimizer
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.engines import make_engine
from deepspeed.testing.tiers import swept
from deepspeed.zero import fragments
from deepspeed.zero.offload.split import SplitPlacement
from torch import nn

NUM_STEPS = 20
WORLDS = swept((1, 2, 3), lambda world: world == 2)
ADAM = {"lr": 1e-2, "weight_decay": 0.1}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 6, "hysteresis": 1}}
ACCUMULATED, CLIPPED = {"gradient_accumulation_steps": 2}, {"gradient_clipping": 0.05}
PIPELINED = {"pipeline_read": True, "pipeline_write": True}
#: (stage, keys of the config, keys of offload_optimizer, frozen layers)
CASES = {
    "1": (1, {}, PIPELINED, False),
    "2, accumulated, clipped, frozen": (2, {**ACCUMULATED, **CLIPPED}, {}, True),
    "3, accumulated, clipped": (3, {**ACCUMULATED, **CLIPPED}, PIPELINED, False),
    "3, bf16": (3, BF16, {"pipeline_read": True}, False),
    "2, fp16 that overflows": (2, FP16, {"pipeline_write": True}, False),
    "1, bf16, accumulated in fp32": (1, {**BF16, **ACCUMULATED, "data_types": {"grad_accum_dtype": "fp32"}}, {}, False),
    "1, half of it": (1, CLIPPED, {"ratio": 0.5}, False),
    "3, bf16, half of it": (3, {**BF16, **ACCUMULATED}, {"ratio": 0.5, **PIPELINED}, False),
    "2, Lamb": (2, {"zero_allow_untested_optimizer": True}, {}, False),
}
ALL = [
    (stage, {**accumulated, **clipped}, offload, frozen)
    for stage, accumulated, clipped, offload, frozen in product(
        (1, 2, 3), ({}, ACCUMULATED), ({}, CLIPPED), (PIPELINED, {"ratio": 0.5}), (False, True)
    )
]


class Net(nn.Module):
    """A scalar, and a parameter that is never used; 2 ranks do not divide it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))
        self.unused = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(7, 3)

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.first(x))) * self.gain)


@functools.cache
def swap_path():
    """A folder of this process."""
    path = tempfile.mkdtemp(prefix="ds_test_nvme_")
    weakref.finalize(swap_path, shutil.rmtree, path, ignore_errors=True)
    return path


def create_engine(stage, keys, offload, *, frozen=False, optimizer="AdamW", seed=3, arguments=None):
    """`offload` of None: no offload. The host's front on both sides: kernels of two fronts differ by roundings."""
    torch.manual_seed(seed)
    net = Net()
    net.middle[1].requires_grad_(not frozen)
    zero = {"reduce_bucket_size": 60, "stage3_param_persistence_threshold": 20}
    if offload is not None:
        zero |= {"offload_optimizer": {"device": "nvme", "nvme_path": swap_path(), **offload}, "sub_group_size": 16}
    make = functools.partial(create_optimizer, optimizer, ADAM if optimizer == "AdamW" else {"lr": 1e-2}, offload=True)
    decayed = [net.first.weight, *net.middle.parameters(), net.last.weight]
    others = [net.first.bias, *net.unused.parameters(), net.gain, net.last.bias]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return make_engine(
        net, stage, arguments={"optimizer": lambda _: make(groups), **(arguments or {})}, zero_optimization=zero,
        **{"zero_force_ds_cpu_optimizer": False, **keys},
    )  # fmt: skip


def loss_of(engine, step):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    x = torch.randn(4, 5, generator=generator).to(next(engine.module.parameters()).dtype)
    return (engine(x).float() - 1.0).square().mean()


def train(engine, steps):
    losses, norms = [], []
    for step in steps:
        for micro_step in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, 10 * step + micro_step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        norms.append(torch.as_tensor(engine.get_global_grad_norm()))
    return torch.stack(losses), torch.stack(norms).float()


def state_of(engine):
    """What `safe_get_*` give, whole on every rank, by parameter."""
    return {
        name: [
            fragments.safe_get_full_fp32_param(param),
            fragments.safe_get_full_optimizer_state(param, "exp_avg"),
            fragments.safe_get_full_optimizer_state(param, "exp_avg_sq"),
        ]
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }


def result_of(engine):
    losses, norms = train(engine, range(NUM_STEPS))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = [param.detach().clone() for param in engine.module.parameters()]
    return {"losses": losses, "norms": norms, "state": state_of(engine), "weights": weights,
            "skipped": engine.skipped_steps}  # fmt: skip


def check_empty(engine):
    """Between steps nothing of the optimizer's side has memory, but for slots and staging buffers."""
    optimizer, placement = engine.basic_optimizer, engine.sharding.placement
    shards = [shard for group in engine.sharding.groups for shard in group.shards]
    swapped = [shard for shard in shards if shard.placement.fetches]
    if isinstance(placement, SplitPlacement):
        assert (
            0.2 < sum(shard.fragment.numel for shard in swapped) / sum(shard.fragment.numel for shard in shards) < 0.8
        )
        placement = placement._offloaded
    for shard in swapped:
        assert (shard.master.numel(), shard.grad) == (0, None)
        state = optimizer.state.get(shard.master, {})
        assert all(value.numel() == 0 or value.dim() == 0 for value in state.values())
    held = placement.held_bytes
    num_slots, num_tensors, largest = placement._slots.count, 4, 52  # elements of the largest fragment or sub-group
    staging = sum(buffer.nbytes for buffer in placement._incoming._buffers if buffer is not None)
    outgoing = placement._outgoing.held_bytes
    assert held - staging - outgoing <= num_slots * num_tensors * largest * 4


def train_all_job(cases):
    results = {}
    for name, (stage, keys, offload, frozen) in cases.items():
        optimizer = "Lamb" if "Lamb" in name else "AdamW"
        for is_offloaded in (False, True):
            engine = create_engine(stage, keys, offload if is_offloaded else None, frozen=frozen, optimizer=optimizer)
            results[name, is_offloaded] = result_of(engine)
            if is_offloaded:
                check_empty(engine)
            engine.destroy()
            assert os.listdir(swap_path()) == []
    return results


@functools.cache
def results_by_rank(world_size):
    return run_ranks(world_size, train_all_job, CASES, timeout_s=280)


def relative_difference(found, expected):
    """inf and nan, the norms of skipped steps, must stand in the same places."""
    assert torch.equal(found.isfinite(), expected.isfinite())
    found, expected = found[found.isfinite()], expected[expected.isfinite()]
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def assert_close(found, expected, bound):
    pairs = [(found[key], expected[key]) for key in ("losses", "norms")]
    pairs += list(zip(found["weights"], expected["weights"], strict=True))
    assert found["state"].keys() == expected["state"].keys()
    for name, tensors in found["state"].items():
        for tensor, other in zip(tensors, expected["state"][name], strict=True):
            assert (tensor is None) is (other is None), name
            pairs += [] if tensor is None else [(tensor, other)]
    assert max(relative_difference(*pair) for pair in pairs) <= bound
    assert found["skipped"] == expected["skipped"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_offload_to_nvme_changes_nothing(world_size, name):
    for results in results_by_rank(world_size):
        bound = 1e-2 if "bf16" in name or "fp16" in name else 1e-6
        assert_close(results[name, True], results[name, False], bound)
        assert (0 < results[name, True]["skipped"] < NUM_STEPS) is ("overflows" in name)


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_combination_changes_nothing(world_size):
    cases = {str(case): case for case in ALL}
    for results in run_ranks(world_size, train_all_job, cases, timeout_s=280):
        for name in cases:
            assert_close(results[name, True], results[name, False], 1e-6)


# ---- single parameters, checkpoints ------------------------------------------------------------------------------


def access_job(stage):
    """What `safe_set_*` writes is what is read, and what the next step uses; as without offload."""
    ended = []
    for offload in (None, PIPELINED):
        engine = create_engine(stage, CLIPPED, offload)
        train(engine, range(2))
        param = engine.module.middle[0].weight
        shape = (7, 7)
        generator = torch.Generator().manual_seed(5)
        master, moment, gradient = (torch.randn(shape, generator=generator) for _ in range(3))
        fragments.safe_set_full_fp32_param(param, master)
        fragments.safe_set_full_optimizer_state(param, moment, "exp_avg")
        assert torch.equal(fragments.safe_get_full_fp32_param(param), master)
        assert torch.equal(fragments.safe_get_full_optimizer_state(param, "exp_avg"), moment)
        engine.backward(loss_of(engine, 7))
        before = fragments.safe_get_full_grad(param)
        fragments.safe_set_full_grad(param, gradient)
        torch.testing.assert_close(fragments.safe_get_full_grad(param), gradient, rtol=1e-6, atol=1e-6)
        local = fragments.safe_get_local_fp32_param(param)
        fragments.safe_set_local_fp32_param(param, local + 1.0)
        engine.step()
        ended.append([before, *(tensor for tensors in state_of(engine).values() for tensor in tensors)])
        engine.destroy()
    for found, expected in zip(ended[1], ended[0], strict=True):
        assert (found is None) is (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", swept((1, 2, 3), lambda stage: stage > 1))
def test_single_parameters_are_read_and_written_through(stage):
    run_ranks(2, access_job, stage)


def check_mapped(engine):
    """What a save assembles is in files, whose memory the system can take back."""
    state = engine.sharding.state_dict()
    key = "fp32_flat_groups" if engine.sharding.stage == 3 else "single_partition_of_fp32_groups"
    buffers = list(state[key])
    for states in state["base_optimizer_state"]["state"].values():
        buffers += [states["exp_avg"], states["exp_avg_sq"]]
    for buffer in buffers:
        assert buffer.untyped_storage().filename.startswith(swap_path())
    assert all(name.endswith((".swap", ".lock")) for _, _, names in os.walk(swap_path()) for name in names)


def checkpoint_job(stage, folder):
    """Save with and without offload, load each in the other: losses go on as unbroken."""
    unbroken = create_engine(stage, {}, None)
    expected, _ = train(unbroken, range(8))
    unbroken.destroy()
    for saves, loads in ((None, PIPELINED), (PIPELINED, None), ({}, {})):
        engine = create_engine(stage, {}, saves)
        train(engine, range(4))
        if saves is not None:
            check_mapped(engine)
        engine.save_checkpoint(folder)
        engine.destroy()
        engine = create_engine(stage, {}, loads, seed=4)
        train(engine, range(2))  # states that the load replaces
        engine.load_checkpoint(folder)
        if loads is not None:
            check_empty(engine)
        losses, _ = train(engine, range(4, 8))
        engine.destroy()
        torch.testing.assert_close(losses, expected[4:], rtol=1e-5, atol=1e-6)
        dist.barrier()


@pytest.mark.parametrize("stage", swept((1, 2, 3), lambda stage: stage > 1))
def test_checkpoints_load_with_and_without_offload(stage, tmp_path):
    run_ranks(2, checkpoint_job, stage, str(tmp_path))


def given_job():
    """torch's own AdamW, and an optimizer with state before `initialize`."""
    for kind, options in ((torch.optim.AdamW, ADAM), (torch.optim.Adagrad, {"lr": 1e-2})):
        ended, arguments = [], {"optimizer": functools.partial(kind, **options)}
        for offload in (None, {}):
            engine = create_engine(2, {"zero_allow_untested_optimizer": True}, offload, arguments=arguments)
            ended.append(train(engine, range(5))[0])
            engine.destroy()
        torch.testing.assert_close(*ended, rtol=1e-6, atol=0.0)


def test_optimizers_of_the_user():
    run_ranks(2, given_job)


# ---- a kill in the middle ----------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
import torch
import deepspeed
from deepspeed.testing.engines import make_engine
from deepspeed.testing.models import tiny_gpt
from deepspeed.zero.offload.nvme import NvmePlacement

folder, swap, kill_at, stop = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
zero = {"reduce_bucket_size": 20000, "sub_group_size": 3000}
if swap != "none":
    zero["offload_optimizer"] = {"device": "nvme", "nvme_path": swap, "pipeline_read": True, "pipeline_write": True}
engine = make_engine(tiny_gpt(), 2, zero_optimization=zero, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
if os.path.exists(folder + "/latest"):
    engine.load_checkpoint(folder)
store = NvmePlacement.store
while engine.global_steps < stop:
    if engine.global_steps == kill_at:  # in the middle of an update
        def store_and_die(placement, number, stored=[]):
            store(placement, number)
            stored.append(number)
            if len(stored) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        NvmePlacement.store = store_and_die
    x, y = torch.randint(64, (2, 2, 16), generator=torch.Generator().manual_seed(engine.global_steps))
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    print("loss", engine.global_steps, loss.item(), flush=True)
    if engine.global_steps == 10:
        engine.save_checkpoint(folder)
engine.destroy()
"""


def losses_in(text):
    return {int(line.split()[1]): float(line.split()[2]) for line in text.splitlines() if line.startswith("loss ")}


def test_a_kill_in_an_update_loses_nothing(start_ranks, tmp_path):
    """The swap files of the killed ranks are of no use to the next run, which removes them."""
    swap = tmp_path / "swap"
    swap.mkdir()
    outputs = []
    for place, kill_at in (("none", 99), (swap, 13), (swap, 99)):
        folder = tmp_path / ("unbroken" if place == "none" else "killed")
        ended = [rank.end() for rank in start_ranks(SCRIPT, folder, place, kill_at, 20)]
        assert all((code == 0) is (kill_at == 99) for code, _ in ended), ended
        outputs.append(losses_in(ended[0][1]))
        left = [path.name for path in Path(swap).iterdir()]
        assert len(left) == (2 if kill_at == 13 else 0)
    unbroken, killed, resumed = outputs
    assert sorted(killed) == list(range(1, 14))
    assert sorted(resumed) == list(range(11, 21))
    for step, loss in (killed | resumed).items():
        assert loss == pytest.approx(unbroken[step], rel=1e-5)


# ---- failures ----------------------------------------------------------------------------------------------------


def damage_job(damage, folder):
    """The weights in memory are those of the last step, and the checkpoint loads in a new engine."""
    engine = create_engine(2, {}, {})
    train(engine, range(2))
    engine.save_checkpoint(folder)
    weights = [param.detach().clone() for param in engine.module.parameters()]
    path = engine.sharding.placement._file.path
    if damage == "unreadable":
        os.rename(path, f"{path}.old")
        os.mkdir(path)
    elif damage == "truncated":
        os.truncate(path, 4096)
    else:
        shutil.rmtree(swap_path())
    with pytest.raises(OSError, match=r"swap file: .*load the last checkpoint") as info:
        train(engine, [2])
    assert str(path) in str(info.value)
    assert all(map(torch.equal, weights, (param.detach() for param in engine.module.parameters())))
    engine.destroy()
    os.makedirs(swap_path(), exist_ok=True)
    engine = create_engine(2, {}, {}, seed=8)
    engine.load_checkpoint(folder)
    assert all(map(torch.equal, weights, (param.detach() for param in engine.module.parameters())))
    train(engine, [2])
    engine.destroy()


@pytest.mark.parametrize("damage", ["unreadable", "truncated", "vanished"])
def test_a_damaged_swap_file_is_named(damage, tmp_path):
    run_ranks(1, damage_job, damage, str(tmp_path))


def finish_step(engine, moment):
    if moment == "backward":
        engine.backward(loss_of(engine, 7))
    engine.step()


def one_rank_job(stage, moment):
    """Rank 0 loses its swap file; the other does not wait for it."""
    engine = create_engine(stage, {}, PIPELINED)
    train(engine, range(2))
    if moment == "update":
        engine.backward(loss_of(engine, 7))
        engine.sharding.reduce()
    if dist.get_rank() == 0:
        os.unlink(engine.sharding.placement._file.path)
    with pytest.raises(OSError if dist.get_rank() == 0 else CommError) as info:
        finish_step(engine, moment)
    assert "rank 0" in str(info.value) or dist.get_rank() == 0
    engine.destroy()


@pytest.mark.parametrize("moment", ["backward", "update"])
@pytest.mark.parametrize("stage", swept((1, 2, 3), lambda stage: stage == 2))
def test_no_rank_waits_for_one_that_lost_its_file(stage, moment):
    run_ranks(2, one_rank_job, stage, moment)


def full_disk_job():
    """Found by `initialize`, before anything is trained."""
    usage, fallocate = shutil.disk_usage, os.posix_fallocate

    def is_full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        shutil.disk_usage = lambda path: usage(path)._replace(free=1000)
        with pytest.raises(ConfigError, match=r"ds_swap_.* has 0.00 MiB free and .* are needed; free .* larger disk"):
            create_engine(2, {}, {})
        shutil.disk_usage, os.posix_fallocate = usage, is_full
        with pytest.raises(OSError, match=r"No space left on device: allocation of .*ENOSPC.*; free space"):
            create_engine(2, {}, {})
    finally:
        shutil.disk_usage, os.posix_fallocate = usage, fallocate
    gc.collect()
    assert os.listdir(swap_path()) == []


def test_a_full_disk_is_found_before_training():
    run_ranks(1, full_disk_job)


def space_job(keys):
    engine = create_engine(2, keys, {})
    file = next(Path(engine.config["zero_optimization"]["offload_optimizer"]["nvme_path"]).glob("*/optimizer.swap"))
    num_bytes = os.stat(file).st_size
    for step in range(2):
        engine.backward(loss_of(engine, step))
        engine.step()
    assert os.stat(file).st_size == num_bytes
    assert os.stat(file).st_blocks * 512 >= num_bytes
    engine.destroy()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_takes_no_space_that_was_not_taken_before(precision):
    run_ranks(1, space_job, {} if precision == "fp32" else {"bf16": {"enabled": True}})


def refusals_job():
    refused = {
        "found 'nvme' with zero_optimization.stage 0": (0, {}, {}),
        "nvme_path: found none": (2, {}, {"nvme_path": None}),
        "/nowhere does not exist": (2, {}, {"nvme_path": "/nowhere"}),
    }
    for text, (stage, keys, offload) in refused.items():
        with pytest.raises(ConfigError, match=text):
            create_engine(stage, keys, offload)
    gc.collect()
    assert os.listdir(swap_path()) == []


def test_what_cannot_be_offloaded_is_refused():
    run_ranks(1, refusals_job)
