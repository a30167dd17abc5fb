"""`MultiNodeRunner`: one class per launcher, of ours or of a plugin's hook `ds_launcher`.

`openmpi`, `mpich`, `impi`, `mvapich` and `slurm` start the ranks themselves. A rank finds its place by what MPI or
Slurm set, and MASTER_ADDR and MASTER_PORT, as `init_distributed` documents. The process becomes the command, so what
happens at a failure is MPI's or Slurm's affair.

`ssh` and `pdsh` start the per-node process on each host, by the host's shell. The words of a command go through that
shell, quoted for it (POSIX), so that each argument arrives as it is. `start.py` runs the commands that are written
here. `reach_hosts` is the look before the start.
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

TYPE_CHECKING = False  # as typing's, which costs start-up time

if TYPE_CHECKING:
    import argparse


class MultiNodeRunner(ABC):
    """Writes the one command that starts every rank of a job. A class with these methods need not derive from it.

    Order of calls, once per start: `__init__`, `backend_exists`, `validate_args`, `get_cmd`; then the process becomes
    that command, in the environment of `command_environment`. Each rank that it starts finds its place as
    `init_distributed` documents: by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which the command has to
    set, or by what MPI or Slurm set.

    Args:
        args: the command line, parsed: `user_script`, `user_args`, `module`, `no_python`, `master_addr`, `master_port`,
            `launcher_args` and the others of `deepspeed --help`.
        world_info_base64: the hosts and their slots, as `encode_world_info` writes them; for commands that need it
            as one word.

    Class attributes:
        flags: names of flags that this launcher honours although they concern each node, for example
            `{"bind_cores_to_rank"}`; see `PER_NODE_FLAGS`. Others of these are refused.
        programs: names of commands, of which one has to be installed here.
        is_watched: the command starts our per-node process on each host, and the process that would become the command
            watches it; those of `host_commands`, unless `is_one_for_all`.
    """

    flags: frozenset[str] = frozenset()
    programs: tuple[str, ...] = ()
    is_watched = False
    is_one_for_all = False

    def __init__(self, args: "argparse.Namespace", world_info_base64: str) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64

    def backend_exists(self) -> bool:
        """Whether what the command needs is here; by default one of `programs`, if there are such."""
        import shutil  # late: costs start-up time

        return not self.programs or any(shutil.which(name) for name in self.programs)

    def validate_args(self) -> None:  # noqa: B027 - most launchers take any command line
        """Raise `ConfigError` for a command line that this launcher cannot carry out."""

    @abstractmethod
    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        """The command, program first, no shell.

        Args:
            environment: of this process, with the variables of `.deepspeed_env`.
            active_resources: host -> its slots, by --hostfile, --include, --exclude, --num_nodes and --num_gpus, in the
                order of the hostfile. Empty without a hostfile: then the launcher's own scheduler knows the hosts.
        """

    def host_commands(
        self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]
    ) -> dict[str, list[str]]:
        """Host -> its command, for a launcher with one per host; else "all hosts" -> the command of `get_cmd`."""
        return {"all hosts": self.get_cmd(environment, active_resources)}

    def command_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment in which the command runs."""
        return dict(environment)

    def rank_command(self) -> list[str]:
        """Return what one rank runs: the user's program with its arguments. For use in `get_cmd`."""
        program = [] if self.args.no_python else [sys.executable, "-u", *(["-m"] if self.args.module else [])]
        return [*program, self.args.user_script, *self.args.user_args]


_WITH_VENV = '. "$0" && exec "$@"'  # for sh: $0 is the script, the rest is the command


class RankStarter(MultiNodeRunner):
    """A `RankStarter` starts the ranks by MPI or Slurm, with the first of `programs` that is installed."""

    def validate_args(self) -> None:
        if self.args.ssh_port is not None and not self.ssh_port_words():
            raise ConfigError(
                f"--ssh_port {self.args.ssh_port}: --launcher {self.args.launcher} has no option for it; set the "
                "port in ~/.ssh/config"
            )

    def program(self) -> str:
        """The command that is installed."""
        return next(name for name in self.programs if shutil.which(name))

    def ssh_port_words(self) -> list[str]:
        """Return the options for `--ssh_port`; [] if the launcher has none, or the flag is not given."""
        return []

    def rank_words(self) -> list[str]:
        """Return what one rank runs, with `--venv_script` read first if that is given."""
        if self.args.venv_script is None:
            return self.rank_command()
        return ["sh", "-c", _WITH_VENV, os.path.abspath(self.args.venv_script), *self.rank_command()]

    def own_words(self) -> list[str]:
        """The words of `--launcher_args`."""
        return shlex.split(self.args.launcher_args)

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that each rank is given."""
        found = exported(environment, read_environment_files())
        if self.args.master_addr:
            found["MASTER_ADDR"] = self.args.master_addr
        if self.args.master_addr or self.args.master_port:
            found["MASTER_PORT"] = str(self.args.master_port or DEFAULT_MASTER_PORT)
        return found

    def counts(self, active_resources: Mapping[str, list[int]]) -> dict[str, int]:
        """Host -> number of ranks.

        Raises:
            ConfigError: there are no hosts, or single slots were chosen, which MPI and Slurm cannot.
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
        """`-x NAME` takes the value from here, so that no value has to be quoted."""
        return {**environment, **self.variables(environment)}


class HydraRunner(RankStarter):
    """`mpiexec` of MPICH and what derives from it."""

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
    """`srun`, inside an allocation or to get one. Without a hostfile Slurm knows the hosts."""

    programs = ("srun",)

    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]]) -> list[str]:
        # a rank that fails ends the others; unless a site's slurm.conf says so, srun lets them wait for it
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
        """srun passes on all of it."""
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
    """A `RemoteShellRunner` starts the per-node process on each host by the host's shell, over `ssh` or `pdsh`."""

    flags = _PER_NODE_FLAGS

    def remote_command(
        self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]], node_rank: str
    ) -> str:
        """The text for a host's shell: go to the working directory, read `--venv_script`, become the node."""
        args = self.args
        slots = list(active_resources.values())
        # a node that comes later sends the same
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
    """One `ssh` per host, all side by side."""

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
        """All commands in one, for a program that watches them itself."""
        commands = self.host_commands(environment, active_resources).values()
        return ["sh", "-c", " ".join(f"{shlex.join(command)} &" for command in commands) + " wait"]


def has_pdsh() -> bool:
    """Whether there is a command `pdsh`."""
    return shutil.which("pdsh") is not None


class PdshRunner(RemoteShellRunner):
    """One `pdsh` for all hosts, which puts the host before each line."""

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


# Nobody sees whose password is asked for. A host that does not answer for 15 s is lost. A master process that ssh would
# leave behind keeps our pipes open.
_OUR_OPTIONS = ("-oBatchMode=yes", "-oServerAliveInterval=5", "-oServerAliveCountMax=3", "-oControlPath=none")


def _ssh(args: "argparse.Namespace") -> list[str]:
    """`ssh` with its options; those of `--launcher_args` come first, and the first counts."""
    own = shlex.split(args.launcher_args) if args.launcher == "ssh" else []
    return ["ssh", *own, *_OUR_OPTIONS, *([] if args.ssh_port is None else ["-p", str(args.ssh_port)])]


def reach_hosts(args: "argparse.Namespace", hosts: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what `hostname -I` prints on each host; all hosts are asked at the same time.

    Raises:
        ConfigError: naming the hosts that cannot be reached, and why the first cannot.
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
        if process.returncode not in (0, 127, 1):  # a system without `hostname -I` can be reached, too
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
