"""Every test starts from the same random numbers, so that a failure in CI is one that can be had again. Ctrl-C acts in
every process that a test starts, also where a shell has started the tests in the background, which ignores it."""

import random
import signal

import numpy as np
import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)  # torch draws a seed of its own in a fresh process
    random.seed(0)
    np.random.seed(0)
