"""What the engine writes by itself after each optimizer step, under DeepSpeed's documented names."""

from collections.abc import Mapping
from typing import Any

from deepspeed.monitor.base import Event

PREFIX = "Train/Samples/"


def step_events(
    samples: int,
    *,
    loss: Any = None,
    lr: float | None = None,
    loss_scale: float | None = None,
    times_ms: Mapping[str, float] | None = None,
) -> list[Event]:
    """The events of one step. Called by the engine's observers where a monitor writes.

    Args:
        samples: samples seen by all ranks so far, this step's included: the x axis.
        loss: mean loss of the step's micro-batches on this rank; None if the engine did not see it.
        lr: learning rate of the first parameter group.
        loss_scale: the scale that this step's losses had; None where losses are not scaled.
        times_ms: phase -> milliseconds of the step, for example `{"forward": 1.5}`.
    """
    figures = {"train_loss": loss, "lr": lr, "loss_scale": loss_scale}
    figures |= {f"elapsed_time_ms_{phase}": elapsed for phase, elapsed in (times_ms or {}).items()}
    return [(PREFIX + name, value, samples) for name, value in figures.items() if value is not None]
