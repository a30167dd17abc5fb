"""TRL's GRPOTrainer generates and trains under DeepSpeed as it does under DDP: same rewards, losses and norms."""

import pytest
from deepspeed.testing.tiers import swept

CASES = {
    "stage 2": ["--stage", "2"],
    "stage 3": ["--stage", "3"],
    "stage 3, hybrid": ["--stage", "3", "--hybrid"],
}
QUICK = {"stage 3, hybrid"}


@pytest.mark.parametrize("case", swept(CASES, QUICK.__contains__))
def test_losses_equal_those_of_plain_torch(case, launch, tmp_path):
    expected = launch(tmp_path / "plain", "--stage", "none")
    found = launch(tmp_path, *CASES[case])

    assert found["rewards"] == expected["rewards"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert found["engine"] == ("DeepSpeedHybridEngine" if "--hybrid" in CASES[case] else "DeepSpeedEngine")


@pytest.mark.sweep
def test_ds_verify_lets_trl_look_for_the_hooks_of_stage_3(launch, tmp_path):
    launch.verify(tmp_path, "--stage", "3")
