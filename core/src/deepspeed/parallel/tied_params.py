"""The mark of parameters that several pipeline stages hold copies of, and sum the gradients of.

`PipelineModule` sets it; `zero/unit_groups.py` reads it.
"""

from torch import Tensor

_MARK = "ds_tied_stages"


def mark_tied(param: Tensor, stages: tuple[int, ...]) -> None:
    """Say that these stages, two or more, hold copies of `param`."""
    assert len(stages) > 1, stages
    setattr(param, _MARK, stages)


def tied_stages(param: Tensor) -> tuple[int, ...]:
    """The stages that hold copies of a parameter; none where only its own does."""
    return getattr(param, _MARK, ())
