"""DeepSpeed's public names over `ds-core`, each loaded when it is first used (PEP 562).

`import deepspeed` alone imports neither torch nor a plugin. Start reading at `engine/build.py`, then
`engine/step.py`, `zero/strategy.py`, `zero/stage2.py`, `plugins/hookspecs.py`.
"""

from deepspeed._absent import FEATURES
from deepspeed._absent import explain as _explain
from deepspeed._forward import forward
from deepspeed._version import DEEPSPEED_API, __version__

# public name -> where it is
_NAMES = {
    "DeepSpeedConfig": "deepspeed.config.root:DeepSpeedConfig",
    "DeepSpeedConfigError": "deepspeed.errors:ConfigError",
    "DeepSpeedEngine": "deepspeed.engine.engine:DeepSpeedEngine",
    "accelerator": "deepspeed.accelerator",
    "add_config_arguments": "deepspeed.engine.build:add_config_arguments",
    "add_tuning_arguments": "deepspeed.optim.lr_arguments:add_tuning_arguments",
    "checkpoint": "deepspeed.checkpoint",
    "checkpointing": "deepspeed.activation.checkpointing",
    "comm": "deepspeed.comm",
    "get_accelerator": "deepspeed.accelerator:get_accelerator",
    "git_version_info": "deepspeed.git_version_info",
    "init_distributed": "deepspeed.comm:init_distributed",
    "initialize": "deepspeed.engine.build:initialize",
    "launcher": "deepspeed.launcher",
    "log_dist": "deepspeed.log:log_dist",
    "logger": "deepspeed.log:logger",
    "ops": "deepspeed.ops",
    "runtime": "deepspeed.runtime",
    "utils": "deepspeed.utils",
    "zero": "deepspeed.zero",
    # functions that this version does not have: they can be named, and say so when they are called
    "default_inference_config": "deepspeed._absent:default_inference_config",
    "init_inference": "deepspeed._absent:init_inference",
    "tp_model_init": "deepspeed._absent:tp_model_init",
}

__version_major__, __version_minor__, __version_patch__ = (int(part) for part in DEEPSPEED_API.split("."))
version = __version__

__all__ = ["__version__", "version", *sorted(_NAMES)]  # noqa: PLE0604

__getattr__, __dir__ = forward(
    __name__, _NAMES, lambda name: _explain(f"deepspeed.{name}", FEATURES[name]) if name in FEATURES else None
)
