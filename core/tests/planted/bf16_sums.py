"""Gradients add up in bf16 where fp32 was asked for."""

import torch
from deepspeed.zero.units import ShardingOptions

CONFIG = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "gradient_accumulation_steps": 2,
}
FIRST = ("gradient", "head.bias")


def plant(patches):
    patches.setattr(ShardingOptions, "gradient_dtype", lambda self, dtype: torch.bfloat16)
