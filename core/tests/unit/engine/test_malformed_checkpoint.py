"""Model files whose values are of other types than a save gives them: one error, which names the file and the key."""

import copy

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import layout
from deepspeed.errors import CheckpointError
from torch import nn

VALUES = {
    "module": [5, None, ["weight"], {5: 6}, torch.ones(2)],
    "buffer_names": ["x", [5], -1],
    "optimizer": ["x", 5, [5]],
    "param_shapes": [5, "x", {"weight": [2, 2]}, [{"weight": "2 x 2"}], [{"weight": 5}], [{"weight": [-2]}]],
    "frozen_param_shapes": [5, "x", {}, {"bias": "2"}, {5: [2]}],
    "frozen_param_fragments": [5, {"bias": "x"}, torch.ones(2)],
    "shared_params": [5, ["x"], {"weight": 5}],
    "global_steps": ["x", -1, 1.5, True, None, torch.ones(2)],
    "global_samples": [[5], {}],
    "skipped_steps": ["3"],
    "lr_scheduler": [
        5,
        ["x"],
        torch.ones(2),
        *({"last_batch_iteration": n} for n in ("x", None, -5, float("nan"), 2**2000)),
    ],
}
#: of which a parameter cannot take values
FORMS = {
    "meta": torch.empty(2, 2, device="meta"),
    "sparse": torch.ones(2, 2).to_sparse(),
}
CASES = [(key, value) for key, values in VALUES.items() for value in values]


@pytest.fixture
def create(make_engine):
    def create(stage):
        torch.manual_seed(0)
        net = nn.Linear(2, 2)
        net.bias.requires_grad_(False)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        return make_engine(net, zero_optimization=zero, scheduler={"type": "WarmupLR", "params": {}})

    return create


def whole_weight(engine):
    with deepspeed.zero.GatheredParameters(engine.module.weight):
        return engine.module.weight.detach().clone()


@pytest.mark.parametrize(("saved_stage", "stage"), [(0, 2), (2, 2), (3, 0)])
def test_values_of_other_types_are_refused_by_name(create, tmp_path, saved_stage, stage):
    create(saved_stage).save_checkpoint(tmp_path, "t")
    engine = create(stage)
    (path,) = tmp_path.glob(f"t/*{layout.model_file(0)}")
    path.with_name("index.json").unlink()
    before = engine.module.weight.detach().clone() if stage < 3 else None
    state = torch.load(path, weights_only=True)
    for key, value in CASES:
        torch.save({**state, key: value}, path)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(tmp_path, "t")
        if key == "lr_scheduler":
            assert "last_batch_iteration" in str(caught.value)
        else:
            assert str(path) in str(caught.value), (key, value)
            assert key in str(caught.value), (key, value)
        assert before is None or torch.equal(engine.module.weight, before)
        assert engine.global_steps == 0
    for form, value in FORMS.items() if saved_stage < 3 else ():
        torch.save({**state, "module": {**state["module"], "weight": value}}, path)
        with pytest.raises(CheckpointError, match=f"weight is a {form} tensor"):
            engine.load_checkpoint(tmp_path, "t")
    torch.save(state, path)
    assert engine.load_checkpoint(tmp_path, "t")[0] == str(path)


@pytest.mark.parametrize(("saved_stage", "stage"), [(0, 0), (2, 2), (3, 3), (3, 1)])
def test_a_file_without_a_counter_is_refused_before_anything_changes(create, tmp_path, saved_stage, stage):
    create(saved_stage).save_checkpoint(tmp_path, "t")
    (path,) = tmp_path.glob(f"t/*{layout.model_file(0)}")
    path.with_name("index.json").unlink()
    state = torch.load(path, weights_only=True)
    engine = create(stage)
    before = whole_weight(engine)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(engine.module.weight, modifier_rank=0):
        engine.module.weight.zero_()
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        torch.save({key: value for key, value in state.items() if key != counter}, path)
        for flags in ({}, {"load_optimizer_states": False}):
            with pytest.raises(
                CheckpointError, match=rf"found no {counter} in it, .*; nothing was loaded\. .*module_only"
            ):
                engine.load_checkpoint(tmp_path, "t", **flags)
            assert not whole_weight(engine).any()
    engine.load_checkpoint(tmp_path, "t", load_module_only=True)
    assert torch.equal(whole_weight(engine), before)


def engine_with(make_engine, create_schedule):
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    arguments = {"optimizer": optimizer, "lr_scheduler": create_schedule(optimizer)}
    return make_engine(net, arguments=arguments, optimizer=None)


def test_a_torch_schedule_takes_numbers_where_it_has_numbers(make_engine, tmp_path):
    engine_with(make_engine, torch.optim.lr_scheduler.ReduceLROnPlateau).save_checkpoint(tmp_path, "t")
    engine = engine_with(make_engine, torch.optim.lr_scheduler.ReduceLROnPlateau)
    (path,) = tmp_path.glob(f"t/*{layout.model_file(0)}")
    path.with_name("index.json").unlink()
    state = torch.load(path, weights_only=True)
    assert state["lr_scheduler"]["best"] == float("inf")
    for change in ({"last_epoch": "x"}, {"best": float("nan")}, {"min_lrs": "0"}, {"min_lrs": ["x"]}):
        torch.save({**state, "lr_scheduler": {**state["lr_scheduler"], **change}}, path)
        with pytest.raises(CheckpointError, match=f"ReduceLROnPlateau: the saved {next(iter(change))} is"):
            engine.load_checkpoint(tmp_path, "t")
    torch.save(state, path)
    assert engine.load_checkpoint(tmp_path, "t")[0] == str(path)


def create_schedules(optimizer):
    """One of each kind that takes a part of its state from a key that must be there."""
    kinds = torch.optim.lr_scheduler
    lambdas = kinds.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    factors = kinds.MultiplicativeLR(optimizer, lambda step: 0.9)
    return {
        "LambdaLR": lambdas,
        "MultiplicativeLR": factors,
        "CyclicLR": kinds.CyclicLR(optimizer, 0.1, 0.2),
        "SequentialLR": kinds.SequentialLR(optimizer, [lambdas, factors], [3]),
        "ChainedScheduler": kinds.ChainedScheduler([lambdas, factors]),
    }


@pytest.mark.parametrize(
    ("kind", "path_to", "change", "message"),
    [
        ("LambdaLR", (), None, "LambdaLR: found no lr_lambdas in the saved state"),
        ("LambdaLR", (), [None, None], "LambdaLR: the saved lr_lambdas is .*, where this run has .None."),
        ("LambdaLR", (), 5, "LambdaLR: the saved lr_lambdas is 5"),
        ("LambdaLR", (), ["x"], "LambdaLR: the saved lr_lambdas is .'x'."),
        ("MultiplicativeLR", (), None, "MultiplicativeLR: found no lr_lambdas"),
        ("CyclicLR", (), None, "CyclicLR: found no _scale_fn_custom"),
        ("CyclicLR", (), 5, "CyclicLR: the saved _scale_fn_custom is 5"),
        ("SequentialLR", (), None, "SequentialLR: found no _schedulers"),
        ("SequentialLR", (), [], "SequentialLR: the saved _schedulers is "),
        ("SequentialLR", (), [5, 5], "LambdaLR, schedule 0 of SequentialLR: the saved state_dict is 5"),
        ("SequentialLR", (1,), None, "MultiplicativeLR, schedule 1 of SequentialLR: found no lr_lambdas"),
        ("ChainedScheduler", (0,), None, "LambdaLR, schedule 0 of ChainedScheduler: found no lr_lambdas"),
    ],
)
def test_a_schedule_is_refused_whose_parts_are_not_in_its_state(make_engine, tmp_path, kind, path_to, change, message):
    engine_with(make_engine, lambda optimizer: create_schedules(optimizer)[kind]).save_checkpoint(tmp_path, "t")
    engine = engine_with(make_engine, lambda optimizer: create_schedules(optimizer)[kind])
    (path,) = tmp_path.glob(f"t/*{layout.model_file(0)}")
    path.with_name("index.json").unlink()
    state = torch.load(path, weights_only=True)
    whole = part = copy.deepcopy(state["lr_scheduler"])
    for place in path_to:
        part = part["_schedulers"][place]
    key = next(name for name in ("lr_lambdas", "_schedulers", "_scale_fn_custom") if name in part)
    if change is None:
        del part[key]
    else:
        part[key] = change
    torch.save({**state, "lr_scheduler": whole}, path)
    before = engine.module.weight.detach().clone()
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(tmp_path, "t")
    assert torch.equal(engine.module.weight, before)
    torch.save(state, path)
    assert engine.load_checkpoint(tmp_path, "t")[0] == str(path)


@pytest.mark.parametrize("scale", ["x", float("nan"), float("inf"), 0.0, True])
def test_a_loss_scale_is_a_number_above_0(make_engine, tmp_path, scale):
    make_engine(nn.Linear(2, 2), zero_optimization={"stage": 1}, fp16={"enabled": True}).save_checkpoint(tmp_path, "t")
    engine = make_engine(nn.Linear(2, 2), zero_optimization={"stage": 1}, fp16={"enabled": True})
    (path,) = tmp_path.glob("t/*optim_states.pt")
    path.with_name("index.json").unlink()
    state = torch.load(path, weights_only=True)
    state["optimizer_state_dict"]["loss_scaler"]["cur_scale"] = scale
    torch.save(state, path)
    before = engine.module.weight.detach().clone()
    with pytest.raises(CheckpointError, match="loss scale: the saved cur_scale is"):
        engine.load_checkpoint(tmp_path, "t")
    assert torch.equal(engine.module.weight, before)
