"""The two versions: our own, and the DeepSpeed interface that it answers for."""

CORE_VERSION = "0.1.0"
DEEPSPEED_API = "0.19.6"  # libraries compare this one with their thresholds
__version__ = f"{DEEPSPEED_API}+core.{CORE_VERSION}"
