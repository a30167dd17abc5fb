"""Profiling: timers, phases of a step, samples per second, memory, operation counts, traces.

May import `accelerator` and below. Read `timer.py` (the public timers), then `breakdown.py` (the measurements of the
engine), `flops.py` and `tracing.py`.
"""

from deepspeed._forward import forward

__getattr__, __dir__ = forward(
    __name__,
    {"mark_phases": "deepspeed.profiling.tracing:mark_phases", "trace": "deepspeed.profiling.tracing:trace"},
)
