"""A process that imports torch and then forks ranks: `python -m deepspeed.testing.rank_server <fd>`.

`forked` starts it. Importing torch, and the modules that its optimizers import on first use, takes 2 s of a core; a
fork takes some milliseconds. The process has one thread and runs only its loop, so a fork is like a fresh interpreter
after its imports. Its ranks end with it, and it ends with the process that started it.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch._dynamo  # noqa: F401 - torch imports it for an optimizer

import deepspeed.engine.engine  # noqa: F401 - so does every engine

_MAX_REQUEST_BYTES = 1 << 20


def serve(client: socket.socket) -> dict[str, Any] | None:
    """Fork ranks until the other end of `client` closes. Returns the request in each rank, and None in this process."""
    listens_to_ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started us ends us
    ranks: dict[int, tuple[int, Connection]] = {}  # pid and where to report, by the descriptor readable at its end
    while True:
        ready, _, _ = select.select([client.fileno(), *ranks], [], [])
        for ended in ranks.keys() & set(ready):
            pid, report = ranks.pop(ended)
            _send(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            report.close()
            os.close(ended)
        if client.fileno() not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(client, _MAX_REQUEST_BYTES, 4)
        if not request:
            break
        *streams, report_fd = descriptors
        report = Connection(report_fd, readable=False)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, listens_to_ctrl_c)
            client.close()
            for connection in (report, *(other for _, other in ranks.values())):
                connection.close()
            _take_over(streams, [*streams, *ranks])
            return dict(json.loads(request))
        for descriptor in streams:
            os.close(descriptor)
        ranks[os.pidfd_open(pid)] = (pid, report)
        _send(report, pid)
    for pid, _ in ranks.values():
        os.kill(pid, signal.SIGKILL)
    return None


def _send(report: Connection, number: int) -> None:
    with suppress(BrokenPipeError):  # the caller has given up, which ends the rank too
        report.send(number)


def _take_over(streams: list[int], unused: list[int]) -> None:
    """Use `streams` as standard input, output and error, and close the server's descriptors."""
    for standard, descriptor in enumerate(streams):
        os.dup2(descriptor, standard)
    for descriptor in unused:
        os.close(descriptor)


def run(command: list[str], environment: Mapping[str, str], directory: str) -> None:
    """Run a script or a module like `python *command`, with these variables, in this directory."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(directory)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = os.path.dirname(command[0])
        runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    """Run the server, or, after a fork, one of its ranks."""
    gc.collect()
    gc.freeze()  # otherwise the first collection in each rank would copy every page
    client = socket.socket(fileno=int(sys.argv[1]))
    client.send(b"!")  # the imports are made
    request = serve(client)
    if request is not None:
        run(**request)


if __name__ == "__main__":
    main()
