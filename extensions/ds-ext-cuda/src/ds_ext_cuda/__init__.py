"""NVIDIA GPUs as a DeepSpeed accelerator. Importing this package loads nothing.

May import `deepspeed` and torch. Read next: `plugin.py` (the entry point), then `devices.py`, `accelerator.py`.
"""
