"""`ds_ssh`: run a command on every host of a hostfile.

    ds_ssh [-f HOSTFILE] COMMAND...

The command uses pdsh if installed, else one `ssh` per host, all at the same time. Each line of output starts with its
host. The words of COMMAND are joined by spaces and interpreted by the remote shell, as with `ssh`. The exit code is the
largest of the hosts' exit codes, or 2 for a wrong command line.
"""

import argparse
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import BinaryIO, NoReturn

from deepspeed._version import __version__
from deepspeed.errors import ConfigError
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE
from deepspeed.launcher.output import write_console
from deepspeed.launcher.resources import fetch_hostfile

USAGE_EXIT_CODE = 2


def main() -> NoReturn:
    """Console script."""
    parser = argparse.ArgumentParser(prog="ds_ssh", description="Run a command on every host of a hostfile.")
    parser.add_argument(
        "-f", "--hostfile", default=DEFAULT_HOSTFILE, help="lines `host slots=N` (default: %(default)s)"
    )
    parser.add_argument("--version", action="version", version=f"ds_ssh {__version__}", help="print the version")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command that each host runs")
    args = parser.parse_args()
    try:
        sys.exit(run_everywhere(args.hostfile, args.command))
    except ConfigError as error:
        print(f"ds_ssh: error: {error}", file=sys.stderr)  # noqa: T201 - the command's answer, not a log line
        sys.exit(USAGE_EXIT_CODE)


def run_everywhere(hostfile: str, command: Sequence[str]) -> int:
    """Run `command` on the hosts of the file and return the largest exit code.

    Raises:
        ConfigError: no command, no hostfile, no host in it, an invalid host name, or neither pdsh nor ssh installed.
    """
    if not command:
        raise ConfigError("no command given; the usage is: ds_ssh [-f HOSTFILE] COMMAND...")
    hosts = _read_hosts(hostfile)
    if shutil.which("pdsh") is not None:
        # -S: exit with the largest code of the hosts
        words = ["pdsh", "-S", "-w", ",".join(hosts), *command]
        return subprocess.run(words, env={**os.environ, "PDSH_RCMD_TYPE": "ssh"}, check=False).returncode
    if shutil.which("ssh") is None:
        raise ConfigError("neither pdsh nor ssh is on PATH; install one of them")
    return _run_by_ssh(hosts, command)


def _read_hosts(path: str) -> list[str]:
    if not os.path.isfile(path):
        raise ConfigError(f"--hostfile {path}: no such file; give one with -f, with a line `host slots=N` per host")
    return list(fetch_hostfile(path) or ())


def _run_by_ssh(hosts: Sequence[str], command: Sequence[str]) -> int:
    processes = {
        host: subprocess.Popen(
            ["ssh", "-o", "BatchMode=yes", "--", host, *command],  # no password prompt: it would not name the host
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for host in hosts
    }
    threads = [
        threading.Thread(target=_pass_lines, args=(host, pipe, fd))
        for host, process in processes.items()
        for pipe, fd in ((process.stdout, 1), (process.stderr, 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = [process.wait() for process in processes.values()]
    return max(128 - code if code < 0 else code for code in codes)


def _pass_lines(host: str, pipe: BinaryIO, console_fd: int) -> None:
    with pipe:
        for line in pipe:
            write_console(console_fd, f"{host}: ".encode() + line.removesuffix(b"\n") + b"\n")


if __name__ == "__main__":
    main()
