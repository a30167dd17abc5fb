import pytest
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.base import Section, declared, default_of, section_of
from deepspeed.config.compression import TECHNIQUES
from deepspeed.errors import ConfigError


def check(**keys):
    config = DeepSpeedConfig({"train_batch_size": 8, **keys})
    config.check_supported()
    return config


ON = {"enabled": True}
REFUSED = [
    (
        "zero_optimization.offload_param.ratio",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "ratio": 0.5}}},
    ),
    ("tensor_parallel.injection_policy_tuple", {"tensor_parallel": {"injection_policy_tuple": ["o_proj"]}}),
    ("optimizer.type", {"optimizer": {"type": "MuAdam"}}),
    ("optimizer.type", {"optimizer": {"type": "MuSGD"}}),
    ("amp.enabled", {"amp": {"enabled": True, "opt_level": "O2"}}),
    ("fp16.fp16_master_weights_and_grads", {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}),
    ("compile.deepcompile", {"compile": {"deepcompile": True}}),
    ("gradient_allreduce_op", {"gradient_allreduce_op": "sum"}),
]


@pytest.mark.parametrize(("where", "keys"), REFUSED)
def test_what_would_change_the_result_is_refused(where, keys):
    with pytest.raises(ConfigError) as caught:
        check(**keys)
    text = str(caught.value)
    assert text.startswith(f"{where}: found ")
    assert ";" in text, "a remedy"
    assert "\n" not in text


def test_the_first_refusal_names_the_others():
    with pytest.raises(ConfigError) as caught:
        check(zero_optimization={"parameter_alignment": True}, gradient_allreduce_op="sum")
    assert str(caught.value) == (
        "zero_optimization.parameter_alignment: found true, but flat buffers are dense in this version; leave it at "
        "false (not in this version either: gradient_allreduce_op)"
    )


def test_what_is_ignored_warns_once(said):
    for _ in range(2):
        check(
            checkpoint={"writer": {"type": "fast"}},
            sparse_attention={"mode": "fixed"},
        )
    assert said() == [
        "checkpoint.writer: found {'type': 'fast'}, ignored: torch.save writes",
        "sparse_attention: found {'mode': 'fixed'}, ignored: a model keeps its own attention; the layers of "
        "deepspeed.ops.sparse_attention are not here",
    ]


def test_what_asks_for_nothing_is_silent(said):
    check(
        zero_optimization={
            "stage": 2,
            "allgather_partitions": False,
            "allgather_bucket_size": 2e8,
            "contiguous_gradients": False,
            "reduce_scatter": False,
            "round_robin_gradients": True,
            "legacy_stage1": True,
            "compute_grad_norm": False,
            "stage3_max_live_parameters": 1e6,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1e7,
            "offload_param": {"device": "none", "buffer_count": 9},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        },
        tensor_parallel={"autotp_size": 1},
        disable_allgather=True,
        bf16={"immediate_grad_update": False},
        compression_training={"sparse_pruning": {"shared_parameters": {"enabled": False, "method": "topk"}}},
        amp={"enabled": False, "opt_level": "O2"},
        activation_checkpointing={"partition_activations": False, "cpu_checkpointing": False},
        aio={"block_size": 4096, "thread_count": 2},
        inference={"tensor_parallel": {"tp_size": 2}},
        wandb={"enabled": False, "project": "p"},
        sequence_parallel_size=1,
    )
    assert said() == []


def test_everything_this_version_acts_on_is_silent(said):
    check(
        zero_optimization={
            "stage": 2,
            "reduce_bucket_size": 1000,
            "overlap_comm": True,
            "ignore_unused_parameters": False,
        },
        bf16={"enabled": True, "check_grad_overflow": True},
        gradient_clipping=1.0,
        prescale_gradients=True,
        gradient_predivide_factor=2,
        communication_data_type="fp16",
        data_types={"grad_accum_dtype": "fp32"},
        optimizer={"type": "Lamb", "params": {"lr": 1}},
        scheduler={"type": "WarmupLR"},
        steps_per_print=1,
        wall_clock_breakdown=True,
        memory_breakdown=True,
        tensorboard={"enabled": True, "output_path": "x", "job_name": "y"},
        comet={"enabled": True, "samples_log_interval": 7, "mode": "get", "online": False},
        monitor_plugins={"mine": {"anything": 1}},
        comms_logger={"enabled": True, "verbose": True, "prof_ops": ["reduce"], "prof_all": False, "debug": True},
        timers={"throughput": {"enabled": False, "synchronized": False}},
        dump_state=True,
        zero_allow_untested_optimizer=True,
        dataloader_drop_last=True,
        checkpoint={"tag_validation": "fail", "async_save": True},
        nebula={"enabled": True, "persistent_storage_path": "checkpoints", "enable_nebula_load": False},
    )
    check(fp16={"enabled": True, "auto_cast": True, "loss_scale": 128, "consecutive_hysteresis": True})
    check(torch_autocast={"enabled": True})
    check(local_sgd={"enabled": True, "sync_every": 50, "outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False})
    assert said() == []


def test_what_changes_nothing_here_is_said(said):
    check(torch_autocast={"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}, disable_python_gc=True)
    assert len(said()) == 2


def _keys(model, path=""):
    for name, info in model.model_fields.items():
        where = f"{path}.{name}".lstrip(".")
        section = section_of(info)
        yield (where, section, info)
        if section is not None:
            yield from _keys(section, where)


@pytest.mark.parametrize(
    ("where", "section", "info"), [pytest.param(*key, id=key[0]) for key in _keys(DeepSpeedConfig)]
)
def test_every_key_is_declared(where, section, info):
    support, _ = declared(info)
    assert info.description, f"{where} says nothing"
    assert support.note or support.action == "acted", f"{where}: a key that is not acted on says why"
    assert not (isinstance(default_of(info), Section) and section is None)


def test_no_switch_is_ignored_in_silence(said):
    """Every `enabled` of every section is acted on, refused, or answered with a warning."""
    acted = {
        *("fp16.enabled", "bf16.enabled", "torch_autocast.enabled"),
        *("tensorboard.enabled", "wandb.enabled", "comet.enabled", "csv_monitor.enabled"),
        *("comms_logger.enabled", "timers.throughput.enabled", "nebula.enabled", "expert_parallel.enabled"),
        *("hybrid_engine.enabled", "elasticity.enabled", "flops_profiler.enabled"),
        *("autotuning.enabled", "curriculum_learning.enabled", "progressive_layer_drop.enabled"),
        *("data_efficiency.enabled", "deterministic.enabled", "local_sgd.enabled"),
        *("data_efficiency.data_sampling.enabled", "data_efficiency.data_sampling.curriculum_learning.enabled"),
        "data_efficiency.data_sampling.dynamic_batching.enabled",
        *("data_efficiency.data_routing.enabled", "data_efficiency.data_routing.random_ltd.enabled"),
        "compression_training.layer_reduction.enabled",
        *(f"compression_training.{technique}.shared_parameters.enabled" for technique in TECHNIQUES),
        "compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize.enabled",
        *("quantize_training.enabled", "quantize_training.fp16_mixed_quantize.enabled"),
        *("quantize_training.eigenvalue.enabled", "eigenvalue.enabled"),
    }
    for where, _, info in _keys(DeepSpeedConfig):
        if not where.endswith(".enabled") or where in acted:
            continue
        keys = not default_of(info)
        for name in reversed(where.split(".")):
            keys = {name: keys}
        try:
            check(**keys)
            answers = said()
        except ConfigError as error:
            answers = [str(error)]
        assert [line for line in answers if line.startswith(where)], f"{where} is ignored in silence"


def test_another_programs_format_is_refused_with_the_command_that_makes_it():
    with pytest.raises(
        ConfigError, match=r"checkpoint.format: found .dcp.; allowed: .*ds_ckpt convert DIR OUT --to dcp"
    ):
        check(checkpoint={"format": "dcp"})
