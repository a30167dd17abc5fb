"""What a micro-batch adds to the buffer of earlier ones is added twice."""

from deepspeed.zero import bucket

CONFIG = {"zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 2}
FIRST = ("gradient", "head.bias")


def plant(patches):
    add = bucket._add

    def adding(views, grads, factor):
        add(views, grads, 2 * factor)

    patches.setattr(bucket, "_add", adding)
