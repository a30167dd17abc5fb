"""Activation checkpointing keeps the inputs of blocks and recomputes their activations in the backward.

May import `precision`, `optim`, `parallel` and below. Read `checkpointing.py` (`deepspeed.checkpointing`, and where
inputs are kept), then `rng.py` (named random states).
"""
