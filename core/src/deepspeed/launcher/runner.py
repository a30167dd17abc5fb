"""The `deepspeed` command: parse, validate, and become the per-node process, or start the job on many hosts.

This process loads no torch, so a wrong command line fails in milliseconds. On one machine it replaces itself (`execv`)
with `deepspeed.launcher.launch`, so the pid that the shell knows runs the ranks, and signals need no forwarding. With
other hosts it continues in `multinode/start.py`. Read `launch.py` next.
"""

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from deepspeed._absent import complete
from deepspeed.errors import ConfigError, DeepSpeedError, environment_int
from deepspeed.launcher.arguments import check_launcher, elastic_limits, parse_arguments
from deepspeed.launcher.multinode.start import (
    choose_hosts,
    find_address,
    find_own_address,
    find_runner,
    make_commands,
    make_runner,
    runner_class,
    start,
)
from deepspeed.launcher.plan import (
    DEEPSPEED_ENVIRONMENT_NAME,
    DEEPSPEED_ENVIRONMENT_PATHS,
    DEFAULT_MASTER_PORT,
    NODE_PROCESS,
    LaunchPlan,
    encode_world_info,
    read_environment_files,
)
from deepspeed.launcher.resources import (
    fetch_hostfile,
    is_local,
    parse_inclusion_exclusion,
    parse_node_list,
    parse_resource_filter,
)

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

USAGE_EXIT_CODE = 2  # the exit code of argparse and most commands for a wrong command line


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Console script: print an error as one line and exit with 2. With `args`, from a program, raise the error."""
    if args is not None:
        _launch(args)
    try:
        _launch(sys.argv[1:])
    except DeepSpeedError as error:
        print(f"deepspeed: error: {error}", file=sys.stderr)  # noqa: T201 - the command's answer, not a log line
        sys.exit(USAGE_EXIT_CODE)


def _launch(argv: Sequence[str]) -> NoReturn:
    arguments = parse_arguments(argv)
    kind = None
    if arguments.launcher is not None:
        kind = find_runner(arguments.launcher)
    if kind is None:
        check_launcher(arguments)
    hosts = choose_hosts(arguments)
    if arguments.autotuning is not None:
        arguments = parse_arguments(_tune(argv, arguments, hosts))
        hosts = choose_hosts(arguments)
    os.environ.update(read_environment_files())
    if kind is not None:
        _start_many(kind, arguments, hosts)
    if arguments.no_ssh:
        _become_node(make_plan_by_hand(arguments, hosts), max(arguments.node_rank, 0), arguments)
    if is_many(arguments, hosts):
        _start_many(None, arguments, hosts)
    plan = make_plan(arguments, hosts).with_limits(elastic_limits(arguments, 1))
    if plan.max_nodes > 1:
        raise ConfigError(
            f"--max_elastic_nodes {plan.max_nodes}: needs the hosts; give a --hostfile, or call the command on each "
            "host by --no_ssh, --node_rank and --master_addr"
        )
    _become_node(plan, 0, arguments)


def _tune(argv: Sequence[str], args: "argparse.Namespace", hosts: Mapping[str, list[int]]) -> list[str]:
    """Run the search of --autotuning. Return the words of the job that follows `run`; exit after `tune`."""
    from deepspeed.autotuning.autotuner import tune_command  # late: it loads torch

    flags = list(argv[: len(argv) - len(args.user_args) - 1])
    at = next(at for at, word in enumerate(flags) if word.partition("=")[0] == "--autotuning")
    del flags[at : at + (1 if "=" in flags[at] else 2)]
    args.launcher_flags = flags
    words = tune_command(args, hosts)
    if words is None:
        sys.exit(0)
    return words


def is_many(args: "argparse.Namespace", hosts: Mapping[str, list[int]]) -> bool:
    """Return whether a launcher is needed: the job uses another host, or --force_multi is given.

    Raises:
        ConfigError: the flags ask for other hosts, but nothing names them.
    """
    if hosts:
        return args.force_multi or len(hosts) > 1 or not is_local(next(iter(hosts)))
    if args.launcher == "slurm" and (args.force_multi or _nodes_of_slurm(args) > 1):
        return True
    if (args.num_nodes or 1) > 1:
        raise ConfigError(
            f"--num_nodes {args.num_nodes}: needs the names of the hosts; give a --hostfile, or call the command on "
            "each node by --no_ssh and --node_rank, or use --num_nodes 1"
        )
    if args.force_multi:
        raise ConfigError(
            "--force_multi: needs the names of the hosts; give a --hostfile, `localhost slots=N` is enough"
        )
    return False


def _nodes_of_slurm(args: "argparse.Namespace") -> int:
    """Return the number of nodes for srun: --num_nodes, else the nodes of the current allocation, else 1.

    --include or --exclude without a hostfile name this machine, so the number is 1.
    """
    if args.num_nodes is not None or args.include or args.exclude:
        return args.num_nodes or 1
    return environment_int("SLURM_JOB_NUM_NODES", 1, least=1)


def _become_node(plan: LaunchPlan, node_rank: int, args: "argparse.Namespace") -> NoReturn:
    command = [sys.executable, "-c", NODE_PROCESS, plan.encode(), str(node_rank), args.user_script, *args.user_args]
    if args.dry_run:
        _show({"localhost": command})
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C before the ranks start: end quietly, without a traceback
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - an argument list, no shell


def _start_many(kind: Any, args: "argparse.Namespace", hosts: Mapping[str, list[int]]) -> NoReturn:
    """Start the job with a plugin's launcher, or with one of ours if `kind` is None."""
    environment = os.environ
    if kind is None:
        kind = runner_class("ssh" if args.elastic_training else args.launcher)
        if hosts and args.launcher != "slurm":
            asked_address = args.master_addr
            args.master_addr = find_address(args, hosts, environment)
            if args.elastic_training:
                args.master_addr = find_own_address(asked_address, hosts)
            if args.master_port is None and all(is_local(host) for host in hosts):
                from deepspeed.launcher.launch import choose_port  # late: logging costs start-up time

                args.master_port = choose_port(None)  # as on one node: a free port if 29500 is taken
    elif not hosts and (args.include or args.exclude):
        flag = "--include" if args.include else "--exclude"
        raise ConfigError(f"{flag}: needs the hosts to choose from; give a --hostfile")
    runner = make_runner(kind, args, hosts)
    if args.dry_run:
        _show(make_commands(runner, environment, hosts))
    start(runner, environment, hosts, elastic_limits(args, len(hosts)))


def _show(commands: Mapping[str, Sequence[str]]) -> NoReturn:
    """Print the commands for --dry_run, and exit."""
    for host, command in commands.items():
        print(f"{host}: {shlex.join(command)}")  # noqa: T201 - the command's answer, not a log line
    sys.stdout.flush()
    sys.exit(0)


def make_plan(args: "argparse.Namespace", hosts: Mapping[str, list[int]]) -> LaunchPlan:
    """Create the plan of a job on this machine alone.

    Args:
        hosts: this machine, if a hostfile names it; empty without a hostfile.

    Raises:
        ConfigError: a filter names another machine.
    """
    plan = LaunchPlan.of_command(
        args,
        num_ranks=args.num_gpus,
        include=None if hosts else _local_slots(args.include, "--include"),
        exclude=None if hosts else _local_slots(args.exclude, "--exclude"),
        master_addr=args.master_addr or "127.0.0.1",
        master_port=args.master_port,
        save_pid=args.save_pid,
    )
    return plan.with_slots(next(iter(hosts.values()))) if hosts else plan


def make_plan_by_hand(args: "argparse.Namespace", hosts: Mapping[str, list[int]]) -> LaunchPlan:
    """Create the plan for --no_ssh, where the user calls this command on every node.

    Raises:
        ConfigError: the rank of this node or the address of node 0 is missing, or the rank is out of range.
    """
    num_nodes = len(hosts) or args.num_nodes or 1
    limits = elastic_limits(args, num_nodes)
    if args.elastic_training and not hosts and args.num_nodes is None:
        num_nodes = limits.max_nodes
    is_many = max(num_nodes, limits.max_nodes) > 1
    if is_many:
        for flag, is_given in (("--node_rank", args.node_rank >= 0), ("--master_addr", args.master_addr)):
            if not is_given:
                raise ConfigError(
                    f"--no_ssh: {flag} is missing; each of the nodes is called with its own --node_rank, "
                    "and with the address of node 0 as --master_addr"
                )
    if args.node_rank >= (len(hosts) or num_nodes) and (hosts or not args.elastic_training):
        raise ConfigError(
            f"--node_rank {args.node_rank}: the nodes are 0 to {num_nodes - 1}; a --hostfile or --num_nodes says more"
        )
    slots = list(hosts.values())
    plan = (
        make_plan(args, {})
        ._replace(
            num_nodes=num_nodes,
            slots_of_nodes=slots or None,
            run_id="deepspeed",
            num_ranks=None if hosts else args.num_gpus,
        )
        .with_limits(limits)
    )
    return plan._replace(master_port=plan.master_port or DEFAULT_MASTER_PORT) if is_many else plan


def _local_slots(text: str, flag: str) -> list[int] | None:
    """Return the slots of this machine in a filter; None if the filter names no single slots."""
    if not text:
        return None
    nodes = parse_node_list(text, flag)
    remote = [host for host in nodes if not is_local(host)]
    if remote:
        raise ConfigError(f"{flag} {text}: {', '.join(remote)} is not this machine; give a --hostfile with its slots")
    if len(nodes) > 1:  # localhost, and its name
        raise ConfigError(f"{flag} {text}: names this machine twice; list all its slots after one colon")
    (slots,) = nodes.values()
    if slots is None and flag == "--exclude":
        raise ConfigError(f"{flag} {text}: leaves no device to run on; exclude single devices, for example localhost:0")
    return slots


complete(__name__)

if __name__ == "__main__":
    main()
