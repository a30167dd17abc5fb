"""`offload_param` to NVMe: shards in swap files, reads ahead, other ways to shard, resume after a kill, refusals."""

import os
import signal
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import RankError, run_ranks
from deepspeed.testing.models import CheckpointedMLP
from deepspeed.testing.offload import access_params, assert_same, create_param_engine, losses_of, train_params
from deepspeed.testing.tiers import swept


def on_disk(path, **keys):
    keys = {"buffer_count": 2, "max_in_cpu": 0, **keys}
    return {"offload_param": {"device": "nvme", "nvme_path": str(path), **keys}}


@pytest.mark.parametrize(
    ("world_size", "precision", "section"),
    swept(
        product((1, 2), ("fp32", "bf16"), ({"zero_quantized_weights": True}, {"mics_shard_size": 1})),
        lambda world_size, precision, section: (
            world_size == 2 and (precision == "bf16") is ("mics_shard_size" in section)
        ),
    ),
)
def test_losses_and_weights_are_those_in_memory(tmp_path, world_size, precision, section):
    expected = run_ranks(world_size, train_params, precision, section)
    assert_same(run_ranks(world_size, train_params, precision, {**section, **on_disk(tmp_path)}), expected)
    assert list(tmp_path.iterdir()) == []  # the swap files are gone with their engine


def buffers_job(path):
    engine = create_param_engine("fp32", on_disk(path, buffer_count=10**9))
    losses_of(engine, 1)
    units = engine.sharding.units.modules.all
    (home,) = {unit.offloaded._home for unit in units if unit.shard_S.is_meta}
    num_buffers = len(home._buffers)
    engine.destroy()
    return num_buffers, len(units)


def test_no_more_buffers_are_made_than_shards_need(tmp_path):
    for num_buffers, num_units in run_ranks(2, buffers_job, str(tmp_path)):
        assert 1 < num_buffers <= num_units


def where(path):
    """On which kinds of device shards are, and how many reads were begun before their unit was used."""
    engine = create_param_engine("fp32", on_disk(path, max_in_cpu=30))
    losses_of(engine, 1)
    units = engine.sharding.units.modules.all
    kinds = [unit.shard_S.device.type for unit in units]
    (folder,) = Path(path).glob(f"*_rank{torch.distributed.get_rank()}_*")
    num_bytes = sum(unit.shard_S.nbytes for unit in units if unit.shard_S.is_meta)
    assert (folder / "parameters.swap").stat().st_size >= num_bytes
    ahead = []
    for unit in units:
        if unit.shard_S.is_meta:
            prepare = unit.offloaded.prepare
            unit.offloaded.prepare = lambda shard=unit.offloaded, do=prepare: (
                ahead.append(shard._buffer is not None), do()
            )  # fmt: skip
    losses_of(engine, 1)
    engine.destroy()
    return kinds, sum(ahead) / len(ahead)


def test_shards_leave_memory_and_are_read_ahead(tmp_path):
    for kinds, part_read_ahead in run_ranks(2, where, str(tmp_path)):
        assert kinds.count("cpu") >= 1  # the first ones, up to `max_in_cpu` elements
        assert kinds.count("meta") > kinds.count("cpu")
        assert part_read_ahead > 0.5  # the others come first after an update, or after a change of direction


def save_and_die(path, folder):
    engine = create_param_engine("bf16", on_disk(path))
    losses_of(engine, 2)
    engine.save_checkpoint(folder, tag="two")
    losses = losses_of(engine, 1)
    if torch.distributed.get_rank() == 0:
        Path(folder, "losses").write_text(repr(losses))
    torch.distributed.barrier()
    engine.backward(engine(torch.ones(4, 7, dtype=torch.bfloat16)))
    os.kill(os.getpid(), signal.SIGKILL)


def resume(folder, section):
    engine = create_param_engine("bf16", section)
    engine.load_checkpoint(folder)
    losses = losses_of(engine, 1)
    engine.destroy()
    return losses


def test_a_killed_run_is_resumed_without_its_swap_files(tmp_path):
    path, folder = tmp_path / "nvme", str(tmp_path / "checkpoint")
    path.mkdir()
    with pytest.raises(RankError):
        run_ranks(2, save_and_die, str(path), folder)
    assert len(list(path.iterdir())) == 2
    expected = eval(Path(folder, "losses").read_text())
    assert run_ranks(2, resume, folder, on_disk(path))[0] == expected
    assert list(path.iterdir()) == []
    assert run_ranks(2, resume, folder, {})[0] == expected


def access_job(path):
    return [access_params("bf16", section) for section in ({}, on_disk(path))]


def test_single_parameters_are_read_and_changed_as_in_memory(tmp_path):
    for in_memory, swapped in run_ranks(2, access_job, str(tmp_path)):
        assert in_memory == swapped


def move_states(path):
    """What is on disk is out of the device's memory already; the rest is that of the host."""
    engine, other = create_param_engine("bf16", on_disk(path)), create_param_engine("bf16", {})
    for each in (engine, other):
        losses_of(each, 1)
        each.offload_states()
        each.reload_states()
    assert losses_of(engine, 2) == losses_of(other, 2)
    engine.offload_states()
    engine.destroy()
    other.destroy()


def test_states_are_moved_beside_shards_on_disk(tmp_path):
    run_ranks(2, move_states, str(tmp_path))


def build(path):
    config = {"zero_optimization": {"stage": 3, **on_disk(path)}}
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = CheckpointedMLP()
    kinds = {param.ds_tensor.device.type for param in model.parameters()}
    engine = create_param_engine("fp32", on_disk(path), model)
    losses = losses_of(engine, 1)
    engine.destroy()
    return kinds, losses


def test_init_builds_on_disk(tmp_path):
    (kinds, losses), _ = run_ranks(2, build, str(tmp_path))
    assert kinds == {"meta"}
    assert losses == run_ranks(2, train_params, "fp32", {}, 1)[0][0][:2]


KEY = r"zero_optimization\.offload_param\.nvme_path"


def refused(path):
    absent = {"offload_param": {"device": "nvme", "max_in_cpu": 0}}
    with pytest.raises(ConfigError, match=r"offload_param\.nvme_path: found none, and device is 'nvme'; name a folder"):
        create_param_engine("fp32", absent)
    with pytest.raises(ConfigError, match="nvme_path: found none"):
        deepspeed.zero.Init(remote_device="nvme")
    with pytest.raises(ConfigError, match="nvme_path: found none"):  # else it would be the working directory
        create_param_engine("fp32", on_disk(""))
    with pytest.raises(ConfigError, match=f"^{KEY}: no folder can be made in .* too long; check"):
        create_param_engine("fp32", on_disk(f"{path}/{'x' * 300}"))
    with pytest.raises(ConfigError, match=f"^{KEY}: no folder can be made in /proc/nowhere: "):
        create_param_engine("fp32", on_disk("/proc/nowhere"))
    with pytest.raises(
        ConfigError, match=r"buffer_size: found 10 elements, and .* layers\.0\.weight .* has 56; make it"
    ):
        create_param_engine("fp32", on_disk(path, buffer_size=10))
    with pytest.raises(ConfigError, match="found 'nvme' with zero_quantized_nontrainable_weights true"):
        create_param_engine("fp32", {"zero_quantized_nontrainable_weights": True, **on_disk(path)})


def test_what_cannot_work_is_refused(tmp_path):
    run_ranks(1, refused, str(tmp_path))
