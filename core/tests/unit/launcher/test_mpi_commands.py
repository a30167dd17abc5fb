"""What MPI and Slurm are told to start; the commands are written here, and not run."""

import os
import sys

import pytest
from deepspeed.errors import ConfigError
from deepspeed.launcher.arguments import parse_arguments
from deepspeed.launcher.multinode.runners import RUNNERS

EVEN = {"a": [0, 1], "b": [0, 1]}
UNEVEN = {"a": [0], "b": [0, 1]}


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """`runner(name, *flags)`: the launcher, whose program is installed; with the argument `x y`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("deepspeed.launcher.multinode.runners.shutil.which", lambda name: f"/bin/{name}")

    def make(name, *flags):
        args = parse_arguments(["--launcher", name, "--master_addr", "a", *flags, "train.py", "x y"])
        made = RUNNERS[name](args, "")
        made.validate_args()
        return made

    return make


RANK = [sys.executable, "-u", "train.py", "x y"]


def test_open_mpi(runner):
    made = runner("openmpi", "--ssh_port", "2222", "--launcher_args=--tag-output --mca 'x' y")
    command = made.get_cmd({"NCCL_A": "1 2", "HOME": "/"}, UNEVEN)
    words = f"mpirun.openmpi -n 3 --host a:1,b:2 --map-by slot --bind-to none --wdir {os.getcwd()} --mca plm_rsh_args"
    variables = ["-x", "NCCL_A", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
    assert command == [*words.split(), "-p 2222", *variables, "--tag-output", "--mca", "x", "y", *RANK]
    environment = made.command_environment({"NCCL_A": "1 2"})
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"], environment["NCCL_A"]) == ("a", "29500", "1 2")


@pytest.mark.parametrize("name", ["mpich", "impi", "mvapich"])
def test_hydra(runner, name):
    command = runner(name).get_cmd({"NCCL_A": "1 2"}, EVEN)
    assert command[:3] == ["mpiexec.hydra", "-wdir", os.getcwd()]
    assert command[3:6] == ["-genv", "NCCL_A", "1 2"]
    assert command[-10:] == ["-hosts", "a,b", "-ppn", "2", "-n", "4", *RANK]
    uneven = runner(name).get_cmd({}, UNEVEN)
    assert uneven[-17:] == ["-host", "a", "-n", "1", *RANK, ":", "-host", "b", "-n", "2", *RANK]


def test_slurm(runner):
    command = runner("slurm", "--launcher_args=--mem 0").get_cmd({}, EVEN)
    placing = [
        "srun",
        "--nodes",
        "2",
        "--ntasks",
        "4",
        "--ntasks-per-node",
        "2",
        "--nodelist",
        "a,b",
        "--export=ALL",
        "--kill-on-bad-exit=1",
        "--mem",
        "0",
    ]
    assert command == [*placing, *RANK]
    assert runner("slurm", "--num_nodes", "2").get_cmd({}, {})[:4] == ["srun", "--nodes", "2", "--export=ALL"]
    with pytest.raises(ConfigError, match="different numbers of slots"):
        runner("slurm").get_cmd({}, UNEVEN)


def test_a_script_of_the_shell_comes_first(runner):
    command = runner("mpich", "--venv_script", "venv/bin/activate").get_cmd({}, EVEN)
    script = os.path.abspath("venv/bin/activate")
    assert command[-8:] == ["sh", "-c", '. "$0" && exec "$@"', script, *RANK]


def test_single_slots_are_refused(runner):
    with pytest.raises(ConfigError, match="cannot choose slots 1 of a"):
        runner("openmpi").get_cmd({}, {"a": [1]})
    with pytest.raises(ConfigError, match="--ssh_port 22: --launcher mpich has no option for it"):
        runner("mpich", "--ssh_port", "22")
