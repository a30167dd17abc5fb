"""`engine.save_checkpoint` and `load_checkpoint` on two ranks: a resumed run is the uninterrupted one, bit for bit."""

import errno
import os
import pickle
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.comm import values
from deepspeed.errors import CheckpointError, CommError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import TiedLM
from deepspeed.testing.tiers import swept
from deepspeed.zero.fragments import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

STAGES = (0, 1, 2)
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}},
}
every_stage = pytest.mark.parametrize("stage", STAGES)
every_mix = pytest.mark.parametrize(
    ("stage", "precision"),
    swept(product(STAGES, PRECISIONS), lambda *mix: mix in ((0, "fp32"), (1, "bf16"), (2, "fp16"), (2, "bf16"))),
)


def create_engine(stage, precision, seed=0, net=None, **keys):
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 40},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}},
        "steps_per_print": 1_000_000,
        **PRECISIONS[precision],
        **keys,
    }
    net = net or TiedLM()
    groups = [
        {"params": [net.tokens.weight, net.gain]},
        {"params": [*net.block.parameters(), *net.unused.parameters()], "weight_decay": 0.0},
    ]
    return deepspeed.initialize(model=net, model_parameters=groups, config=config)[0]


def train(engine, first, last):
    """Losses of steps first .. last - 1; in fp16 step 3 overflows."""
    losses = []
    for step in range(first, last):
        for micro in range(2):
            generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * step + micro)
            loss = engine(torch.randint(11, (4, 6), generator=generator))
            if engine.fp16_enabled() and step == 3:
                loss = loss * 1e6
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().clone())
    return losses


def snapshot(engine):
    """Everything that a resumed run must have alike."""
    trained = [param for param in engine.module.parameters() if param.requires_grad]
    tensors = [tensor.detach().clone() for tensor in engine.module.state_dict().values()]
    for param in trained:
        tensors += [safe_get_full_fp32_param(param)]
        tensors += [safe_get_full_optimizer_state(param, name) for name in ("exp_avg", "exp_avg_sq")]
    values = {
        "lr": engine.get_lr(),
        "scale": engine.loss_scale(),
        "scaler": engine.precision.loss_scaler.state_dict(),
        "schedule": engine.lr_scheduler.state_dict(),
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps),
        "groups": [
            {name: value for name, value in group.items() if name != "params"}
            for group in engine.basic_optimizer.param_groups
        ],
    }
    return tensors, values


def assert_same(found, expected):
    for one, other in zip(found[0], expected[0], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert found[1] == expected[1]


def resume_job(folder, stage, precision):
    engine = create_engine(stage, precision)
    train(engine, 0, 5)
    engine.save_checkpoint(folder, client_state={"epoch": 3, "seen": torch.arange(3)})
    saved = snapshot(engine)
    losses = train(engine, 5, 9)
    finished = snapshot(engine)

    resumed = create_engine(stage, precision, seed=1)  # other weights, never trained
    path, client = resumed.load_checkpoint(folder)
    assert Path(path).is_file()
    assert client["epoch"] == 3
    assert torch.equal(client["seen"], torch.arange(3))
    assert_same(snapshot(resumed), saved)
    assert all(map(torch.equal, train(resumed, 5, 9), losses))
    assert_same(snapshot(resumed), finished)

    engine.backward(engine(torch.zeros(4, 6, dtype=torch.int64)))  # a micro-batch that is not stepped
    engine.load_checkpoint(folder)  # back, in an engine that went on
    assert_same(snapshot(engine), saved)
    assert all(map(torch.equal, train(engine, 5, 9), losses))
    assert_same(snapshot(engine), finished)
    if precision == "fp16":
        assert engine.skipped_steps >= 1
    return sorted(os.listdir(Path(folder) / "global_step5"))


@every_mix
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, stage, precision):
    names = run_ranks(2, resume_job, str(tmp_path), stage, precision)[0]
    prefix = "bf16_" if precision == "bf16" else ""
    shards = [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)] if stage else []
    assert names == sorted(["index.json", "mp_rank_00_model_states.pt", *shards])
    assert (tmp_path / "latest").read_text() == "global_step5"
    assert (tmp_path / "zero_to_fp32.py").is_file()


def before_training_job(folder, stage):
    """A checkpoint of step 0 has no moments; loading it into a trained engine must not leave the trained ones."""
    engine = create_engine(stage, "fp32")
    engine.save_checkpoint(folder)
    losses = train(engine, 0, 3)
    finished = snapshot(engine)
    engine.load_checkpoint(folder)
    assert all(map(torch.equal, train(engine, 0, 3), losses))
    assert_same(snapshot(engine), finished)


@every_stage
def test_back_to_the_start(tmp_path, stage):
    run_ranks(2, before_training_job, str(tmp_path), stage)


def parts_job(folder, stage, precision):
    engine = create_engine(stage, precision)
    train(engine, 0, 5)
    engine.save_checkpoint(folder)
    weights = [tensor.clone() for tensor in engine.module.state_dict().values()]

    def fresh():
        other = create_engine(stage, precision, seed=1)
        train(other, 0, 2)
        return other

    def has_weights(other):
        return all(map(torch.equal, other.module.state_dict().values(), weights))

    def masters_fit(other):
        return all(
            torch.equal(safe_get_full_fp32_param(param).to(param.dtype), param)
            for param in other.module.parameters()
            if param.requires_grad
        )

    module_only = fresh()
    schedule = module_only.lr_scheduler.state_dict()
    path, _ = module_only.load_checkpoint(folder, load_module_only=True)
    assert path
    assert has_weights(module_only)
    assert masters_fit(module_only)
    assert module_only.global_steps == 2
    assert module_only.lr_scheduler.state_dict() == schedule

    no_optimizer = fresh()
    moment = safe_get_full_optimizer_state(no_optimizer.module.gain, "exp_avg")
    no_optimizer.load_checkpoint(folder, load_optimizer_states=False)
    assert has_weights(no_optimizer)
    assert masters_fit(no_optimizer)
    assert no_optimizer.global_steps == 5
    assert torch.equal(safe_get_full_optimizer_state(no_optimizer.module.gain, "exp_avg"), moment)
    assert no_optimizer.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()

    no_schedule = fresh()
    no_schedule.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert has_weights(no_schedule)
    assert no_schedule.lr_scheduler.state_dict() == schedule

    calls = []

    def load(src, dst):
        calls.append((sorted(src), dst))
        dst.load_state_dict(src)

    custom = fresh()
    custom.load_checkpoint(folder, custom_load_fn=load)
    assert calls == [(sorted(custom.module.state_dict()), custom.module)]
    assert_same(snapshot(custom), snapshot(engine))

    missing = fresh()
    before = snapshot(missing)
    assert missing.load_checkpoint(folder + "/nowhere") == (None, None)
    with pytest.raises(CheckpointError, match="global_step5"):
        missing.load_checkpoint(folder, tag="global_step6")
    assert_same(snapshot(missing), before)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (2, "fp32"), (0, "bf16")])
def test_parts_of_a_checkpoint(tmp_path, stage, precision):
    run_ranks(2, parts_job, str(tmp_path), stage, precision)


def frozen_job(folder, stage):
    engine = create_engine(stage, "bf16")
    train(engine, 0, 2)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    saved = snapshot(engine)
    resumed = create_engine(stage, "bf16")
    with pytest.raises(RuntimeError, match=r"frozen\.weight"):
        resumed.load_checkpoint(folder)
    resumed.load_checkpoint(folder, load_module_strict=False)
    assert_same(snapshot(resumed), saved)
    names = torch.load(f"{folder}/global_step2/mp_rank_00_model_states.pt", weights_only=True)["module"]
    assert "block.weight" in names
    assert not [name for name in names if name.startswith("frozen")]


@every_stage
def test_without_frozen_parameters(tmp_path, stage):
    run_ranks(2, frozen_job, str(tmp_path), stage)


def tags_job(folder):
    engine = create_engine(1, "fp32", checkpoint={"tag_validation": "Fail"})
    with pytest.raises(CheckpointError, match="different tags"):
        engine.save_checkpoint(folder, tag=f"mine{dist.get_rank()}")
    assert not Path(folder).exists() or not os.listdir(folder)
    assert engine.save_checkpoint(folder, tag="mine")
    engine.save_checkpoint(folder, tag="other", save_latest=False)
    dist.barrier()
    assert (Path(folder) / "latest").read_text() == "mine"


def test_ranks_that_disagree_on_the_tag_save_nothing(tmp_path):
    run_ranks(2, tags_job, str(tmp_path / "checkpoints"))


def own_tags_job(folder, section):
    """Nobody compares the tags before the save; gives what it raises, and what it leaves."""
    engine = create_engine(1, "fp32", checkpoint=section)
    with pytest.raises(CheckpointError) as raised:
        engine.save_checkpoint(folder, tag=f"step{dist.get_rank()}")
    dist.barrier()
    left = Path(folder).exists() and os.listdir(folder)
    dist.barrier()
    engine.save_checkpoint(folder, tag="mine")
    engine.destroy()
    return str(raised.value), left


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("mode", ["Warn", "Ignore"])
def test_a_save_under_several_tags_names_each(tmp_path, mode, async_save):
    section = {"tag_validation": mode, "async_save": async_save}
    for said, left in run_ranks(2, own_tags_job, str(tmp_path / "checkpoints"), section):
        assert "under different tags: rank 0: 'step0', rank 1: 'step1'. Compute the tag from" in said
        assert not left
    assert (tmp_path / "checkpoints" / "latest").read_text() == "mine"


def misfit_on_one_rank_job(folder, stage):
    """The check of one rank fails; no rank may have loaded anything by then."""
    engine = create_engine(stage, "bf16")
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    train(engine, 2, 3)
    if dist.get_rank() == 1:
        engine.module.block.extra = nn.Parameter(torch.ones(2))
    before = [param.detach().clone() for param in engine.module.parameters()]
    messages = []
    for flags in ({}, {"load_optimizer_states": False}, {"load_module_only": True}):
        with pytest.raises(CheckpointError) as raised:
            engine.load_checkpoint(folder, **flags)
        messages.append(str(raised.value))
    assert all(map(torch.equal, engine.module.parameters(), before))
    assert engine.global_steps == 3
    return messages


@every_stage
def test_a_model_that_does_not_fit_on_one_rank_is_refused_on_all(tmp_path, stage):
    first, second = run_ranks(2, misfit_on_one_rank_job, str(tmp_path), stage)
    for theirs, own in zip(first, second, strict=True):
        assert "block.extra is missing there" in own
        assert theirs.endswith(f"rank 1: {own}")


def folders_of_their_own_job(folder):
    """What `tempfile.mkdtemp()` on each rank leads to: all ranks say what rank 1 misses."""
    engine = create_engine(2, "bf16")
    with pytest.raises(CheckpointError) as raised:
        engine.save_checkpoint(f"{folder}/{dist.get_rank()}")
    return str(raised.value)


def test_every_rank_says_what_failed_on_one(tmp_path):
    first, second = run_ranks(2, folders_of_their_own_job, str(tmp_path))
    assert second in first
    assert first.startswith(f"cannot save {tmp_path}/0/global_step0: rank 1: ")
    assert f"{tmp_path}/1/.global_step0.staging" in second


def broken(*_, **__):
    raise RuntimeError("planted")


# What fails in a save or a load -> the rank on which it does, and the words by which the error names it.
SAVE_FAULTS = {
    "module hook": (0, "planted"),
    "scheduler": (0, "planted"),
    "optimizer": (1, "planted"),
    "optimizer content": (1, "builtins.object"),
    "client_state": (0, "client_state['f'] is a builtins.function"),
    "tag": (1, "tag: '' cannot name"),
    "save_dir": (1, "found None; give a folder"),
    "mkdir": (0, "cannot prepare"),
    "disk full": (1, "No space left on device"),
}
LOAD_FAULTS = {
    "tag": (1, "tag: '' cannot name"),
    "load_dir": (1, "found None; give a folder"),
    "load_dir with a tag": (1, "found None; give a folder"),
    "custom_load_fn": (1, "planted"),
    "module hook": (1, "planted"),
    "optimizer": (1, "planted"),
    "scheduler": (1, "planted"),
}


def break_save(engine, fault, patch, arguments):
    if fault == "module hook":
        engine.module.register_state_dict_post_hook(broken)
    elif fault == "scheduler":
        patch.setattr(engine.lr_scheduler, "state_dict", broken)
    elif fault == "optimizer":
        patch.setattr(engine.sharding.states, "take_outside_changes", broken)
    elif fault == "optimizer content":
        engine.basic_optimizer.param_groups[0]["odd"] = object()
    elif fault == "client_state":
        arguments["client_state"] = {"f": broken}
    elif fault == "tag":
        arguments["tag"] = ""
    elif fault == "save_dir":
        arguments["save_dir"] = None
    elif fault == "mkdir":
        arguments["save_dir"] = __file__
    elif fault == "disk full":
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))


def break_load(engine, fault, patch, arguments):
    if fault == "tag":
        arguments["tag"] = ""
    elif fault == "load_dir":
        arguments["load_dir"] = None
    elif fault == "load_dir with a tag":
        arguments.update(load_dir=None, tag="global_step1")
    elif fault == "custom_load_fn":
        arguments["custom_load_fn"] = broken
    elif fault == "module hook":
        engine.module.register_load_state_dict_post_hook(broken)
    elif fault == "optimizer":
        patch.setattr(torch.Tensor, "copy_", broken)
    elif fault == "scheduler":
        patch.setattr(engine.lr_scheduler, "load_state_dict", broken)


def fails_on_one_rank(call, break_it, engine, fault, failing_rank, **arguments):
    """The error that this rank raises when `fault` is planted on `failing_rank` only."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == failing_rank:
            break_it(engine, fault, patch, arguments)
        with pytest.raises(Exception) as raised:  # noqa: PT011 - the failing rank raises the cause itself
            call(**arguments)
    return str(raised.value)


def failing_save_job(folder, fault, failing_rank):
    engine = create_engine(2, "bf16")
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    said = fails_on_one_rank(engine.save_checkpoint, break_save, engine, fault, failing_rank, save_dir=folder, tag="x")
    dist.barrier()
    left = sorted(os.listdir(folder))
    other = create_engine(2, "bf16", seed=1)
    path, _ = other.load_checkpoint(folder)
    return said, left, path


@pytest.mark.parametrize("fault", SAVE_FAULTS)
def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path, fault):
    rank, words = SAVE_FAULTS[fault]
    outcomes = run_ranks(2, failing_save_job, str(tmp_path), fault, rank)
    cause = outcomes[rank][0]
    assert words in cause
    assert f"rank {rank}: " in outcomes[1 - rank][0]
    assert cause in outcomes[1 - rank][0]
    for _, left, path in outcomes:
        assert left == ["global_step1", "latest", "zero_to_fp32.py"], "nothing of the failed save takes up room"
        assert path == str(tmp_path / "global_step1" / "mp_rank_00_model_states.pt")


def failing_load_job(folder, fault, failing_rank):
    engine = create_engine(2, "bf16")
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    said = fails_on_one_rank(engine.load_checkpoint, break_load, engine, fault, failing_rank, load_dir=folder)
    assert create_engine(2, "bf16", seed=1).load_checkpoint(folder)[0], "the ranks still answer each other"
    return said


@pytest.mark.parametrize("fault", LOAD_FAULTS)
def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path, fault):
    rank, words = LOAD_FAULTS[fault]
    said = run_ranks(2, failing_load_job, str(tmp_path), fault, rank)
    assert words in said[rank]
    assert f"rank {rank}: " in said[1 - rank]
    assert said[rank] in said[1 - rank]


def other_tag_job(folder):
    engine = create_engine(1, "fp32")
    engine.save_checkpoint(folder, tag="a")
    engine.save_checkpoint(folder, tag="b")
    with pytest.raises(CheckpointError, match="rank 0: a, rank 1: b"):
        engine.load_checkpoint(folder, tag="ab"[dist.get_rank()])
    with pytest.raises(CheckpointError, match="rank 0: a, rank 1: b"):
        engine.load_checkpoint(folder, tag=None if dist.get_rank() else "a")


def test_ranks_that_load_different_tags_load_nothing(tmp_path):
    run_ranks(2, other_tag_job, str(tmp_path))


def other_arguments_job(folder, stage):
    """What one rank skips the other would wait for."""
    engine = create_engine(stage, "fp32")
    engine.save_checkpoint(folder)
    rank = dist.get_rank()
    for flag in ("load_optimizer_states", "load_module_only"):
        with pytest.raises(CheckpointError, match=f"load_checkpoint: .* different arguments: rank 0: .*'{flag}'"):
            engine.load_checkpoint(folder, **{flag: bool(rank)})
    with pytest.raises(CheckpointError, match="save_checkpoint: .* different arguments: rank 0: .*'exclude_frozen_par"):
        engine.save_checkpoint(folder, exclude_frozen_parameters=bool(rank))
    engine.save_checkpoint(folder, save_latest=not rank)  # that of the committing rank counts
    assert engine.load_checkpoint(folder)[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_pass_different_arguments_are_told(tmp_path, stage):
    run_ranks(2, other_arguments_job, str(tmp_path), stage)


def save_job(folder, stage, precision="bf16"):
    engine = create_engine(stage, precision)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    masters = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        master = safe_get_full_fp32_param(param) if param.requires_grad else None
        masters[name] = param.detach().float() if master is None else master.float()
    return masters


def other_stage_job(folder):
    """Stages 1 and 2 hold the same."""
    engine = create_engine(1, "bf16")
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    other = create_engine(2, "bf16", seed=1)
    other.load_checkpoint(folder)
    assert_same(snapshot(other), snapshot(engine))


def test_stage_2_takes_the_files_of_stage_1(tmp_path):
    run_ranks(2, other_stage_job, str(tmp_path))


@every_mix
def test_zero_to_fp32_gives_the_masters(tmp_path, stage, precision):
    expected = run_ranks(2, save_job, str(tmp_path), stage, precision)[0]
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert set(expected) <= set(found)
    for name, master in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], master), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_shards_lie_end_to_end_as_deepspeeds_do(tmp_path, stage, precision):
    """Rank r's file has the r-th of equal partitions of each group's parameters in order, padded at the end."""
    masters = run_ranks(2, save_job, str(tmp_path), stage, precision)[0]
    prefix = "bf16_" if precision == "bf16" else ""
    folder = tmp_path / "global_step2"
    files = [folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    states = [torch.load(file, weights_only=True)["optimizer_state_dict"] for file in files]
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    assert [list(shapes) for shapes in model["param_shapes"]] == [
        ["tokens.weight", "gain"],
        ["block.weight", "block.bias", "unused.weight", "unused.bias"],
    ]
    for group, shapes in enumerate(model["param_shapes"]):
        partitions = [state["single_partition_of_fp32_groups"][group] for state in states]
        expected = torch.cat([masters[name].flatten() for name in shapes])
        padded = -(-expected.numel() // 4) * 4
        assert [part.shape for part in partitions] == [(padded // 2,), (padded // 2,)]
        assert torch.equal(torch.cat(partitions)[: expected.numel()], expected)
        assert states[1]["group_paddings"][group] == padded - expected.numel()
        for name in ("exp_avg", "exp_avg_sq"):
            assert states[0]["base_optimizer_state"]["state"][group][name].shape == (padded // 2,)
    assert states[0]["zero_stage"] == stage
    for file, state in zip(files, states, strict=True):
        assert file.stat().st_size < num_bytes(state) + 20_000  # pickle and zip need a few KB
    assert (folder / "mp_rank_00_model_states.pt").stat().st_size < num_bytes(model) + 30_000


def num_bytes(state):
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(num_bytes, state.values()))
    return sum(map(num_bytes, state)) if isinstance(state, list | tuple) else 0


def large_job(folder, stage):
    """Two megabytes of weights per rank: a storage that came along whole would show."""
    net = TiedLM()
    net.block = nn.Linear(7, 100_000)
    net.forward = lambda x: (net.block(x).square().mean() + net.tokens.weight.sum() + net.gain) * 1.0
    engine = create_engine(stage, "fp32", net=net)
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 7)))
        engine.step()
    engine.save_checkpoint(folder)


@pytest.mark.parametrize("stage", [1, 2])
def test_files_hold_no_storage_larger_than_their_tensors(tmp_path, stage):
    run_ranks(2, large_job, str(tmp_path), stage)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "global_step1").glob("*.pt")}
    for name, size in sizes.items():
        state = torch.load(tmp_path / "global_step1" / name, weights_only=True)
        assert size < num_bytes(state) * 1.02 + 30_000, name
    shards = [size for name, size in sizes.items() if "optim" in name]
    assert len(shards) == 2
    assert max(shards) < 1.1 * 12 * 800_000 / 2  # fp32 master and two moments of half the elements


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path(os.environ["DS_TEST_PAYLOAD"]),))


def evil_job(folder, stage, mark):
    engine = create_engine(stage, "fp32")
    before = snapshot(engine)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(folder)
    assert not Path(mark).exists()
    assert_same(snapshot(engine), before)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
@pytest.mark.parametrize(
    ("stage", "name"),
    swept([(0, "mp_rank_00_model"), (1, "mp_rank_00_model"), (2, "zero_pp_rank_1")], lambda stage, name: stage != 1),
)
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, monkeypatch, stage, name, how):
    run_ranks(2, save_job, str(tmp_path), stage, "fp32")
    mark = tmp_path / "ran"
    monkeypatch.setenv("DS_TEST_PAYLOAD", str(mark))
    (victim,) = [path for path in (tmp_path / "global_step2").iterdir() if path.name.startswith(name)]
    victim.with_name("index.json").unlink()  # who forges a file can forge its checksum
    if how == "pickle":
        victim.write_bytes(pickle.dumps({"module": Payload()}))
    else:
        torch.save({"module": Payload()}, victim)
    run_ranks(2, evil_job, str(tmp_path), stage, str(mark))
    assert not mark.exists()


def save_alone_job(folder):
    """Rank 0 saves alone, under `if rank == 0`, while its peer goes on training; then both go on."""
    engine = create_engine(2, "fp32")
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            said = []
            patch.setattr(engine._saving._meet.__self__, "limit_s", 0.2)
            patch.setattr(values.parted, "WARNING_S", 0.05)
            patch.setattr(values.logger, "warning", lambda text, *values: said.append(text % values))
            with pytest.raises(CommError) as caught:
                engine.save_checkpoint(folder)
        expected = "rank 0 called save_checkpoint and waited for 0.2 s: rank 1 has not called it. Every rank must"
        assert expected in str(caught.value)
        (warning,) = said
        assert warning.startswith("save_checkpoint waits: rank 1 has not called it. Every rank must call")
    train(engine, 1, 2)
    engine.save_checkpoint(folder)
    saved = snapshot(engine)
    train(engine, 2, 3)
    path, _ = engine.load_checkpoint(folder)
    assert_same(snapshot(engine), saved)
    return path


def test_a_save_on_one_rank_alone_is_an_error_and_training_goes_on(tmp_path):
    assert run_ranks(2, save_alone_job, str(tmp_path))[0].startswith(str(tmp_path / "global_step2"))


def sixteen_bit_job(folder, stage):
    engine = create_engine(stage, "bf16")
    train(engine, 0, 1)
    assert engine.save_16bit_model(folder, "weights.bin")
    loaded = torch.load(f"{folder}/weights.bin", weights_only=True)
    assert loaded.keys() == engine.module.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in engine.module.state_dict().items())


@every_stage
def test_save_16bit_model(tmp_path, stage):
    run_ranks(2, sixteen_bit_job, str(tmp_path), stage)


def fail_within_the_save(folder):
    """Rank 1 fails before the collectives of the save, and lives on; rank 0 waits in them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 5))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if dist.get_rank() == 1:
        engine.sharding.states.take_outside_changes = lambda: 1 // 0
    with pytest.raises((CheckpointError, ZeroDivisionError)) as caught:
        engine.save_checkpoint(folder)
    return str(caught.value)


@pytest.mark.parametrize("direct", ["0", "1"])
def test_a_rank_that_fails_within_a_save_lets_its_peers_go(tmp_path, direct):
    outcomes = run_ranks(2, fail_within_the_save, str(tmp_path), environment={"DS_COMM_DIRECT": direct})
    assert "rank 1: ZeroDivisionError" in outcomes[0]
    assert "division" in outcomes[1]
