"""Packages that `import torch` loads by itself (entry points `torch.backends`): when one is broken, torch is.

`ds_report` has to tell of it rather than to fail with it.
"""

import os
import sys
from typing import Any

from deepspeed.plugins.entry_points import distribution_of, one_line, read_entry_points

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def import_torch() -> list[dict[str, Any]]:
    """Import torch, then what torch would have loaded, one by one. Called by `ds_report` before all that needs torch.

    Returns:
        One row per package: `name`, `origin`, `error` (None: it was loaded). No rows when torch was there before, or
        the user keeps it from loading them.
    """
    if "torch" in sys.modules or os.environ.get(VARIABLE, "1") != "1":
        return []
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "0"
    try:
        import torch  # noqa: F401  for its effect
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
    return [_load(entry) for entry in read_entry_points("torch.backends")]


def describe(row: dict[str, Any]) -> str:
    """What a broken one means, in one line."""
    return (
        f"import torch fails, because it loads {row['name']!r} of {row['origin']}: {row['error']}. Repair or uninstall "
        f"that package; {VARIABLE}=0 keeps torch from loading it"
    )


def _load(entry: Any) -> dict[str, Any]:
    error = None
    try:
        entry.load()()
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - a vendor's package, whatever it raises
        error = one_line(failure)
    return {"name": entry.name, "origin": distribution_of(entry), "error": error}
