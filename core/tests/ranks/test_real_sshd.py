"""`deepspeed --hostfile` by a real sshd on two addresses of this machine, with ssh and with pdsh."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.launcher.launch import find_free_port

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")
AWKWARD = "a b\"c'$d\n%n `e` \\ *"
REPORT = """
import json, os, sys
with open(os.environ["RANK"] + ".json", "w") as file:
    json.dump([sys.argv[2:], os.environ["CROSS_RANK"], os.environ["NCCL_AWKWARD"]], file)
"""
CONFIG = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
PidFile none
"""


@pytest.fixture
def port(folder, monkeypatch):
    """The port of an sshd that lets this user in; the options of ssh are in `SSH_OPTIONS`."""
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("sshd and ssh are not installed (openssh-server)")
    if os.getuid() == 0 and not Path("/run/sshd").is_dir():
        pytest.skip("sshd of root needs the folder /run/sshd, which its service makes")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name], check=True)
    number = find_free_port()
    (folder / "sshd_config").write_text(CONFIG.format(port=number, folder=folder))
    (folder / "hosts").write_text("127.0.0.1 slots=2\n127.0.0.2 slots=2\n")
    options = f"-i {folder}/user -oStrictHostKeyChecking=no -oUserKnownHostsFile=/dev/null -oLogLevel=ERROR"
    monkeypatch.setenv("SSH_OPTIONS", options)
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", options)
    server = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.PIPE, text=True, cwd=folder
    )
    listening = [server.stderr.readline() for _ in range(2)]
    assert all("Server listening" in line for line in listening), listening
    yield number
    server.terminate()
    server.communicate()


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_arguments_arrive_as_they_are(folder, port, launch, monkeypatch, launcher):
    if shutil.which(launcher) is None:
        pytest.skip(f"{launcher} is not installed")
    monkeypatch.setenv("NCCL_AWKWARD", AWKWARD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    (folder / "train.py").write_text(REPORT)
    own = ["--launcher", "ssh", f"--launcher_args={os.environ['SSH_OPTIONS']}"]
    if launcher == "pdsh":
        own = ["--launcher", "pdsh", "--no_ssh_check"]
    done = launch("-H", "hosts", *own, "--ssh_port", str(port), "train.py", AWKWARD)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert json.loads((folder / f"{rank}.json").read_text()) == [[AWKWARD], str(rank // 2), AWKWARD]
