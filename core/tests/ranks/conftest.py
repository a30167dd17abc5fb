"""What several files need: a folder to launch in, and whether ranks may read each other's memory."""

import deepspeed.comm as dist
import pytest
from deepspeed.testing.distributed import run_ranks


def connects():
    backend = dist.group_backend()
    backend.connect()
    return getattr(backend, "is_direct", False)


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
    """Skips where ranks cannot read each other's memory."""
    if not all(run_ranks(2, connects)):
        pytest.skip("ds-ext-cpu is not installed, or the kernel does not let ranks read each other's memory")


@pytest.fixture(params=["direct", "messages"])
def path(request):
    """Both transports of ds-ext-cpu."""
    if request.param == "direct":
        request.getfixturevalue("direct")
    return request.param


@pytest.fixture(params=["plain", "direct", "messages"])
def transport(request):
    """The core's own transport, and those of ds-ext-cpu."""
    if request.param == "direct":
        request.getfixturevalue("direct")
    return request.param
