"""Measuring a run: timers, phases of a step, samples per second, memory.

May import `accelerator` and below. Read `timer.py` (what users hold), then `breakdown.py` (what the engine
measures and prints).
"""

from deepspeed._absent import complete

complete(__name__)
