"""`torch_build` finds which torch this process has or would import, and what it was built for, without importing it.

For probes: whether there is a device is half of the answer, whether the installed torch can use it is the other, and
importing torch takes a second.
"""

import importlib.util
import re
import sys
from pathlib import Path

_LINE = re.compile(r"^(\w+)\b[^=\n]*=\s*(?:'([^'\n]*)'|\"([^\"\n]*)\"|None)", re.MULTILINE)


def torch_build() -> dict[str, str | None]:
    """Return what `torch.version` states, as text or None: `{"__version__": "2.13.0+cpu", "git_version": ...}`.

    Read the torch in memory if it is there whole, else its `version.py`. Return {} when torch is not installed, and
    `{"__version__": None}` when that file cannot be read.
    """
    version = getattr(sys.modules.get("torch"), "version", None)
    if hasattr(version, "__version__"):  # not while another thread is in the middle of importing torch
        return {name: None if value is None else str(value) for name, value in vars(version).items()}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    except OSError:
        return {"__version__": None}
    return {match[1]: match[2] or match[3] for match in _LINE.finditer(text)}


def torch_name(build: dict[str, str | None]) -> str:
    """That torch as reasons name it: `torch 2.13.0+cpu`, or `torch is not installed`."""
    return f"torch {build['__version__'] or 'of an unknown version'}" if build else "torch is not installed"
