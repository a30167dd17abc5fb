import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from deepspeed.config import DeepSpeedConfig, intake
from deepspeed.config.base import json_keys, section_of
from deepspeed.config.inference import DeepSpeedInferenceConfig
from deepspeed.config.intake import parse_section
from deepspeed.config.precision import canonical_dtype, torch_dtype
from deepspeed.config.zero import ZeroConfig
from deepspeed.errors import ConfigError


def parse(**keys):
    return DeepSpeedConfig({"train_batch_size": 8, **keys})


def test_importing_the_room_loads_no_torch():
    code = "import deepspeed, sys; deepspeed.DeepSpeedConfig({'train_batch_size': 1}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import deepspeed, sys; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_listing_of_seed_004(said):
    config = DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
            "fp16": {"enabled": True},
            "zero_optimization": True,
        },
        world_size=2,
    )
    config.check_supported()
    assert config.train_micro_batch_size_per_gpu == 4
    assert config.zero_optimization_stage == 1
    assert config.fp16_enabled
    assert said() == ['"zero_optimization": true is deprecated; write "zero_optimization": {"stage": 1}']


def test_listing_of_seed_002(said):
    config = DeepSpeedConfig(
        {
            "train_batch_size": 32,
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999]}},
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        }
    )
    config.check_supported()
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    assert said() == []


def test_documented_defaults():
    config = parse()
    zero = config.zero_optimization
    assert (zero.stage, zero.reduce_bucket_size, zero.allgather_bucket_size) == (0, 500_000_000, 500_000_000)
    assert (zero.contiguous_gradients, zero.reduce_scatter, zero.allgather_partitions) == (True, True, True)
    assert (zero.round_robin_gradients, zero.ignore_unused_parameters) == (False, True)
    assert (zero.offload_optimizer, zero.offload_param, zero.sub_group_size) == (None, None, 1_000_000_000)
    fp16 = config.fp16
    assert (fp16.enabled, fp16.loss_scale, fp16.initial_scale_power, fp16.loss_scale_window) == (False, 0, 16, 1000)
    assert (fp16.hysteresis, fp16.consecutive_hysteresis, fp16.min_loss_scale) == (2, False, 1)
    assert (config.steps_per_print, config.wall_clock_breakdown, config.dump_state) == (None, False, False)
    assert (config.gradient_clipping, config.prescale_gradients, config.gradient_predivide_factor) == (1.0, False, 1.0)
    assert config.communication_data_type is None
    assert config.data_types.grad_accum_dtype is None
    assert config.torch_autocast.lower_precision_safe_modules[0] == "torch.nn.Linear"
    assert config.checkpoint.tag_validation == "Warn"


def test_overlap_comm_has_one_default_at_every_stage():
    for keys in ({}, {"stage": 2}, {"stage": 3}, {"overlap_comm": None}, {"overlap_comm": "auto"}):
        assert parse(zero_optimization=keys).zero_optimization.overlap_comm is True
    assert parse(zero_optimization={"overlap_comm": False}).zero_optimization.overlap_comm is False


def test_two_configs_share_no_mutable_default():
    one, other = parse(optimizer={"type": "SGD"}), parse(optimizer={"type": "SGD"})
    one.optimizer.params["lr"] = 1
    one.torch_autocast.lower_precision_safe_modules.append("x")
    one.elasticity.micro_batch_sizes.append(8)
    assert other.optimizer.params == {}
    assert len(other.torch_autocast.lower_precision_safe_modules) == 4
    assert other.elasticity.micro_batch_sizes == [2, 4, 6]


@pytest.mark.parametrize(
    ("path", "written", "meant"),
    [
        ("zero_optimization.stage", "2", 2),
        ("zero_optimization.stage", " 2.0 ", 2),
        ("zero_optimization.reduce_bucket_size", "500_000", 500_000),
        ("zero_optimization.stage3_max_live_parameters", "500.0", 500),
        ("zero_optimization.overlap_comm", "True", True),
        ("zero_optimization.overlap_comm", "off", False),
        ("zero_optimization.offload_optimizer.ratio", "5e-1", 0.5),
        ("zero_optimization.offload_param.buffer_count", "3", 3),
        ("fp16.enabled", "true", True),
        ("fp16.enabled", "false", False),
        ("fp16.loss_scale", "128", 128.0),
        ("fp16.loss_scale_window", "500", 500),
        ("bf16.enabled", "1", True),
        ("comms_logger.enabled", "yes", True),
        ("csv_monitor.enabled", "no", False),
        ("csv_monitor.job_name", "1", "1"),
        ("timers.throughput.enabled", "false", False),
        ("tensor_parallel.autotp_size", "2", 2),
        ("hybrid_engine.max_out_tokens", "512", 512),
    ],
)
def test_sections_of_pydantic_take_numbers_in_quotes(path, written, meant):
    """The pairs are what DeepSpeed 0.19.6 makes of them."""
    *sections, name = path.split(".")
    config: Any = {name: written}
    for section in reversed(sections):
        config = {section: config}
    found = parse(**config)
    for section in sections:
        found = getattr(found, section)
    found = getattr(found, name.removeprefix("stage3_"))
    assert (found, type(found)) == (meant, type(meant))


def test_a_section_alone_takes_numbers_in_quotes():
    assert ZeroConfig(stage="2", stage3_prefetch_bucket_size="10").prefetch_bucket_size == 10


MALFORMED = [
    ({"train_batch_size": "32"}, "train_batch_size: found '32'; allowed: an integer >= 1; write it without quotes"),
    ({"train_batch_size": True}, "train_batch_size: found True; allowed: an integer >= 1"),
    ({"train_batch_size": 8.5}, "train_batch_size: found 8.5; allowed: an integer >= 1"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: found 4; allowed: 0 or 1 or 2 or 3"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
        'zero_optimization.offload_optimizer.device: found \'gpu\'; allowed: "none" or "cpu" or "nvme"',
    ),
    (
        {"zero_optimization": {"stage3_prefetch_bucket_size": -1}},
        "zero_optimization.stage3_prefetch_bucket_size: found -1; allowed: an integer >= 0",
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "nvme", "buffer_count": 0}}},
        "zero_optimization.offload_param.buffer_count: found 0; allowed: an integer >= 1",
    ),
    ({"fp16": {"enabled": "maybe"}}, "fp16.enabled: found 'maybe'; allowed: true or false"),
    ({"fp16": {"loss_scale": "nan"}}, "fp16.loss_scale: found nan; allowed: a finite number >= 0"),
    (
        {"prescale_gradients": "false"},
        "prescale_gradients: found 'false'; allowed: true or false; write it without quotes",
    ),
    (
        {"zero_optimization": {"reduce_bucket_size": "5e8"}},
        "zero_optimization.reduce_bucket_size: found '5e8'; allowed: an integer >= 1; write it without quotes",
    ),
    ({"zero_optimization": {"stage": "4"}}, "zero_optimization.stage: found 4; allowed: 0 or 1 or 2 or 3"),
    ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage: found 'two'; allowed: 0 or 1 or 2 or 3"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: found True; allowed: 0 or 1 or 2 or 3"),
    ({"aio": {"block_size": "1M"}}, "aio.block_size: found '1M'; allowed: an integer >= 1"),
    ({"fp16": True}, 'fp16: found true; allowed: an object, such as {"enabled": true}'),
    ({"gradient_clipping": float("nan")}, "gradient_clipping: found nan; allowed: a number"),
    ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type: is missing; write a string"),
    ({"optimizer": {"type": 3}}, "optimizer.type: found 3; allowed: a string"),
    (
        {"communication_data_type": "int8"},
        'communication_data_type: found \'int8\'; allowed: "fp32" or "fp16" or "bf16" (or a longer spelling) or null',
    ),
    (
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        "bf16.enabled: found true together with fp16.enabled; keep one of them",
    ),
    ({"steps_per_print": 0}, "steps_per_print: found 0; allowed: an integer >= 1 or infinity or null"),
    (
        {"checkpoint": {"tag_validation": "shout"}},
        'checkpoint.tag_validation: found \'shout\'; allowed: "Ignore" or "Warn" or "Fail"',
    ),
    ({3: 4}, "config: the key 3 is not text; put it in double quotes"),
]


@pytest.mark.parametrize(("keys", "message"), MALFORMED)
def test_malformed_configs_get_one_line(keys, message):
    with pytest.raises(ConfigError) as caught:
        DeepSpeedConfig({"train_batch_size": 8, **keys})
    assert str(caught.value) == message
    assert caught.value.__cause__ is None
    assert isinstance(caught.value, ValueError)


def test_a_negative_clipping_is_kept():
    assert parse(gradient_clipping=-1).gradient_clipping == -1.0  # the engine does not clip


def test_a_stage_is_an_integer():
    for value in (True, "1.5", 1.5, [1]):
        with pytest.raises(ConfigError, match=r"zero_optimization\.stage: found"):
            parse(zero_optimization={"stage": value})
    assert repr(parse(zero_optimization={"stage": 2.0}).zero_optimization.stage) == "2"
    assert repr(parse(zero_optimization=False).zero_optimization.stage) == "0"


@pytest.mark.parametrize(
    "pair", [("fp16", "amp"), ("bf16", "amp"), ("fp16", "torch_autocast"), ("amp", "torch_autocast")]
)
def test_precisions_that_exclude_each_other(pair):
    with pytest.raises(
        ConfigError, match=f"found true together with .*{pair[0] if pair[1] == 'torch_autocast' else ''}"
    ):
        parse(**{name: {"enabled": True} for name in pair})
    parse(bf16={"enabled": True}, torch_autocast={"enabled": True, "dtype": "bfloat16"})


def test_bf16_states_need_bf16_masters():
    with pytest.raises(ConfigError, match=r"^bf16\.bf16_optimizer_states: found true without"):
        parse(bf16={"enabled": True, "bf16_optimizer_states": True})


def test_numbers_as_people_write_them():
    config = parse(zero_optimization={"reduce_bucket_size": 5e7}, steps_per_print=float("inf"), gradient_clipping=1)
    assert config.zero_optimization.reduce_bucket_size == 50_000_000
    assert isinstance(config.zero_optimization.reduce_bucket_size, int)
    assert config.steps_per_print == float("inf")
    assert isinstance(config.gradient_clipping, float)
    assert parse(fp16={"enabled": 1}).fp16.enabled is True


def test_an_unknown_top_level_key_warns_once(said):
    """Libraries keep keys of their own at the top level (Accelerate: msamp; TRL: dotted ones)."""
    for _ in range(2):
        parse(train_batch_per_gpu=4, msamp={"enabled": True}, own_key=1)
    assert said() == [
        "train_batch_per_gpu: unknown config key, ignored; did you mean 'train_micro_batch_size_per_gpu'?",
        "msamp: unknown config key, ignored; did you mean 'amp'?",
        "own_key: unknown config key, ignored",
    ]


@pytest.mark.parametrize(
    ("written", "value", "owners"),
    [
        ("offload_optimizer", {"device": "cpu"}, "zero_optimization"),
        ("stage3_param_persistence_threshold", 1, "zero_optimization"),
        ("loss_scale", 0, "fp16 or amp"),
        ("nvme_path", "/x", "zero_optimization.offload_optimizer or zero_optimization.offload_param"),
    ],
)
def test_a_sections_key_at_the_top_level_is_told_its_section(written, value, owners, said, monkeypatch):
    """A run would go on without offload, for example; no other key that looks alike is named."""
    parse(**{written: value})
    assert said() == [f"{written}: unknown config key, ignored; it is a key of {owners}, write it there"]
    monkeypatch.setenv("DS_CONFIG_STRICT", "1")
    with pytest.raises(
        ConfigError, match=rf"^{written}: found an unknown key; it is a key of {owners}, write it there$"
    ):
        parse(**{written: value})


@pytest.mark.parametrize(
    ("written", "meant"),
    [("zero_stage", "zero_optimization.stage"), ("max_grad_norm", "gradient_clipping"), ("lr", "optimizer.params.lr")],
)
def test_a_name_of_other_trainers_is_told_ours(written, meant, said):
    parse(**{written: 1})
    assert said() == [f"{written}: unknown config key, ignored; here it is '{meant}'"]


def test_comments_at_the_top_level_are_nobodys_keys(said, monkeypatch):
    monkeypatch.setenv("DS_CONFIG_STRICT", "1")
    parse(**{"_comment": "for 8 GPUs", "//": "", "#": "", "comment_2": ""})
    assert said() == []


def test_a_key_of_many_sections_is_told_none_of_them(said):
    parse(enabled=True)
    assert said() == ["enabled: unknown config key, ignored"]


def test_aio_below_zero_optimization_is_moved_and_said(said):
    """As the documentation of transformers has it."""
    zero, aio = {"stage": 3, "aio": {"queue_depth": 5}}, {"queue_depth": 5}
    for keys in ({}, {"aio": aio}, {"aio": None}):
        config = parse(zero_optimization=zero, **keys)
        assert (config.zero_optimization.stage, config.aio.queue_depth) == (3, 5)
        assert config.raw["zero_optimization"] == zero
    assert said() == ["zero_optimization.aio belongs to the top level: write it as aio; it is used as if it were there"]
    with pytest.raises(
        ConfigError, match=r"^zero_optimization\.aio: found {'queue_depth': 5}, but aio at the top level"
    ):
        parse(zero_optimization=zero, aio={"queue_depth": 6})
    with pytest.raises(ConfigError, match=r"^aio\.queue_depth: found 'x'; allowed: an integer"):
        parse(zero_optimization={"aio": {"queue_depth": "x"}})


UNKNOWN = [
    ({"bf16": {"enable": True}}, "bf16.enable: found an unknown key; did you mean 'enabled'?"),
    ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge: found an unknown key; did you mean 'stage'?"),
    ({"zero_optimization": {"STAGE": 2}}, "zero_optimization.STAGE: found an unknown key; did you mean 'stage'?"),
    (
        {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
        "zero_optimization.offload_optimizer.devise: found an unknown key; did you mean 'device'?",
    ),
    (
        {"zero_optimization": {"device": "cpu"}},
        "zero_optimization.device: found an unknown key; it is a key of zero_optimization.offload_optimizer or "
        "zero_optimization.offload_param, write it there",
    ),
    (
        {"optimizer": {"type": "Adam", "lr": 1e-3}},
        "optimizer.lr: found an unknown key; allowed: legacy_fusion, params, type",
    ),
    (
        {"fp16": {"enabled": True, "zero_optimization": {"stage": 2}}},
        "fp16.zero_optimization: found an unknown key; it is a key of the top level, close the braces before it",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "pipeline": True}}},
        "zero_optimization.offload_optimizer.pipeline: found an unknown key; did you mean 'pipeline_read' or "
        "'pipeline_write'?",
    ),
    ({"comet": {"api_kye": "secret"}}, "comet.api_kye: found an unknown key; did you mean 'api_key'?"),
    (
        {"data_types": {"a\nb": 1}},
        "data_types.'a\\nb': found an unknown key; allowed: buffer_dtype, grad_accum_dtype, keep_in_fp32_modules, "
        "param_dtype",
    ),
]


@pytest.mark.parametrize(("keys", "message"), UNKNOWN)
def test_an_unknown_key_in_a_section_is_an_error(keys, message):
    with pytest.raises(ConfigError) as caught:
        parse(**keys)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *[("zero_optimisation", "zero_optimization"), ("gradient_cliping", "gradient_clipping"), ("bf61", "bf16")],
        *[("zero-optimization", "zero_optimization"), ("Optimizer", "optimizer"), ("schedular", "scheduler")],
    ],
)
def test_a_top_level_key_that_is_one_letter_off_is_an_error(written, meant):
    with pytest.raises(ConfigError, match=rf"^{written}: found an unknown key; did you mean '{meant}'\?$"):
        parse(**{written: {}})


def test_an_unknown_argument_of_init_inference_is_an_error():
    with pytest.raises(ConfigError, match=r"^mpsize: found an unknown key; did you mean 'mp_size'\?"):
        parse_section(DeepSpeedInferenceConfig, {"mpsize": 2})
    with pytest.raises(ConfigError, match=r"^num_beams: found an unknown key; allowed: "):
        parse_section(DeepSpeedInferenceConfig, {"num_beams": 4})


@pytest.mark.parametrize(
    ("section", "written", "meant"),
    [
        ("", "train_micro_batch_per_gpu", "train_micro_batch_size_per_gpu"),
        ("", "grad_accumulation_steps", "gradient_accumulation_steps"),
        ("", "grad_accum_steps", "gradient_accumulation_steps"),
        ("zero_optimization", "stage3_max_live_params", "stage3_max_live_parameters"),
        ("zero_optimization", "stage3_parameter_persistence_threshold", "stage3_param_persistence_threshold"),
        ("zero_optimization", "stage3_gather_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
    ],
)
def test_a_key_with_a_word_left_out_or_cut_short_is_an_error(section, written, meant):
    where = f"{section}.{written}" if section else written
    with pytest.raises(ConfigError, match=rf"^{where}: found an unknown key; did you mean '{meant}'\?$"):
        parse(**({section: {written: 4}} if section else {written: 4}))


@pytest.mark.parametrize(
    "written",
    ["micro_batch_size", "global_batch_size", "train_batch_per_gpu", "model_parallel_size", "zero_config", "fp8_format"]
    + ["bf32", "num_micro_batches", "optimizer_params", "gradient_checkpointing_kwargs", "per_device_train_batch_size"],
)
def test_a_key_of_another_library_at_the_top_level_is_a_warning(written, said):
    parse(**{written: 4})
    assert len(said()) == 1


def test_no_other_key_of_deepspeeds_is_taken_for_a_slip(said):
    """A key that is not known here, but in another section or another version, resembles none by its words."""
    everything = {key for section in sections_of(DeepSpeedConfig) for key in json_keys(section)}
    for section in sections_of(DeepSpeedConfig):
        known = json_keys(section)
        for key in sorted(everything - set(known)):
            meant = intake.by_words(key, known)
            assert meant is None or meant.endswith("train_batch_size"), (section, key, meant)


def sections_of(model):
    inner = [section for info in model.model_fields.values() if (section := section_of(info)) is not None]
    return {model}.union(*map(sections_of, inner))


@pytest.mark.parametrize("section", ["zero_optimization", "bf16", "checkpoint", "tensor_parallel"])
def test_a_key_of_a_newer_deepspeed_is_a_warning(section, said):
    """In a section too, where it resembles no key that is known."""
    parse(**{section: {"brand_new_feature": 1}})
    assert said() == [f"{section}.brand_new_feature: unknown config key, ignored"]


def test_a_key_of_a_newer_deepspeed_is_an_error_if_asked(monkeypatch):
    monkeypatch.setenv("DS_CONFIG_STRICT", "1")
    with pytest.raises(ConfigError, match="brand_new_feature: found an unknown key; DS_CONFIG_STRICT=1 refuses it"):
        parse(zero_optimization={"brand_new_feature": 1})


def test_what_trl_writes_is_ignored_without_a_word(said):
    keys = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 80, "stage3_prefetch_bucket_size": 57.6}
    parse(**{f"zero_optimization.{key}": value for key, value in keys.items()})
    assert said() == []


def test_strict_makes_unknown_top_level_keys_errors(monkeypatch, said):
    monkeypatch.setenv("DS_CONFIG_STRICT", "1")
    with pytest.raises(
        ConfigError, match=r"^train_batchsize: found an unknown key; did you mean 'train_batch_size'\?$"
    ):
        parse(train_batchsize=4)
    with pytest.raises(ConfigError, match=r"^zero_optimization\.stage: found an unknown key; a dot does not nest"):
        parse(**{"zero_optimization.stage": 2})
    with pytest.raises(ConfigError, match=r"^own: found an unknown key; DS_CONFIG_STRICT=1 refuses it; remove the key"):
        parse(own=1)
    monkeypatch.setenv("DS_CONFIG_STRICT", "yes")
    with pytest.raises(ConfigError, match="DS_CONFIG_STRICT: found 'yes'; allowed: 0 or 1"):
        parse(own=1)
    monkeypatch.setenv("DS_CONFIG_STRICT", "0")
    parse(own=1)
    assert said() == ["own: unknown config key, ignored"]


def test_a_section_made_of_arguments_has_no_unknown_ones():
    with pytest.raises(ValueError, match="stge"):
        ZeroConfig(stge=2)
    with pytest.raises(ValueError, match="devise"):
        ZeroConfig(stage=2, offload_optimizer={"devise": "cpu"})


def test_a_dotted_key_is_no_nesting(said):
    config = parse(**{"zero_optimization.reduce_bucket_size": 4096})
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    [line] = said()
    assert 'write "zero_optimization": {"reduce_bucket_size": ...}' in line


def test_deprecated_keys_move_and_say_so_once(said):
    for _ in range(2):
        config = parse(
            bfloat16={"enabled": True},
            zero_optimization={
                "stage": 3,
                "cpu_offload": True,
                "cpu_offload_use_pin_memory": False,
                "cpu_offload_params": False,
                "stage3_gather_fp16_weights_on_model_save": True,
            },
        )
    assert config.bf16.enabled
    zero = config.zero_optimization
    assert (zero.offload_optimizer.device, zero.offload_optimizer.pin_memory) == ("cpu", False)
    assert zero.offload_param.device == "none"
    assert zero.gather_16bit_weights_on_model_save
    assert zero.gather_fp16_weights_on_model_save
    assert said() == [
        "bfloat16 is deprecated; write bf16",
        "zero_optimization.cpu_offload is deprecated; write zero_optimization.offload_optimizer.device",
        "zero_optimization.cpu_offload_use_pin_memory is deprecated; "
        "write zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.cpu_offload_params is deprecated; write zero_optimization.offload_param.device",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save is deprecated; "
        "write zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ]


@pytest.mark.parametrize(("value", "dtype"), [(True, "fp32"), (1, "fp32"), (False, None), (0, None), (None, None)])
def test_fp32_allreduce_is_a_switch(value, dtype):
    assert parse(fp32_allreduce=value).communication_data_type == dtype


@pytest.mark.parametrize("value", ["true", "yes", 2, 0.5, [1], {"enabled": True}, torch.ones(2)])
@pytest.mark.parametrize("key", ["fp32_allreduce", "zero_optimization.cpu_offload"])
def test_a_deprecated_switch_takes_nothing_else(key, value):
    section, _, name = key.rpartition(".")
    with pytest.raises(ConfigError, match=f"^{key}: found .*; allowed: true or false"):
        parse(**({section: {name: value}} if section else {name: value}))


def test_1_is_true_for_a_deprecated_switch():
    zero = parse(zero_optimization={"cpu_offload": 1, "cpu_offload_params": 0}).zero_optimization
    assert (zero.offload_optimizer.device, zero.offload_param.device) == ("cpu", "none")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bfloat16": 3}, r"^bfloat16 \(now bf16\): found 3; allowed: an object"),
        ({"bfloat16": torch.ones(2)}, r"^bfloat16 \(now bf16\): found tensor"),
        (
            {"bfloat16": {"enabled": "x"}},
            r"^bfloat16\.enabled \(now bf16\.enabled\): found 'x'; allowed: true or false",
        ),
        ({"bf16": 3}, "^bf16: found 3"),
        (
            {"zero_optimization": {"cpu_offload_use_pin_memory": "x"}},
            r"^zero_optimization\.cpu_offload_use_pin_memory \(now zero_optimization\.offload_optimizer\.pin_memory\): "
            "found 'x'",
        ),
        (
            {"zero_optimization": {"cpu_offload_use_pin_memory": torch.ones(2), "offload_optimizer": {}}},
            r"^zero_optimization\.cpu_offload_use_pin_memory \(now",
        ),
        (
            {"bfloat16": {"enabled": True}, "bf16": torch.ones(2)},
            "bfloat16: found .*, but its replacement bf16 says",
        ),
    ],
)
def test_a_wrong_value_names_the_key_of_the_users_file(keys, message):
    with pytest.raises(ConfigError, match=message):
        parse(**keys)


def test_an_array_for_what_is_not_here_is_refused_by_its_key():
    config = parse(tensor_parallel={"autotp_size": 1, "injection_policy_tuple": torch.ones(2)})
    with pytest.raises(ConfigError, match=r"^tensor_parallel\.injection_policy_tuple: found tensor"):
        config.check_supported()


def test_old_and_new_spelling_that_disagree():
    with pytest.raises(ConfigError, match=r"zero_optimization\.cpu_offload: found 'cpu', but its replacement"):
        parse(zero_optimization={"cpu_offload": True, "offload_optimizer": {"device": "none"}})
    with pytest.raises(ConfigError, match="given twice under two spellings"):
        parse(zero_optimization={"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2})


def test_null_and_false_mean_not_said():
    config = parse(
        gradient_clipping=None,
        optimizer=None,
        fp16=None,
        zero_optimization={"offload_param": False, "offload_optimizer": {"device": None, "nvme_path": None}},
    )
    assert config.gradient_clipping == 1.0  # the default
    assert config.optimizer is None
    assert config.zero_optimization.offload_param is None
    assert config.zero_optimization.offload_optimizer.device == "none"


HUGGING_FACE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "pipeline": {"stages": "auto"},
    "steps_per_print": float("inf"),
}


def test_auto_as_hugging_face_leaves_it(said):
    config = DeepSpeedConfig(HUGGING_FACE, batch_required=False)
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.fp16.enabled is False
    assert config.optimizer.params["lr"] == "auto"
    assert config.unresolved_auto() == [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "scheduler.params.warmup_num_steps",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
    ]
    assert said() == []
    with pytest.raises(ConfigError, match="Hugging Face's Trainer"):
        DeepSpeedConfig(HUGGING_FACE)
    assert DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": "auto"}}).unresolved_auto() == [
        "optimizer.type"
    ]


def test_names_that_deepspeeds_users_read():
    config = parse(optimizer={"type": "AdamW", "params": {"lr": 1}}, scheduler={"type": "WarmupLR", "params": {"a": 1}})
    assert (config.optimizer_name, config.optimizer_params) == ("adamw", {"lr": 1})
    assert (config.scheduler_name, config.scheduler_params) == ("WarmupLR", {"a": 1})
    assert config.zero_config is config.zero_optimization
    assert not config.zero_enabled
    assert config.float16_config is config.fp16
    assert config.bfloat16_config is config.bf16
    assert (config.bfloat16_enabled, config.loss_scale, config.grad_accum_dtype) == (False, 0.0, None)
    assert (parse().optimizer_name, parse().scheduler_params) == (None, None)


def test_describe_marks_the_users_own():
    lines = {line[2:].split()[0]: line for line in parse(zero_optimization={"stage": 1}).describe().splitlines()}
    assert lines["train_batch_size"].startswith("* ")
    assert lines["gradient_accumulation_steps"].startswith("  ")
    assert lines["zero_optimization.stage"].split() == ["*", "zero_optimization.stage", "1"]
    assert lines["zero_optimization.stage3_prefetch_bucket_size"].split()[-1] == "50000000"
    assert lines["zero_optimization.overlap_comm"].startswith("  ")


def test_print_logs_on_request(said):
    from deepspeed.log import logger

    level = logger.level
    logger.setLevel("INFO")
    try:
        parse().print("the config")
    finally:
        logger.setLevel(level)
    text = "\n".join(said())
    assert "the config:" in text
    assert "json = {" in text


def test_copies_and_pickles():
    config = parse(optimizer={"type": "SGD", "params": {"lr": "auto"}})
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert twin.raw == config.raw
        assert twin.unresolved_auto() == ["optimizer.params.lr"]


def test_a_section_alone(said):
    zero = parse_section(ZeroConfig, {"stage": 2, "cpu_offload": True, "sub_group_size": "auto"}, "zero_optimization")
    assert (zero.stage, zero.offload_optimizer.device, zero.sub_group_size) == (2, "cpu", 1_000_000_000)
    with pytest.raises(ConfigError, match=r"^zero_optimization\.stage: found 9"):
        parse_section(ZeroConfig, {"stage": 9}, "zero_optimization")
    assert ZeroConfig(stage=1, prefetch_bucket_size=5).prefetch_bucket_size == 5


def test_data_types():
    import torch

    for name in ("fp16", "float16", "half", "torch.float16", torch.float16, torch.half):
        assert canonical_dtype(name) == "fp16"
    assert [torch_dtype(name) for name in ("fp32", "fp16", "bf16")] == [torch.float32, torch.float16, torch.bfloat16]
    assert parse(data_types={"grad_accum_dtype": torch.bfloat16}).data_types.grad_accum_dtype == "bf16"
    assert parse(torch_autocast={"dtype": "float16"}).torch_autocast.dtype == "fp16"
    with pytest.raises(ConfigError, match=r"torch_autocast\.dtype: found 'float32'"):
        parse(torch_autocast={"dtype": "float32"})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data_types": {"param_dtype": "fp16"}}, "fp16 needs its loss scale"),
        ({"data_types": {"param_dtype": "fp32"}, "bf16": {"enabled": True}}, "found 'fp32' together with bf16.enabled"),
        ({"data_types": {"param_dtype": "bf16"}, "fp16": {"enabled": True}}, "found 'bf16' together with fp16.enabled"),
        ({"data_types": {"param_dtype": "bf16"}, "torch_autocast": {"enabled": True}}, "torch_autocast.enabled"),
        ({"data_types": {"keep_in_fp32_modules": "router"}}, 'a list of regular expressions or "auto"'),
        ({"data_types": {"keep_in_fp32_modules": ["(router"]}}, r"\['\(router'\]"),
    ],
)
def test_types_of_weights_and_buffers_that_do_not_fit(keys, message):
    with pytest.raises(ConfigError, match=message):
        parse(**keys)


def test_types_of_weights():
    assert [parse(**keys).weights_dtype for keys in ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}})] == [
        *(None, "bf16", "fp16")
    ]
    assert parse(data_types={"param_dtype": "bfloat16"}).weights_dtype == "bf16"
    assert parse(data_types={"param_dtype": "float"}).weights_dtype == "fp32"
    assert parse(data_types={"keep_in_fp32_modules": ["a", "b.*"]}).data_types.keep_in_fp32_modules == ["a", "b.*"]
