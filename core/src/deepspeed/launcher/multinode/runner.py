"""`MultiNodeRunner`: one class per launcher, of ours or of a plugin's hook `ds_launcher`."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping

TYPE_CHECKING = False
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
        """What one rank runs: the user's program with its arguments. For use in `get_cmd`."""
        program = [] if self.args.no_python else [sys.executable, "-u", *(["-m"] if self.args.module else [])]
        return [*program, self.args.user_script, *self.args.user_args]
