"""The table says whether a name of DeepSpeed's documented interface works, works differently, or is not here yet.

The table is pure data. It is read by `deepspeed._absent` (names that are not here yet), by the engine (its methods) and
by docs/generate/compatibility.py (docs/reference/compatibility.md). When a feature arrives, its lines here go and the
generated modules with them. May import nothing of the project. Read `features.py` first.
"""

from deepspeed.compatibility.features import (
    DEFAULTS,
    ENGINE_METHODS,
    FEATURES,
    MODULES,
    Default,
    EngineMethod,
    Feature,
    Module,
    differences,
    feature_of,
    upstream_names,
)

__all__ = [
    "DEFAULTS",
    "ENGINE_METHODS",
    "FEATURES",
    "MODULES",
    "Default",
    "EngineMethod",
    "Feature",
    "Module",
    "differences",
    "feature_of",
    "upstream_names",
]
