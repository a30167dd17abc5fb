"""Gradients are not cleared after the step, and the next one adds to them."""

from deepspeed.zero.bucket import Bucket

CONFIG = {"zero_optimization": {"stage": 0}}
FIRST = ("gradient", "head.bias")


def plant(patches):
    patches.setattr(Bucket, "clear", Bucket.finish)
