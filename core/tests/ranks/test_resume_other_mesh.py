"""A checkpoint of a divided model loads where the model is divided otherwise, and training goes on as if unbroken.

The model of these tests needs no communication: its loss is a sum over elements, each with its own gradient.
"""

import deepspeed
import pytest
import torch
from deepspeed.errors import CheckpointError
from deepspeed.parallel.model_part import ModelPart, mark_part, part_held
from deepspeed.testing.distributed import run_ranks
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

SHAPES = {"column": (12, 5), "row": (5, 12), "fused": (18, 3), "frozen": (6, 4)}
STEPS = 2


def ranges_of(name, tp_rank, tp_size):
    """Along the divided dimension: a third of each of the three in "fused", else uneven runs."""

    def share(start, stop):
        cuts = [start + (stop - start) * each // tp_size for each in range(tp_size + 1)]
        return cuts[tp_rank], cuts[tp_rank + 1]

    if name == "fused":
        return tuple(share(start, start + 6) for start in (0, 6, 12))
    return (share(0, 4 if name == "frozen" else SHAPES[name][1 if name == "row" else 0]),)


class Divided(torch.nn.Module):
    """Each parameter of `SHAPES` in parts, and a whole one, a scalar and a buffer."""

    def __init__(self, tp_rank=0, tp_size=1, *, marks=True):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in SHAPES.items():
            whole = torch.randn(shape, generator=generator)
            dim = 1 if name in ("row", "frozen") else 0
            part = ModelPart(whole.shape, dim, ranges_of(name, tp_rank, tp_size))
            param = torch.nn.Parameter(part.take(whole).clone(), requires_grad=name != "frozen")
            setattr(self, name, param)
            if tp_size > 1 and marks:
                mark_part(param, part)
        self.whole = torch.nn.Parameter(torch.randn(7, generator=generator))
        self.scalar = torch.nn.Parameter(torch.tensor(2.0))
        self.register_buffer("count", torch.tensor([5.0]))

    def forward(self, step):
        terms = [(param * (1 + step)).sin().sum() for param in self.parameters() if param.requires_grad]
        return sum(terms) + self.frozen.sum() * 0


def make_engine(tp, stage, dtype, **kwargs):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        dtype: {"enabled": True},
        "mesh": {"tp": tp},
    }
    if dtype == "fp32":
        config.pop(dtype)
    model = Divided(deepspeed.comm.get_rank() % tp, tp, **kwargs)
    return deepspeed.initialize(model=model, config=config)[0]


def unmarked_job(folder, tp, marks):
    deepspeed.init_distributed()
    engine = make_engine(tp, 1, "fp32", marks=marks)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder, tag="a")
    engine.save_checkpoint(folder, tag="b")
    engine.destroy()
    return str(caught.value)


def train(engine, first):
    for step in range(first, first + STEPS):
        engine.backward(engine(torch.tensor(float(step))))
        engine.step()


def states_of(engine):
    """Master weights and first moments, with the part that they are."""
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = (
                part_held(param),
                safe_get_full_fp32_param(param).clone(),
                safe_get_full_optimizer_state(param, "exp_avg").clone(),
            )
    return found


def save_job(folder, tp, stage, dtype):
    deepspeed.init_distributed()
    engine = make_engine(tp, stage, dtype)
    train(engine, 0)
    engine.module.count.fill_(9.0)
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()


def resume_job(folder, tp, stage, dtype, states=True):
    deepspeed.init_distributed()
    engine = make_engine(tp, stage, dtype)
    if folder is None:
        train(engine, 0)
    else:
        engine.load_checkpoint(folder, tag="a", load_optimizer_states=states)
        assert engine.module.count.item() == 9.0
        assert engine.global_steps == STEPS
    if states:
        train(engine, STEPS)
    found = (
        states_of(engine)
        if states
        else {
            n: (part_held(p), safe_get_full_fp32_param(p).clone())
            for n, p in engine.module.named_parameters()
            if p.requires_grad
        }
    )
    engine.destroy()
    return found


def joined(by_rank):
    """Whole values, from what each rank has."""
    wholes = {}
    for states in by_rank:
        for name, (part, *values) in states.items():
            for index, value in enumerate(values):
                if part is None:
                    wholes[name, index] = value
                else:
                    part.put(value, wholes.setdefault((name, index), torch.full(part.shape, torch.nan)))
    return wholes


COVERING = [
    # tp and ranks of the save, of the load; stages; dtype
    ((2, 2), (1, 1), 0, 0, "fp32"),
    ((2, 2), (1, 2), 1, 3, "bf16"),
    ((2, 2), (1, 1), 3, 2, "fp32"),
    ((1, 1), (2, 2), 2, 3, "fp32"),
    ((1, 2), (2, 2), 3, 0, "bf16"),
    ((3, 3), (2, 2), 1, 1, "bf16"),
    ((2, 2), (3, 3), 3, 3, "fp32"),
]
WORLDS = [(1, 1), (1, 2), (2, 2), (3, 3), (2, 4)]
EVERY = [
    pytest.param(source, target, saved, loaded, "fp32", marks=pytest.mark.sweep)
    for source in WORLDS
    for target in WORLDS
    for saved, loaded in ((0, 1), (1, 0), (2, 3), (3, 2), (0, 3), (3, 0))
    if source[0] != target[0]
]


@pytest.mark.parametrize(("source", "target", "saved", "loaded", "dtype"), [*COVERING, *EVERY])
def test_training_goes_on_where_the_model_is_divided_otherwise(tmp_path, source, target, saved, loaded, dtype):
    run_ranks(source[1], save_job, tmp_path, source[0], saved, dtype)
    found = joined(run_ranks(target[1], resume_job, tmp_path, target[0], loaded, dtype))
    unbroken = joined(run_ranks(1, resume_job, None, 1, loaded, dtype))
    assert found.keys() == unbroken.keys()
    for key, value in unbroken.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=str(key))


@pytest.mark.parametrize("loaded", [0, 3])
def test_weights_alone_load_where_the_model_is_divided_otherwise(tmp_path, loaded):
    run_ranks(2, save_job, tmp_path, 2, 3, "fp32")
    found = joined(run_ranks(1, resume_job, tmp_path, 1, loaded, "fp32", False))
    whole = joined(run_ranks(2, resume_job, tmp_path, 2, 3, "fp32", False))
    assert all(torch.equal(found[key], value) for key, value in whole.items())


def test_a_model_whose_division_is_not_known_loads_only_as_it_was_saved(tmp_path):
    run_ranks(1, save_job, tmp_path, 1, 1, "fp32")
    for told in run_ranks(2, unmarked_job, tmp_path, 2, False):
        assert "was saved by 1 model parallel ranks, this job has 2, and this run did not say" in told
    (tmp_path / "a").rename(tmp_path / "other")
    (tmp_path / "b").rename(tmp_path / "a")
    (told,) = run_ranks(1, unmarked_job, tmp_path, 1, True)
    assert "was saved by 2 model parallel ranks, this job has 1, and the run that saved it did not say" in told
