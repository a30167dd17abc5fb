"""`deepspeed.profiling.trace`: files with the phases of each step, and nothing of it when it is over."""

import gzip
import json

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError, StateError

PHASES = ("forward", "backward", "backward_inner", "step")


@pytest.fixture
def engine(single_rank):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam"},
    }
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
    yield engine
    engine.destroy()


def make_step(engine):
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()


def count_phases(folder, rank=0):
    events = json.loads(gzip.decompress((folder / f"rank{rank}.pt.trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return {phase: names.count(f"deepspeed.{phase}") for phase in PHASES}


def test_a_trace_has_the_phases_of_each_step(engine, tmp_path):
    with deepspeed.profiling.trace(tmp_path / "new"):
        for _ in range(3):
            make_step(engine)
    assert count_phases(tmp_path / "new") == {"forward": 6, "backward": 6, "backward_inner": 6, "step": 3}


def test_only_the_steps_that_were_asked_for(engine, tmp_path):
    with deepspeed.profiling.trace(tmp_path, skip_steps=2, num_steps=1):
        for _ in range(5):
            make_step(engine)
    assert count_phases(tmp_path)["backward"] == 2


def test_an_engine_built_inside_is_named_too(single_rank, tmp_path):
    with deepspeed.profiling.trace(tmp_path):
        config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "wall_clock_breakdown": True}
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
    assert count_phases(tmp_path) == {"forward": 1, "backward": 1, "backward_inner": 1, "step": 1}
    assert engine.timers("bwd").elapsed(reset=False) > 0  # measured as without a trace
    engine.destroy()


def test_an_exception_leaves_the_trace_of_what_was_before(engine, tmp_path):
    def fail():
        with deepspeed.profiling.trace(tmp_path):
            make_step(engine)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert count_phases(tmp_path)["forward"] == 2


def test_nothing_is_left_when_it_is_over(engine, tmp_path):
    before = engine._training.observers.phase
    with deepspeed.profiling.trace(tmp_path):
        assert engine._training.observers.phase != before
    assert engine._training.observers.phase == before


def test_other_ranks_do_nothing(engine, tmp_path):
    with deepspeed.profiling.trace(tmp_path / "none", ranks=[1]) as profile:
        assert profile is None
    assert not (tmp_path / "none").exists()


def test_memory_and_shapes(engine, tmp_path):
    with deepspeed.profiling.trace(tmp_path, memory=True, shapes=True):
        make_step(engine)
    text = gzip.decompress((tmp_path / "rank0.pt.trace.json.gz").read_bytes()).decode()
    assert '"[memory]"' in text
    assert '"Input Dims"' in text


def test_a_trace_within_a_trace_is_refused(engine, tmp_path):
    with deepspeed.profiling.trace(tmp_path / "first"):
        with pytest.raises(StateError, match="is open"), deepspeed.profiling.trace(tmp_path / "second"):
            pass
        with pytest.raises(StateError, match="is open"), deepspeed.profiling.mark_phases():
            pass
        make_step(engine)
    assert count_phases(tmp_path / "first")["step"] == 1


@pytest.mark.parametrize("numbers", [{"skip_steps": -1}, {"num_steps": 0}])
def test_numbers_of_steps_that_cannot_be(tmp_path, numbers):
    with (
        pytest.raises(ConfigError, match="give skip_steps of 0"),
        deepspeed.profiling.trace(tmp_path, **numbers),
    ):
        pass


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), deepspeed.profiling.trace(tmp_path / "file"):
        pytest.fail("it was entered")


def test_a_trace_without_a_step_leaves_no_file_and_says_so(engine, tmp_path, caplog):
    (tmp_path / "rank0.pt.trace.json.gz").write_text("of an earlier trace")
    with deepspeed.profiling.trace(tmp_path, skip_steps=3, num_steps=1):
        make_step(engine)
    assert not list(tmp_path.iterdir())
    assert "no step was recorded, for skip_steps is 3" in caplog.text


def test_the_accelerators_ranges_go_around_the_phases(engine, monkeypatch):
    opened, accelerator = [], get_accelerator()
    monkeypatch.setattr(accelerator, "range_push", lambda msg, *_: opened.append(msg))
    monkeypatch.setattr(accelerator, "range_pop", lambda *_: opened.append("end"))
    with deepspeed.profiling.mark_phases():
        make_step(engine)
    assert opened[:2] == ["deepspeed.forward", "end"]
    assert opened.count("end") == len(opened) / 2
    opened.clear()
    make_step(engine)
    assert not opened
