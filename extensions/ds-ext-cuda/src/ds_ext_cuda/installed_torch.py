"""For which CUDA the installed torch was built, read from its files: importing torch takes a second."""

import importlib.util
import re
import sys
from pathlib import Path

_LINE = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=\s*(?:'([^'\n]*)'|\"([^\"\n]*)\"|None)", re.MULTILINE)


def cuda_of_torch() -> tuple[str | None, str]:
    """The CUDA version of the torch that this process has or would import, and what is said of it.

    Returns:
        `("13.0", "torch 2.13.0+cu130")`; `(None, "torch 2.13.0+cpu is built without CUDA; ...")` for another build,
        or when there is no torch.
    """
    version = getattr(sys.modules.get("torch"), "version", None)
    if hasattr(version, "cuda"):
        found = {name: getattr(version, name, None) for name in ("__version__", "cuda", "hip")}
    else:  # not imported, or another thread is about to
        found = _stated_on_disk()
    name = f"torch {found.get('__version__') or 'of an unknown version'}"
    cuda = found.get("cuda")
    if cuda:
        return cuda, name
    if not found:
        return None, "torch is not installed"
    other = "built for ROCm" if found.get("hip") else "built without CUDA"
    return None, f"{name} is {other}; a CUDA build is installed as https://pytorch.org/get-started/locally says"


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
