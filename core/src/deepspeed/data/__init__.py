"""Data loading: the distributed loader that `initialize(training_data=...)` makes.

May import `parallel`, `comm` and below. Read `loader.py`.
"""

from deepspeed.data.loader import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
