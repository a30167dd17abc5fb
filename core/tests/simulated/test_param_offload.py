"""`offload_param` on devices with memory of their own: losses and weights are those without it."""

import contextlib
import os
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.testing.models import CheckpointedMLP, make_engine
from deepspeed.testing.offload import access_params, assert_same, create_param_engine, losses_of, train_params
from deepspeed.testing.tiers import swept
from deepspeed.zero.offload import buffers

OPTIMIZER = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PARAMS = {"offload_param": {"device": "cpu", "pin_memory": True}}
#: kernels of the optimizer stay off, as in the other tests, and files can be read
WITH_FILES = {"DS_OPS_DISABLE": "cpu_adam,fused_adam"}
#: what is offloaded with the parameters, and the engine to compare with
SECTIONS = {"params": (PARAMS, {}), "both": ({**PARAMS, **OPTIMIZER}, OPTIMIZER)}


def train(precision, section, steps=20, schedule="late"):
    torch.sim.set_schedule(schedule)
    result = train_params(precision, section, steps)
    torch.sim.set_schedule("late")
    return result


def train_on_disk(precision, optimizer, path, schedule="late"):
    """With shards in files, of which two are in memory at a time; `optimizer`: where it is."""
    section = {"offload_param": {"device": "nvme", "nvme_path": path, "buffer_count": 2, "max_in_cpu": 0}}
    if optimizer is not None:
        section["offload_optimizer"] = {"device": optimizer, "nvme_path": path}
    with mock.patch.dict(os.environ, WITH_FILES):
        return train(precision, section, 3, schedule)


_results = {}


def result(ranks, *arguments):
    key = id(ranks), str(arguments)
    if key not in _results:
        _results[key] = ranks(train, *arguments)
    return _results[key]


def assert_close(one, other, tolerance=1e-5):
    for each, its in zip(one, other, strict=True):
        torch.testing.assert_close(torch.tensor(each), torch.tensor(its), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("which", "precision", "schedule"),
    swept(
        [(which, *mix) for which in SECTIONS for mix in
         (("fp32", "late"), ("fp32", "early"), ("bf16", "late"), ("fp16", "early"))],
        lambda which, precision, schedule: (which, precision, schedule) in
        (("params", "fp32", "late"), ("params", "bf16", "late"), ("both", "fp32", "early"), ("both", "fp16", "early")),
    ),
)  # fmt: skip
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_and_weights_are_those_without(sim, sim_ranks, which, precision, schedule, world_size):
    ranks = {1: sim, 2: sim_ranks}[world_size]
    section, other = SECTIONS[which]
    assert_same(result(ranks, precision, section, 20, schedule), result(ranks, precision, other, 20))


@pytest.mark.parametrize(
    ("optimizer", "precision", "schedule"),
    swept(
        [
            (where, *mix)
            for where in (None, "cpu", "nvme")
            for mix in (("fp32", "late"), ("bf16", "late"), ("bf16", "early"))
        ],
        lambda optimizer, precision, schedule: (
            (optimizer, precision, schedule)
            in ((None, "bf16", "late"), ("cpu", "bf16", "early"), ("nvme", "fp32", "late"))
        ),
    ),
)
def test_shards_on_disk_reach_the_device(sim_ranks, tmp_path, optimizer, precision, schedule):
    expected = result(sim_ranks, precision, OPTIMIZER if optimizer else {}, 3)
    assert_same(sim_ranks(train_on_disk, precision, optimizer, str(tmp_path), schedule), expected)


@pytest.mark.parametrize("ratio", swept([0.5, 0.0], lambda ratio: ratio == 0.5))
def test_a_part_of_the_optimizer_is_offloaded_too(sim_ranks, ratio):
    section = {**PARAMS, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    assert_same(result(sim_ranks, "bf16", section, 3), result(sim_ranks, "bf16", OPTIMIZER, 3))


@contextlib.contextmanager
def copying_without_waiting(lane):
    with lane._accelerator.stream(lane._stream):
        yield


#: a wait left out: the place, and what is there instead
FAULTS = {
    "a shard is copied while its memory is still computed with": (buffers.CopyLane, "copying", copying_without_waiting),
    "weights are used before they are there": (buffers.Mark, "wait", lambda mark: None),
}


def losses_with(fault, schedule):
    torch.sim.set_schedule(schedule)
    with mock.patch.object(*FAULTS[fault]) if fault else contextlib.nullcontext():
        engine = create_param_engine("fp32", PARAMS)
        losses = losses_of(engine, 2)
        engine.destroy()
    torch.sim.set_schedule("late")
    return losses


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_is_seen(sim, fault):
    right = sim(losses_with, None, "late")
    assert any(sim(losses_with, fault, schedule) != right for schedule in ("late", "early"))


def write_before_the_copy_is_done(without_waiting):
    """The shard changes while the copy of a prefetched unit waits in its stream."""
    engine = create_param_engine("fp32", PARAMS)
    (unit, *_) = engine.sharding.units.modules.all
    with mock.patch.object(buffers.Mark, "wait_on_host") if without_waiting else contextlib.nullcontext():
        unit.launch()
        unit.set_shard(unit.shard_S + 1)
    unit.finish()
    seen = unit.params[0].detach().cpu()
    unit.release()
    unit.gather()
    changed = unit.params[0].detach().cpu()
    engine.destroy()
    return (changed - seen).abs().max().item()


def test_a_shard_is_written_when_its_copy_is_done(sim):
    assert sim(write_before_the_copy_is_done, False) == [1.0]
    assert sim(write_before_the_copy_is_done, True) != [1.0]


def bytes_of_device(section):
    from deepspeed.accelerator import get_accelerator

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
    stage3 = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    engine = make_engine(model, 3, zero_optimization={**stage3, **section}, bf16={"enabled": True})
    x = torch.ones(1, 256, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).float().sum())
    engine.step()
    held = get_accelerator().memory_allocated()
    pinned = all(get_accelerator().is_pinned(unit.shard_S) for unit in engine.sharding.units.modules.all)
    engine.destroy()
    return held, pinned


def test_shards_leave_the_device(sim_ranks):
    (with_shards, _), *_ = sim_ranks(bytes_of_device, OPTIMIZER)
    (without, is_pinned), *_ = sim_ranks(bytes_of_device, {**PARAMS, **OPTIMIZER})
    assert is_pinned
    assert with_shards - without >= 4 * 256 * 256 * 2 // 2  # bf16, on two ranks


@pytest.mark.parametrize(
    "section",
    swept(
        [
            {"zero_hpz_partition_size": 2},
            {"mics_shard_size": 1},
            {"zero_quantized_weights": True, "zero_quantized_gradients": True},
            {"zeropp_loco_param": {}, "zero_quantized_gradients": True},
        ],
        lambda section: "mics_shard_size" not in section,
    ),
    ids=lambda section: next(iter(section)),
)
def test_other_ways_to_shard(sim_ranks, section):
    for offload, without in SECTIONS.values():
        assert_same(
            result(sim_ranks, "bf16", {**section, **offload}, 3), result(sim_ranks, "bf16", {**section, **without}, 3)
        )


def save(folder, section, precision):
    engine = create_param_engine(precision, section)
    losses_of(engine, 2)
    engine.save_checkpoint(folder, tag="two")
    engine.save_16bit_model(folder)
    losses = losses_of(engine, 2)
    engine.destroy()
    return losses


def resume(folder, section, precision):
    engine = create_param_engine(precision, section)
    losses_of(engine, 1)  # what is gathered, and what was saved, differ
    engine.load_checkpoint(folder)
    losses = losses_of(engine, 2)
    engine.destroy()
    return losses


@pytest.mark.parametrize("precision", swept(["fp32", "bf16"], lambda precision: precision == "bf16"))
def test_checkpoints_load_with_and_without_at_any_size(sim, sim_ranks, tmp_path, precision):
    folder = str(tmp_path)
    losses = sim_ranks(save, folder, {**PARAMS, **OPTIMIZER}, precision)
    assert sim_ranks(save, f"{folder}/without", OPTIMIZER, precision) == losses
    for section in (PARAMS, {**PARAMS, **OPTIMIZER}, {}):
        assert_close(sim_ranks(resume, folder, section, precision), losses)
    alone = sim(resume, folder, {}, precision)
    assert sim(resume, folder, PARAMS, precision) == alone


def access():
    return [access_params("bf16", section) for section in ({}, PARAMS, {**PARAMS, **OPTIMIZER})]


def test_single_parameters_are_read_and_changed_as_without(sim_ranks):
    for without, *offloaded in sim_ranks(access):
        for each in offloaded:
            assert_close(each, without)


def build(arguments):
    """A model built in `zero.Init`: the device of its shards, and its losses."""
    config = {"zero_optimization": {"stage": 3, **PARAMS}}
    torch.manual_seed(0)
    with deepspeed.zero.Init(**arguments):
        model = CheckpointedMLP()
    shards = {param.ds_tensor.device.type for param in model.parameters()}
    stage3 = {"stage3_param_persistence_threshold": 4, "stage3_max_reuse_distance": 0}
    engine = make_engine(model, 3, zero_optimization={**stage3, **config["zero_optimization"]})
    losses = losses_of(engine, 2)
    engine.destroy()
    return shards, losses


def test_init_keeps_shards_where_it_was_asked_to(sim_ranks):
    config = {"zero_optimization": {"stage": 3, **PARAMS}}
    plain = sim_ranks(build, {})
    assert [shards for shards, _ in plain] == [{"sim"}] * 2
    for arguments in ({"remote_device": "cpu"}, {"config_dict_or_path": config}):
        assert sim_ranks(build, arguments) == [({"cpu"}, losses) for _, losses in plain]
    on_device = {"remote_device": "none", "config_dict_or_path": config}
    assert sim_ranks(build, on_device) == plain


def reuse_of_a_buffer(path, without_waiting):
    """A shard is read into a buffer from which the copy of another one still waits in its stream."""
    section = {"offload_param": {"device": "nvme", "nvme_path": path, "buffer_count": 1, "max_in_cpu": 0}}
    with mock.patch.dict(os.environ, WITH_FILES):
        engine = create_param_engine("fp32", section)
        first, second, *_ = engine.sharding.units.modules.all
        first.gather()
    expected = first.params[0].detach().cpu()
    first.release()
    with mock.patch.object(buffers.Mark, "wait_on_host") if without_waiting else contextlib.nullcontext():
        first.launch()
        second.launch()
    first.finish()
    second.finish()
    is_right = torch.equal(first.params[0].detach().cpu(), expected)
    engine.destroy()
    return is_right


def test_a_buffer_is_read_into_when_its_copy_is_done(sim, tmp_path):
    assert sim(reuse_of_a_buffer, str(tmp_path), False) == [True]
    assert sim(reuse_of_a_buffer, str(tmp_path), True) == [False]
