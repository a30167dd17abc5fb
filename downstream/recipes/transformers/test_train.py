"""The Trainer under DeepSpeed has the losses, norms and weights that it has under DDP; so has a resumed run. With
`deterministic` they are the same bits on one rank and on two.
"""

import pytest
import torch
from deepspeed.testing.tiers import swept
from safetensors.torch import load_file
from torch.testing import assert_close

OF_CONFIG = ["--from-config", "optimizer"]
CASES = {
    "stage 1": ["--stage", "1"],
    "stage 1, optimizer from the config": ["--stage", "1", *OF_CONFIG],
    "stage 2": ["--stage", "2"],
    "stage 2, optimizer states in host memory": ["--stage", "2", "--offload"],
    "stage 2, bf16": ["--stage", "2", "--bf16"],
    "stage 3": ["--stage", "3"],
    "stage 3, optimizer from the config, its states in host memory": ["--stage", "3", "--offload", *OF_CONFIG],
    "stage 3, bf16": ["--stage", "3", "--bf16"],
}


def check(result, expected, check_losses, rel):
    check_losses(result["losses"], expected["losses"], rel)
    assert result["norms"] == pytest.approx(expected["norms"], rel=10 * rel)
    assert result["evaluated"] == pytest.approx(expected["evaluated"], rel=rel)


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_those_of_plain_torch(case, launch, plain, check_losses, tmp_path):
    expected = plain.result
    result = launch(tmp_path, *CASES[case])

    is_bf16 = "--bf16" in CASES[case]
    check(result, expected, check_losses, rel=2e-3 if is_bf16 else 1e-6)
    if is_bf16:  # Adam makes whole steps of the rounding noise in a gradient that should be 0, as key biases have
        return
    saved, reference = (load_file(each / "saved" / "model.safetensors") for each in (tmp_path, plain.folder))
    for name, value in reference.items():
        assert_close(saved[name], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("stage", "sections"),
    [
        ("3", ["optimizer"]),
        pytest.param("2", ["optimizer"], marks=pytest.mark.sweep),
        pytest.param("2", ["optimizer", "scheduler"], marks=pytest.mark.sweep),
    ],
)
def test_resumes(stage, sections, launch, plain, check_losses, tmp_path):
    flags = ["--stage", stage, "--offload", "--from-config", *sections]
    whole = launch(tmp_path, *flags)
    (tmp_path / "result.json").unlink()
    resumed = launch(tmp_path, *flags, "--resume-from", str(tmp_path / "checkpoint-8"))

    if "scheduler" not in sections:  # WarmupDecayLR is one step later than the Trainer's own schedule
        check(whole, plain.result, check_losses, rel=1e-6)
    assert (tmp_path / "checkpoint-8" / "global_step8").is_dir()
    # the resumed run's log begins with what the checkpoint brought of the first eight steps
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert resumed["norms"] == pytest.approx(whole["norms"], rel=1e-4)
    assert resumed["evaluated"] == pytest.approx(whole["evaluated"], rel=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_launchers(launcher, launch, plain, check_losses, tmp_path):
    result = launch(tmp_path, "--stage", "1", launcher=launcher)
    assert result["stage"] == 1
    check(result, plain.result, check_losses, rel=1e-6)


@pytest.mark.parametrize("flags", [[], pytest.param(["--resize"], marks=pytest.mark.sweep)])
def test_starts_from_a_saved_model(flags, launch, plain, check_losses, tmp_path):
    """Under stage 3 `from_pretrained` builds the model inside `zero.Init`."""
    flags = ["--from-pretrained", str(plain.folder / "saved"), *flags]
    expected = launch(tmp_path / "plain", "--stage", "none", *flags)
    check(launch(tmp_path / "stage 3", "--stage", "3", *flags), expected, check_losses, rel=1e-6)


@pytest.mark.sweep
def test_only_evaluates(launch, plain, tmp_path):
    flags = ["--only-evaluate", "--from-pretrained", str(plain.folder / "saved")]
    found = launch(tmp_path, "--stage", "3", *flags)
    assert found["evaluated"] == pytest.approx(plain.result["evaluated"], rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "is_saved"),
    swept([("1", False), ("2", False), ("3", False), ("3", True)], lambda stage, is_saved: is_saved),
)
def test_tensor_parallel(stage, is_saved, launch, plain, check_losses, tmp_path):
    """Two ranks that share a model learn from one batch what two replicas learn from its halves; a model that is
    loaded under stage 3 is built inside `zero.Init`."""
    flags = ["--dropout", "0", *(["--from-pretrained", str(plain.folder / "saved")] if is_saved else [])]
    expected = launch(tmp_path / "plain", "--stage", "none", *flags)
    flags += ["--stage", stage, "--tensor-parallel", "2", "--from-config", "optimizer"]
    check(launch(tmp_path / "divided", *flags), expected, check_losses, rel=1e-5)


@pytest.mark.parametrize("flags", swept([["--stage", "3"], ["--stage", "2", "--offload"]], lambda flags: "3" in flags))
def test_one_rank_and_two_have_the_same_bits(flags, launch, tmp_path):
    alone = ["--stage", "0", "--deterministic", "--accumulation", "4"]
    expected = launch(tmp_path / "alone", *alone, launcher="deepspeed, one rank")
    result = launch(tmp_path / "two", *flags, "--deterministic")
    assert result["norms"] == expected["norms"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)  # the Trainer averages them over the ranks
    saved, reference = (load_file(tmp_path / each / "saved" / "model.safetensors") for each in ("two", "alone"))
    assert all(torch.equal(reference[name], value) for name, value in saved.items())  # stage 3 saves a tied weight once
