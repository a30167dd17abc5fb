"""A model with fp32 buffers trained in bf16 by the Trainer has the losses that it has under plain autocast."""

import pytest
from deepspeed.testing.tiers import swept

CASES = {
    "stage 1": ["--stage", "1"],
    "stage 2": ["--stage", "2"],
    "stage 3": ["--stage", "3"],
    "stage 3, built inside zero.Init": ["--stage", "3", "--init"],
}
QUICK = {"stage 3"}


@pytest.mark.parametrize("case", swept(CASES, QUICK.__contains__))
def test_rotary_frequencies_stay_as_they_are(case, launch, check_losses, tmp_path):
    expected = launch(tmp_path / "plain", "--stage", "none", "--bf16")
    found = launch(tmp_path, *CASES[case], "--bf16")

    assert found["weights"] == "torch.bfloat16"
    assert (found["dtype"], found["angle_error"]) == ("torch.float32", 0.0)
    check_losses(found["losses"], expected["losses"], 1e-2)
