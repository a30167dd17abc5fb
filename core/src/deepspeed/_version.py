"""The two versions: our own, and the version of the DeepSpeed interface that it implements."""

CORE_VERSION = "0.1.0"
DEEPSPEED_API = "0.19.6"  # libraries compare this version with their minimum
__version__ = f"{DEEPSPEED_API}+core.{CORE_VERSION}"
