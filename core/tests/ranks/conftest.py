"""Whether the ranks of this machine may read each other's memory; where they may not, tests of that are skipped."""

import pytest
import torch
from deepspeed.comm.direct import connect
from deepspeed.comm.staging import StagingPool
from deepspeed.testing.distributed import run_ranks


def connects():
    return connect(torch.distributed.group.WORLD, StagingPool(1)) is not None


@pytest.fixture(scope="session")
def direct():
    """Skips where exchanges by reading cannot be had."""
    if not all(run_ranks(2, connects)):
        pytest.skip("the kernel does not let ranks read each other's memory")


@pytest.fixture(params=["direct", "messages"])
def path(request):
    """Both ways of an exchange."""
    if request.param == "direct":
        request.getfixturevalue("direct")
    return request.param
