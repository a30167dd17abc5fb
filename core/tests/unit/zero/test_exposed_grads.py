"""torch's clipping finds no gradients at stages 1 to 3, and that is said once."""

import pytest
import torch
from deepspeed.zero import gradient_memory
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

CLIPPING = [clip_grad_norm_, clip_grad_value_]  # imported before there is an engine, as scripts do


@pytest.fixture
def said(monkeypatch):
    said = []
    monkeypatch.setattr(gradient_memory, "warn_once", said.append)
    return said


@pytest.mark.parametrize("clip", CLIPPING)
@pytest.mark.parametrize("stage", range(4))
def test_clipping_that_finds_no_gradients(make_engine, said, stage, clip):
    model = nn.Linear(3, 2)
    engine = make_engine(model, zero_optimization={"stage": stage})
    engine.backward(engine(torch.ones(4, 3)).sum())
    clip(model.parameters(), 1.0)
    assert len(said) == (stage > 0)
    if stage:
        assert f"{clip.__name__}: clips nothing, since at zero_optimization.stage {stage}" in said[0]
        assert "set gradient_clipping" in said[0]
    engine.step()


def test_gradients_of_others_are_clipped_as_before(make_engine, said):
    make_engine(nn.Linear(3, 2), zero_optimization={"stage": 1})
    other = nn.Linear(3, 2, bias=False)
    clip_grad_norm_(other.parameters(), 1.0)
    other(torch.full((1, 3), 4.0)).sum().backward()
    norm = clip_grad_norm_(other.parameters(), 1.0)
    assert norm > 1.0
    assert other.weight.grad.norm() == pytest.approx(1.0, rel=1e-4)
    clip_grad_value_(other.weight, clip_value=0.1)
    assert other.weight.grad.abs().max() == pytest.approx(0.1)
    assert other.weight.requires_grad
    assert not said
