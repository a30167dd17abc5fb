"""The command line of `deepspeed`: this module defines, parses and checks every flag.

`runner.main` calls `parse_arguments`; `docs/generate/launcher.py` writes the reference page from `create_parser`.
A wrong command line raises `ConfigError` with one line that starts with the flag.
"""

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from typing import NoReturn

from deepspeed._version import __version__
from deepspeed.errors import ConfigError
from deepspeed.launcher.plan import DEFAULT_GRACE_S, ElasticLimits

DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_MAX_RESTARTS = 3
_OF_TORCHRUN = {"nproc_per_node": "--num_gpus", "nnodes": "--num_nodes"}
LAUNCHERS = ("pdsh", "ssh", "openmpi", "mvapich", "slurm", "mpich", "impi")


class _OneLineParser(argparse.ArgumentParser):
    """A parser that raises `ConfigError` instead of printing the usage, so that each error is one line."""

    def error(self, message: str) -> NoReturn:
        if "user_script" in message:
            raise ConfigError("no script given; the usage is: deepspeed [flags] script.py [script arguments]")
        raise ConfigError(f"{message.removeprefix('argument ')}; `deepspeed --help` lists the flags")


def create_parser() -> argparse.ArgumentParser:
    """Return the parser alone, with no check between flags; called by `parse_arguments` and by the reference page."""
    parser = _OneLineParser(
        prog="deepspeed",
        usage="deepspeed [flags] script.py [script arguments]",
        description="Start a training script as one process (rank) per device of each host, and end them together.",
        allow_abbrev=False,
    )
    _add_resource_flags(parser.add_argument_group("Which devices"))
    _add_rendezvous_flags(parser.add_argument_group("How ranks find each other"))
    _add_script_flags(parser.add_argument_group("What a rank runs"))
    _add_binding_flags(parser.add_argument_group("Cores"))
    _add_record_flags(parser.add_argument_group("What is written down"))
    _add_multinode_flags(parser.add_argument_group("Many nodes"))
    other = parser.add_argument_group("Other")
    other.add_argument("--version", action="version", version=f"deepspeed {__version__}", help="print the version")
    parser.add_argument("user_script", help="the script, module (`--module`) or program (`--no_python`)")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="everything after the script belongs to the script")
    return parser


def _add_resource_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-H",
        "--hostfile",
        default=None,
        metavar="FILE",
        help=f"lines `host slots=N` (default: {DEFAULT_HOSTFILE} if it exists; without a file, this machine)",
    )
    group.add_argument(
        "-i",
        "--include",
        default="",
        metavar="HOSTS",
        help="run on these devices only: `worker-1@worker-2:0,2`; `@` separates hosts; a host alone means all its "
        "devices",
    )
    group.add_argument(
        "-e", "--exclude", default="", metavar="HOSTS", help="run on all devices but these; written like --include"
    )
    group.add_argument(
        "--num_nodes",
        type=_count,
        default=None,
        metavar="N",
        help="run on the first N hosts of the hostfile; with --no_ssh or slurm also without a hostfile",
    )
    group.add_argument(
        "--num_gpus",
        "--num_accelerators",
        dest="num_gpus",
        type=_count,
        default=None,
        metavar="N",
        help="number of ranks on each node (default: the slots of the hostfile, or the accelerator's device count)",
    )


def _add_rendezvous_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--master_addr",
        default="",
        metavar="HOST",
        help="address of rank 0 (default: the first that `hostname -I` prints on the first host; 127.0.0.1 where "
        "every host is this machine)",
    )
    group.add_argument(
        "--master_port",
        type=_port,
        default=None,
        metavar="PORT",
        help="port of rank 0 (default: 29500, or on one node a free one when that is taken)",
    )
    group.add_argument("--node_rank", type=int, default=-1, metavar="N", help="rank of this node; with --no_ssh")


def _add_script_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--module", action="store_true", help="the script is a module name, as after `python -m`")
    group.add_argument(
        "--no_python", action="store_true", help="the script is a program of its own: do not put `python` before it"
    )
    group.add_argument(
        "--grace_period",
        type=_seconds,
        default=DEFAULT_GRACE_S,
        metavar="S",
        help="seconds that ranks have to end after a SIGTERM to this command, before they are killed (default: "
        f"{DEFAULT_GRACE_S:g}); see checkpoint.on_sigterm",
    )
    group.add_argument("--no_local_rank", action="store_true", help="do not pass `--local_rank=N` to the script")


def _add_binding_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--bind_cores_to_rank",
        action="store_true",
        help="give each rank its own equal share of the cores, and set OMP_NUM_THREADS to the size of that share",
    )
    group.add_argument(
        "--bind_core_list",
        default=None,
        metavar="LIST",
        help="the cores to share out, e.g. `0-3,8` (default: all); needs --bind_cores_to_rank",
    )


def _add_record_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log_dir", default=None, metavar="DIR", help="copy what each rank prints also into DIR/rank_<rank>.log"
    )
    group.add_argument(
        "--enable_each_rank_log",
        default=None,
        metavar="DIR",
        help="send what each rank prints into DIR/rank_<rank>.log instead of to the console",
    )
    group.add_argument(
        "--save_pid",
        action="store_true",
        help="write the launcher's process id into /tmp/<pid>.ds, where <pid> is that number, while it runs",
    )


def _add_multinode_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--launcher",
        type=str.lower,
        default=None,
        metavar="NAME",
        help=f"how other hosts are reached: {', '.join(LAUNCHERS)}, or the name of a plugin's launcher (default: pdsh, "
        "or ssh where pdsh is not installed); without effect where this machine is the only host",
    )
    group.add_argument(
        "--launcher_args", default="", metavar="ARGS", help="arguments for that, as one word that a shell would divide"
    )
    group.add_argument(
        "--force_multi", action="store_true", help="use the launcher also where this machine is the only host"
    )
    group.add_argument("--ssh_port", type=_port, default=None, metavar="PORT", help="port of sshd on every host")
    group.add_argument(
        "--no_ssh_check", action="store_true", help="do not look whether every host can be reached before the start"
    )
    group.add_argument(
        "--no_ssh",
        action="store_true",
        help="this command is called on every node, with --node_rank, --master_addr, and --hostfile or --num_nodes",
    )
    group.add_argument(
        "--venv_script", default=None, metavar="FILE", help="a script that every host's shell reads before the start"
    )
    group.add_argument(
        "--dry_run", action="store_true", help="print the exact command for each host, and start nothing"
    )
    group.add_argument(
        "--elastic_training",
        action="store_true",
        help="go on when a rank fails, or a node is lost or comes: the ranks are started again on the nodes there are",
    )
    group.add_argument(
        "--min_elastic_nodes",
        type=_count,
        default=None,
        metavar="N",
        help="with fewer nodes wait for more (default: 1); needs --elastic_training",
    )
    group.add_argument(
        "--max_elastic_nodes",
        type=_count,
        default=None,
        metavar="N",
        help="nodes beyond that are spares (default: the hosts of the hostfile, --num_nodes, or 1); needs "
        "--elastic_training",
    )
    group.add_argument(
        "--max_restarts",
        type=_restarts,
        default=None,
        metavar="N",
        help="how often ranks are started again because one failed; nodes that are lost or come do not count "
        f"(default: {DEFAULT_MAX_RESTARTS}); needs --elastic_training",
    )
    group.add_argument(
        "--autotuning",
        choices=("tune", "run"),
        default=None,
        help="search for the settings with which the script trains fastest, by short jobs; run: then train with them",
    )


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check `argv` (without the program's name).

    Raises:
        ConfigError: the first error, in one line: the flag, the value found, and what to do.
    """
    parser = create_parser()
    args, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise ConfigError(
            f"{unknown[0]}: no such flag{_did_you_mean(parser, unknown[0])}; the script's own flags follow the script; "
            "`deepspeed --help` lists the flags"
        )
    _check_resources(args)
    _check_elastic(args)
    _check_search(args)
    _check_binding(args)
    _check_logs(args)
    _check_script(args)
    return args


def check_launcher(args: argparse.Namespace) -> None:
    """Refuse an unknown launcher, and multi-node flags that contradict each other. Not called when a plugin's launcher
    starts the job.

    Raises:
        ConfigError: the message names the flags.
    """
    if args.launcher is not None and args.launcher not in LAUNCHERS:
        raise ConfigError(
            f"--launcher {args.launcher}: no plugin gives this launcher, and it is none of {', '.join(LAUNCHERS)}; "
            "install the plugin (`ds_report` lists those that are), or omit the flag"
        )
    if args.no_ssh:
        _check_by_hand(args)
    elif args.node_rank not in (-1, 0):
        raise ConfigError(f"--node_rank {args.node_rank}: is for nodes that are started by hand; add --no_ssh")
    try:
        shlex.split(args.launcher_args)
    except ValueError as error:
        raise ConfigError(f"--launcher_args {args.launcher_args}: {error}; close every quote") from error
    if args.launcher == "slurm" and args.ssh_port is not None:
        raise ConfigError(f"--ssh_port {args.ssh_port} and --launcher slurm exclude each other: srun uses no ssh")


def elastic_limits(args: argparse.Namespace, num_nodes: int) -> ElasticLimits:
    """Return the limits that --elastic_training asks for; all are 0 without that flag.

    Args:
        num_nodes: the number of nodes that the job starts with.

    Raises:
        ConfigError: --min_elastic_nodes is above the maximum number of nodes.
    """
    if not args.elastic_training:
        return ElasticLimits()
    least, most = args.min_elastic_nodes or 1, args.max_elastic_nodes or num_nodes
    if least > most:
        raise ConfigError(
            f"--min_elastic_nodes {least}: the job starts with {num_nodes}; give --max_elastic_nodes, or fewer"
        )
    restarts = DEFAULT_MAX_RESTARTS if args.max_restarts is None else args.max_restarts
    return ElasticLimits(least, most, restarts)


def _check_by_hand(args: argparse.Namespace) -> None:
    if args.force_multi:
        raise ConfigError("--no_ssh and --force_multi exclude each other: with --no_ssh there is no launcher to force")
    if args.node_rank < -1:
        raise ConfigError(f"--node_rank {args.node_rank}: nodes count from 0")
    if args.num_nodes is not None and args.node_rank >= args.num_nodes and not args.elastic_training:
        raise ConfigError(
            f"--node_rank {args.node_rank}: with --num_nodes {args.num_nodes} the nodes are 0 to {args.num_nodes - 1}"
        )


def _check_elastic(args: argparse.Namespace) -> None:
    for flag in ("min_elastic_nodes", "max_elastic_nodes", "max_restarts"):
        value = getattr(args, flag)
        if value is not None and not args.elastic_training:
            raise ConfigError(f"--{flag} {value}: is for a job that goes on with other nodes; add --elastic_training")
    if not args.elastic_training:
        return
    if args.launcher not in (None, "ssh"):
        raise ConfigError(
            f"--elastic_training and --launcher {args.launcher} exclude each other: a node that is lost has to be "
            "noticed by itself; use --launcher ssh, or start each node by --no_ssh"
        )
    least, most = args.min_elastic_nodes or 1, args.max_elastic_nodes
    if most is not None and most < least:
        raise ConfigError(f"--max_elastic_nodes {most}: is less than --min_elastic_nodes ({least}); make it larger")


def _check_search(args: argparse.Namespace) -> None:
    for flag in ("elastic_training", "no_ssh", "dry_run"):
        if args.autotuning is not None and getattr(args, flag):
            raise ConfigError(
                f"--autotuning {args.autotuning} and --{flag} exclude each other: this command starts jobs of its own, "
                "and compares those that end by themselves; omit one of them"
            )


def _check_resources(args: argparse.Namespace) -> None:
    if args.include and args.exclude:
        raise ConfigError(f"--include {args.include} and --exclude {args.exclude} exclude each other; give one of them")
    chosen = "--include" if args.include else "--exclude"
    if (args.include or args.exclude) and args.num_gpus is not None:
        raise ConfigError(
            f"{chosen} already says which devices to use; give it or --num_gpus {args.num_gpus}, not both"
        )
    if (args.include or args.exclude) and args.num_nodes is not None:
        raise ConfigError(
            f"{chosen} already says which nodes to use; give it or --num_nodes {args.num_nodes}, not both"
        )


def _check_binding(args: argparse.Namespace) -> None:
    if args.bind_core_list is None:
        return
    if not args.bind_cores_to_rank:
        raise ConfigError(
            f"--bind_core_list {args.bind_core_list}: says which cores, not to bind them; add --bind_cores_to_rank"
        )
    from deepspeed.launcher.resources import parse_core_list

    parse_core_list(args.bind_core_list)


def _check_logs(args: argparse.Namespace) -> None:
    if args.log_dir is not None and args.enable_each_rank_log is not None:
        raise ConfigError(
            "--log_dir (console and files) and --enable_each_rank_log (files only) exclude each other; give one of them"
        )
    for flag in ("log_dir", "enable_each_rank_log"):
        directory = getattr(args, flag)
        if directory is not None and os.path.exists(directory) and not os.path.isdir(directory):
            raise ConfigError(f"--{flag} {directory}: is not a directory; give the directory for the log files")


def _check_script(args: argparse.Namespace) -> None:
    if args.module and args.no_python:
        raise ConfigError("--module and --no_python exclude each other: a module is run by python; give one of them")
    if args.no_python:
        _check_program(args.user_script)
        return
    if args.module or os.path.isfile(args.user_script):
        return
    if os.path.isdir(args.user_script) and os.path.isfile(os.path.join(args.user_script, "__main__.py")):
        return
    raise ConfigError(
        f"{args.user_script}: no such script (looked in {os.getcwd()}); check the path, or give --module for a module "
        "and --no_python for a program"
    )


def _check_program(program: str) -> None:
    import shutil  # late: costs start-up time, and this way of starting is rare

    if shutil.which(program) is None:
        raise ConfigError(f"--no_python {program}: no such program on PATH, or it is not executable; check the path")


def _count(text: str) -> int | None:
    """Parse a whole number of at least 1 for argparse. DeepSpeed's -1 ("all") gives None."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < -1 or number == 0:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; give a whole number of 1 or more, or omit the flag to use all"
        )
    return None if number == -1 else number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}; give a number of seconds of 0 or more")
    return seconds


def _restarts(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}; give a whole number of 0 or more")
    return int(text)


def _port(text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = 0
    if not 0 < port < 65536:
        raise argparse.ArgumentTypeError(f"found {text!r}; give a whole number from 1 to 65535")
    return port


def _did_you_mean(parser: argparse.ArgumentParser, flag: str) -> str:
    import difflib

    written = flag.partition("=")[0]
    known = list(parser._option_string_actions)
    near = _OF_TORCHRUN.get(written.lstrip("-").replace("-", "_"))
    near = near or next(iter(difflib.get_close_matches(written, known, n=1)), None)
    return f", did you mean {near}?" if near else ""
