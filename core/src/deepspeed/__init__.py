"""DeepSpeed's public names over `ds-core`, each loaded when it is first used (PEP 562).

`import deepspeed` alone imports neither torch nor a plugin. Start reading at `engine/build.py`, then
`engine/step.py`, `zero/strategy.py`, `zero/stage2.py`, `plugins/hookspecs.py`.
"""

import importlib
from typing import Any

from deepspeed._version import __version__

# public name -> module that holds it ("" in the second place: the name is the module itself)
_NAMES = {
    "DeepSpeedConfig": ("deepspeed.config.root", "DeepSpeedConfig"),
    "DeepSpeedEngine": ("deepspeed.engine.engine", "DeepSpeedEngine"),
    "add_config_arguments": ("deepspeed.engine.build", "add_config_arguments"),
    "get_accelerator": ("deepspeed.accelerator", "get_accelerator"),
    "init_distributed": ("deepspeed.comm", "init_distributed"),
    "initialize": ("deepspeed.engine.build", "initialize"),
    "logger": ("deepspeed.log", "logger"),
    "log_dist": ("deepspeed.log", "log_dist"),
    "accelerator": ("deepspeed.accelerator", ""),
    "checkpoint": ("deepspeed.checkpoint", ""),
    "comm": ("deepspeed.comm", ""),
    "ops": ("deepspeed.ops", ""),
    "runtime": ("deepspeed.runtime", ""),
    "utils": ("deepspeed.utils", ""),
    "zero": ("deepspeed.zero", ""),
}

__all__ = ["__version__", *sorted(_NAMES)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'deepspeed' has no attribute {name!r}")
    module_name, attribute = _NAMES[name]
    module = importlib.import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
