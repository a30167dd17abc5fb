"""Model files whose values are of other types than a save gives them: one error, which names the file and the key."""

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
    "global_steps": ["x", -1, 1.5, None, torch.ones(2)],
    "global_samples": [[5], {}],
    "skipped_steps": ["3"],
    "lr_scheduler": [5, ["x"], torch.ones(2)],
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
            assert "the saved scheduler state has no last_batch_iteration" in str(caught.value)
        else:
            assert str(path) in str(caught.value), (key, value)
            assert key in str(caught.value), (key, value)
            assert torch.equal(engine.module.weight, before)
    torch.save(state, path)
    assert engine.load_checkpoint(tmp_path, "t")[0] == str(path)
