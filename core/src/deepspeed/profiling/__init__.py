"""Measuring a run: timers, phases of a step, samples per second, memory, operations, traces.

May import `accelerator` and below. Read `timer.py` (what users hold), then `breakdown.py` (what the engine
measures and prints), `flops.py` and `tracing.py`.
"""

from deepspeed._forward import forward

__getattr__, __dir__ = forward(
    __name__,
    {"mark_phases": "deepspeed.profiling.tracing:mark_phases", "trace": "deepspeed.profiling.tracing:trace"},
)
