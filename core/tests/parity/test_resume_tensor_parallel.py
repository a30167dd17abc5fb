"""A model of transformers that was saved on some tensor-parallel ranks goes on, on others, as if unbroken."""

import deepspeed
import pytest
import torch
from deepspeed.testing.distributed import run_ranks

from .test_tensor_parallel import NUM_STEPS, config_of, create, loss_of, reference, tokens

HALF = NUM_STEPS // 2


def steps(engine, first):
    losses = []
    for step in range(first, first + HALF):
        loss = loss_of(engine, tokens(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def start(name, tp, stage):
    config = config_of(tp, stage)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return deepspeed.initialize(model=create(name), config=config)[0]


def save_job(folder, name, tp, stage):
    engine = start(name, tp, stage)
    losses = steps(engine, 0)
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()
    return losses


def resume_job(folder, name, tp, stage):
    engine = start(name, tp, stage)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.zero_()
    engine.load_checkpoint(folder, tag="a")
    losses = steps(engine, HALF)
    assert engine.save_16bit_model(folder, "weights.bin")
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        # tensor-parallel ranks and stage of the save and of the load
        ("llama, tied", (2, 1), (1, 0)),
        ("gpt2", (3, 3), (2, 2)),
        pytest.param("llama, one key", (2, 0), (3, 3), marks=pytest.mark.sweep),
        pytest.param("bloom", (2, 3), (3, 1), marks=pytest.mark.sweep),
        pytest.param("falcon", (3, 2), (1, 3), marks=pytest.mark.sweep),
        pytest.param("falcon, new", (2, 1), (1, 0), marks=pytest.mark.sweep),
        pytest.param("t5", (1, 3), (2, 1), marks=pytest.mark.sweep),
        pytest.param("bert", (2, 1), (1, 2), marks=pytest.mark.sweep),
        pytest.param("phi3", (1, 0), (2, 3), marks=pytest.mark.sweep),
        pytest.param("llama, grouped", (3, 1), (2, 0), marks=pytest.mark.sweep),
    ],
)
def test_a_divided_model_goes_on_over_other_ranks(tmp_path, name, saved, loaded):
    losses, _, weights = reference(name)
    for found in run_ranks(saved[0], save_job, tmp_path, name, *saved):
        assert found == pytest.approx(losses[:HALF], rel=1e-5)
    for found in run_ranks(loaded[0], resume_job, tmp_path, name, *loaded):
        assert found == pytest.approx(losses[HALF:], rel=1e-5)
    model = create(name)
    model.load_state_dict(torch.load(tmp_path / "weights.bin"), strict=True)
    for path, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), weights[path], atol=1e-5, rtol=0, msg=path)
