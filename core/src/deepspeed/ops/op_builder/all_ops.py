"""DeepSpeed's address of `ALL_OPS`: op name -> builder for the current accelerator, computed when it is read."""

from typing import Any

from deepspeed._absent import complete

__all__ = ["ALL_OPS"]  # noqa: F822 - see __getattr__


def __getattr__(name: str) -> Any:
    if name == "ALL_OPS":
        from deepspeed.ops import registry

        return registry.all_ops()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


complete(__name__)
