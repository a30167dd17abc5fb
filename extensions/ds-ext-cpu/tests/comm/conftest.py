"""Whether ranks may read each other's memory here."""

import deepspeed.comm as dist
import pytest
from deepspeed.testing.distributed import run_ranks


def connects():
    backend = dist.group_backend()
    backend.connect()
    return backend.is_direct


@pytest.fixture(scope="session")
def direct():
    """Skips where ranks cannot read each other's memory."""
    if not all(run_ranks(2, connects)):
        pytest.skip("the kernel does not let ranks read each other's memory")
