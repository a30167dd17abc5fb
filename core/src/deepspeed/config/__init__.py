"""Parse and check the user's JSON: each key has a type, default, unit and meaning, checked before the engine is built.

Only `engine/build.py` and `engine/sharding.py` read the root; every other part gets its own section. The package
imports only `errors`, `log` and `elasticity`. It never imports torch, so data types are names: "fp32", "fp16", "bf16".
Read `root.py` first, then `base.py` (the declaration of keys) and `intake.py` (the processing of a user's dict).
"""

from deepspeed.config.read import read_config, redacted
from deepspeed.config.root import DeepSpeedConfig

__all__ = ["DeepSpeedConfig", "read_config", "redacted"]
