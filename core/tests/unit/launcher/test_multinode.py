"""`--launcher NAME` of a plugin: the hosts it gets, the command it writes, and what is refused."""

import json
import os
import subprocess
import sys

import pytest
from deepspeed.errors import ConfigError, PluginError
from deepspeed.launcher.arguments import parse_arguments
from deepspeed.launcher.multinode import MultiNodeRunner
from deepspeed.launcher.multinode.start import choose_hosts, make_commands, make_runner, runner_class
from deepspeed.launcher.plan import encode_world_info

HOSTS = "worker-0 slots=2\nworker-1 slots=4\nworker-2 slots=4\n"


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """The command line of `--launcher mine` with a hostfile of three hosts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text(HOSTS)

    def arguments(*flags, hosts=True):
        files = ["--hostfile", "hosts"] if hosts else []
        return parse_arguments(["--launcher", "MINE", *files, *flags, "train.py", "--epochs", "3"])

    return arguments


def make_command(kind, args, environment):
    hosts = choose_hosts(args)
    (command,) = make_commands(make_runner(kind, args, hosts), environment, hosts).values()
    return command


class Runner(MultiNodeRunner):
    """The smallest launcher."""

    def get_cmd(self, environment, active_resources):
        return ["start", *active_resources, *self.rank_command()]


CHOICES = {
    "": {"worker-0": [0, 1], "worker-1": [0, 1, 2, 3], "worker-2": [0, 1, 2, 3]},
    "--num_nodes 2": {"worker-0": [0, 1], "worker-1": [0, 1, 2, 3]},
    "--num_nodes 2 --num_gpus 1": {"worker-0": [0], "worker-1": [0]},
    "--include worker-2:1,3@worker-0": {"worker-0": [0, 1], "worker-2": [1, 3]},
    "--exclude worker-0@worker-1:0": {"worker-1": [1, 2, 3], "worker-2": [0, 1, 2, 3]},
}


@pytest.mark.parametrize("flags", CHOICES)
def test_hosts_by_flags(parse, flags):
    hosts = choose_hosts(parse(*flags.split()))
    assert hosts == CHOICES[flags]
    assert list(hosts) == sorted(hosts)


REFUSED = {
    "--num_nodes 4": r"--num_nodes 4: the hostfile hosts has 3 hosts",
    "--num_gpus 3": r"--num_accelerators 3: worker-0 has 2 slots",
    "--include worker-9": "no host worker-9",
    "--exclude worker-0@worker-1@worker-2": "leaves no slot",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_hosts_that_are_not_there(parse, flags):
    with pytest.raises(ConfigError, match=REFUSED[flags]):
        choose_hosts(parse(*flags.split()))


def test_without_a_hostfile_the_launcher_knows_the_hosts(parse):
    assert choose_hosts(parse("--num_nodes", "8", hosts=False)) == {}
    with pytest.raises(ConfigError, match="--include worker-0: needs the hosts to choose from; give a --hostfile"):
        choose_hosts(parse("--include", "worker-0", hosts=False))


def test_the_command(parse):
    command = make_command(Runner, parse("--num_nodes", "1"), {})
    assert command == ["start", "worker-0", sys.executable, "-u", "train.py", "--epochs", "3"]
    assert make_command(Runner, parse("--num_nodes", "1", "--module"), {})[3:6] == ["-u", "-m", "train.py"]


def test_a_launcher_written_for_deepspeed(parse):
    class Old:
        def __init__(self, args, world_info_base64):
            self.args, self.world = args, world_info_base64

        def get_cmd(self, environment, active_resources):
            return ["pdsh", environment["USER"], self.world, self.args.user_script]

    world = encode_world_info({"worker-0": [0, 1]})
    assert make_command(Old, parse("--num_nodes", "1"), {"USER": "me"}) == ["pdsh", "me", world, "train.py"]


def test_what_a_launcher_does_not_do_is_refused(parse):
    class Binding(Runner):
        flags = frozenset({"bind_cores_to_rank"})

    args = parse("--bind_cores_to_rank")
    with pytest.raises(ConfigError, match="--bind_cores_to_rank: Runner of --launcher mine does not do this"):
        make_command(Runner, args, {})
    assert make_command(Binding, args, {})
    with pytest.raises(ConfigError, match="--log_dir: Binding"):
        make_command(Binding, parse("--bind_cores_to_rank", "--log_dir", "logs"), {})


def test_a_launcher_that_cannot_start(parse):
    class Absent(Runner):
        def backend_exists(self):
            return False

    class Strict(Runner):
        def validate_args(self):
            raise ConfigError("--ssh_port: not here")

    with pytest.raises(ConfigError, match="--launcher mine: what Absent needs is not installed"):
        make_command(Absent, parse(), {})
    with pytest.raises(ConfigError, match="--ssh_port: not here"):
        make_command(Strict, parse(), {})


def test_a_program_that_is_not_installed_is_named(parse, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, programs in {"pdsh": "pdsh", "ssh": "ssh", "slurm": "srun", "impi": "mpiexec.hydra or mpirun"}.items():
        with pytest.raises(ConfigError, match=f"{programs} is not installed on this machine; install it"):
            make_command(runner_class(name), parse(), {})


@pytest.mark.parametrize("answer", [None, [], "start all", ["start", 7]])
def test_a_command_that_is_none(parse, answer):
    broken = type("Broken", (Runner,), {"get_cmd": lambda self, environment, resources: answer})
    with pytest.raises(PluginError, match=r"Broken.get_cmd returned .*; a list of words is expected"):
        make_command(broken, parse(), {})


@pytest.mark.parametrize("thing", [Runner(None, ""), object, 5])
def test_what_is_no_launcher(parse, thing):
    with pytest.raises(PluginError, match="a class with the methods of MultiNodeRunner is expected"):
        make_command(thing, parse(), {})


PLUGIN = """
import sys
from deepspeed.launcher.multinode import MultiNodeRunner
from deepspeed.plugins import hookimpl

START = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['FROM_FILE'], os.getpid()]))"

class Mine(MultiNodeRunner):
    def get_cmd(self, environment, active_resources):
        assert environment["FROM_FILE"] == "yes"
        assert "torch" not in sys.modules
        program = "no such program" if self.args.no_ssh else sys.executable
        return [program, "-c", START, *active_resources, *self.args.launcher_args.split(), *self.rank_command()[2:]]

@hookimpl
def ds_launcher(name):
    return Mine if name in ("mine", "slurm") else None
"""


@pytest.fixture
def command(tmp_path):
    """Starts the `deepspeed` command where a plugin with launchers is installed."""
    (tmp_path / "plugin_mine.py").write_text(PLUGIN)
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deepspeed.plugins]\nmine = plugin_mine\n")
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "hosts").write_text(HOSTS)
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=yes\n")

    def start(*flags):
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        return subprocess.Popen(
            [sys.executable, "-m", "deepspeed.launcher.runner", *flags, "train.py", "--epochs", "3"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


@pytest.mark.parametrize("name", ["mine", "slurm"])
def test_the_process_becomes_the_launchers_command(command, name):
    process = command("--launcher", name, "-H", "hosts", "--num_nodes", "2", "--launcher_args=-v")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    words = ["worker-0", "worker-1", "-v", "train.py", "--epochs", "3"]
    assert json.loads(out) == [words, "yes", process.pid]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--launcher nosuch", "--launcher nosuch: no plugin gives this launcher, and it is none of pdsh, "),
        ("--launcher mine -i localhost", "--include: needs the hosts to choose from"),
        ("--launcher mine --no_ssh", "--launcher mine: cannot run no such program (No such file or directory)"),
        ("--num_nodes 2", "--num_nodes 2: needs the names of the hosts"),
    ],
)
def test_what_cannot_be_started_is_one_line(command, flags, message):
    process = command(*flags.split())
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("deepspeed: error: " + message)
    assert err.count("\n") == 1
