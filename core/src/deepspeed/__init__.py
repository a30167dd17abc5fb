"""DeepSpeed's public names over `ds-core`, each loaded on first use (PEP 562).

`import deepspeed` alone imports neither torch nor a plugin. Start reading at `engine/build.py`, then
`engine/training.py`, `zero/sharding.py`, `zero/stages.py`, `plugins/hookspecs.py`.
"""

import sys
from typing import Any

from deepspeed._forward import forward
from deepspeed._version import DEEPSPEED_API, __version__

# public name -> its address; a name of a feature that is missing in this version raises when it is used
_NAMES = {
    "ADAM_OPTIMIZER": "deepspeed.config.constants:ADAM_OPTIMIZER",
    "DeepSpeedDataLoader": "deepspeed.data.loader:DeepSpeedDataLoader",
    "DeepSpeedConfig": "deepspeed.config.root:DeepSpeedConfig",
    "DeepSpeedConfigError": "deepspeed.errors:ConfigError",
    "DeepSpeedEngine": "deepspeed.engine.engine:DeepSpeedEngine",
    "DeepSpeedHybridEngine": "deepspeed.engine.hybrid:DeepSpeedHybridEngine",
    "DeepSpeedInferenceConfig": "deepspeed.inference.config:DeepSpeedInferenceConfig",
    "DeepSpeedOptimizer": "deepspeed.zero.optimizer:DeepSpeedOptimizer",
    "DeepSpeedOptimizerCallable": "deepspeed.engine.optimizers:DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable": "deepspeed.engine.optimizers:DeepSpeedSchedulerCallable",
    "DeepSpeedTransformerConfig": "deepspeed.ops.transformer.transformer:DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer": "deepspeed.ops.transformer.transformer:DeepSpeedTransformerLayer",
    "InferenceEngine": "deepspeed.inference.engine:InferenceEngine",
    "LAMB_OPTIMIZER": "deepspeed.config.constants:LAMB_OPTIMIZER",
    "MUON_OPTIMIZER": "deepspeed.config.constants:MUON_OPTIMIZER",
    "OnDevice": "deepspeed.zero.construct:OnDevice",
    "PipelineEngine": "deepspeed.engine.pipeline:PipelineEngine",
    "PipelineModule": "deepspeed.pipe.module:PipelineModule",
    "TORCH_DISTRIBUTED_DEFAULT_PORT": "deepspeed.comm.start:DEFAULT_PORT",
    "ZeROOptimizer": "deepspeed.zero.optimizer:ZeroOptimizer",
    "__git_branch__": "deepspeed.git_version_info:git_branch",
    "__git_hash__": "deepspeed.git_version_info:git_hash",
    "accelerator": "deepspeed.accelerator",
    "add_config_arguments": "deepspeed.engine.build:add_config_arguments",
    "add_tuning_arguments": "deepspeed.optim.lr_arguments:add_tuning_arguments",
    "checkpoint": "deepspeed.checkpoint",
    "checkpointing": "deepspeed.activation.checkpointing",
    "comm": "deepspeed.comm",
    "default_inference_config": "deepspeed.inference.entry:default_inference_config",
    "dist": "deepspeed.comm",
    "domino": "deepspeed.runtime.domino",
    "elasticity": "deepspeed.elasticity",
    "get_accelerator": "deepspeed.accelerator:get_accelerator",
    "git_branch": "deepspeed.git_version_info:git_branch",
    "git_hash": "deepspeed.git_version_info:git_hash",
    "git_version_info": "deepspeed.git_version_info",
    "inference": "deepspeed.inference",
    "init_distributed": "deepspeed.comm:init_distributed",
    "init_inference": "deepspeed.inference.entry:init_inference",
    "initialize": "deepspeed.engine.build:initialize",
    "is_compile_supported": "deepspeed.engine.compiler:is_compile_supported",
    "launcher": "deepspeed.launcher",
    "log_dist": "deepspeed.log:log_dist",
    "logger": "deepspeed.log:logger",
    "model_implementations": "deepspeed.model_implementations",
    "module_inject": "deepspeed.module_inject",
    "moe": "deepspeed.moe",
    "monitor": "deepspeed.monitor",
    "nebula": "deepspeed.nebula",
    "ops": "deepspeed.ops",
    "pipe": "deepspeed.pipe",
    "profiling": "deepspeed.profiling",
    "replace_transformer_layer": "deepspeed.module_inject.replace_module:replace_transformer_layer",
    "revert_transformer_layer": "deepspeed.module_inject.replace_module:revert_transformer_layer",
    "runtime": "deepspeed.runtime",
    "sequence": "deepspeed.sequence",
    "tp_model_init": "deepspeed.tensor_parallel.entry:tp_model_init",
    "utils": "deepspeed.utils",
    "zero": "deepspeed.zero",
}

__version_major__, __version_minor__, __version_patch__ = (int(part) for part in DEEPSPEED_API.split("."))
version = __version__

__all__ = ["__version__", "version", *sorted(_NAMES)]  # noqa: PLE0604

__getattr__, __dir__ = forward(__name__, _NAMES)

__path__.append(f"{__path__[0]}/_old")  # DeepSpeed's packages whose content has moved; in a wheel they lie flat


class _AbsentModules:
    """`_AbsentModules` is the last finder of `sys.meta_path`, for DeepSpeed modules missing in this version."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("deepspeed."):
            return None
        from deepspeed._absent import AbsentModules  # imported late, because it reads a table of names

        return AbsentModules.find_spec(name, path, target)


sys.meta_path.append(_AbsentModules)
