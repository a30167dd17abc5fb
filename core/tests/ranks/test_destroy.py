"""`destroy` leaves the process group in order, whatever was in flight on this rank."""

import re

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm import parted
from deepspeed.errors import CommError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept


def destroy_between_backward_and_step(stage):
    """Rank 0 has waited for its reductions, the others have not; afterwards a collective of the group is right."""
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(1, 8)).sum())
    if rank == 0:
        for bucket in engine.sharding.gradients.memory.buckets:
            bucket.finish()
    engine.destroy()
    total = torch.ones(3)
    dist.group_backend().all_reduce(total).wait()
    return total.tolist(), model[0].weight.shape


@pytest.mark.parametrize("stage", [1, 3])
def test_a_collective_follows(stage):
    assert run_ranks(2, destroy_between_backward_and_step, stage) == [([2.0] * 3, (8, 8))] * 2


class Crossing(torch.nn.Module):
    """Where the ranks part, each goes first through another layer, or the last one through fewer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, width) for width in (8, 8, 16))
        self.way = ""

    def forward(self, x):
        if self.way == "fails":
            raise ZeroDivisionError("before the first layer")
        first = dist.get_rank() if self.way == "other" else 0
        x = self.layers[first](x)
        if self.way != "fewer" or dist.get_rank() == 0:
            x = self.layers[2](self.layers[1 - first](x))
        return x.sum()


def crossing_engine(stage=3):
    model = Crossing()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return model, deepspeed.initialize(model=model, config=config)[0]


def destroy_after_ranks_parted(direct, way):
    """All ranks catch the error, and train another engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_COMM_DIRECT", direct)
        for each in (way, ""):
            model, engine = crossing_engine()
            model.way = each
            try:
                engine.backward(engine(torch.ones(1, 8)))
                engine.step()
            except CommError:
                assert each
            else:
                assert not each
            engine.destroy()
    return engine.global_steps, model.layers[0].weight.shape


@pytest.mark.parametrize("way", ["other", "fewer"])
@pytest.mark.parametrize("direct", ["1", "0"])
def test_after_ranks_parted(direct, way):
    """Over sockets, ranks that go through fewer layers wait for each other in collectives of other sizes."""
    assert run_ranks(2, destroy_after_ranks_parted, direct, way) == [(1, (8, 8))] * 2


def destroy_after_failures_unheard(direct, num_failures):
    """Rank 1 has failed in forwards of its own; nobody waited for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_COMM_DIRECT", direct)
        model, engine = crossing_engine()
        if dist.get_rank() == 1:
            model.way = "fails"
            for _ in range(num_failures):
                with pytest.raises(ZeroDivisionError):
                    engine(torch.ones(1, 8))
        engine.destroy()
    return model.layers[0].weight.shape


@pytest.mark.parametrize("num_failures", [1, 5])
@pytest.mark.parametrize("direct", ["1", "0"])
def test_after_failures_that_a_rank_has_not_heard_of(direct, num_failures):
    assert run_ranks(2, destroy_after_failures_unheard, direct, num_failures, timeout_s=30) == [(8, 8)] * 2


def fail_in_an_evaluation_and_destroy(direct, peer_does, folder):
    """Rank 1 fails in an evaluation that gathers nothing, and destroys the engine in its `except`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_COMM_DIRECT", direct)
        patch.setattr(parted, "FIRST_LOOK_S", 0.2)
        model, engine = crossing_engine()
        found = "no error"
        with torch.no_grad():
            engine(torch.ones(1, 8))  # keeps what it gathers
            if dist.get_rank() == 1:
                model.way = "fails"
                with pytest.raises(ZeroDivisionError):
                    engine(torch.ones(1, 8))
            else:
                try:
                    engine(torch.ones(1, 8))
                    if peer_does == "save":
                        engine.save_checkpoint(folder)
                except Exception as error:  # noqa: BLE001
                    found = f"{type(error).__name__}: {error}"
        engine.destroy()
        model, engine = crossing_engine()
        engine.backward(engine(torch.ones(1, 8)))
        engine.step()
        engine.destroy()
    return found, model.layers[0].weight.shape


@pytest.mark.parametrize("peer_does", ["destroy", "save"])
@pytest.mark.parametrize("direct", ["1", "0"])
def test_after_an_evaluation_that_gathers_nothing_failed_on_one_rank(direct, peer_does, tmp_path):
    """A rank that waits there for its peers does so until they have heard of its failure."""
    peer, failed = run_ranks(2, fail_in_an_evaluation_and_destroy, direct, peer_does, str(tmp_path), timeout_s=30)
    assert failed == ("no error", (8, 8))
    assert peer[1] == (8, 8)
    told = "PartedByFailure: rank 0 cannot go on: rank 1 failed with ZeroDivisionError: before the first layer. Then"
    assert re.match(told if peer_does == "save" else "no error", peer[0]), peer


def search_batch_size(direct, stage, fails_in, *, destroys=True):
    """Rank 1 fails outside of the engine's calls, and both ranks destroy or drop the engine behind their `except`."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_COMM_DIRECT", direct)
        patch.setattr(parted, "FIRST_LOOK_S", 0.2)
        for attempt in range(3):
            model, engine = crossing_engine(stage)
            try:
                for step in range(3):
                    fails = attempt < 2 and step == 1 and dist.get_rank() == 1
                    train_step(engine, fails_in if fails else "")
                found.append("fine")
            except (CommError, MemoryError) as error:
                found.append(type(error).__name__)
            if destroys or attempt == 2:
                engine.destroy()
            del engine
    return found, model.layers[0].weight.shape, model.layers[0].weight.sum().item()


def train_step(engine, fails_in):
    loss = engine(torch.ones(1, 8))
    run_out(fails_in == "loss")
    engine.backward(loss)
    run_out(fails_in == "metric")
    engine.step()
    run_out(fails_in == "log")


def run_out(fails):
    if fails:
        raise MemoryError("out of memory, in the script")


SEARCHES = [(d, stage, where) for d in ("1", "0") for stage in (0, 2, 3) for where in ("loss", "metric", "log")]
IN_EVERY_RUN = {("1", 3, "loss"), ("0", 3, "log"), ("1", 3, "metric"), ("0", 2, "log"), ("1", 0, "loss")}


@pytest.mark.parametrize(("direct", "stage", "fails_in"), swept(SEARCHES, lambda *case: case in IN_EVERY_RUN))
def test_a_search_goes_on_whose_failed_engines_are_destroyed_behind_the_except(direct, stage, fails_in):
    """The peer is in a step of the engine that the failed rank has destroyed; both ranks make the same attempts."""
    check_search(*run_ranks(2, search_batch_size, direct, stage, fails_in, timeout_s=60))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_search_goes_on_whose_failed_engines_are_dropped(stage):
    check_search(*run_ranks(2, drop_engines, stage, timeout_s=60))


def drop_engines(stage):
    return search_batch_size("1", stage, "metric", destroys=False)


def check_search(peer, failed):
    assert failed[0] == ["MemoryError", "MemoryError", "fine"]
    assert peer[0][2] == "fine"
    assert "fine" not in peer[0][:2]
    assert peer[1:] == failed[1:]
