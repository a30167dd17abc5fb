"""`MultiNodeRunner` is the interface of a launcher: one class per built-in launcher or per hook `ds_launcher`.

`openmpi`, `mpich`, `impi`, `mvapich` and `slurm` start the ranks themselves. A rank reads its place from the variables
of MPI or Slurm, and from MASTER_ADDR and MASTER_PORT, as `init_distributed` documents. The process becomes the command,
so MPI or Slurm handles failures.

`ssh` and `pdsh` start the per-node process on each host through the host's shell. The command is quoted for a POSIX
shell, so that each argument arrives unchanged. `start.py` runs the commands that this module writes. `reach_hosts`
checks the hosts before the start.
"""

import os
import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from deepspeed.errors import ConfigError
from deepspeed.launcher.arguments import elastic_limits
from deepspeed.launcher.plan import DEFAULT_MASTER_PORT, NODE_PROCESS, LaunchPlan, exported, read_environment_files

TYPE_CHECKING = False  # instead of importing typing, which costs start-up time

if TYPE_CHECKING:
    import argparse


class MultiNodeRunner(ABC):
    """Writes the one command that starts every rank of a job. A class with these methods need not derive from it.

    Order of calls, once per start: `__init__`, `backend_exists`, `validate_args`, `get_cmd`. Then the process becomes
    that command, in the environment of `command_environment`. Each started rank finds its place as `init_distributed`
    documents: from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which the command has to set, or from
    the variables of MPI or Slurm.

    Args:
        args: the parsed command line: `user_script`, `user_args`, `module`, `no_python`, `master_addr`, `master_port`,
            `launcher_args` and the other flags of `deepspeed --help`.
        world_info_base64: the hosts and their slots as one word, encoded by `encode_world_info`, for commands that
            need them.

    Class attributes:
        flags: names of the per-node flags (`PER_NODE_FLAGS`) that this launcher supports, for example
            `{"bind_cores_to_rank"}`. The other per-node flags are refused.
        programs: names of commands; at least one of them has to be installed here.
        is_watched: whether the launcher watches the commands of `host_commands` instead of becoming the command.
        is_one_for_all: whether a watched command serves all hosts and puts the host before each line, like pdsh.
    """

    flags: frozenset[str] = frozenset()
    programs: tuple[str, ...] = ()
    is_watched = False
    is_one_for_all = False

    def __init__(self, args: "argparse.Namespace", world_info_base64: str) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64

    def backend_exists(self) -> bool:
        """Return whether this machine has the required programs; by default one of `programs`, if any are named."""
        import shutil  # late: costs start-up time

        return not self.programs or any(shutil.which(name) for name in self.programs)

    def validate_args(self) -> None:  # noqa: B027 - most launchers take any command line
        """Raise `ConfigError` for a command line that this launcher does not support."""

    @abstractmethod
    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        """Return the command, program first. No shell interprets it.

        Args:
            environment: environment of this process, with the variables of `.deepspeed_env`.
            active_resources: host -> its slots after --hostfile, --include, --exclude, --num_nodes and --num_gpus, in
                the order of the hostfile. Empty without a hostfile: the launcher's own scheduler knows the hosts.
        """

    def host_commands(
        self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]
    ) -> dict[str, list[str]]:
        """Return host -> command for a launcher with one command per host, else "all hosts" -> `get_cmd`."""
        return {"all hosts": self.get_cmd(environment, active_resources)}

    def command_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the command."""
        return dict(environment)

    def rank_command(self) -> list[str]:
        """Return what one rank runs: the user's program with its arguments. For use in `get_cmd`."""
        program = [] if self.args.no_python else [sys.executable, "-u", *(["-m"] if self.args.module else [])]
        return [*program, self.args.user_script, *self.args.user_args]


_WITH_VENV = '. "$0" && exec "$@"'  # for sh: $0 is the script, the rest is the command


class RankStarter(MultiNodeRunner):
    """A `RankStarter` starts the ranks with MPI or Slurm, using the first of `programs` that is installed."""

    def validate_args(self) -> None:
        if self.args.ssh_port is not None and not self.ssh_port_words():
            raise ConfigError(
                f"--ssh_port {self.args.ssh_port}: --launcher {self.args.launcher} has no option for it; set the "
                "port in ~/.ssh/config"
            )

    def program(self) -> str:
        """Return the first of `programs` that is installed."""
        return next(name for name in self.programs if shutil.which(name))

    def ssh_port_words(self) -> list[str]:
        """Return the options for `--ssh_port`; [] if the launcher has no such option, or without the flag."""
        return []

    def rank_words(self) -> list[str]:
        """Return the command of one rank, which reads `--venv_script` first if the flag is given."""
        if self.args.venv_script is None:
            return self.rank_command()
        return ["sh", "-c", _WITH_VENV, os.path.abspath(self.args.venv_script), *self.rank_command()]

    def own_words(self) -> list[str]:
        """Return the words of `--launcher_args`."""
        return shlex.split(self.args.launcher_args)

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that each rank gets."""
        found = exported(environment, read_environment_files())
        if self.args.master_addr:
            found["MASTER_ADDR"] = self.args.master_addr
        if self.args.master_addr or self.args.master_port:
            found["MASTER_PORT"] = str(self.args.master_port or DEFAULT_MASTER_PORT)
        return found

    def counts(self, active_resources: Mapping[str, list[int]]) -> dict[str, int]:
        """Return host -> number of ranks.

        Raises:
            ConfigError: there are no hosts, or single slots were chosen, which MPI and Slurm do not support.
        """
        name = f"--launcher {self.args.launcher}"
        if not active_resources:
            raise ConfigError(f"{name}: needs the hosts; give a --hostfile")
        for host, slots in active_resources.items():
            if slots != list(range(len(slots))):
                raise ConfigError(
                    f"{name}: starts a number of ranks per host and cannot choose slots {', '.join(map(str, slots))} "
                    f"of {host}; choose whole hosts, or use pdsh or ssh"
                )
        return {host: len(slots) for host, slots in active_resources.items()}


class OpenMPIRunner(RankStarter):
    """`mpirun` of Open MPI."""

    programs = ("mpirun.openmpi", "mpirun")

    def ssh_port_words(self) -> list[str]:
        return [] if self.args.ssh_port is None else ["--mca", "plm_rsh_args", f"-p {self.args.ssh_port}"]

    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        counts = self.counts(active_resources)
        hosts = ",".join(f"{host}:{count}" for host, count in counts.items())
        # fill the hosts in order, and leave the ranks all their cores
        placing = ["-n", str(sum(counts.values())), "--host", hosts, "--map-by", "slot", "--bind-to", "none"]
        variables = [word for name in self.variables(environment) for word in ("-x", name)]
        words = [*placing, "--wdir", os.getcwd(), *self.ssh_port_words(), *variables]
        return [self.program(), *words, *self.own_words(), *self.rank_words()]

    def command_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment from which `-x NAME` takes each value, so that no value needs quoting."""
        return {**environment, **self.variables(environment)}


class HydraRunner(RankStarter):
    """`mpiexec` of MPICH and of libraries derived from MPICH."""

    programs: tuple[str, ...] = ("mpiexec.hydra", "mpiexec.mpich", "mpirun.mpich", "mpiexec", "mpirun")

    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        counts = self.counts(active_resources)
        variables = [word for pair in self.variables(environment).items() for word in ("-genv", *pair)]
        words = [self.program(), "-wdir", os.getcwd(), *variables, *self.own_words()]
        if len(set(counts.values())) == 1:
            per_host = next(iter(counts.values()))
            placing = ["-hosts", ",".join(counts), "-ppn", str(per_host), "-n", str(sum(counts.values()))]
            return [*words, *placing, *self.rank_words()]
        for number, (host, count) in enumerate(counts.items()):
            words += [*([":"] if number else []), "-host", host, "-n", str(count), *self.rank_words()]
        return words


class MPICHRunner(HydraRunner):
    """`mpiexec` of MPICH."""


class IMPIRunner(HydraRunner):
    """`mpiexec` of Intel MPI."""

    programs = ("mpiexec.hydra", "mpirun")


class MVAPICHRunner(HydraRunner):
    """`mpiexec` of MVAPICH."""

    programs = ("mpiexec.hydra", "mpiexec", "mpirun")


class SlurmRunner(RankStarter):
    """`srun`, inside an allocation or to get one. Without a hostfile, Slurm chooses the hosts."""

    programs = ("srun",)

    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        # a failed rank ends the others; srun does this by default only if the site's slurm.conf says so
        passed = ["--export=ALL", "--kill-on-bad-exit=1"]
        return [self.program(), *self._placing(active_resources), *passed, *self.own_words(), *self.rank_words()]

    def _placing(self, active_resources: Mapping[str, list[int]]) -> list[str]:
        if not active_resources:
            nodes = [] if self.args.num_nodes is None else ["--nodes", str(self.args.num_nodes)]
            ranks = [] if self.args.num_gpus is None else ["--ntasks-per-node", str(self.args.num_gpus)]
            return [*nodes, *ranks]
        counts = self.counts(active_resources)
        if len(set(counts.values())) > 1:
            raise ConfigError(
                "--launcher slurm: the hosts of the hostfile have different numbers of slots; srun starts as "
                "many ranks on each, give --num_gpus"
            )
        per_host = next(iter(counts.values()))
        total = ["--nodes", str(len(counts)), "--ntasks", str(per_host * len(counts))]
        return [*total, "--ntasks-per-node", str(per_host), "--nodelist", ",".join(counts)]

    def command_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of srun, which passes all of it to the ranks."""
        return {**environment, **self.variables(environment)}


RUNNERS = {
    "openmpi": OpenMPIRunner,
    "mpich": MPICHRunner,
    "impi": IMPIRunner,
    "mvapich": MVAPICHRunner,
    "slurm": SlurmRunner,
}


_CONNECT_S = 10  # for ssh to reach a host
_ANSWER_S = 30  # for a host's shell to answer
_PER_NODE_FLAGS = frozenset({"bind_cores_to_rank", "log_dir", "enable_each_rank_log", "save_pid"})


class RemoteShellRunner(MultiNodeRunner):
    """A `RemoteShellRunner` starts the per-node process through each host's shell, over `ssh` or `pdsh`."""

    flags = _PER_NODE_FLAGS

    def remote_command(
        self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]], node_rank: str
    ) -> str:
        """Return the text for a host's shell: cd to the working directory, source `--venv_script`, exec the node."""
        args = self.args
        slots = list(active_resources.values())
        # an elastic job has a constant id, so that a node that joins later sends the same one
        run_id = "deepspeed" if args.elastic_training else f"deepspeed-{os.getpid()}"
        plan = LaunchPlan.of_command(
            args,
            master_addr=args.master_addr,
            master_port=args.master_port or DEFAULT_MASTER_PORT,
            num_nodes=len(slots),
            slots_of_nodes=slots[:1] if all(each == slots[0] for each in slots) else slots,
            run_id=run_id,
            is_watched=True,
        ).with_limits(elastic_limits(args, len(slots)))
        variables = [f"{name}={value}" for name, value in exported(environment, read_environment_files()).items()]
        node = [sys.executable, "-c", NODE_PROCESS, plan.encode(), node_rank, args.user_script, *args.user_args]
        steps = [f"cd {shlex.quote(os.getcwd())}"]
        if args.venv_script is not None:
            steps.append(f". {shlex.quote(os.path.abspath(args.venv_script))}")
        steps.append(f"exec {shlex.join(['env', *variables, *node])}")
        return " && ".join(steps)


class SshRunner(RemoteShellRunner):
    """Starts one `ssh` per host, all at the same time."""

    is_watched = True
    programs = ("ssh",)

    def host_commands(
        self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]
    ) -> dict[str, list[str]]:
        return {
            host: [*_ssh(self.args), host, self.remote_command(environment, active_resources, str(node_rank))]
            for node_rank, host in enumerate(active_resources)
        }

    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        """Return all commands as one shell command, for a caller that watches it."""
        commands = self.host_commands(environment, active_resources).values()
        return ["sh", "-c", " ".join(f"{shlex.join(command)} &" for command in commands) + " wait"]


def has_pdsh() -> bool:
    """Return whether there is a command `pdsh`."""
    return shutil.which("pdsh") is not None


class PdshRunner(RemoteShellRunner):
    """Starts one `pdsh` for all hosts. pdsh puts the host before each line."""

    is_watched = True
    is_one_for_all = True
    programs = ("pdsh",)

    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        mark = "DEEPSPEED_NODE_RANK"
        text = self.remote_command(environment, active_resources, mark)
        # pdsh reads %n as the number of the host, %% as a percent sign
        before, _, after = text.replace("%", "%%").partition(f" {mark} ")
        words = ["pdsh", "-S", "-f", str(len(active_resources)), "-w", ",".join(active_resources)]
        return [*words, *shlex.split(self.args.launcher_args), f"{before} %n {after}"]

    def command_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        options = _OUR_OPTIONS if self.args.ssh_port is None else (*_OUR_OPTIONS, "-p", str(self.args.ssh_port))
        before = environment.get("PDSH_SSH_ARGS_APPEND", "")
        return {
            **environment,
            "PDSH_RCMD_TYPE": "ssh",
            "PDSH_SSH_ARGS_APPEND": f"{before} {' '.join(options)}".strip(),
        }


# BatchMode: with many hosts a user cannot see which host asks for a password. ServerAlive: a host that does not answer
# for 15 s is lost. ControlPath: a master process that ssh leaves behind would keep our pipes open.
_OUR_OPTIONS = ("-oBatchMode=yes", "-oServerAliveInterval=5", "-oServerAliveCountMax=3", "-oControlPath=none")


def _ssh(args: "argparse.Namespace") -> list[str]:
    """Return `ssh` with its options. Those of `--launcher_args` come first, because ssh uses the first value."""
    own = shlex.split(args.launcher_args) if args.launcher == "ssh" else []
    return ["ssh", *own, *_OUR_OPTIONS, *([] if args.ssh_port is None else ["-p", str(args.ssh_port)])]


def reach_hosts(args: "argparse.Namespace", hosts: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return host -> output of `hostname -I` there; all hosts run it at the same time.

    Raises:
        ConfigError: the message names the unreachable hosts, and the reason for the first one.
    """
    command = [*_ssh(args), f"-oConnectTimeout={_CONNECT_S}"]
    asked = {}
    for host in hosts:
        asked[host] = subprocess.Popen(
            [*command, host, "hostname -I"],
            env=dict(environment),
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    answers, failed = {}, {}
    for host, process in asked.items():
        try:
            answers[host], errors = process.communicate(timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failed[host] = f"no answer in {_ANSWER_S} s"
            continue
        if process.returncode not in (0, 127, 1):  # 127 and 1: reachable, but without `hostname -I`
            failed[host] = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    if failed:
        host, reason = next(iter(failed.items()))
        if args.no_ssh_check:
            raise ConfigError(
                f"{host}: cannot be reached by ssh ({reason}), and its address is asked for there; give --master_addr"
            )
        raise ConfigError(
            f"{', '.join(failed)}: cannot be reached by ssh ({host}: {reason}); nothing was started. Set up ssh "
            "without a password (`ssh-copy-id`), check --ssh_port, or start each node by --no_ssh"
        )
    return answers
