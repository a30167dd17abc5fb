"""What DeepSpeed's installation writes down, for builders of vendors that ask for it in their `load()`.

Here a library in the wheel is found by `OpBuilder.load` itself, beside the builder's package; so no op counts as
installed, and a vendor's own `load()` goes on to its `jit_load()`. May import `ops.documented`.
"""

from typing import Any

from deepspeed._version import __version__
from deepspeed.ops.documented import OPS

version = __version__
git_hash: str | None = None
git_branch: str | None = None
installed_ops: dict[str, bool] = dict.fromkeys(OPS, False)
compatible_ops: dict[str, bool] = dict.fromkeys(OPS, False)
#: what the installed ops were built for: nothing
torch_info: dict[str, Any] = {"version": "0.0", "bf16_support": False}

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]
