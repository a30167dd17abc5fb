"""What several files need: a folder to launch in, whether ranks may read each other's memory, ranks of a script."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import deepspeed.comm as dist
import pytest
from deepspeed.testing import forked
from deepspeed.testing.distributed import run_ranks
from torch.distributed import TCPStore

LAUNCHING = Path(__file__).parent / "launching.py"
#: for a rank to end; a loaded machine needs a part of it
LIMIT_S = 100
HOSTS = "127.0.0.1 slots=2\n127.0.0.2 slots=2\n"
# Joins the words by spaces, gives them to `sh -c` and passes on no variable, as ssh does; both hosts are this machine.
STAND_IN = """#!/bin/sh
while true; do case "$1" in -p|-o|-i) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift
echo "$host $*" >> {log}
case $host in gone*) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255;; esac
cd /
exec env -i HOME={home} PATH=/usr/bin:/bin SSH_HOST="$host" sh -c "$*"
"""


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


@pytest.fixture
def hosts(folder, monkeypatch):
    """A working directory with a hostfile, and the stand-in first on PATH."""
    (folder / "hosts").write_text(HOSTS)
    (folder / "bin").mkdir()
    (folder / "home").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(STAND_IN.format(log=folder / "ssh.log", home=folder / "home"))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return folder


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


@pytest.fixture
def warm(warm_python, monkeypatch):
    """What a test starts by `sys.executable` and `launch`, such as a launcher and its ranks, are forks that have torch
    already. Signals reach a fork alone, not what it starts, so that tests of signals to groups have real processes, as
    `test_launcher.py` has."""
    monkeypatch.setattr(sys, "executable", str(warm_python() / "python"))


@pytest.fixture
def fork_module(tmp_path_factory):
    """`fork_module(name, *words)`: `python -m name *words`, by a fork of a process that has torch; as `subprocess.run`.

    A process of a node that it becomes is the same process, and has torch already (`launching.py`).
    """

    def run(name, *words):
        folder = tmp_path_factory.mktemp("module")
        command = [str(LAUNCHING), sys.executable, name, *words]
        with open(os.devnull) as nothing, (folder / "out").open("wb") as output, (folder / "err").open("wb") as errors:
            streams = (nothing.fileno(), output.fileno())
            job = forked.start(0, command, dict(os.environ), *streams, errors=errors.fileno())
        try:
            code = job.wait(2 * LIMIT_S)
        finally:
            job.kill()
        return subprocess.CompletedProcess(
            command, code, (folder / "out").read_text(), stderr=(folder / "err").read_text()
        )

    return run


@pytest.fixture
def launch(fork_module):
    """`launch(*flags)`: `deepspeed` with these flags; as `subprocess.run`."""
    return functools.partial(fork_module, "deepspeed.launcher.runner")


class Script:
    """A rank that runs a script."""

    def __init__(self, rank, command, environment, log):
        stdin, self._stdin = os.pipe()
        self._log = log
        with log.open("wb") as output:
            self._process = forked.start(rank, command, environment, stdin, output.fileno())
        os.close(stdin)
        self.poll, self.kill = self._process.poll, self._process.kill

    def end(self):
        """Its exit code and output, once it has ended; its standard input ends here."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None
        try:
            code = self._process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still runs after {LIMIT_S} s:\n{self._log.read_text()}") from error
        return code, self._log.read_text()


@pytest.fixture
def start_ranks(tmp_path):
    """`start_ranks(text, *arguments, **environment)`: two ranks that run a script, in a job of their own."""
    jobs = []

    def start(text, *arguments, **environment):
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        (folder / "train.py").write_text(text)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        world |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCAL_", "TORCHELASTIC_"))}
        command = [str(folder / "train.py"), *map(str, arguments)]
        ranks = []
        jobs.append((store, ranks))
        forked.prepare(2, clean)
        for rank in range(2):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
            ranks.append(Script(rank, command, {**clean, **world, **own}, folder / f"rank{rank}.log"))
        return ranks

    yield start
    for _, ranks in jobs:
        for rank in ranks:
            rank.kill()
            rank.end()
