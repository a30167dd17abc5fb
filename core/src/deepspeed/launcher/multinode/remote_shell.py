"""The launchers `ssh` and `pdsh`: the per-node process on each host, by the host's shell.

The words of a command go through that shell, quoted for it (POSIX), so that each argument arrives as it is. `watch.py`
runs the commands that are written here. `reach_hosts` is the look before the start.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from deepspeed.errors import ConfigError
from deepspeed.launcher.arguments import elastic_limits
from deepspeed.launcher.environment import exported, read_environment_files
from deepspeed.launcher.multinode.runner import MultiNodeRunner
from deepspeed.launcher.plan import DEFAULT_MASTER_PORT, NODE_PROCESS, LaunchPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

_CONNECT_S = 10  # for ssh to reach a host
_ANSWER_S = 30  # for a host's shell to answer
_PER_NODE_FLAGS = frozenset({"bind_cores_to_rank", "log_dir", "enable_each_rank_log", "save_pid"})


class RemoteShellRunner(MultiNodeRunner):
    """What `ssh` and `pdsh` have in common."""

    flags = _PER_NODE_FLAGS

    def remote_command(
        self, environment: Mapping[str, str], active_resources: Mapping[str, list[int]], node_rank: str
    ) -> str:
        """The text for a host's shell: go to the working directory, read `--venv_script`, become the node."""
        args = self.args
        slots = list(active_resources.values())
        plan = LaunchPlan(
            master_addr=args.master_addr,
            master_port=args.master_port or DEFAULT_MASTER_PORT,
            module=args.module,
            no_python=args.no_python,
            no_local_rank=args.no_local_rank,
            bind_cores_to_rank=args.bind_cores_to_rank,
            bind_core_list=args.bind_core_list,
            log_dir=args.log_dir or args.enable_each_rank_log,
            log_only=args.enable_each_rank_log is not None,
            grace_s=args.grace_period,
            num_nodes=len(slots),
            slots_of_nodes=slots[:1] if all(each == slots[0] for each in slots) else slots,
            run_id="deepspeed"
            if args.elastic_training
            else f"deepspeed-{os.getpid()}",  # a node that comes later sends the same
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
    """What `hostname -I` prints on each host, all asked at the same time.

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
