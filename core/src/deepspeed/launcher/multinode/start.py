"""Start a job on many hosts: find the launcher's class and the hosts, check them, and run the commands.

`Watcher` runs the commands that reach the hosts at the same time: it prints their output, notices their end, and passes
on signals. It runs in the user's `deepspeed` process, which has no torch. Each command runs the per-node process
(`launch.py`) on its host. That process reads orders from stdin and ends when stdin ends, so no host is left behind when
this process is killed. One loop does all of this, without threads or polling.
"""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from deepspeed.errors import ConfigError, PluginError, counted
from deepspeed.launcher.arguments import DEFAULT_HOSTFILE
from deepspeed.launcher.membership import Coordinator
from deepspeed.launcher.multinode.runners import (
    RUNNERS,
    MultiNodeRunner,
    PdshRunner,
    SshRunner,
    has_pdsh,
    reach_hosts,
)
from deepspeed.launcher.output import write_console
from deepspeed.launcher.plan import DEFAULT_GRACE_S, DEFAULT_MASTER_PORT, ElasticLimits, ReportReader, encode_world_info
from deepspeed.launcher.resources import fetch_hostfile, is_local, parse_inclusion_exclusion, parse_node_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

# Flags that only our per-node process implements: (attribute, flag).
PER_NODE_FLAGS = (
    ("bind_cores_to_rank", "--bind_cores_to_rank"),
    ("log_dir", "--log_dir"),
    ("enable_each_rank_log", "--enable_each_rank_log"),
    ("save_pid", "--save_pid"),
)


def find_runner(name: str) -> Any | None:
    """Return a feature plugin's class for `--launcher NAME`, or None. The call chooses no accelerator."""
    from deepspeed.plugins import plugin_manager  # late: only a command line with --launcher pays for it

    return plugin_manager().hook.ds_launcher(name=name)


def runner_class(name: str | None) -> Any:
    """Return our class for `--launcher NAME`. Without a name, return pdsh's, or print a line and return ssh's."""
    if name is None:
        if has_pdsh():
            return PdshRunner
        say("deepspeed: pdsh is not installed; starting by ssh (--launcher ssh says the same without this line)")
        return SshRunner
    return {"pdsh": PdshRunner, "ssh": SshRunner, **RUNNERS}[name]


def make_runner(kind: Any, args: "argparse.Namespace", hosts: Mapping[str, list[int]]) -> Any:
    """Create a launcher of class `kind`, and check it.

    Raises:
        ConfigError: the launcher does not support the command line, or is not installed.
        PluginError: the plugin's class is not a launcher.
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
    """Return host -> command, or "all hosts" -> the one command.

    Raises:
        PluginError: the plugin's class returns no command.
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
    """Run the launcher's commands: watch them if `is_watched`, else become the one command.

    Raises:
        ConfigError: the program of a command cannot be run.
    """
    commands = make_commands(runner, environment, hosts)
    if isinstance(runner, MultiNodeRunner):
        environment = runner.command_environment(environment)
    if getattr(runner, "is_watched", False):
        from deepspeed.launcher.launch import pid_file

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
    """Return the address of the first host. Unless --no_ssh_check, also check by ssh that each host can be reached.

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
    """Return the address at which the hosts of an elastic job reach this machine, which runs the coordinator.

    Args:
        asked: --master_addr; "" without it.
        hosts: hosts of the job.

    Raises:
        ConfigError: this machine finds no route to the first remote host.
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
    """Print a line for the user on stderr, before the start."""
    print(line, file=sys.stderr)  # noqa: T201 - the command's answer, not a log line


def choose_hosts(args: "argparse.Namespace") -> dict[str, list[int]]:
    """Return host -> slots, from the hostfile and the flags that restrict it; {} without a hostfile. In that case
    --include and --exclude may only name this machine.

    Raises:
        ConfigError: a flag asks for more than the hostfile has, or needs a hostfile that is missing.
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


_CHUNK_BYTES = 65536
_STOP_AFTER_S = 15.0  # after a failure that blames another node: how long the other node may take to end
_KILL_AFTER_S = 15.0  # added to the grace period of ranks; a node that takes longer to end is out of reach
_LOST_BY_PDSH = re.compile(rb"^pdsh@\S+: (\S+): ssh exited with exit code 255\s*$")
_SSH_FAILED = 255


class _Host:
    """A running command. `prefix` is put before each line of its output."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], prefix: bytes) -> None:
        self.name = name
        self.prefix = prefix
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
            )
        except OSError as error:
            raise ConfigError(
                f"{command[0]}: cannot be started ({error.strerror}); install it, or check PATH"
            ) from error
        self.unfinished: dict[int, bytes] = {}  # by pipe

    def order(self, text: str) -> None:
        """Write one order, a line, to the node's stdin."""
        assert self.process.stdin is not None
        try:
            os.write(self.process.stdin.fileno(), f"{text}\n".encode())
        except (BrokenPipeError, ValueError):  # the command has ended, which is noticed next
            return


class Watcher:
    """Runs commands to their end.

    Args:
        commands: host -> command; or one command for all hosts, under any name.
        environment: environment of the commands.
        is_one_for_all: whether there is one command that puts the host before each line and ignores stdin, like pdsh.
        coordinator: the coordinator of an elastic job, which survives the loss of hosts.
        grace_s: seconds that a node gives its ranks to end.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        is_one_for_all: bool,
        coordinator: Coordinator | None = None,
        grace_s: float = DEFAULT_GRACE_S,
    ) -> None:
        self._kill_after_s = grace_s + _KILL_AFTER_S
        self._coordinator = coordinator
        self._commands = commands
        self._environment = environment
        self._is_one_for_all = is_one_for_all
        self._reader = ReportReader()
        self._selector = selectors.DefaultSelector()
        self._running: list[_Host] = []
        self._failed: list[tuple[str, int]] = []  # host and exit code, in the order of their ends
        self._signals: list[int] = []
        self._deadline: float | None = None  # when to call `_next_step`
        self._is_stopped = False

    def run(self) -> int:
        """Run until every command has ended, print the cause of a failure, and return the exit code for the shell."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        self._selector.register(wake_read, selectors.EVENT_READ, None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._take_signals()
        if self._coordinator is not None:
            self._coordinator.start()
        try:
            for name, command in self._commands.items():
                self._start(name, command)
            while self._running:
                self._turn(wake_read)
        finally:
            signal.set_wakeup_fd(-1)
            for host in self._running:
                host.process.kill()
        if self._coordinator is not None:
            verdict = self._coordinator.verdict  # before `finish`, which sets a verdict too
            self._coordinator.finish()
            if verdict is not None and verdict.exit_code == 0:
                return 0
        return self._last_words()

    def _start(self, name: str, command: Sequence[str]) -> None:
        host = _Host(name, command, self._environment, b"" if self._is_one_for_all else f"{name}: ".encode())
        self._running.append(host)
        for pipe, console_fd in ((host.process.stdout, 1), (host.process.stderr, 2)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (host, console_fd))

    def _take_signals(self) -> None:
        """Install handlers, so that signals wake the loop."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
        for number in passed_on:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(number, lambda number, frame: self._signals.append(number))

    def _turn(self, wake_read: int) -> None:
        """Wait for one event, and process it."""
        wait_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                os.read(wake_read, _CHUNK_BYTES)
            else:
                self._read(key.fileobj, *key.data)
        while self._signals:
            self._pass_on(self._signals.pop(0))
        for host in list(self._running):
            if host.process.poll() is not None:
                self._end(host)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._next_step()

    def _read(self, pipe: Any, host: _Host, console_fd: int) -> bool:
        """Pass on the available output; return False after closing the pipe at its end."""
        while True:
            try:
                data = os.read(pipe.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return True
            whole = host.unfinished.pop(console_fd, b"") + data
            *lines, rest = re.split(rb"(?<=[\n\r])", whole)  # a progress bar's lines end with \r
            if not data and rest:
                lines.append(rest + b"\n")
            for line in lines:
                self._pass_line(host, console_fd, line)
            if not data:
                self._selector.unregister(pipe)
                pipe.close()
                return False
            host.unfinished[console_fd] = rest

    def _pass_line(self, host: _Host, console_fd: int, line: bytes) -> None:
        if console_fd == 2 and self._reader.take(host.name, line):
            return
        write_console(console_fd, host.prefix + line)
        lost = _LOST_BY_PDSH.match(line) if self._is_one_for_all else None
        if lost is not None:
            self._failed.append((lost[1].decode(), _SSH_FAILED))
            host.process.terminate()  # ends stdin on the other hosts, which end too

    def _pass_on(self, number: int) -> None:
        ends = number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if ends:
            if self._coordinator is not None:
                self._coordinator.stop()
            self._failed.append(("", 128 + number))
            self._is_stopped = True
            self._deadline = time.monotonic() + self._kill_after_s
        for host in self._running:
            if not self._is_one_for_all:
                host.order(str(number))
            elif ends:
                host.process.terminate()

    def _end(self, host: _Host) -> None:
        """Read the last output of a command that has ended, and stop the other commands if it failed."""
        self._running.remove(host)
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data[0] is host and self._read(key.fileobj, *key.data):
                self._selector.unregister(key.fileobj)  # a child of ssh keeps the pipe open
        code = host.process.returncode
        if code == 0:
            return
        self._failed.append((host.name, 128 - code if code < 0 else code))
        if self._is_stopped:
            return
        if self._coordinator is not None:
            self._coordinator.expect(len(self._running))
            if self._coordinator.verdict is None:
                return
        blames_another = any(name == host.name and report.is_consequence for name, report in self._reader.reports)
        if blames_another:
            self._deadline = self._deadline or time.monotonic() + _STOP_AFTER_S
        else:
            self._next_step()

    def _next_step(self) -> None:
        """Order the running hosts to stop. When called again, kill the commands of hosts that still run."""
        if self._is_stopped:
            for host in self._running:
                text = f"deepspeed: {host.name} did not end within {self._kill_after_s:g} s and is left to itself\n"
                write_console(2, text.encode())
                host.process.kill()
        for host in self._running:
            host.order("stop")
        self._is_stopped = True
        self._deadline = time.monotonic() + self._kill_after_s

    def _last_words(self) -> int:
        if not self._failed:
            return 0
        host, code = self._failed[0]
        cause = self._reader.cause()
        if cause is not None and host:
            host, report = cause
            write_console(2, f"deepspeed: on {host}:\n{report.text}\n".encode(errors="replace"))
            return report.exit_code
        if code == _SSH_FAILED:
            text = f"deepspeed: {host}: the connection failed or was lost; the ranks on the other hosts were stopped\n"
            write_console(2, text.encode())
        elif host:
            text = f"deepspeed: the command for {host} ended with exit code {code}; see above for what it printed\n"
            write_console(2, text.encode())
        else:
            write_console(2, f"deepspeed: the run was ended by {signal.Signals(code - 128).name}\n".encode())
        return code
