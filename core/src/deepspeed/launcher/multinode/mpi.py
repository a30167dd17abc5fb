"""The launchers `openmpi`, `mpich`, `impi`, `mvapich` and `slurm`: each starts the ranks itself.

A rank finds its place by what MPI or Slurm set, and MASTER_ADDR and MASTER_PORT, as `init_distributed` documents. The
process becomes the command, so what happens at a failure is MPI's or Slurm's affair.
"""

import os
import shlex
import shutil
from collections.abc import Mapping

from deepspeed.errors import ConfigError
from deepspeed.launcher.environment import exported, read_environment_files
from deepspeed.launcher.multinode.runner import MultiNodeRunner
from deepspeed.launcher.plan import DEFAULT_MASTER_PORT

_WITH_VENV = '. "$0" && exec "$@"'  # for sh: $0 is the script, the rest is the command


class RankStarter(MultiNodeRunner):
    """What they have in common. Of `programs` the first that is installed is taken."""

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
        """The options for `--ssh_port`; none where there is no such."""
        return []

    def rank_words(self) -> list[str]:
        """What one rank runs, after `--venv_script`."""
        if self.args.venv_script is None:
            return self.rank_command()
        return ["sh", "-c", _WITH_VENV, os.path.abspath(self.args.venv_script), *self.rank_command()]

    def own_words(self) -> list[str]:
        """The words of `--launcher_args`."""
        return shlex.split(self.args.launcher_args)

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What each rank is given."""
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
