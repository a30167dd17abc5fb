"""DeepSpeed's installation facts, which vendors' op builders read in their `load()`.

Each name is computed when it is read, for the current accelerator; importing the module loads no torch and no plugin.

    version             the DeepSpeed version that this package implements, with its own version
    git_hash            the commit, and git_branch the branch or tag, that pip installed this from; None otherwise
    accelerator_name    the current accelerator
    installed_ops       op -> whether its library was prebuilt and is beside its builder's package
    compatible_ops      op -> whether it has a kernel for the current accelerator on this machine
    torch_info          versions of torch (major.minor) and of the toolkits it was built with: "0.0" for none
"""

from typing import Any

from deepspeed._installation import origin
from deepspeed._version import __version__

version = __version__


def __getattr__(name: str) -> Any:
    if name not in _ANSWERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _ANSWERS[name]()


def __dir__() -> list[str]:
    return sorted({*globals(), *_ANSWERS})


def _origin(key: str) -> str | None:
    """Return pip's record of `key` for the repository it installed from; None if there is none."""
    found = origin().get("vcs_info", {}).get(key)
    return None if found is None else str(found)


def _accelerator_name() -> str:
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator()._name)


def _installed_ops() -> dict[str, bool]:
    from deepspeed.ops import registry
    from deepspeed.ops.op_builder import loading

    built = {op: loading.is_there(builder.absolute_name()) for op, builder in registry.all_ops().items()}
    return {**dict.fromkeys(registry.OPS, False), **built}


def _compatible_ops() -> dict[str, bool]:
    from deepspeed.ops import registry

    return registry.compatible_ops()


def _torch_info() -> dict[str, Any]:
    import torch

    from deepspeed.accelerator import get_accelerator

    release = torch.__version__.split(".")
    toolkits = {name: value for name, value in vars(torch.version).items() if name in torch.version.__all__}
    built_with = {f"{name}_version": value or "0.0" for name, value in toolkits.items() if name not in _NO_TOOLKITS}
    return {
        **built_with,
        "version": ".".join(release[:2]),
        "bf16_support": bool(get_accelerator().is_bf16_supported()),
    }


#: names in `torch.version` that are not a toolkit's version
_NO_TOOLKITS = ("__version__", "debug", "git_version")
_ANSWERS = {
    "accelerator_name": _accelerator_name,
    "compatible_ops": _compatible_ops,
    "git_branch": lambda: _origin("requested_revision"),
    "git_hash": lambda: _origin("commit_id"),
    "installed_ops": _installed_ops,
    "torch_info": _torch_info,
}

__all__ = ["version", *sorted(_ANSWERS)]  # noqa: PLE0604
