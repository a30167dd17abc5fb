"""`ds_ssh`, with programs of our own in the place of ssh and pdsh."""

import os
import subprocess
import sys

import pytest

SSH = """#!/bin/sh
echo "$@"
case "$*" in *worker-1*) echo lost >&2; exit 7;; esac
"""
PDSH = """#!/bin/sh
echo "$PDSH_RCMD_TYPE $@"
exit 3
"""


@pytest.fixture
def run(tmp_path):
    """Runs `ds_ssh` with nothing on PATH but the programs given."""
    (tmp_path / "bin").mkdir()

    def run(*words, hosts="worker-0 slots=2\nworker-1 slots=2\n", **programs):
        for name, text in programs.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        (tmp_path / "hosts").write_text(hosts)
        environment = {**os.environ, "PATH": str(tmp_path / "bin")}
        command = [sys.executable, "-m", "deepspeed.launcher.ssh", *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_each_host_runs_the_command_by_ssh(run):
    done = run("-f", "hosts", "ls", "-l", "a b", ssh=SSH)
    assert done.returncode == 7
    lines = [f"{host}: -o BatchMode=yes -- {host} ls -l a b" for host in ("worker-0", "worker-1")]
    assert sorted(done.stdout.splitlines()) == lines
    assert done.stderr == "worker-1: lost\n"


def test_pdsh_is_preferred(run):
    done = run("-f", "hosts", "uptime", ssh=SSH, pdsh=PDSH)
    assert done.returncode == 3
    assert done.stdout == "ssh -S -w worker-0,worker-1 uptime\n"


@pytest.mark.parametrize(
    ("words", "hosts", "part"),
    [
        (["-f", "nosuch", "ls"], "", "nosuch: no such file"),
        (["-f", "hosts", "ls"], "# none\n", "names no host"),
        (["-f", "hosts", "ls"], "-oProxyCommand=x slots=1\n", "'-oProxyCommand=x' where a host"),
        (["-f", "hosts"], "a slots=1\n", "no command given"),
        (["-f", "hosts", "ls"], "a slots=1\n", "neither pdsh nor ssh"),
    ],
)
def test_each_mistake_is_one_line(run, words, hosts, part):
    done = run(*words, hosts=hosts)
    assert done.returncode == 2
    assert done.stderr.startswith("ds_ssh: error: ")
    assert part in done.stderr
    assert done.stderr.count("\n") == 1
