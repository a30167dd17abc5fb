"""`--launcher NAME` becomes the commands that start the job: the class, the hosts, the checks, the start."""

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

from deepspeed.errors import ConfigError, PluginError, counted
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE
from deepspeed.launcher.multinode.runners import (
    RUNNERS,
    MultiNodeRunner,
    PdshRunner,
    SshRunner,
    has_pdsh,
    reach_hosts,
)
from deepspeed.launcher.plan import DEFAULT_MASTER_PORT, ElasticLimits, encode_world_info
from deepspeed.launcher.resources import fetch_hostfile, is_local, parse_inclusion_exclusion, parse_node_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

# What the process on each node does for ranks that the core starts itself: (attribute, flag).
PER_NODE_FLAGS = (
    ("bind_cores_to_rank", "--bind_cores_to_rank"),
    ("log_dir", "--log_dir"),
    ("enable_each_rank_log", "--enable_each_rank_log"),
    ("save_pid", "--save_pid"),
)


def find_runner(name: str) -> Any | None:
    """The class that a feature plugin gives for `--launcher NAME`, or None. No accelerator is chosen for it."""
    from deepspeed.plugins import plugin_manager  # late: only a command line with --launcher pays for it

    return plugin_manager().hook.ds_launcher(name=name)


def runner_class(name: str | None) -> Any:
    """Our own class for `--launcher NAME`; without a name pdsh's, or ssh's, and a line, if there is none."""
    if name is None:
        if has_pdsh():
            return PdshRunner
        say("deepspeed: pdsh is not installed; starting by ssh (--launcher ssh says the same without this line)")
        return SshRunner
    return {"pdsh": PdshRunner, "ssh": SshRunner, **RUNNERS}[name]


def make_runner(kind: Any, args: "argparse.Namespace", hosts: Mapping[str, list[int]]) -> Any:
    """An object of the launcher's class `kind`, checked.

    Raises:
        ConfigError: the command line asks for what the launcher cannot do.
        PluginError: the plugin's class is no launcher.
    """
    where = f"--launcher {args.launcher}"
    if not isinstance(kind, type) or not callable(getattr(kind, "get_cmd", None)):
        raise PluginError(f"{where}: a plugin gave {kind!r}; a class with the methods of MultiNodeRunner is expected")
    for attribute, flag in PER_NODE_FLAGS:
        if getattr(args, attribute) and attribute not in getattr(kind, "flags", ()):
            raise ConfigError(f"{flag}: {kind.__name__} of {where} does not do this; omit the flag")
    runner = kind(args, encode_world_info(hosts))
    if not getattr(runner, "backend_exists", lambda: True)():
        needed = " or ".join(getattr(kind, "programs", ())) or f"what {kind.__name__} needs"
        raise ConfigError(f"{where}: {needed} is not installed on this machine; install it")
    getattr(runner, "validate_args", lambda: None)()
    return runner


def make_commands(runner: Any, environment: Mapping[str, str], hosts: Mapping[str, list[int]]) -> dict[str, list[str]]:
    """Host -> command, or "all hosts" -> the one command.

    Raises:
        PluginError: the plugin's class gives no command.
    """
    if isinstance(runner, MultiNodeRunner):
        commands = runner.host_commands(environment, hosts)
    else:
        commands = {"all hosts": runner.get_cmd(environment, hosts)}
    for command in commands.values():
        if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
            where = f"--launcher {runner.args.launcher}: {type(runner).__name__}.get_cmd"
            raise PluginError(f"{where} returned {command!r}; a list of words is expected")
    return commands


def start(
    runner: Any, environment: Mapping[str, str], hosts: Mapping[str, list[int]], limits: ElasticLimits
) -> NoReturn:
    """Run what the launcher writes: watch it if it is one of ours, else become it. `limits`: of an elastic job.

    Raises:
        ConfigError: its program cannot be run.
    """
    commands = make_commands(runner, environment, hosts)
    if isinstance(runner, MultiNodeRunner):
        environment = runner.command_environment(environment)
    if getattr(runner, "is_watched", False):
        from deepspeed.launcher.launch import pid_file
        from deepspeed.launcher.multinode.watch import Watcher

        coordinator = None
        if limits.min_nodes:
            from deepspeed.launcher.membership import Coordinator

            port = runner.args.master_port or DEFAULT_MASTER_PORT
            coordinator = Coordinator(port, "deepspeed", *limits, len(hosts), lambda line: say(f"deepspeed: {line}"))
        with pid_file() if runner.args.save_pid else nullcontext():
            grace_s = runner.args.grace_period
            code = Watcher(commands, environment, runner.is_one_for_all, coordinator, grace_s).run()
        sys.exit(code)
    (command,) = commands.values()
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, dict(environment))  # noqa: S606 - an argument list, no shell
    except OSError as error:
        raise ConfigError(
            f"--launcher {runner.args.launcher}: cannot run {command[0]} ({error.strerror}); install it, or check PATH"
        ) from error


def find_address(args: "argparse.Namespace", hosts: Mapping[str, list[int]], environment: Mapping[str, str]) -> str:
    """The address of the first host, for all others; on the way, every host is reached once unless --no_ssh_check.

    Raises:
        ConfigError: a host cannot be reached, or the first one has no address.
    """

    first = next(iter(hosts))
    are_here = all(is_local(host) for host in hosts)
    asked = list(hosts)
    if args.no_ssh_check:
        asked = [] if args.master_addr or are_here else [first]
    answers = reach_hosts(args, asked, environment) if asked else {}
    if args.master_addr:
        return str(args.master_addr)
    if are_here:
        return "127.0.0.1"
    address = next(iter(answers[first].split()), None)
    if address is None:
        raise ConfigError(f"{first}: `hostname -I` there prints no address; give --master_addr")
    return address


def find_own_address(asked: str, hosts: Mapping[str, list[int]]) -> str:
    """The address of this machine for the hosts of an elastic job, whose list of nodes is kept here.

    Args:
        asked: --master_addr; "" without it.
        hosts: of the job.

    Raises:
        ConfigError: this machine does not know the first host by its name.
    """
    if asked:
        return asked
    there = next((host for host in hosts if not is_local(host)), None)
    if there is None:
        return "127.0.0.1"
    import socket  # late: most starts need none

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((there, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"{there}: ssh knows this host, and the network does not ({error.strerror}); give the address of this "
            "machine as --master_addr"
        ) from error


def say(line: str) -> None:
    """A line for the user, before the start."""
    print(line, file=sys.stderr)  # noqa: T201 - the command's answer, not a log line


def choose_hosts(args: "argparse.Namespace") -> dict[str, list[int]]:
    """Host -> slots, from the hostfile and the flags that cut it down; empty without a hostfile,
    where --include and --exclude may name this machine only.

    Raises:
        ConfigError: a flag asks for more than the hostfile has, or there is none to ask.
    """
    path = args.hostfile or (DEFAULT_HOSTFILE if os.path.isfile(DEFAULT_HOSTFILE) else None)
    found = fetch_hostfile(path) if path else None
    if found is None:
        flag, text = ("--include", args.include) if args.include else ("--exclude", args.exclude)
        if text and not all(is_local(host) for host in parse_node_list(text, flag)):
            if text.replace(",", "").isdecimal():
                raise ConfigError(f"{flag} {text}: names no host; for devices of this machine write localhost:{text}")
            raise ConfigError(f"{flag} {text}: needs the hosts to choose from; give a --hostfile")
        return {}
    hosts = parse_inclusion_exclusion(found, args.include, args.exclude)
    if not hosts:
        raise ConfigError(f"--exclude {args.exclude}: leaves no slot to run on")
    if args.num_nodes is not None:
        if args.num_nodes > len(hosts):
            raise ConfigError(
                f"--num_nodes {args.num_nodes}: the hostfile {path} has {counted(len(hosts), 'host')}; ask for those"
            )
        hosts = dict(list(hosts.items())[: args.num_nodes])
    if args.num_gpus is not None:
        for host, slots in hosts.items():
            if args.num_gpus > len(slots):
                raise ConfigError(
                    f"--num_gpus/--num_accelerators {args.num_gpus}: {host} has {counted(len(slots), 'slot')} in the "
                    f"hostfile {path}; ask for those"
                )
        hosts = {host: slots[: args.num_gpus] for host, slots in hosts.items()}
    return hosts
