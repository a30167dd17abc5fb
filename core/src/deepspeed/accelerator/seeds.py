"""`set_random_seed`: one seed for every generator of this process."""

import random

import numpy as np
import torch

from deepspeed.accelerator.current import get_accelerator


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy, torch, and all devices of the accelerator.

    Args:
        seed: 0 to 2**32 - 1.

    Raises:
        ValueError: from NumPy, for another seed; Python's generator is seeded then.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)
