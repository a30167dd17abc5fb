"""Lightning's Trainer with its DeepSpeed strategy has the losses that it has with DDP, also after a resume."""

import pytest
from deepspeed.testing.tiers import swept

CASES = {
    "stage 1": ["--stage", "1"],
    "stage 2": ["--stage", "2"],
    "stage 2, bf16": ["--stage", "2", "--bf16"],
    "stage 3": ["--stage", "3"],
    "stage 3, built inside zero.Init": ["--stage", "3", "--configure-model"],
    "stage 3, bf16": ["--stage", "3", "--bf16"],
}
QUICK = {"stage 3"}


@pytest.mark.parametrize("case", swept(CASES, QUICK.__contains__))
def test_trains_saves_resumes_and_tests(case, launch, plain, check_losses, tmp_path):
    rel = 5e-3 if "--bf16" in CASES[case] else 1e-6
    whole = launch(tmp_path, *CASES[case])
    check_losses(whole["losses"], plain.result["losses"], rel)
    for tested in ("tested", "tested_first"):
        assert whole[tested] == pytest.approx(plain.result[tested], rel=rel)
    assert whole["tested"] < whole["tested_first"]

    assert (tmp_path / "epoch=0.ckpt" / "checkpoint").is_dir()
    resumed = launch(tmp_path, *CASES[case], "--resume")
    assert resumed["losses"] == pytest.approx(whole["losses"][8:], rel=1e-6)
    assert resumed["tested"] == pytest.approx(whole["tested"], rel=1e-6)


@pytest.mark.sweep
def test_lightnings_own_launcher(launch, plain, check_losses, tmp_path):
    check_losses(launch(tmp_path, "--stage", "2", launcher="python")["losses"], plain.result["losses"], 1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", ["2", "3"])
def test_resumes_on_one_rank(stage, launch, tmp_path):
    whole = launch(tmp_path, "--stage", stage)
    resumed = launch(tmp_path, "--stage", stage, "--resume", "--devices", "1", launcher="python")
    assert resumed["losses"] == pytest.approx(whole["losses"][8:], rel=1e-4)
    assert resumed["tested"] == pytest.approx(whole["tested"], rel=1e-4)


@pytest.mark.parametrize("stage", swept(["2", "3"], {"2"}.__contains__))
def test_a_module_trains_again_when_its_engine_is_destroyed(stage, launch, tmp_path):
    wanted = launch(tmp_path / "plain", "--stage", "none", "--again")
    found = launch(tmp_path / "sharded", "--stage", stage, "--again")
    assert found["again"] == pytest.approx(wanted["again"], rel=1e-4)
    assert found["again"][0] < found["losses"][0]
