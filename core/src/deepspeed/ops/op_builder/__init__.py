"""Op builders: compile the sources of a kernel, from any package, and load the library.

May import `accelerator` and lower floors; knows no device. A device's builders are in its extension. The names here
(`FusedAdamBuilder`, `CPUAdamBuilder`, ... and `ALL_OPS`) refer to the builders of the current accelerator when used.
Read next: `builder.py` (the base class), `jit.py` (how an op is compiled), `names.py`, then `../registry.py`.
"""

import difflib
from typing import Any

from deepspeed._absent import complete
from deepspeed.ops.documented import OPS
from deepspeed.ops.op_builder.builder import OpBuilder, TorchCPUOpBuilder
from deepspeed.ops.op_builder.names import builder_name

# `__getattr__` also finds a vendor's own builder, under another name, while its accelerator is the current one.
_DOCUMENTED = sorted(op.builder for op in OPS.values())

__all__ = ["OpBuilder", "TorchCPUOpBuilder", *_DOCUMENTED]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _DOCUMENTED:
        return builder_name(name)
    if name == "ALL_OPS":
        from deepspeed.ops import registry

        return registry.all_ops()
    known = [*__all__, "ALL_OPS"]
    if name.endswith("Builder"):
        from deepspeed.ops import implementations

        if implementations.implemented(name):
            return builder_name(name)
        known = ["OpBuilder", *implementations.builder_names()]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "ALL_OPS"})


complete(__name__)
