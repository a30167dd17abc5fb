"""The command line of `deepspeed`: every documented flag, and what this version does with it.

`runner.main` calls `parse_arguments`; `docs/generate/launcher.py` writes the reference page from `create_parser`.
Whatever is wrong raises `ConfigError` in one line that starts with the flag.
"""

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from deepspeed._version import __version__
from deepspeed.compatibility import LAUNCHER_FLAGS
from deepspeed.errors import ConfigError

DEFAULT_HOSTFILE = "/job/hostfile"
LAUNCHERS = ("pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi")


class _OneLineParser(argparse.ArgumentParser):
    """Raises instead of printing the usage, so that each error is one line."""

    def error(self, message: str) -> NoReturn:
        if "user_script" in message:
            raise ConfigError("no script given; the usage is: deepspeed [flags] script.py [script arguments]")
        raise ConfigError(f"{message.removeprefix('argument ')}; `deepspeed --help` lists the flags")


def create_parser() -> argparse.ArgumentParser:
    """The parser alone, with no check between flags; called by `parse_arguments` and by the reference page."""
    parser = _OneLineParser(
        prog="deepspeed",
        usage="deepspeed [flags] script.py [script arguments]",
        description="Start a training script as one process (rank) per device of this machine, and end them together.",
        allow_abbrev=False,
    )
    _add_resource_flags(parser.add_argument_group("Which devices"))
    _add_rendezvous_flags(parser.add_argument_group("How ranks find each other"))
    _add_script_flags(parser.add_argument_group("What a rank runs"))
    _add_binding_flags(parser.add_argument_group("Cores"))
    _add_record_flags(parser.add_argument_group("What is written down"))
    _add_multinode_flags(
        parser.add_argument_group(
            "Many nodes (a later feature; parsed, so that known command lines work or say why not)"
        )
    )
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
        help=f"lines `host slots=N`; only this machine may be used for now (default: {DEFAULT_HOSTFILE} if it exists)",
    )
    group.add_argument(
        "-i",
        "--include",
        default="",
        metavar="HOSTS",
        help="run on these devices only: `localhost:0,1`; `@` separates hosts; a host alone means all its devices",
    )
    group.add_argument(
        "-e", "--exclude", default="", metavar="HOSTS", help="run on all devices but these; written like --include"
    )
    group.add_argument(
        "--num_nodes",
        type=_count,
        default=None,
        metavar="N",
        help="number of nodes; only 1 for now, or as many as the hostfile has with a plugin's launcher",
    )
    group.add_argument(
        "--num_gpus",
        "--num_accelerators",
        dest="num_gpus",
        type=_count,
        default=None,
        metavar="N",
        help="number of ranks on this node (default: the accelerator's device count)",
    )


def _add_rendezvous_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--master_addr", default="", metavar="HOST", help="address of rank 0 (default: 127.0.0.1)")
    group.add_argument(
        "--master_port",
        type=_port,
        default=None,
        metavar="PORT",
        help="port of rank 0 (default: 29500, or a free one when that is taken)",
    )
    group.add_argument("--node_rank", type=int, default=-1, metavar="N", help="rank of this node; only 0 for now")


def _add_script_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--module", action="store_true", help="the script is a module name, as after `python -m`")
    group.add_argument(
        "--no_python", action="store_true", help="the script is a program of its own: do not put `python` before it"
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
        help=f"how remote nodes are reached: the name of a plugin's launcher; {', '.join(LAUNCHERS)} are known and, "
        "unless a plugin has them, without effect on one node",
    )
    group.add_argument(
        "--launcher_args", default="", metavar="ARGS", help="arguments for that; without effect on one node"
    )
    group.add_argument("--ssh_port", type=_port, default=None, metavar="PORT", help="without effect on one node")
    group.add_argument("--no_ssh_check", action="store_true", help="without effect on one node")
    group.add_argument("--no_ssh", action="store_true", help="each node is started by hand; without effect on one node")
    group.add_argument("--venv_script", default=None, metavar="FILE", help="not supported yet")
    group.add_argument("--force_multi", action="store_true", help="not supported yet")
    group.add_argument("--elastic_training", action="store_true", help="not supported yet")
    group.add_argument("--min_elastic_nodes", type=int, default=None, metavar="N", help="not supported yet")
    group.add_argument("--max_elastic_nodes", type=int, default=None, metavar="N", help="not supported yet")
    group.add_argument("--autotuning", choices=("tune", "run"), default=None, help="not supported yet")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check `argv` (without the program's name).

    Raises:
        ConfigError: the first thing that is wrong, in one line: the flag, what was found, what to do.
    """
    parser = create_parser()
    args, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise ConfigError(
            f"{unknown[0]}: no such flag{_did_you_mean(parser, unknown[0])}; `deepspeed --help` lists the flags"
        )
    for name, feature in LAUNCHER_FLAGS.items():
        if getattr(args, name) not in (None, False):
            raise ConfigError(feature.explain(f"--{name}"))
    _check_resources(args)
    _check_binding(args)
    _check_logs(args)
    _check_script(args)
    return args


def check_one_node(args: argparse.Namespace) -> None:
    """Refuse what asks for other machines. Called unless a plugin's launcher starts the job.

    Raises:
        ConfigError: a flag names another node, or a launcher that nobody has.
    """
    if args.launcher is not None and args.launcher not in LAUNCHERS:
        raise ConfigError(
            f"--launcher {args.launcher}: no plugin gives this launcher, and it is none of {', '.join(LAUNCHERS)}; "
            "install the plugin (`ds_report` lists those that are), or omit the flag to run on this machine"
        )
    if args.num_nodes is not None and args.num_nodes > 1:
        raise ConfigError(
            f"--num_nodes {args.num_nodes}: this version runs on one node; launching on many is a later feature. "
            "Use --num_nodes 1, or start one rank per process with mpirun or srun"
        )
    if args.node_rank not in (-1, 0):
        raise ConfigError(
            f"--node_rank {args.node_rank}: this version runs on one node, whose rank is 0; omit the flag"
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
    from deepspeed.launcher.numa import parse_core_list

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
    """A type for argparse: a whole number of at least 1; DeepSpeed's -1 for "all" is accepted as well."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < -1 or number == 0:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; give a whole number of 1 or more, or omit the flag to use all"
        )
    return None if number == -1 else number


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

    near = difflib.get_close_matches(flag.partition("=")[0], list(parser._option_string_actions), n=1)
    return f", did you mean {near[0]}?" if near else ""
