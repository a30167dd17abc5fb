"""For which SYCL compiler the installed torch was built, read from its files: importing torch takes a second."""

import importlib.util
import re
import sys
from pathlib import Path

_LINE = re.compile(r"^(__version__|xpu)\b[^=\n]*=\s*(?:'([^'\n]*)'|\"([^\"\n]*)\"|None)", re.MULTILINE)


def xpu_of_torch() -> tuple[str | None, str]:
    """The version of the SYCL compiler that the torch of this process was built with, and what is said of that torch.

    Returns:
        `("20250302", "torch 2.13.0+xpu")`: the year, the minor and the patch version;
        `(None, "torch 2.13.0+cpu is built without XPU; ...")` for another build, or when there is no torch.
    """
    if "torch" in sys.modules:
        version = sys.modules["torch"].version
        found = {"__version__": str(version.__version__), "xpu": getattr(version, "xpu", None)}
    else:
        found = _stated_on_disk()
    name = f"torch {found.get('__version__') or 'of an unknown version'}"
    if found.get("xpu"):
        return found["xpu"], name
    if not found:
        return None, "torch is not installed"
    return None, f"{name} is built without XPU; an XPU build: pip install torch --index-url {_INDEX}"


_INDEX = "https://download.pytorch.org/whl/xpu"


def _stated_on_disk() -> dict[str, str | None]:
    """What `torch/version.py` assigns; empty without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    except OSError:
        return {"__version__": None}
    return {match[1]: match[2] or match[3] for match in _LINE.finditer(text)}
