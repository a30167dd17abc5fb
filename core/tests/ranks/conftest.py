"""What several files need: a folder to launch in, and whether ranks may read each other's memory."""

import pytest
import torch
from deepspeed.comm.direct import connect
from deepspeed.comm.staging import StagingPool
from deepspeed.testing.distributed import run_ranks


def connects():
    return connect(torch.distributed.group.WORLD, StagingPool(1)) is not None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, and an environment as a user's shell has it; for tests that launch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPORT_DIR", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "DS_ENV_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


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
