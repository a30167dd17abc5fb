"""Weights go through torch.distributed.checkpoint from any stage to any other, and to DDP and back."""

import pytest
import torch
from deepspeed.testing.tiers import swept
from torch.testing import assert_close

STAGES = ("none", "0", "1", "2", "3")
QUICK = {("3", "none"), ("2", "3")}
CASES = [(saver, loader) for saver in STAGES for loader in STAGES if (saver, loader) != ("none", "none")]


def weights_of(folder):
    return torch.load(folder / "whole.pt", weights_only=True)


@pytest.mark.parametrize(("saver", "loader"), swept(CASES, lambda *case: case in QUICK))
def test_goes_on_from_the_weights_of_another(saver, loader, launch, plain, check_losses, tmp_path):
    saved = plain.folder
    if saver != "none":
        saved = tmp_path / "saved"
        check_losses(launch(saved, "--stage", saver)["losses"], plain.result["losses"], 1e-5)
    found = launch(tmp_path / "loaded", "--stage", loader, "--load", str(saved / "weights"))
    assert found["losses"] == pytest.approx(plain.result["losses"][8:], rel=1e-5)
    assert_close(weights_of(tmp_path / "loaded"), weights_of(plain.folder), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", swept(STAGES[1:], lambda stage: stage == "3"))
def test_master_weights_follow(stage, launch, plain, tmp_path):
    """In bf16: what was set survives the steps that follow."""
    found = launch(tmp_path, "--stage", stage, "--bf16", "--load", str(plain.folder / "weights"))
    assert found["losses"] == pytest.approx(plain.result["losses"][8:], rel=2e-2)
