"""LoRA adapters on a frozen model have the losses and the weights under DeepSpeed that they have under DDP."""

import pytest
from deepspeed.testing.tiers import swept
from safetensors.torch import load_file
from torch.testing import assert_close

CASES = {
    "stage 1": ["--stage", "1"],
    "stage 2": ["--stage", "2"],
    "stage 2, activations checkpointed": ["--stage", "2", "--checkpointing", "not-reentrant"],
    "stage 2, bf16": ["--stage", "2", "--bf16"],
    "stage 3": ["--stage", "3"],
    "stage 3, activations checkpointed": ["--stage", "3", "--checkpointing", "not-reentrant"],
    "stage 3, activations checkpointed, re-entrant": ["--stage", "3", "--checkpointing", "reentrant"],
    "stage 3, bf16": ["--stage", "3", "--bf16"],
}
QUICK = {"stage 3"}


@pytest.mark.parametrize("case", swept(CASES, QUICK.__contains__))
def test_losses_and_adapters_equal_those_of_plain_torch(case, launch, plain, check_losses, tmp_path):
    expected = plain.result
    is_bf16 = "--bf16" in CASES[case]
    found = launch(tmp_path, *CASES[case])

    check_losses(found["losses"], expected["losses"], 5e-3 if is_bf16 else 1e-6)
    assert (found["trainable"], found["total"]) == (expected["trainable"], expected["total"])
    saved, reference = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (tmp_path, plain.folder))
    assert set(saved) == set(reference)
    if not is_bf16:
        assert_close(saved, reference, rtol=0, atol=1e-4)
