"""`init_distributed` in a process of its own: no environment, half an environment, a master that is not there."""

import os
import subprocess
import sys
import time

import deepspeed.comm as dist
import pytest
from deepspeed.errors import CommError

_SINGLE = """
import os, sys
import deepspeed.comm as dist
dist.init_distributed("gloo")
dist.init_distributed("gloo")
print(dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), os.environ["RANK"], os.environ["WORLD_SIZE"])
import torch
x = torch.ones(3)
dist.all_reduce(x)
dist.barrier()
print(x.tolist(), dist.is_backend("gloo"), "mpi4py" in sys.modules)
dist.destroy_process_group()
print(dist.is_initialized())
"""

_FAILING = """
from datetime import timedelta
import deepspeed.comm as dist
try:
    dist.init_distributed({backend!r}, timeout=timedelta(seconds=2))
except Exception as error:
    print(type(error).__name__, error)
"""


def run_script(script, **variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_no_environment_is_one_rank_and_starting_twice_is_harmless():
    assert run_script(_SINGLE) == ["0 1 0 0 1", "[1.0, 1.0, 1.0] True False", "False"]


def test_half_an_environment_fails_at_once():
    (line,) = run_script(_FAILING.format(backend="gloo"), RANK="1", MASTER_ADDR="127.0.0.1")
    assert line.startswith("CommError")
    assert "missing WORLD_SIZE, MASTER_PORT" in line


def test_a_master_that_is_not_there_is_named_within_the_timeout():
    started = time.monotonic()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    (line,) = run_script(_FAILING.format(backend="gloo"), **variables)
    assert line.startswith("CommError rank 1 of 2 could not join")
    assert "127.0.0.1:9" in line
    assert "timeout 2 s" in line
    assert "Check that rank 0 runs" in line
    assert time.monotonic() - started < 50  # not torch's thirty minutes


def test_an_unknown_backend_is_named():
    (line,) = run_script(_FAILING.format(backend="nosuch"))
    assert line.startswith("CommError")
    assert "no communication backend 'nosuch'" in line
    assert "gloo" in line


def test_questions_before_the_start():
    assert not dist.is_initialized()
    for ask in (dist.get_world_group, dist.backend):
        with pytest.raises(CommError, match="init_distributed"):
            ask()
    with pytest.raises(CommError, match="not initialized"):
        dist.init_distributed(dist_init_required=False)
