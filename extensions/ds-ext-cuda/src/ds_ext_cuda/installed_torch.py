"""`cuda_of_torch` finds the CUDA version that the installed torch was built for."""

from deepspeed.plugins.hookspecs import torch_build, torch_name


def cuda_of_torch() -> tuple[str | None, str]:
    """Return the CUDA version of the torch that this process has imported or would import, and a text for messages.

    Returns:
        `("13.0", "torch 2.13.0+cu130")`; `(None, "torch 2.13.0+cpu is built without CUDA; ...")` for a build without
        CUDA; also None and a text if torch is not installed.
    """
    build = torch_build()
    cuda, name = build.get("cuda"), torch_name(build)
    if cuda or not build:
        return cuda, name
    other = "built for ROCm" if build.get("hip") else "built without CUDA"
    return None, f"{name} is {other}; a CUDA build is installed as https://pytorch.org/get-started/locally says"
