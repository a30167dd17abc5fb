"""`set_random_seed`: by its old address, and for every generator."""

import random

import numpy as np
import torch
from deepspeed.runtime.utils import set_random_seed


def test_every_generator_starts_again():
    drawn = []
    for seed in (7, 7, 8):
        set_random_seed(seed)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))
