"""Single parameters, checkpoints and refusals where the optimizer is in swap files.

That offload changes nothing in training: `parity/test_offload_equals_none.py`; faults of a disk: `test_swap_faults.py`.
"""

import functools
import gc
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.errors import ConfigError
from deepspeed.testing import offload as offloaded
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.offload import OPTIMIZERS, loss_of, state_of, train
from deepspeed.testing.tiers import swept
from deepspeed.zero import fragments, state_dict

PIPELINED = {"pipeline_read": True, "pipeline_write": True}


@functools.cache
def swap_path():
    """A folder of this process."""
    path = tempfile.mkdtemp(prefix="ds_test_nvme_")
    weakref.finalize(swap_path, shutil.rmtree, path, ignore_errors=True)
    return path


def create_engine(stage, offload, **keys):
    """`offload`: keys of `offload_optimizer`; None: no offload."""
    section = {"offload_optimizer": {"device": "nvme", "nvme_path": swap_path(), **(offload or {})}}
    return offloaded.create_engine(stage, {} if offload is None else section, **keys)


def check_empty(engine):
    """Between steps nothing of the optimizer's side has memory, but for slots and staging buffers."""
    optimizer, placement = engine.basic_optimizer, engine.sharding.placement
    shards = [shard for group in engine.sharding.units for shard in group.shards]
    for shard in shards:
        assert (shard.master.numel(), shard.grad) == (0, None)
        state = optimizer.state.get(shard.master, {})
        assert all(value.numel() == 0 or value.dim() == 0 for value in state.values())
    held = placement.held_bytes
    num_slots, num_tensors, largest = placement._slots.count, 4, 4096  # bytes of a tensor of a sub-group: a page
    staging = sum(buffer.nbytes for buffer in placement._incoming._buffers if buffer is not None)
    outgoing = placement._outgoing.held_bytes
    assert held - staging - outgoing <= num_slots * num_tensors * largest


# ---- single parameters, checkpoints ------------------------------------------------------------------------------


def access_job(stage):
    """What `safe_set_*` writes is what is read, and what the next step uses; as without offload."""
    ended = []
    for offload in (None, PIPELINED):
        engine = create_engine(stage, offload, gradient_clipping=0.05)
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
        ended.append([before, *state_of(engine)])
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
    state = state_dict.collect(engine.sharding)
    key = "fp32_flat_groups" if engine.sharding.stage == 3 else "single_partition_of_fp32_groups"
    buffers = list(state[key])
    for states in state["base_optimizer_state"]["state"].values():
        buffers += [states["exp_avg"], states["exp_avg_sq"]]
    for buffer in buffers:
        assert buffer.untyped_storage().filename.startswith(swap_path())
    assert all(name.endswith((".swap", ".lock")) for _, _, names in os.walk(swap_path()) for name in names)


def checkpoint_job(stage, folder):
    """Save with and without offload, load each in the other: losses go on as unbroken."""
    unbroken = create_engine(stage, None)
    expected = train(unbroken, range(8))
    unbroken.destroy()
    for saves, loads in ((None, PIPELINED), (PIPELINED, None), ({}, {})):
        engine = create_engine(stage, saves)
        train(engine, range(4))
        if saves is not None:
            check_mapped(engine)
        engine.save_checkpoint(folder)
        engine.destroy()
        engine = create_engine(stage, loads, seed=4)
        train(engine, range(2))  # states that the load replaces
        engine.load_checkpoint(folder)
        if loads is not None:
            check_empty(engine)
        found = train(engine, range(4, 8))
        engine.destroy()
        torch.testing.assert_close(found, expected[len(found) :], rtol=1e-5, atol=1e-6)
        dist.barrier()


@pytest.mark.parametrize("stage", swept((1, 2, 3), lambda stage: stage > 1))
def test_checkpoints_load_with_and_without_offload(stage, tmp_path):
    run_ranks(2, checkpoint_job, stage, str(tmp_path))


def given_job():
    """torch's own AdamW, and an optimizer with state before `initialize`."""
    for kind, options in ((torch.optim.AdamW, OPTIMIZERS["AdamW"]), (torch.optim.Adagrad, {"lr": 1e-2})):
        ended, arguments = [], {"optimizer": functools.partial(kind, **options)}
        for offload in (None, {}):
            engine = create_engine(2, offload, arguments=arguments, zero_allow_untested_optimizer=True)
            ended.append(train(engine, range(5)))
            engine.destroy()
        torch.testing.assert_close(*ended, rtol=1e-6, atol=0.0)


def test_optimizers_of_the_user():
    run_ranks(2, given_job)


def space_job(keys):
    engine = create_engine(2, {}, **keys)
    (file,) = Path(swap_path()).glob("*/optimizer.swap")
    num_bytes = os.stat(file).st_size
    train(engine, range(2))
    assert os.stat(file).st_size == num_bytes
    assert os.stat(file).st_blocks * 512 >= num_bytes
    engine.destroy()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_takes_no_space_that_was_not_taken_before(precision):
    run_ranks(1, space_job, {} if precision == "fp32" else {"bf16": {"enabled": True}})


def refusals_job():
    refused = {
        "nvme_path: found none": (2, {"nvme_path": None}),
        "nvme_path: found none with": (2, {"nvme_path": ""}),
        "no folder can be made in /proc/nowhere": (2, {"nvme_path": "/proc/nowhere"}),
    }
    for text, (stage, offload) in refused.items():
        with pytest.raises(ConfigError, match=text):
            create_engine(stage, offload)
    gc.collect()
    assert os.listdir(swap_path()) == []


def test_what_cannot_be_offloaded_is_refused():
    run_ranks(1, refusals_job)
