"""TRL's SFTTrainer under DeepSpeed has the losses that it has under DDP."""

import pytest
from deepspeed.testing.tiers import swept

CASES = {
    "stage 1": ["--stage", "1"],
    "stage 2": ["--stage", "2"],
    "stage 2, LoRA": ["--stage", "2", "--lora"],
    "stage 2, bf16": ["--stage", "2", "--bf16"],
    "stage 3": ["--stage", "3"],
    "stage 3, LoRA": ["--stage", "3", "--lora"],
}
QUICK = {"stage 2"}


@pytest.mark.parametrize("case", swept(CASES, QUICK.__contains__))
def test_losses_equal_those_of_plain_torch(case, launch, check_losses, tmp_path):
    flags = [flag for flag in CASES[case] if flag == "--lora"]
    expected = launch(tmp_path / "plain", "--stage", "none", *flags)
    found = launch(tmp_path, *CASES[case])

    rel = 5e-3 if "--bf16" in CASES[case] else 1e-6
    check_losses(found["losses"], expected["losses"], rel)
    assert found["norms"] == pytest.approx(expected["norms"], rel=10 * rel)
