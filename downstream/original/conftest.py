"""`original`: a Python in which `import deepspeed` is DeepSpeed itself. The session `deepspeed` of nox makes it."""

import os
import sys

import pytest


@pytest.fixture(scope="session")
def original():
    path = os.environ.get("ORIGINAL_DEEPSPEED_PYTHON")
    if not path:
        pytest.skip("start it as `nox -s deepspeed`, which installs DeepSpeed in an environment of its own")
    return path


@pytest.fixture(scope="session")
def ours():
    return sys.executable
