"""Fabric with its DeepSpeed strategy has the losses that it has with DDP, also after a load."""

import pytest
from deepspeed.testing.tiers import swept

CASES = {
    "stage 1": ["--stage", "1"],
    "stage 2": ["--stage", "2"],
    "stage 2, bf16": ["--stage", "2", "--bf16"],
    "stage 3": ["--stage", "3"],
    "stage 3, bf16": ["--stage", "3", "--bf16"],
}
QUICK = {"stage 3"}


@pytest.mark.parametrize("case", swept(CASES, QUICK.__contains__))
def test_trains_saves_and_loads(case, launch, plain, check_losses, tmp_path):
    whole = launch(tmp_path, *CASES[case])
    check_losses(whole["losses"], plain.result["losses"], 5e-3 if "--bf16" in CASES[case] else 1e-6)
    resumed = launch(tmp_path, *CASES[case], "--resume")
    assert resumed["losses"] == pytest.approx(whole["losses"][8:], rel=1e-6)
