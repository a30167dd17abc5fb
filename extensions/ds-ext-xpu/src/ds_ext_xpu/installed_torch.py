"""Read the version of the SYCL compiler that the installed torch was built with."""

from deepspeed.plugins.hookspecs import torch_build, torch_name

_INDEX = "https://download.pytorch.org/whl/xpu"


def xpu_of_torch() -> tuple[str | None, str]:
    """Return the version of the SYCL compiler that built the installed torch, and a description of that torch.

    Returns:
        `("20250302", "torch 2.13.0+xpu")`: the year, the minor and the patch version;
        `(None, "torch 2.13.0+cpu is built without XPU; ...")` for another build, or when there is no torch.
    """
    build = torch_build()
    xpu, name = build.get("xpu"), torch_name(build)
    if xpu or not build:
        return xpu, name
    return None, f"{name} is built without XPU; an XPU build: pip install torch --index-url {_INDEX}"
