"""What a load takes of a rank's memory: it grows with the rank's part of the states, not with the model."""

import ctypes
import threading
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.checkpoint.convert import convert
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import nn

WIDTH, LAYERS = 512, 24
NUMEL = WIDTH * WIDTH * LAYERS
STATE_BYTES = 12 * NUMEL  # master weights and two moments
WORLD_SIZE = 4  # of the load
PART_BYTES = STATE_BYTES // WORLD_SIZE


def private_bytes():
    """Of this process. Files that are mapped do not count."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def give_back_what_is_freed():
    """Let glibc keep none of the memory of tensors that are freed; stage 3 sets the same."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        assert libc.mallopt(m_trim_threshold, 2**17)
        assert libc.mallopt(m_mmap_threshold, 2**17)
        libc.malloc_trim(0)


@contextmanager
def added_bytes():
    """A list that gets, at the end, the most private memory that was added inside."""
    found, is_over, peaks = [], threading.Event(), [0]

    def watch():
        while not is_over.wait(0.001):
            peaks.append(max(peaks.pop(), private_bytes()))

    before = private_bytes()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        found.append(peaks[0] - before)


def create_engine(stage):
    torch.manual_seed(0)
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return deepspeed.initialize(model=model, config=config)[0]


def save_job(folder, stage):
    engine = create_engine(stage)
    engine.backward(engine(torch.ones(4, WIDTH)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, "t")
    engine.destroy()


def load_job(folder, tag, stage):
    give_back_what_is_freed()
    engine = create_engine(stage)
    engine.load_checkpoint(folder, tag)  # what is imported and allocated once is not of the load
    with added_bytes() as found:
        engine.load_checkpoint(folder, tag)
    assert engine.global_steps == 1
    engine.destroy()
    return found[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Gives the folder and the tag of a checkpoint, made when it is asked for: of "<world size> stage <stage>", or what
    one of stage 2 was converted to."""
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def make(source):
        place = folder / source
        if source not in ("dcp", "universal"):
            world_size, _, stage = source.split()
            run_ranks(int(world_size), save_job, str(place), int(stage))
            return str(place), "t"
        tag = "t_universal" if source == "universal" else "t"
        convert(make("1 stage 2")[0], place if source == "universal" else place / tag, source)
        return str(place), tag

    return make


SOURCES = ["4 stage 1", "4 stage 3", "1 stage 0", "1 stage 2", "1 stage 3", "dcp", "universal"]
KEPT = {("4 stage 1", 1), ("4 stage 3", 3), ("1 stage 2", 3), ("dcp", 1), ("universal", 1), ("1 stage 0", 1)}


@pytest.mark.parametrize(("source", "stage"), swept(product(SOURCES, (1, 3)), lambda *case: case in KEPT))
def test_a_load_adds_less_than_the_part_of_the_rank(saved, source, stage):
    peaks = run_ranks(WORLD_SIZE, load_job, *saved(source), stage)
    assert max(peaks) < 1.25 * PART_BYTES  # states that the engine has are replaced; a checkpoint has 4 parts
