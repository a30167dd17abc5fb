"""The door for users' JSON: every key with its type, default, unit and meaning, checked before anything is built.

`engine/build.py` and `engine/sharding.py` alone read the root; a part gets its own section and never sees the rest. The
room may import `errors` and `log` only; it never imports torch (data types stay names: "fp32", "fp16", "bf16").
Read `root.py` first, then `base.py` (what a key declares) and `intake.py` (what happens to a user's dict).
"""

from deepspeed.config.read import read_config, redacted
from deepspeed.config.root import DeepSpeedConfig

__all__ = ["DeepSpeedConfig", "read_config", "redacted"]
