"""Every test starts from the same random numbers, so that a failure in CI is one that can be had again."""

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)  # torch draws a seed of its own in a fresh process
    random.seed(0)
    np.random.seed(0)
