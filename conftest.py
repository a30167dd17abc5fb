"""Every test starts from the same random numbers, so that a failure in CI is one that can be had again. Ctrl-C acts in
every process that a test starts, also where a shell has started the tests in the background, which ignores it."""

import os
import random
import select
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.testing import forked

WARM_PYTHON = Path(__file__).parent / "core" / "tests" / "warm_python.py"
COMMANDS = [path.name for path in Path(sys.executable).parent.iterdir() if path.name.startswith(("ds_", "deepspeed"))]
COMMANDS += ["accelerate"]
START_LIMIT_S = 240

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)  # torch draws a seed of its own in a fresh process
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def warm_python(request, tmp_path_factory):
    """`warm_python(*modules)`: a folder with `python`, `deepspeed` and the commands `ds_...` whose processes are forks
    of one that has imported torch, our engine and these modules (`core/tests/warm_python.py`); with `is_bare` torch
    alone, for other copies of us.

    It begins `PATH` of tests that run commands. With the sweeps (`-m ''`), and where torch does not survive a fork, the
    folder is that of this Python, and every process a fresh interpreter.
    """
    folders, ends, bare = {}, [], []
    executable = sys.executable  # tests may set another

    def start(*modules, is_bare=False):
        if request.config.option.markexpr == "" or not hasattr(os, "pidfd_open"):
            return Path(executable).parent
        if (modules, is_bare) in folders:
            return folders[modules, is_bare]
        folder, name = tmp_path_factory.mktemp("warm_python"), uuid.uuid4().hex
        for command in ("python", *COMMANDS):
            script = "" if command == "python" else str(Path(executable).parent / command)
            words = shlex.join([executable, "-IS", str(WARM_PYTHON), "client", name, script])
            (folder / command).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (folder / command).chmod(0o755)
        stdin, ours = os.pipe()
        answer, stdout = os.pipe()
        ends.append(ours)
        command = [str(WARM_PYTHON), "server", name, str(folder / "python"), *modules]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DS_COMM_")}
        if is_bare:
            command = [executable, *command, "torch._dynamo"]  # torch imports it for an optimizer
            bare.append(
                subprocess.Popen(command, env={**environment, "OMP_NUM_THREADS": "1"}, stdin=stdin, stdout=stdout)
            )
        else:
            forked.start(0, command, environment, stdin, stdout, errors=sys.__stderr__.fileno())
        os.close(stdin)
        os.close(stdout)
        assert select.select([answer], [], [], START_LIMIT_S)[0]
        assert os.read(answer, 1) == b"!", f"{WARM_PYTHON} has ended"
        os.close(answer)
        folders[modules, is_bare] = folder
        return folder

    yield start
    for each in ends:
        os.close(each)
    for each in bare:
        each.wait(START_LIMIT_S)
