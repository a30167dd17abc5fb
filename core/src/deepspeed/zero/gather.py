"""`GatheredParameters`: partitioned parameters made whole for a while (stage 3).

In stages 0, 1 and 2 every rank holds whole parameters, so the context gives them as they are, as documented.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Module, Parameter


class GatheredParameters(contextlib.AbstractContextManager["GatheredParameters"]):
    """Context in which parameters are whole.

    Args:
        params: one parameter, or any iterable of them.
        modifier_rank: global rank that may change them inside; the change is only broadcast for partitioned
            parameters, as documented. None: nobody changes them.
        fwd_module: module to which the parameters are external.
        enabled: False turns the context off.
    """

    def __init__(
        self,
        params: Parameter | Iterable[Parameter],
        modifier_rank: int | None = None,
        fwd_module: Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.params = [params] if isinstance(params, torch.Tensor) else list(params)
        self.enabled = enabled

    def __exit__(self, *exc: object) -> None:
        return None


def register_external_parameter(module: Module, parameter: Any) -> None:
    """Say that `module`'s forward uses a parameter of another module.

    Stage 3 gathers it with the module; in other stages it is whole anyway, and only the argument is checked.

    Raises:
        TypeError: if `parameter` is not a Parameter.
    """
    if not isinstance(parameter, Parameter):
        raise TypeError(f"register_external_parameter: found {type(parameter).__name__}, wanted a torch.nn.Parameter")


def unregister_external_parameter(module: Module, parameter: Any) -> None:
    """Take `register_external_parameter` back."""
    register_external_parameter(module, parameter)
