"""Activation checkpointing: blocks whose inputs are kept and whose activations are computed again in the backward.

May import `precision`, `optim`, `parallel` and below. Read `checkpointing.py`, which is
`deepspeed.checkpointing`, then `keeping.py` (where inputs are kept) and `rng.py` (named random states).
"""
