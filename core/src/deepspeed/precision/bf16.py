"""bf16 with fp32 master weights: the range of fp32, so no loss scaling."""

import torch

from deepspeed.precision.policy import Precision


class BF16(Precision):
    """Parameters and computation in bfloat16; `zero/` keeps the fp32 master weights that the optimizer updates."""

    name = "bf16"
    model_dtype = torch.bfloat16
