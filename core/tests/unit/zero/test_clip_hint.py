"""torch's clipping finds no gradients at stages 1 to 3, and that is said once."""

import pytest
import torch
from deepspeed.zero import clip_hint
from torch import nn
from torch.nn.utils import clip_grad_norm_


@pytest.mark.parametrize("stage", range(4))
def test_clipping_that_finds_no_gradients(make_engine, monkeypatch, stage):
    said = []
    monkeypatch.setattr(clip_hint, "warn_once", said.append)
    model = nn.Linear(3, 2)
    engine = make_engine(model, zero_optimization={"stage": stage})
    engine.backward(engine(torch.ones(4, 3)).sum())
    clip_grad_norm_(model.parameters(), 1.0)
    assert len(said) == (stage > 0)
    if stage:
        assert f"clips nothing, since at zero_optimization.stage {stage}" in said[0]
        assert "set gradient_clipping" in said[0]
    engine.step()


def test_gradients_of_others_are_clipped_as_before(make_engine, monkeypatch):
    said = []
    monkeypatch.setattr(clip_hint, "warn_once", said.append)
    make_engine(nn.Linear(3, 2), zero_optimization={"stage": 1})
    other = nn.Linear(3, 2, bias=False)
    clip_grad_norm_(other.parameters(), 1.0)
    other(torch.full((1, 3), 4.0)).sum().backward()
    norm = clip_grad_norm_(other.parameters(), 1.0)
    assert norm > 1.0
    assert other.weight.grad.norm() == pytest.approx(1.0, rel=1e-4)
    assert said == []
