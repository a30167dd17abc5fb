"""Fabric with its DeepSpeed strategy has the losses that it has with DDP, also after a load."""

import pytest


def test_trains_saves_and_loads(stage_flags, launch, plain, check_losses, tmp_path):
    whole = launch(tmp_path, *stage_flags)
    check_losses(whole["losses"], plain.result["losses"], 5e-3 if "--bf16" in stage_flags else 1e-6)
    resumed = launch(tmp_path, *stage_flags, "--resume")
    assert resumed["losses"] == pytest.approx(whole["losses"][8:], rel=1e-6)
