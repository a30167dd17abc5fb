"""The `deepspeed` command: parse, validate, and become the per-node process, or the command of a plugin's launcher.

This process loads no torch: a wrong command line answers in milliseconds. It ends by `execv` of
Python with `deepspeed.launcher.launch`, so the pid that the shell knows is the one that runs the ranks, and a signal to
it needs no forwarding. Read `launch.py` next.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from deepspeed._absent import complete
from deepspeed.errors import ConfigError, DeepSpeedError
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE, check_one_node, parse_arguments
from deepspeed.launcher.environment import (
    DEEPSPEED_ENVIRONMENT_NAME,
    DEEPSPEED_ENVIRONMENT_PATHS,
    read_environment_files,
)
from deepspeed.launcher.hostfile import fetch_hostfile
from deepspeed.launcher.plan import LaunchPlan, encode_world_info
from deepspeed.launcher.resources import is_local, parse_inclusion_exclusion, parse_node_list, parse_resource_filter

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DEEPSPEED_ENVIRONMENT_PATHS",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
]

# `python -m` would look for every module in the working directory first: a user's `random.py` is not for this process.
# Under PYTHONSAFEPATH Python puts no folder there, and the first entry is another.
_NODE_PROCESS = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    "from deepspeed.launcher.launch import start; start()"
)
USAGE_EXIT_CODE = 2  # what argparse and most commands exit with when the command line is wrong


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Console script: errors are one line and exit 2. With `args` given, by a program, they are raised."""
    if args is not None:
        _launch(args)
    try:
        _launch(sys.argv[1:])
    except DeepSpeedError as error:
        print(f"deepspeed: error: {error}", file=sys.stderr)  # noqa: T201 - the command's answer, not a log line
        sys.exit(USAGE_EXIT_CODE)


def _launch(argv: Sequence[str]) -> NoReturn:
    arguments = parse_arguments(argv)
    if arguments.launcher is not None:
        from deepspeed.launcher.multinode import find_runner  # late: plugins cost start-up time

        kind = find_runner(arguments.launcher)
        if kind is not None:
            _become_launcher(kind, arguments)
    plan = make_plan(arguments)
    os.environ.update(read_environment_files())
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C before the ranks start: end quietly, without a traceback
    command = [sys.executable, "-c", _NODE_PROCESS, plan.encode(), arguments.user_script, *arguments.user_args]
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - an argument list, no shell


def _become_launcher(kind: Any, args: "argparse.Namespace") -> NoReturn:
    """Run the command that the plugin's launcher writes, in place of this process."""
    from deepspeed.launcher.multinode import make_command

    os.environ.update(read_environment_files())
    command = make_command(kind, args, os.environ)
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)  # noqa: S606 - an argument list, no shell
    except OSError as error:
        raise ConfigError(
            f"--launcher {args.launcher}: cannot run {command[0]} ({error.strerror}); install it, or check PATH"
        ) from error


def make_plan(args: "argparse.Namespace") -> LaunchPlan:
    """The command line and the hostfile as one plan for this node.

    Raises:
        ConfigError: the flags or the hostfile ask for another machine.
    """
    check_one_node(args)
    num_slots = _slots_of_hostfile(args)
    return LaunchPlan(
        num_ranks=args.num_gpus,
        include=_local_slots(args.include, "--include"),
        exclude=_local_slots(args.exclude, "--exclude"),
        num_slots=num_slots,
        master_addr=args.master_addr or "127.0.0.1",
        master_port=args.master_port,
        module=args.module,
        no_python=args.no_python,
        no_local_rank=args.no_local_rank,
        bind_cores_to_rank=args.bind_cores_to_rank,
        bind_core_list=args.bind_core_list,
        log_dir=args.log_dir or args.enable_each_rank_log,
        log_only=args.enable_each_rank_log is not None,
        save_pid=args.save_pid,
    )


def _slots_of_hostfile(args: "argparse.Namespace") -> int | None:
    path = args.hostfile
    if path is None:
        if not os.path.isfile(DEFAULT_HOSTFILE):
            return None
        path = DEFAULT_HOSTFILE
    hosts = fetch_hostfile(path)
    if hosts is None:
        return None
    remote = [host for host in hosts if not is_local(host)]
    one_node = args.num_nodes == 1 or args.include or args.exclude
    if remote and not (one_node and len(remote) < len(hosts)):
        raise ConfigError(
            f"--hostfile {path}: names {', '.join(remote)}; this version runs on this machine alone, many nodes are a "
            "later feature. Name only localhost, or omit the hostfile"
        )
    return next(slots for host, slots in hosts.items() if is_local(host))


def _local_slots(text: str, flag: str) -> list[int] | None:
    """The slots of this machine in a filter; `None` if the filter says nothing about single slots."""
    if not text:
        return None
    nodes = parse_node_list(text, flag)
    remote = [host for host in nodes if not is_local(host)]
    if remote:
        raise ConfigError(
            f"{flag} {text}: {', '.join(remote)} is not this machine; launching on other hosts is a later feature. "
            "Name only localhost, for example localhost:0,1"
        )
    if len(nodes) > 1:
        raise ConfigError(f"{flag} {text}: names this machine twice; list all its slots after one colon")
    (slots,) = nodes.values()
    if slots is None and flag == "--exclude":
        raise ConfigError(f"{flag} {text}: leaves no device to run on; exclude single devices, for example localhost:0")
    return slots


complete(__name__)

if __name__ == "__main__":
    main()
