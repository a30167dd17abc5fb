"""Gradients are sent in bf16 where fp32 was asked for."""

import torch
from deepspeed.zero.bucket import Bucket

CONFIG = {"zero_optimization": {"stage": 1}}
FIRST = ("gradient", "head.bias")


def plant(patches):
    launch = Bucket.launch

    def narrow(self, reduce):
        self._wire_dtype = torch.bfloat16
        launch(self, reduce)

    patches.setattr(Bucket, "launch", narrow)
