"""The room's names are loaded on first use; the rooms themselves load no torch."""

import subprocess
import sys

import pytest


def test_rooms_are_light():
    loaded = "print('torch' in sys.modules)"
    code = f"import sys, deepspeed.ops, deepspeed.optim; {loaded}; deepspeed.ops.adam; {loaded}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"]


def test_unknown_names():
    import deepspeed.ops
    import deepspeed.optim

    with pytest.raises(AttributeError, match="nothing_here"):
        deepspeed.ops.nothing_here  # noqa: B018
    with pytest.raises(AttributeError, match="nothing_here"):
        deepspeed.optim.nothing_here  # noqa: B018
