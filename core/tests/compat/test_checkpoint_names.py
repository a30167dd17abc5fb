"""Names of keys and files that scripts written for DeepSpeed import from `deepspeed.checkpoint`."""

import deepspeed.checkpoint
import pytest
from deepspeed.checkpoint import constants

# imported by Megatron-DeepSpeed at the top of its training script
MEGATRON = """
    VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS TP_REPLICATED_PARAMETER_PATTERNS
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_TO_AVERAGE_PATTERNS
    ORIGINAL_VOCAB_SIZE UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE
"""


@pytest.mark.parametrize("name", MEGATRON.split())
def test_megatron_finds_it(name):
    assert getattr(deepspeed.checkpoint, name) == getattr(constants, name)


def test_every_key_has_the_value_of_its_name():
    keys = {name: value for name, value in vars(constants).items() if name.isupper()}
    told = {"FP32_WEIGHT_KEY", "UNIVERSAL_CHECKPOINT_VERSION_KEY", "UNIVERSAL_CHECKPOINT_VERSION_VALUE"}
    others = {name: value for name, value in keys.items() if not name.endswith(("FIX",)) and name not in told}
    assert others == {name: name.lower() for name in others}
    assert all(hasattr(deepspeed.checkpoint, name) for name in keys)


def test_files_are_named_so(single_rank, tmp_path):
    import torch

    engine, *_ = deepspeed.initialize(
        model=torch.nn.Linear(2, 2),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 1},
        },
    )
    engine.save_checkpoint(str(tmp_path), "tag")
    engine.destroy()
    files = {path.name for path in (tmp_path / "tag").iterdir()}
    assert f"{constants.MODEL_FILE_PREFIX}00{constants.MODEL_FILE_SUFFIX}" in files
    assert f"{constants.ZERO_FILE_PREFIX}0_mp_rank_00{constants.OPTIM_FILE_SUFFIX}" in files
