"""Constants and enumerations that scripts import from DeepSpeed's modules."""

import pytest
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.base import default_of, json_keys, section_of
from deepspeed.errors import ConfigError
from deepspeed.optim.lr_arguments import _BY_SCHEDULE
from deepspeed.runtime import config, config_utils, constants, lr_schedules, precision_config
from deepspeed.runtime.zero import config as zero_config
from deepspeed.runtime.zero import offload_config

# beginning of a constant's name -> the section its key is in; what begins otherwise is at the top level
SECTIONS = {
    **{"FP16_": "fp16", "BFLOAT16_": "bf16", "AMP_": "amp", "PLD_": "progressive_layer_drop"},
    **{"EIGENVALUE_": "eigenvalue", "LEGACY_FUSION": "optimizer", "GRAD_ACCUM_": "data_types"},
    **{"CHECKPOINT_PARALLEL_WRITE_": "checkpoint.parallel_write", "CHECKPOINT_": "checkpoint"},
    **{"LOAD_UNIVERSAL": "checkpoint", "USE_NODE_LOCAL": "checkpoint"},
}
WITH_DEFAULT = sorted(
    name.removesuffix("_DEFAULT")
    for name in vars(constants)
    if name.endswith("_DEFAULT") and not name.startswith(("OPTIMIZER_", "SCHEDULER_", "ADAM_W_"))
)


@pytest.mark.parametrize("name", WITH_DEFAULT)
def test_a_constant_is_a_key_and_its_default_the_configs(name):
    model = DeepSpeedConfig
    path = next((path for start, path in SECTIONS.items() if name.startswith(start)), "")
    for part in filter(None, path.split(".")):
        model = section_of(model.model_fields[part])
    ours = default_of(model.model_fields[json_keys(model)[getattr(constants, name)]])
    stated = getattr(constants, f"{name}_DEFAULT")
    assert (stated.capitalize() if name == "CHECKPOINT_TAG_VALIDATION" else stated) == ours


def test_names_of_schedules_arguments():
    names = {value for name, value in vars(lr_schedules).items() if name.isupper() and isinstance(value, str)}
    arguments = {argument for schedule in _BY_SCHEDULE.values() for argument in schedule}
    assert arguments - names == {"cycle_momentum"}
    assert lr_schedules.LR_RANGE_TEST_MIN_LR == "lr_range_test_min_lr"
    assert list(_BY_SCHEDULE) == lr_schedules.VALID_LR_SCHEDULES
    assert (lr_schedules.WARMUP_LOG_RATE, lr_schedules.LR_SCHEDULE) == ("log", "lr_schedule")


def test_enumerations_are_values_of_the_config():
    zero = zero_config.DeepSpeedZeroConfig(
        stage=zero_config.ZeroStageEnum.gradients,
        offload_optimizer={"device": offload_config.OffloadDeviceEnum.cpu},
    )
    assert (repr(zero.stage), repr(zero.offload_optimizer.device)) == ("2", "'cpu'")
    assert zero.stage == zero_config.ZeroStageEnum.gradients < zero_config.ZeroStageEnum.max_stage == 3
    assert zero.offload_optimizer.device == offload_config.OffloadDeviceEnum.cpu
    assert offload_config.OffloadStateTypeEnum("hp_params") is offload_config.OffloadStateTypeEnum.hp_params
    assert constants.ROUTE_TRAIN == "train"


def test_sections_out_of_a_dict():
    whole = {"zero_optimization": True, "bfloat16": {"enabled": True}, "fp16": {"loss_scale": 4}}
    assert zero_config.get_zero_config(whole).stage == 1
    assert precision_config.get_bfloat16_config(whole).enabled
    assert precision_config.get_float16_config(whole).loss_scale == 4
    assert config_utils.get_scalar_param(whole, "absent", 7) == 7
    with pytest.raises(ConfigError, match=r"^bf16\.enable: found an unknown key"):
        precision_config.get_bfloat16_config({"bf16": {"enable": True}})
    with pytest.raises(ValueError, match="appears twice"):
        config_utils.dict_raise_error_on_duplicate_keys([("a", 1), ("a", 2)])


def test_a_model_of_a_script():
    class Mine(config_utils.DeepSpeedConfigModel):
        size: int = 3

    assert Mine(size=4).size == 4
    assert (config.ADAM_OPTIMIZER, config.LAMB_OPTIMIZER) == ("adam", "lamb")
    assert config.ADAM_OPTIMIZER in config.DEEPSPEED_OPTIMIZERS
