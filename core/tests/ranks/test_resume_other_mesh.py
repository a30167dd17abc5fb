"""A checkpoint of a divided model loads where the model is divided otherwise, and training goes on as if unbroken.

The model of these tests needs no communication: its loss is a sum over elements, each with its own gradient.
"""

import subprocess
import sys

import deepspeed
import pytest
import torch
from deepspeed.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.checkpoint.convert import convert
from deepspeed.errors import CheckpointError
from deepspeed.parallel.model_part import ModelPart, mark_part
from deepspeed.pipe import PipelineModule
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
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
            elif tp_size > 1:
                param.tensor_model_parallel = True  # Megatron's mark, which norms read
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
    """Master weights and first moments."""
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg")
    return found


def save_job(folder, tp, stage, dtype, client_state=None):
    deepspeed.init_distributed()
    engine = make_engine(tp, stage, dtype, marks=client_state is None)
    train(engine, 0)
    engine.module.count.fill_(9.0)
    engine.save_checkpoint(folder, tag="a", client_state=client_state)
    engine.destroy()


def resume_job(folder, tp, stage, dtype, states=True, tag="a"):
    deepspeed.init_distributed()
    engine = make_engine(tp, stage, dtype)
    if folder is None:
        train(engine, 0)
    else:
        engine.load_checkpoint(folder, tag=tag, load_optimizer_states=states)
        assert engine.module.count.item() == 9.0
        assert engine.global_steps == STEPS
    if states:
        train(engine, STEPS)
    found = (
        states_of(engine)
        if states
        else {n: (safe_get_full_fp32_param(p),) for n, p in engine.module.named_parameters() if p.requires_grad}
    )
    engine.destroy()
    return found


def joined(by_rank):
    """The values that all ranks have."""
    wholes = {(name, index): value for name, its in by_rank[0].items() for index, value in enumerate(its)}
    for states in by_rank[1:]:
        for name, its in states.items():
            assert all(torch.equal(value, wholes[name, index]) for index, value in enumerate(its))
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
        assert "was saved by 1 model parallel rank, this job has 2, and this run did not say" in told
    (tmp_path / "a").rename(tmp_path / "other")
    (tmp_path / "b").rename(tmp_path / "a")
    (told,) = run_ranks(1, unmarked_job, tmp_path, 1, True)
    assert "was saved by 2 model parallel ranks, this job has 1, and the run that saved it did not say" in told
    with pytest.raises(CheckpointError, match="saved by 2 model parallel ranks, and its files do not say which part"):
        convert(tmp_path, tmp_path / "joined", "universal", tag="a")


CONSOLIDATED = [(2, 2, 0, "bf16"), (3, 3, 3, "fp32"), (2, 4, 2, "bf16")]
ALL = [(tp, world, stage, dtype) for tp, world in WORLDS[2:] for stage in range(4) for dtype in ("fp32", "bf16")]


@pytest.mark.parametrize(("tp", "world", "stage", "dtype"), swept(ALL, lambda *case: case in CONSOLIDATED))
def test_fp32_weights_of_a_divided_model_are_whole(tmp_path, tp, world, stage, dtype):
    run_ranks(world, save_job, tmp_path / "divided", tp, stage, dtype)
    run_ranks(1, save_job, tmp_path / "whole", 1, stage, dtype)
    expected = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "whole", "a")
    blocker = "import sys, runpy; sys.modules['deepspeed'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    script = f"sys.argv[1:] = {['-t', 'a', str(tmp_path / 'divided'), str(tmp_path / 'out')]!r}"
    program = blocker.replace("runpy.run_path(sys.argv[1]", f"path = sys.argv[1]; {script}; runpy.run_path(path")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "divided" / "zero_to_fp32.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for found in (
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "divided", "a"),
        torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True),
    ):
        assert list(found) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "divided", "a", exclude_frozen_parameters=True)
    assert list(trained) == [name for name in expected if name != "frozen"]


def test_parts_that_are_missing_are_named(tmp_path):
    run_ranks(3, save_job, tmp_path, 3, 0, "fp32")
    (tmp_path / "a" / "index.json").unlink()
    path = tmp_path / "a" / "mp_rank_01_model_states.pt"
    state = torch.load(path, weights_only=True)
    del state["module"]["column"]
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="column: found nothing of number 4 of the 12 along dimension 0"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "a")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_01_model_states\.pt cannot be read"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "a")


JOINED = [
    # tp and ranks of the save; stage; format; tp and ranks of the load; stage; dtype
    ((2, 2), 1, "universal", (1, 1), 0, "fp32"),
    ((2, 4), 3, "universal", (1, 2), 3, "bf16"),
    ((3, 3), 0, "universal", (2, 2), 3, "bf16"),
    ((2, 4), 2, "dcp", (1, 2), 1, "fp32"),
    ((2, 2), 3, "dcp", (3, 3), 0, "fp32"),
]
ALL_JOINED = [
    (source, saved, form, target, loaded, "fp32")
    for source in WORLDS[2:]
    for target in WORLDS
    for saved, loaded in ((0, 1), (1, 3), (2, 0), (3, 2), (3, 3))
    for form in ("universal", "dcp")
]


@pytest.mark.parametrize(
    ("source", "saved", "form", "target", "loaded", "dtype"),
    swept([*JOINED, *ALL_JOINED], lambda *case: case in JOINED),
)
def test_what_is_joined_of_a_divided_model_trains_on(tmp_path, source, saved, form, target, loaded, dtype):
    run_ranks(source[1], save_job, tmp_path / "saved", source[0], saved, dtype)
    joined_folder = tmp_path / "joined" if form == "universal" else tmp_path / "joined" / "a"
    convert(tmp_path / "saved", joined_folder, form, tag="a")
    tag = "a_universal" if form == "universal" else "a"
    found = joined(run_ranks(target[1], resume_job, tmp_path / "joined", target[0], loaded, dtype, True, tag))
    unbroken = joined(run_ranks(1, resume_job, None, 1, loaded, dtype))
    assert found.keys() == unbroken.keys()
    for key, value in unbroken.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=str(key))


INFO = {
    "universal_checkpoint_info": {
        "universal_checkpoint_version": 0.4,
        "original_vocab_size": 12,
        "vocabulary_parameter_patterns": ["column"],
        "tp_replicated_parameter_patterns": ["who.e$"],
        "parameter_to_average_patterns": ["scalar"],
        "parameter_with_row_parallelism_patterns": ["row", "frozen"],
        "parameter_with_sub_params": [{"patterns": ["fused"], "shape": [[6, 6, 6], 3], "partition_dim": 0}],
    }
}


@pytest.mark.parametrize(("saved", "target", "loaded"), [(1, (1, 1), 2), (3, (1, 2), 3), (0, (2, 2), 1)])
def test_the_patterns_of_a_client_state_say_how_a_model_is_divided(tmp_path, saved, target, loaded):
    run_ranks(2, save_job, tmp_path / "saved", 2, saved, "bf16", INFO)
    convert(tmp_path / "saved", tmp_path / "joined", "universal", tag="a")
    found = joined(
        run_ranks(target[1], resume_job, tmp_path / "joined", target[0], loaded, "bf16", True, "a_universal")
    )
    unbroken = joined(run_ranks(1, resume_job, None, 1, loaded, "bf16"))
    assert found.keys() == unbroken.keys()
    for key, value in unbroken.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=str(key))


def dtypes_job(folder):
    deepspeed.init_distributed()
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(4)) for name in "abc"})
    model["b"] = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
    groups = [{"params": [model["a"], model["b"]]}, {"params": [model["c"]], "lr": 0.5}]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.1), config=config)[0]
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()


def test_a_group_of_several_dtypes_is_whole_where_others_read_it(tmp_path):
    run_ranks(1, dtypes_job, tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "joined", "universal", tag="a")
    groups = torch.load(tmp_path / "joined/a_universal/zero/optimizer_state.pt", weights_only=True)["param_groups"]
    assert [(group["lr"], group["params"]) for group in groups] == [(0.1, [0, 1]), (0.5, [2])]


def stages_job(folder, num_stages, zero_stage):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    module = PipelineModule([torch.nn.Linear(6, 6) for _ in range(4)], num_stages, loss_fn=torch.nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": zero_stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=module, config=config)[0]
    generator = torch.Generator().manual_seed(1)
    engine.train_batch(iter([tuple(torch.randn(2, 2, 6, generator=generator)) for _ in range(2)]))
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()


@pytest.mark.parametrize("zero_stage", swept([0, 1, 3], lambda zero_stage: zero_stage == 1))
def test_fp32_weights_of_pipeline_stages_are_whole(tmp_path, zero_stage):
    run_ranks(2, stages_job, tmp_path / "stages", 2, zero_stage)
    run_ranks(1, stages_job, tmp_path / "whole", 1, zero_stage)
    found, expected = (get_fp32_state_dict_from_zero_checkpoint(tmp_path / name, "a") for name in ("stages", "whole"))
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)
