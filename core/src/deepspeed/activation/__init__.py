"""Activation checkpointing: blocks whose inputs are kept and whose activations are computed again in the backward.

May import `precision`, `optim`, `parallel` and below. Read `checkpointing.py` (`deepspeed.checkpointing`, and where
inputs are kept), then `rng.py` (named random states).
"""
