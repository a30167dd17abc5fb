"""Hostfiles and command lines that are wrong: one line each, before anything starts on any host."""

import os
import re
import subprocess
import sys

import pytest
from deepspeed.errors import ConfigError
from deepspeed.launcher.runner import main

HOSTFILE = "localhost slots=2\nworker-1 slots=2\nworker-2 slots=4\n"

BAD_HOSTFILES = {
    "": "names no host",
    "# worker-1 slots=4\n\n": "names no host",
    "worker-1\n": "line 1: found 'worker-1'",
    "worker-1 slots=4\nworker-1 slots=2\n": "line 2: host worker-1 comes twice, first in line 1",
    "# hosts\nworker-1 slots=0\n": "line 2: host worker-1 has slots=0",
    "worker-1 slots=-1\n": "line 1: found 'worker-1 slots=-1'",
    "worker-1 slots=four\n": "line 1: found 'worker-1 slots=four'",
    "worker-1 slots=4 max_slots=8\n": "line 1: found 'worker-1 slots=4 max_slots=8'",
    "-oProxyCommand=touch slots=4\n": "line 1: found '-oProxyCommand=touch' where a host's name belongs",
    "worker-1;reboot slots=4\n": "line 1: found 'worker-1;reboot' where a host's name belongs",
    "worker-[1-4] slots=4\n": "line 1: found 'worker-[1-4]' where a host's name belongs",
    b"\xff\xfe slots=4\n": "it is no text in UTF-8",
}

BAD_LINES = {
    "--include worker-9": "--include worker-9: no host worker-9; there are: localhost, worker-1, worker-2",
    "--exclude worker-9:0": "--exclude worker-9:0: no host worker-9",
    "--include worker-1:2": "--include worker-1:2: no slot 2 on worker-1; there are: 0, 1",
    "--include worker-1:0@worker-1:5": "no slot 5 on worker-1",
    "--include worker-1:a": "found 'a' where a slot number belongs",
    "--include worker-1@": "found no host in ''",
    "--exclude localhost@worker-1@worker-2": "leaves no slot to run on",
    "--num_nodes 4": "--num_nodes 4: the hostfile hosts has 3 hosts",
    "--num_nodes 0": "--num_nodes: found '0'",
    "--num_gpus 3": "--num_gpus/--num_accelerators 3: localhost has 2 slots",
    "--include worker-1 --exclude worker-2": "--include worker-1 and --exclude worker-2 exclude each other",
    "--include worker-1 --num_nodes 1": "--include already says which nodes to use",
    "--exclude worker-1 --num_gpus 1": "--exclude already says which devices to use",
    "--launcher nosuch": "--launcher nosuch: no plugin gives this launcher, and it is none of pdsh, ssh",
    "--launcher_args='": "--launcher_args ': No closing quotation",
    "--launcher slurm --ssh_port 22": "--ssh_port 22 and --launcher slurm exclude each other",
    "--ssh_port 70000": "--ssh_port: found '70000'",
    "--node_rank 1": "--node_rank 1: is for nodes that are started by hand; add --no_ssh",
    "--no_ssh": "--no_ssh: --node_rank is missing",
    "--no_ssh --node_rank 1": "--no_ssh: --master_addr is missing",
    "--no_ssh --node_rank 3 --master_addr worker-1": "--node_rank 3: the nodes are 0 to 2",
    "--no_ssh --node_rank -2": "--node_rank -2: nodes count from 0",
    "--no_ssh --force_multi": "--no_ssh and --force_multi exclude each other",
    "--master_port 0": "--master_port: found '0'",
    "--hostfile missing --num_nodes 2": "--num_nodes 2: needs the names of the hosts",
    "--hostfile missing --force_multi": "--force_multi: needs the names of the hosts",
    "--hostfile missing --include worker-1": "--include worker-1: needs the hosts to choose from; give a --hostfile",
    "--hostfile missing --include 0,1": "--include 0,1: names no host; for devices of this machine write localhost:0,1",
    "--nproc_per_node 2": "--nproc_per_node: no such flag, did you mean --num_gpus?",
    "--nproc-per-node=2": "--nproc-per-node=2: no such flag, did you mean --num_gpus?",
    "--nnodes 2": "--nnodes: no such flag, did you mean --num_nodes?",
    "--deepspeed_config ds.json": "--deepspeed_config: no such flag; the script's own flags follow the script",
    "--deepspeed": "--deepspeed: no such flag; the script's own flags follow the script",
}


@pytest.fixture
def refuse(tmp_path, monkeypatch):
    """`refuse(words, hostfile)`: the one line that this command line gets; nothing may start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def started(*args, **kwargs):
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(subprocess, "Popen", started)
    for name in ("execv", "execvpe"):
        monkeypatch.setattr(os, name, started)

    def message(words, hostfile):
        (tmp_path / "hosts").write_bytes(hostfile if isinstance(hostfile, bytes) else hostfile.encode())
        with pytest.raises(ConfigError) as caught:
            main(["--hostfile", "hosts", *words, "train.py"])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return message


@pytest.mark.parametrize("text", BAD_HOSTFILES)
def test_a_bad_hostfile(refuse, text):
    message = refuse([], text)
    assert message.startswith("--hostfile hosts")
    assert BAD_HOSTFILES[text] in message


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_command_line(refuse, line):
    assert BAD_LINES[line] in refuse(line.split(), HOSTFILE)


@pytest.mark.parametrize("line", ["", "--help", "--world_info=e30= --master_addr=127.0.0.1 train.py"])
def test_the_process_of_a_node_started_by_hand(line):
    """As launchers of others start DeepSpeed's module of this name."""
    command = [sys.executable, "-m", "deepspeed.launcher.launch", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"deepspeed.launcher.launch: error: found the arguments .* Call `deepspeed` .*\n", done.stderr)
