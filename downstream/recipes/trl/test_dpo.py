"""TRL's DPOTrainer under DeepSpeed, with a reference model in an engine of its own, has the losses of DDP."""

import pytest


def test_losses_equal_those_of_plain_torch(stage_flags, launch, plain, check_losses, tmp_path):
    found = launch(tmp_path, *stage_flags)

    rel = 5e-3 if "--bf16" in stage_flags else 1e-6
    check_losses(found["losses"], plain.result["losses"], rel)
    assert found["norms"] == pytest.approx(plain.result["norms"], rel=10 * rel)
    # TRL shards the reference model under stage 3 only
    assert found["reference"] == (3 if "3" in stage_flags else 0)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", ["2", "3"])
def test_reference_computed_before_training(stage, launch, plain, check_losses, tmp_path):
    """An engine that only evaluates comes before the one that trains the same module."""
    check_losses(launch(tmp_path, "--stage", stage, "--precompute")["losses"], plain.result["losses"], 1e-6)
