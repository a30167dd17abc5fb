"""Accelerate with DeepSpeed has the losses, norms and weights that it has with DDP; so has a resumed run."""

import pytest
import torch
from deepspeed.testing.tiers import swept
from safetensors.torch import load_file
from torch.testing import assert_close

CASES = {
    "stage 1": ["--stage", "1"],
    "stage 2": ["--stage", "2"],
    "stage 2, bf16": ["--stage", "2", "--bf16", "--from-config"],
    "stage 3": ["--stage", "3"],
    "stage 3, bf16": ["--stage", "3", "--bf16", "--from-config"],
}
QUICK = {"stage 3"}


def check(found, expected, check_losses, rel):
    check_losses(found["losses"], expected["losses"], rel)
    assert found["norms"] == pytest.approx(expected["norms"], rel=10 * rel)


@pytest.mark.parametrize("case", swept(CASES, QUICK.__contains__))
def test_trains_saves_and_loads_its_state(case, launch, plain, check_losses, tmp_path):
    expected = plain.result
    is_bf16 = "--bf16" in CASES[case]
    whole = launch(tmp_path, *CASES[case])
    check(whole, expected, check_losses, rel=5e-3 if is_bf16 else 1e-6)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    if not is_bf16:
        assert_close(weights, torch.load(plain.folder / "weights.pt", weights_only=True), rtol=0, atol=1e-4)

    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert set(weights) - set(saved) == {"lm_head.weight"}, "one name of each weight, and this one is tied"
    assert_close({name: value.float() for name, value in saved.items()}, {name: weights[name] for name in saved})

    resumed = launch(tmp_path, *CASES[case], "--resume")
    assert resumed["losses"] == pytest.approx(whole["losses"][8:], rel=1e-6)
    assert_close(torch.load(tmp_path / "weights.pt", weights_only=True), weights)


def test_accelerate_launch(launch, plain, check_losses, tmp_path):
    found = launch(tmp_path, "--stage", "2", launcher="accelerate")
    assert found["stage"] == 2
    check(found, plain.result, check_losses, rel=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_launchers(launcher, launch, plain, check_losses, tmp_path):
    check(launch(tmp_path, "--stage", "1", launcher=launcher), plain.result, check_losses, rel=1e-6)


@pytest.mark.parametrize("stage", swept(("1", "2", "3"), lambda stage: stage == "2"))
def test_tensor_parallel(stage, launch, check_losses, tmp_path):
    """Two ranks that share a model learn from one batch what two replicas learn from its halves."""
    flags = ["--stage", stage, "--from-config"]
    expected = launch(tmp_path / "replicas", *flags)
    check(launch(tmp_path / "divided", *flags, "--tensor-parallel", "2"), expected, check_losses, rel=1e-5)
    weights, reference = (
        torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("divided", "replicas")
    )
    assert_close(weights, reference, rtol=0, atol=1e-4)
