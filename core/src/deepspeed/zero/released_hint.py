"""What to do when a forward reads a parameter that is not whole: torch's own error speaks of an empty tensor only."""

import re
from collections.abc import Iterable

from torch import Tensor

from deepspeed.zero.param_state import ZeroParamStatus

#: how torch's errors show a 1-D tensor without elements: "vec (0)", "shape [0]", "tensor b (0)", "got 1-D tensor"
_EMPTY = re.compile(r"[(\[]0[)\]]|1-?D\b|2-?D\b|at least \w+ dimensions")


def add_released_hint(error: Exception, params: Iterable[Tensor]) -> None:
    """Append a hint to the message of `error` if a forward may have failed over a sharded parameter (stage 3).

    Called by the engine with what the module's forward raised; the error keeps its type and traceback.

    Args:
        params: the module's parameters.
    """
    if not _EMPTY.search(str(error)) or not any(_is_released(param) for param in params):
        return
    hint = (
        "in ZeRO stage 3 a parameter is empty, of shape (0,), outside of its module's forward and backward; if one "
        "module uses a parameter of another, call deepspeed.zero.register_external_parameter(module, parameter)"
    )
    error.args = (f"{error}; {hint}", *error.args[1:])


def _is_released(param: Tensor) -> bool:
    return getattr(param, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE
