"""Every default of DeepSpeed 0.19.6's configuration beside ours, from the names and defaults of its sdist.

`docs/generate/deepspeed_names.py` has read them into `deepspeed_names.json`. What differs on purpose is in
`deepspeed.compatibility.DEFAULTS`, with its reason, which compatibility.md shows.
"""

import json
import sys
from pathlib import Path

import pytest
from deepspeed.compatibility import DEFAULTS
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.base import default_of, json_keys, section_of
from deepspeed.config.zero import LEAF_CLASSES

THEIRS = json.loads((Path(__file__).parent / "deepspeed_names.json").read_text(encoding="utf-8"))

TRAINING = "compression_training"
MIXED = f"{TRAINING}.weight_quantization.shared_parameters.fp16_mixed_quantize"
PRUNINGS = ("CHANNEL", "HEAD", "ROW", "SPARSE")

# module of constants, beginning of their names -> the section; "" is the top level, None what no key of ours is
SECTIONS = {
    "autotuning.constants": {"MODEL_INFO_": None, "": "autotuning"},
    "comm.constants": {"": "comms_logger"},
    "compression.constants": {
        **{"ACTIVATION_QUANTIZ": f"{TRAINING}.activation_quantization.shared_parameters"},
        **{f"{kind}_PRUNING_": f"{TRAINING}.{kind.lower()}_pruning.shared_parameters" for kind in PRUNINGS},
        **{"LAYER_REDUCTION_": f"{TRAINING}.layer_reduction", "WEIGHT_QUANTIZATION_PERIOD": None},
        **{"WEIGHT_QUANTIZE_CHANGE_RATIO": MIXED, "WEIGHT_QUANTIZE_FP16_MIXED": MIXED},
        "WEIGHT_QUANTIZE_": f"{TRAINING}.weight_quantization.shared_parameters",
        "DIFFERENT_GROUPS_": None,  # of groups
    },
    "elasticity.constants": {"": "elasticity"},
    "nebula.constants": {"": "nebula"},
    "profiling.constants": {"": "flops_profiler"},
    "runtime.activation_checkpointing.config": {"ACT_CHKPT=": None, "": "activation_checkpointing"},
    "runtime.swap_tensor.constants": {"": "aio"},
    "runtime.data_pipeline.constants": {
        **{"CURRICULUM_LEARNING_": "curriculum_learning", "DATA_EFFICIENCY_": "data_efficiency"},
        "": None,  # inside free objects, which are refused as a whole
    },
    "runtime.model_checkpointing.constants": {
        **{
            "CHECKPOINT_SERIALIZATION": "checkpoint",
            "CHECKPOINT_TAG_": "checkpoint",
            "CHECKPOINT_WRITER=": "checkpoint",
        },
        "": None,  # of the writer, a free object
    },
    "runtime.constants": {
        **{"AMP_": "amp", "BFLOAT16_": None, "FP16_": None, "EIGENVALUE_": "eigenvalue"},
        **{"PLD_": "progressive_layer_drop", "TORCH_AUTOCAST_": "torch_autocast", "LEGACY_FUSION": "optimizer"},
        **{"CHECKPOINT_PARALLEL_WRITE_": "checkpoint.parallel_write", "CHECKPOINT_": "checkpoint"},
        **{"LOAD_UNIVERSAL": "checkpoint", "USE_NODE_LOCAL": "checkpoint", "SPARSE_GRADIENTS": "", "SPARSE_": None},
        **{"GRAD_ACCUM_": "data_types", "PARAM_": "data_types", "BUFFER_": "data_types", "KEEP_IN_": "data_types"},
        "": "",
    },
}


def keys_of(version):
    """Dotted key -> default of every key that the version knows."""
    for name, default in THEIRS[version]["defaults"].items():
        module, colon, rest = name.partition(":")
        if not colon:
            yield name, default
            continue
        constant, _, key = rest.partition("=")
        starts = SECTIONS[module.removeprefix("deepspeed.")]
        section = next(where for start, where in starts.items() if f"{constant}=".startswith(start))
        if section is not None:
            yield f"{section}.{key}".lstrip("."), default


def field_of(dotted):
    """Our declaration of a key; None where its section takes anything; KeyError for a key that we do not know."""
    model, info = DeepSpeedConfig, None
    for part in dotted.split("."):
        if model is None:
            return None
        if part in model.moved:
            return None
        info = model.model_fields[json_keys(model)[part]]
        model = section_of(info)
    return info


def plain(value):
    """As JSON has it: 5e8 is an integer, an empty path none, an enumeration its value."""
    if isinstance(value, str):
        if value.startswith("lambda: list(DEFAULT_LEAF_MODULE_"):
            return list(LEAF_CLASSES) if "CLASSES" in value else None
        values = {"sys.maxsize": sys.maxsize, "ValidationMode.WARN": "Warn", "10 * 1024 * 1024": 10 * 1024 * 1024}
        return values.get(value, value or None)
    return int(value) if isinstance(value, float) and value.is_integer() else value or (None if value == [] else value)


ALL = sorted({key for version in THEIRS for key, _ in keys_of(version)})


@pytest.mark.parametrize("key", ALL)
def test_every_key_of_both_versions_is_known(key):
    field_of(key)


@pytest.mark.parametrize(("key", "default"), sorted(dict(keys_of("0.19.6")).items(), key=str))
def test_a_default_is_that_of_the_pinned_version_or_differs_for_a_reason(key, default):
    if (info := field_of(key)) is None or section_of(info) is not None:
        return
    ours = plain(default_of(info))
    theirs = plain(default)
    if key in DEFAULTS:
        assert (ours, theirs) == (plain(DEFAULTS[key].ours), plain(DEFAULTS[key].theirs)), "the table is out of date"
    else:
        assert ours == theirs


def test_the_table_of_differences_names_keys():
    assert set(DEFAULTS) <= {key for key, _ in keys_of("0.19.6")}
    assert all(each.reason.endswith(".") for each in DEFAULTS.values())
