"""A `python` for the commands that tests start: each is a fork of a process that has imported torch.

A command such as `ds_verify` starts a launcher, the launcher two ranks, and all of that twice: seven interpreters, most
of which import torch for 2 s of a core, and the Trainer of transformers for 5 s more. The fixture `warm_python` of
conftest.py writes small programs of these names into a folder; each calls this file:

    warm_python.py CLIENT NAME SCRIPT WORDS...     as `python WORDS...`, or `python SCRIPT WORDS...`
    warm_python.py SERVER NAME EXECUTABLE MODULES...

The client hands its words, variables, directory and open files to the server over the socket NAME, and stands for the
fork: it passes on signals and ends as the fork does, and the fork ends when it is killed. In the fork `sys.executable`
is EXECUTABLE, so that what the command starts in turn is a fork too. The server ends, and its forks with it, when its
standard input does. With the sweeps all commands are fresh interpreters.
"""

import contextlib
import io
import json
import os
import signal
import socket
import sys

CLIENT, SERVER = "client", "server"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_MAX_REQUEST_BYTES, _MAX_FILES = 1 << 20, 64


def call(name, script, words):
    """Run `python [script] words` by the server, and end as it does."""
    if script:
        words = [script, *words]
    if not words or (words[0].startswith("-") and words[0] not in ("-u", "-c", "-m")):  # an option that a fork has not
        os.execv(sys.executable, [sys.executable, *words])
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(f"\0{name}")
    numbers = [int(number) for number in os.listdir("/proc/self/fd")]
    files = [number for number in sorted(numbers) if number != client.fileno() and _is_open(number)]
    request = {
        "words": words,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "parent": os.getppid(),
        "files": files,
        "leads": os.getsid(0) == os.getpid(),
        "ignored": [int(each) for each in _PASSED_ON if signal.getsignal(each) is signal.SIG_IGN],
        "cores": sorted(os.sched_getaffinity(0)),
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    socket.send_fds(client, [json.dumps(request).encode()], files)
    pid = int(client.recv(32))
    for each in _PASSED_ON:
        signal.signal(each, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    for number in files:
        os.close(number)  # whoever reads them waits for the end of the fork alone
    answer = client.recv(32)
    code = int(answer) if answer else -signal.SIGKILL  # the server was ended
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:  # the listing's own
        return False
    return True


def serve(name, modules):
    """Fork for each client until the standard input ends. Returns in each fork, with its request; and here, None."""
    import gc
    import importlib
    import select

    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or the first collection of each fork would copy every page
    listens_to_ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started us ends us
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(f"\0{name}")
    door.listen(64)
    os.write(1, b"!")
    forks = {}  # by the file that is readable at its end: its pid, its client, whether it leads a session
    clients = {}  # by the client's file: the file of its fork
    while True:
        ready, _, _ = select.select([0, door.fileno(), *forks, *clients], [], [])
        if 0 in ready:
            break
        for ended in forks.keys() & set(ready):
            pid, client, _ = forks.pop(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if clients.pop(client.fileno(), None) is not None:
                with contextlib.suppress(BrokenPipeError):  # killed just now
                    client.send(str(code).encode())
            client.close()
            os.close(ended)
        for gone in clients.keys() & set(ready):
            _end(*forks[clients.pop(gone)])
        if door.fileno() not in ready:
            continue
        client, _ = door.accept()
        text, files, _, _ = socket.recv_fds(client, _MAX_REQUEST_BYTES, _MAX_FILES)
        if not text:  # killed before it could ask
            client.close()
            continue
        request = json.loads(text)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, listens_to_ctrl_c)
            _take_over(request, files, [door.fileno(), client.fileno(), *forks, *clients])
            for each in (door, client, *(other for _, other, _ in forks.values())):
                each.detach()
            return request
        for number in files:
            os.close(number)
        ended = os.pidfd_open(pid)
        forks[ended], clients[client.fileno()] = (pid, client, request["leads"]), ended
        with contextlib.suppress(BrokenPipeError):  # killed just now
            client.send(str(pid).encode())
    for each in forks.values():
        _end(*each)
    return None


def _end(pid, _, leads):
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if leads else os.kill)(pid, signal.SIGKILL)


def _take_over(request, files, unused):
    """Have the client's open files under its numbers, and its session, directory, signals and cores."""
    for number in unused:
        os.close(number)
    above = max([*files, *request["files"]]) + 1
    for place, number in enumerate(files):  # first out of the way of each other
        os.dup2(number, above + place)
        os.close(number)
    for place, number in enumerate(request["files"]):
        os.dup2(above + place, number, inheritable=True)
        os.close(above + place)
    for number in {0, 1, 2} - set(request["files"]):
        os.close(number)
    if request["leads"]:
        os.setsid()
    os.chdir(request["directory"])
    own, real = os.getpid(), os.getppid
    os.getppid = lambda: request["parent"] if os.getpid() == own else real()  # some ranks end their launcher
    os.sched_setaffinity(0, request["cores"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)


def run(words, environment, executable):
    """Run what `python *words` would, with these variables."""
    import runpy

    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    added = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:] = [*added, *(path for path in sys.path[1:] if path not in before)]
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    sys.executable = executable
    is_unbuffered = words[0] == "-u"
    if is_unbuffered:
        words = words[1:]
    raw = open(1, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115 - open to the end
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(raw, encoding="utf-8", write_through=is_unbuffered)
    if words[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.realpath(words[0])), words
        runpy.run_path(words[0], run_name="__main__")


def main():
    role, name, first, *words = sys.argv[1:]
    if role == CLIENT:
        call(name, first, words)
    request = serve(name, words)
    if request is not None:
        run(request["words"], request["environment"], first)


if __name__ == "__main__":
    main()
