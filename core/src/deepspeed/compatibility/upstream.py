"""Public names of DeepSpeed 0.19.6 and 0.19.8, and the feature that each module belongs to which is not here.

`names.json` is read from the sdists by docs/generate/deepspeed_names.py. A module or a name in it that this version
lacks imports all the same, and refuses when it is used, with the sentence of its feature.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path

from deepspeed.compatibility.features import FEATURES, MODULES, Default, Feature

# Beginning of a module below `deepspeed` -> its feature; the longest that fits counts.
_FEATURE_OF = {
    "": "internals",
    "autotuning": "autotuning internals",
    "checkpoint": "universal checkpoints",
    "comm": "communication internals",
    "compile": "DeepCompile",
    "compression": "compression",
    "datastates": "checkpoint engines",
    "elasticity": "elasticity",
    "inference": "inference internals",
    "io": "checkpoint engines",
    "launcher": "launcher internals",
    "linear": "LoRA",
    "model_implementations": "kernel injection",
    "module_inject": "kernel injection",
    "module_inject.auto_ep": "AutoEP's classes",
    "module_inject.auto_tp": "AutoTP's classes",
    "module_inject.autotp": "AutoTP's classes",
    "module_inject.layers": "AutoTP's classes",
    "module_inject.tp_": "AutoTP's classes",
    "moe.ep_": "AutoEP's classes",
    "moe.fused_expert": "AutoEP's classes",
    "nebula": "Nebula",
    "nvme": "nvme",
    "ops.deepspeed4science": "kernels of DeepSpeed",
    "ops.fp_quantizer": "fp8 quantizer",
    "ops.op_builder": "builders of DeepSpeed",
    "ops.random_ltd": "data efficiency",
    "ops.sparse_attention": "sparse attention",
    "ops.transformer": "transformer layer",
    "ops.triton_ops": "kernels of DeepSpeed",
    "profiling": "internals",
    "runtime.checkpoint_engine": "checkpoint engines",
    "runtime.comm": "compressed collectives",
    "runtime.compression": "compressed collectives",
    "runtime.data_pipeline": "data efficiency",
    "runtime.domino": "Domino",
    "runtime.eigenvalue": "eigenvalue",
    "runtime.model_checkpointing": "checkpoint engines",
    "runtime.pipe.dualpipev": "DualPipeV",
    "runtime.progressive_layer_drop": "internals",
    "runtime.quantize": "weight quantization",
    "runtime.rollout": "rollouts",
    "runtime.sparse_tensor": "sparse gradient tensors",
    "runtime.superoffload": "SuperOffload",
    "runtime.swap_tensor": "nvme",
    "runtime.tensor_parallel": "AutoTP's classes",
    "runtime.torch_autocast": "communication types",
    "runtime.weight_quantizer": "weight quantization",
    "runtime.zenflow": "ZenFlow",
    "sequence.auto": "AutoSP",
    "sequence.fpdt_layer": "FPDT",
}

# Keys whose default differs from DeepSpeed 0.19.6's on purpose; core/tests/compat/test_defaults.py compares all others.
# Key -> both defaults, as the configuration has them, and why.
DEFAULTS = {
    "tensor_parallel.dtype": Default(None, "torch.float16", "The model is divided in its own type."),
    "zero_optimization.overlap_comm": Default(
        True, None, "Gradients are reduced while backward runs at every stage; null there means at stage 3 only."
    ),
}


@functools.cache
def upstream_names() -> Mapping[str, Mapping[str, str]]:
    """Module, with `deepspeed` -> public name -> "class", "def" or "value"; an address, if it is taken from there."""
    text = Path(__file__).with_name("names.json").read_text(encoding="utf-8")
    names: dict[str, dict[str, str]] = json.loads(text)
    return names


@functools.cache
def differences() -> Mapping[str, tuple[tuple[str, ...], str]]:
    """Members of classes and arguments of functions that are not here, and why.

    "module:Class", "module:Class.method" or "module:function", below `deepspeed` -> (names, reason). Methods of the
    engine that are not here are in `features.py`.
    """
    table = json.loads(Path(__file__).with_name("members.json").read_text(encoding="utf-8"))
    return {where: (tuple(names), reason) for where, (names, reason) in table.items()}


def feature_of(module: str) -> Feature:
    """The feature of a module, by its name with `deepspeed`, that is not here or lacks names."""
    below = module.removeprefix("deepspeed").removeprefix(".")
    if below in MODULES:
        return FEATURES[MODULES[below].feature]
    longest = max((start for start in _FEATURE_OF if below.startswith(start)), key=len)
    return FEATURES[_FEATURE_OF[longest]]
