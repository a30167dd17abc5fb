"""Ranks that wait for each other in different calls: one error on each, at once, and all can go on afterwards.

The timeout of groups and `checkpoint.wait_s` are half an hour: ranks that are not told hang until the pool's limit.
"""

import os
import re
import threading

import deepspeed
import pytest
import torch
from deepspeed.comm import parted
from deepspeed.comm.failure import PeerFailed
from deepspeed.comm.torch_group import TorchGroup, forget
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import nn

WIDTH = 8


def take_path(path):
    os.environ["DS_COMM_DIRECT"] = "1" if path == "direct" else "0"  # put back after the job
    forget()


def create_engine(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "checkpoint": {"wait_s": 1800},
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train_step(engine):
    engine.backward(engine(torch.full((2, WIDTH), 1.0 + torch.distributed.get_rank())).square().mean())
    engine.step()


def evaluate(engine):
    with torch.no_grad():
        engine(torch.ones(2, WIDTH))


def caught(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "no error"


def sums(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [float(param.detach().double().sum()) for param in engine.module.parameters()]


def part(path, stage, others_do, folder):
    """The last rank makes the call alone that saves or loads, while the others do something else."""
    take_path(path)
    parted.FIRST_LOOK_S = 0.2
    engine = create_engine(stage)
    train_step(engine)
    engine.save_checkpoint(folder)
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    other = {
        "step": lambda: train_step(engine),
        "evaluation": lambda: evaluate(engine),
        "load": lambda: engine.load_checkpoint(folder),
    }[others_do]
    found = caught(lambda: engine.save_checkpoint(folder) if is_last else other())
    train_step(engine)
    engine.save_checkpoint(folder)
    weights = sums(engine)
    engine.load_checkpoint(folder)
    engine.destroy()
    return found, weights


CASES = [(2, stage, "step") for stage in range(4)]
CASES += [(2, 3, "evaluation"), (2, 0, "load"), (2, 3, "load"), (4, 0, "step"), (4, 3, "step"), (4, 2, "load")]
IN_EVERY_RUN = {(2, 0, "step"), (2, 3, "step"), (2, 3, "load"), (4, 3, "step")}


@pytest.mark.parametrize(("num_ranks", "stage", "others_do"), swept(CASES, lambda *case: case in IN_EVERY_RUN))
def test_a_save_on_one_rank_while_the_others_do_something_else(path, tmp_path, num_ranks, stage, others_do):
    results = run_ranks(num_ranks, part, path, stage, others_do, str(tmp_path))
    last = num_ranks - 1
    for rank, (found, weights) in enumerate(results):
        assert re.search(rf"rank {last} (called|waits in) save_checkpoint", found), found
        if rank == last:
            waits_in = {"load": "load_checkpoint"}.get(others_do, "an? [a-z-]+ of")
            assert re.search(rf"rank \d (called|waits in) {waits_in}", found), found
            assert "they wait for each other. Every rank must call " in found
        assert weights == results[0][1]


def part_in_calls(path, stage, first_does, last_does, folder):
    """What ends the call of this rank, and the weights after a step that follows it."""
    take_path(path)
    parted.FIRST_LOOK_S = 0.2
    engine = create_engine(stage)
    train_step(engine)
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    call = {
        "step": lambda: train_step(engine),
        "evaluation": lambda: evaluate(engine),
        "barrier": deepspeed.comm.barrier,
        "initialize": lambda: create_engine(stage),
        "save": lambda: engine.save_checkpoint(folder),
    }[last_does if is_last else first_does]
    found = caught(call)
    engine.destroy()
    engine = create_engine(stage)
    deepspeed.comm.barrier()
    train_step(engine)
    weights = sums(engine)
    engine.destroy()
    return found, weights


PAIRS = [
    (2, 0, "barrier", "step"),
    (2, 3, "barrier", "evaluation"),
    (2, 1, "barrier", "initialize"),
    (2, 1, "initialize", "step"),
    (2, 3, "evaluation", "initialize"),
    (2, 1, "barrier", "save"),
    (2, 1, "initialize", "save"),
    (4, 2, "step", "initialize"),
    (4, 3, "barrier", "initialize"),
]


@pytest.mark.parametrize(("num_ranks", "stage", "first_does", "last_does"), PAIRS)
def test_ranks_in_calls_that_wait_for_each_other(path, tmp_path, num_ranks, stage, first_does, last_does):
    names = {"initialize": "initialize", "save": "save_checkpoint", "barrier": "barrier"}
    results = run_ranks(num_ranks, part_in_calls, path, stage, first_does, last_does, str(tmp_path), timeout_s=60)
    last = num_ranks - 1
    for found, weights in results:
        assert re.match("RanksParted|PeerFailed|PeerLeft|CommError", found), found
        told = [name for call, name in names.items() if call in (first_does, last_does)]
        assert all(name in found for name in told), found
        assert re.search(rf"rank {last}\b", found), found
        assert weights == results[0][1]


def part_in_a_pipeline(path, folder):
    take_path(path)
    parted.FIRST_LOOK_S = 0.2
    torch.manual_seed(0)
    module = PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)], num_stages=2, loss_fn=nn.MSELoss())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "checkpoint": {"wait_s": 1800},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    batches = iter([(torch.ones(2, WIDTH), torch.ones(2, WIDTH))] * 20)
    engine.train_batch(batches)
    is_first = torch.distributed.get_rank() == 0
    found = caught(lambda: engine.save_checkpoint(folder) if is_first else engine.train_batch(batches))
    engine.train_batch(batches)
    engine.save_checkpoint(folder)
    engine.destroy()
    return found


def test_a_save_on_one_stage_of_a_pipeline(path, tmp_path):
    for found in run_ranks(2, part_in_a_pipeline, path, str(tmp_path)):
        assert re.search(r"RanksParted: rank 0 called save_checkpoint, and rank 1 waits in", found), found


def build_three():
    with deepspeed.zero.Init(dtype=torch.float32):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


class SlowToBuild(nn.Module):
    """Rank 1 builds its second layer when `wait` has returned."""

    def __init__(self, wait):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        wait()
        self.second = nn.Linear(WIDTH, WIDTH)


def build_slowly(wait):
    with deepspeed.zero.Init(dtype=torch.float32):
        return SlowToBuild(wait)


def wait_in_a_thread():
    """As a hook of autograd does where it runs in a thread of its own."""
    thread = threading.Thread(target=lambda: parted.Noting(parted.Wait("a sum", "another group", 1, [])).end())
    thread.start()
    thread.join()


def call_alone(path, call, has_threads=False):
    """What rank 0 says that makes a call alone, until rank 1 hears of it and makes it, too."""
    take_path(path)
    parted.FIRST_LOOK_S, parted.WARNING_S = 0.2, 0.05
    store = torch.distributed.distributed_c10d._get_default_store()
    model, key = build_three(), f"said/{path}/{call}/{has_threads}"
    said = []

    def wait():
        if torch.distributed.get_rank() == 1:
            store.wait([key])

    def gather(*args):
        wait()
        with deepspeed.zero.GatheredParameters(model.parameters(), *args):
            pass

    def say(text, *values):
        said.append(text % values)
        store.set(key, "")

    def build():
        wait()
        build_three()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parted.Noting, "_threads_wait", False)  # put back
        if has_threads:
            wait_in_a_thread()
        if torch.distributed.get_rank() == 0:
            patch.setattr(parted.logger, "warning", say)
        {"gather": gather, "modify": lambda: gather(0), "build": build, "build slowly": lambda: build_slowly(wait)}[
            call
        ]()
    parted.WARNING_S = 10.0  # rank 1 may be late in what follows
    deepspeed.comm.barrier()
    return said


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("gather", r"GatheredParameters waits in an all-gather of \d+ float32 \(weight\): rank 1 is not in it"),
        ("modify", r"GatheredParameters waits in an all-gather of \d+ float32 \(weight\): rank 1 is not in it"),
        ("build", "zero.Init waits: rank 1 has not called it"),
        ("build slowly", r"zero.Init waits in a broadcast from rank 0 .*: rank 1 is not in it"),
    ],
    ids=["gather", "modify", "build", "build slowly"],
)
def test_a_rank_that_does_not_come_is_named(path, call, expected):
    said, nothing = run_ranks(2, call_alone, path, call, timeout_s=60)
    name = "zero.Init (transformers' from_pretrained() does, at stage 3)" if "build" in call else "GatheredParameters"
    assert re.match(rf"{expected}\. Every rank must call {re.escape(name)} at the same point of the program", said[0])
    assert len(said) == 1
    assert nothing == []


@pytest.mark.parametrize("call", ["gather", "build slowly"])
def test_a_rank_that_does_not_come_is_named_where_another_thread_has_waited(path, call):
    said, nothing = run_ranks(2, call_alone, path, call, True, timeout_s=60)
    assert len(said) == 1
    assert ": rank 1 is not in it. Every rank must call " in said[0]
    assert nothing == []


def init_beside_a_step(path):
    take_path(path)
    parted.FIRST_LOOK_S = 0.2
    engine = create_engine(3)
    found = caught(build_three if torch.distributed.get_rank() == 0 else lambda: train_step(engine))
    engine.destroy()
    return found


def test_a_model_that_one_rank_builds_alone_while_the_other_trains(path):
    for found in run_ranks(2, init_beside_a_step, path, timeout_s=60):
        assert re.search(r"RanksParted: .*rank 0 called zero\.Init, and rank 1 waits in .* Every rank must", found), (
            found
        )


def test_a_look_that_fails_leaves_the_others(monkeypatch):
    looked = []

    def of_a_store_that_is_gone():
        raise RuntimeError("Connection reset by peer")

    waits = {1: (0.0, of_a_store_that_is_gone), 2: (0.0, lambda: looked.append(2)), 3: (9.0, lambda: looked.append(3))}
    monkeypatch.setattr(parted, "_looks", waits)
    for _ in range(2):
        parted._look_after_waits(now_s=10.0)
    assert looked == [2, 2]


def leave_in_the_middle_of_a_message(numel):
    """Rank 1 leaves an all-to-all when the first of the peer's numbers have come and the last have not. Then both can
    go on. Returns what ended the all-to-all here."""
    group = TorchGroup(torch.distributed.group.WORLD)
    while True:
        output_N, input_N = torch.zeros(numel), torch.ones(numel)
        group.barrier()
        is_cut_off, error = torch.zeros(1), None
        work = group.all_to_all(output_N, input_N)
        try:
            if torch.distributed.get_rank() == 1:
                while output_N[0] == 0:
                    pass
                is_cut_off += output_N[numel // 2 - 1] == 0
                raise MemoryError("no memory")
            work.wait()
        except PeerFailed as raised:
            group.abandon([work], failed=True)
            is_cut_off += 1
            error = raised
        except MemoryError as raised:
            group.abandon([work], failed=True)
            error = raised
        else:  # the last of the numbers were sent before the peer left, and nothing fails here
            group.abandon([], failed=True)
        group.all_reduce(is_cut_off).wait()
        if is_cut_off == 2:  # on both ranks
            return f"{type(error).__name__}: {error}"


def test_a_message_under_way_to_a_rank_that_leaves_ends():
    peer, failed = run_ranks(2, leave_in_the_middle_of_a_message, 1 << 25, timeout_s=110)
    assert failed == "MemoryError: no memory"
    assert peer.startswith("PeerFailed: ")
    assert "rank 1 failed with MemoryError: no memory" in peer
