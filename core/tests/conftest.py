"""What all of core's tests share: a process group of one rank, and a check that none is left."""

import os
import sys

import hypothesis
import pytest

# Core knows no device: its tests take the host, also on a machine with a GPU and the extension for it.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# nothing depends on how fast the machine is, and no examples are kept between runs
hypothesis.settings.register_profile("project", deadline=None, database=None)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    """A process group that a module's tests leave would serve the next module's in the same worker."""
    yield
    torch_dist = sys.modules.get("torch.distributed")
    if torch_dist is not None and torch_dist.is_initialized():
        torch_dist.destroy_process_group()
        pytest.fail("the tests of this module left a process group; let them use the fixture single_rank")


@pytest.fixture(scope="module")
def single_rank():
    """`deepspeed.comm` with one rank and no launcher's environment; gone after the module's tests."""
    import deepspeed.comm as dist

    before = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    dist.init_distributed("gloo", verbose=False)
    yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
