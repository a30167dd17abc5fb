"""The per-node process, which `runner.py` becomes or starts on each host; its arguments are PLAN NODE_RANK SCRIPT
ARGUMENTS...

The process gets the devices from the current accelerator, writes one command per rank, runs the commands with
`node_agent.py`, and prints the report of `failure.py` if a rank failed. Exit codes: the failing rank's own, 128 + n for
signal n, 2 for a wrong flag or an unavailable accelerator. A node that `multinode/start.py` watches reads its signals
from stdin: one number per line, or `stop` when another host failed. The end of stdin (the connection or the watcher is
gone) acts as SIGTERM.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from deepspeed._absent import complete
from deepspeed.errors import ConfigError, DeepSpeedError, counted
from deepspeed.launcher.output import write_console
from deepspeed.launcher.plan import DEFAULT_MASTER_PORT, LaunchPlan, NodeFailure, NodeReport
from deepspeed.log import environment_level

if TYPE_CHECKING:
    from deepspeed.launcher.node_agent import NodeAgent, RankCommand
    from deepspeed.launcher.output import OutputReader

USAGE_EXIT_CODE = 2
PID_FOLDER = Path("/tmp")  # noqa: S108 - a documented address; the file is created and never followed as a link
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NUM_ARGUMENTS = 3  # at least: PLAN NODE_RANK SCRIPT


class NodePlacement(NamedTuple):
    """A `NodePlacement` holds the number of ranks on this node, and the variables that select their devices."""

    num_ranks: int
    environment: dict[str, str]


def main(argv: Sequence[str]) -> NoReturn:
    """Run the node. `argv` holds the encoded plan, the rank of this node, the script, and the script's arguments."""
    if len(argv) < _NUM_ARGUMENTS or argv[0].startswith("-"):
        text = (
            f"deepspeed.launcher.launch: error: found the arguments {' '.join(argv) or '(none)'}; the deepspeed "
            "command starts this module with a plan of its own. Call `deepspeed` with the same script (`deepspeed "
            "--help`; --no_ssh where another tool starts each node), or torchrun\n"
        )
        write_console(sys.stderr.fileno(), text.encode())
        sys.exit(USAGE_EXIT_CODE)
    plan = LaunchPlan.decode(argv[0])
    try:
        with pid_file() if plan.save_pid else nullcontext():
            code = run_node(plan, int(argv[1]), argv[2], argv[3:])
    except DeepSpeedError as error:
        code = _report(plan, NodeReport(f"deepspeed: error: {error}", USAGE_EXIT_CODE, False))
    sys.exit(code)


def run_node(plan: LaunchPlan, node_rank: int, script: str, script_args: Sequence[str]) -> int:
    """Run every rank of this node to its end, and return the exit code for the shell."""
    orders = _Orders()
    if plan.is_watched:
        orders.start()
    from deepspeed.accelerator import get_accelerator

    plan = plan.on_node(node_rank)
    placement = place_ranks(plan, get_accelerator())
    commands = make_commands(plan, placement, script, script_args)
    if "LOGLEVEL" not in os.environ:  # the agent's log lines about signals would hide the cause
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    return (_run_elastic if plan.is_elastic else _run_fixed)(plan, node_rank, commands, orders)


def _run_fixed(plan: LaunchPlan, node_rank: int, commands: "list[RankCommand]", orders: "_Orders") -> int:
    """Run the ranks of a node in a job that ends at the first failure."""
    from deepspeed.launcher.failure import describe_job, describe_standing, exit_code_of, may_be_a_consequence
    from deepspeed.launcher.node_agent import NodeAgent
    from deepspeed.launcher.nodes import NodeRendezvous

    port = choose_port(plan.master_port) if node_rank == 0 else plan.master_port or DEFAULT_MASTER_PORT
    rendezvous = NodeRendezvous(
        plan.master_addr,
        port,
        None if plan.master_port else find_free_port,
        node_rank,
        plan.num_nodes,
        plan.run_id,
    )
    output = _make_output(plan)
    agent = NodeAgent(commands, rendezvous, output, is_watched=plan.is_watched, grace_s=plan.grace_s)
    stopped_by = _run_agent(agent, orders, output.finish)
    if agent.cause is not None:
        text = describe_job(agent.cause, [end for end in agent.ends() if end.rank != agent.cause.rank])
        return _report(plan, NodeReport(text, exit_code_of(agent.cause.return_code), may_be_a_consequence(agent.cause)))
    if agent.cause_elsewhere is not None:
        verdict = f"deepspeed: {agent.cause_elsewhere}; the ranks of node {node_rank} were stopped"
        text = "\n".join([*describe_standing(agent.ends()), verdict])
        return _report(plan, NodeReport(text, agent.cause_elsewhere.exit_code, True))
    for rank, uncaught in output.unprinted():
        _say(f"deepspeed: rank {rank} raised:\n{uncaught.traceback.rstrip()}")
    return 0 if stopped_by is None else _ended_by(plan, stopped_by)


def _run_elastic(plan: LaunchPlan, node_rank: int, commands: "list[RankCommand]", orders: "_Orders") -> int:
    """Run the ranks of a node in a job that survives the loss of nodes. An unwatched node 0 runs the coordinator."""
    from deepspeed.launcher.elastic import ElasticAgent, ElasticRendezvous, NodeLink
    from deepspeed.launcher.membership import Coordinator

    coordinator, port = None, plan.master_port or DEFAULT_MASTER_PORT
    if node_rank == 0 and not plan.is_watched:
        port = choose_port(plan.master_port)
        limits = (plan.min_nodes, plan.max_nodes, plan.max_restarts, plan.num_nodes)
        coordinator = Coordinator(port, plan.run_id, *limits, lambda line: _say(f"deepspeed: {line}"))
        coordinator.start()
    name = f"node {node_rank} ({socket.gethostname()})" if node_rank >= 0 else socket.gethostname()
    hello = {"run_id": plan.run_id, "name": name, "node_rank": node_rank, "num_ranks": len(commands)}
    link = NodeLink(plan.master_addr, port, hello)
    rendezvous = ElasticRendezvous(link, plan.run_id)
    watched = (plan.max_restarts, plan.is_watched, plan.grace_s)
    agent = ElasticAgent(commands, rendezvous, link, lambda appends: _make_output(plan, appends), _say, *watched)
    if coordinator is not None:
        agent.on_signal = coordinator.give_up
    try:
        stopped_by = _run_agent(agent, orders, agent.finish_output)
    finally:
        if coordinator is not None:
            coordinator.finish()
    if stopped_by is not None:
        return _ended_by(plan, stopped_by)
    end = link.end
    assert end is not None, "the agent runs until the job has ended, or a signal"
    if end["exit_code"] == 0:
        return 0
    if end["is_blamed"]:
        return _report(plan, NodeReport(agent.describe(), int(end["exit_code"]), False))
    words = NodeFailure(**end["failure"]) if end["failure"] else "the process that keeps the list of nodes is gone"
    text = f"deepspeed: {words}; the ranks of {name} were stopped"
    return _report(plan, NodeReport(text, int(end["exit_code"]), True))


def _ended_by(plan: LaunchPlan, number: int) -> int:
    """Print which signal ended the run, unless a watcher prints it, and return the exit code."""
    if not plan.is_watched:
        _say(f"deepspeed: the run was ended by {signal.Signals(number).name}")
    return 128 + number


def _make_output(plan: LaunchPlan, appends: bool = False) -> "OutputReader":
    from deepspeed.launcher.output import OutputReader

    return OutputReader(plan.log_dir, plan.log_only, environment_level() != "DEBUG", appends)


def _run_agent(agent: "NodeAgent", orders: "_Orders", finish_output: Callable[[], None]) -> int | None:
    """Run the agent to its end, and return the number of the signal that ended it, or None."""
    from deepspeed.launcher.node_agent import SignalException

    _raise_on_signals(SignalException, agent.told_to_end)
    _pass_on_signals(agent.pass_on)
    orders.agent = agent
    try:
        agent.run()
    except SignalException as stop:
        return int(stop.sigval)
    finally:
        finish_output()
        agent.leave()
    return None


def place_ranks(plan: LaunchPlan, accelerator: Any) -> NodePlacement:
    """Choose the number of ranks and the visible devices from the plan and the current accelerator.

    On an accelerator that computes on the host, any number of ranks may start, as slots from 0 on, and no device is
    hidden.

    Raises:
        ConfigError: the plan asks for a device that does not exist.
    """
    shares_host = bool(accelerator.is_synchronized_device())
    count = plan.num_slots if plan.num_slots is not None else accelerator.device_count()
    flag, slots = _asked_slots(plan, count)
    if slots and slots[-1] >= count and not shares_host:
        asked = f"device {slots[-1]}" if plan.include is not None else counted(len(slots), "device")
        raise ConfigError(
            f"{flag}: asks for {asked}; found {count} of {accelerator.device_name()}, numbered from 0; ask for those"
        )
    if not slots:
        raise ConfigError(
            f"{flag}: leaves no device of {accelerator.device_name()} to run on ({count} found); `ds_report` shows why"
        )
    if shares_host and plan.num_slots is None and slots[-1] >= len(slots) and plan.include is not None:
        raise ConfigError(
            f"{flag}: asks for slot {slots[-1]}; {accelerator.device_name()} has no devices to choose from, and runs "
            f"any number of ranks, as slots 0, 1, ...; ask for {','.join(map(str, range(len(slots))))}, or use "
            f"--num_accelerators {len(slots)}"
        )
    environment: dict[str, str] = {}
    if flag != "devices" and not shares_host:
        accelerator.set_visible_devices_envs(environment, _visible(accelerator, slots))
        if not environment and slots != list(range(len(slots))):
            raise ConfigError(
                f"{flag}: asks for devices {', '.join(map(str, slots))}, but {type(accelerator).__name__} names no "
                "variable that limits which devices a rank sees (visible_devices_envs); ask for a number of devices"
            )
    return NodePlacement(len(slots), environment)


def _asked_slots(plan: LaunchPlan, count: int) -> tuple[str, list[int]]:
    """Return the flag that selects the slots, and these slots in ascending order."""
    if plan.include is not None:
        return "--include", list(plan.include)
    if plan.exclude is not None:
        if plan.exclude and max(plan.exclude) >= count:
            raise ConfigError(f"--exclude: there is no device {max(plan.exclude)}; the devices are 0 to {count - 1}")
        return "--exclude", [slot for slot in range(count) if slot not in plan.exclude]
    if plan.num_ranks is not None:
        return "--num_gpus/--num_accelerators", list(range(plan.num_ranks))
    return "--hostfile" if plan.num_slots is not None else "devices", list(range(count))


def _visible(accelerator: Any, slots: Sequence[int]) -> list[Any]:
    """Map slots to the devices that the environment already limits (a scheduler may have set devices 4 to 7)."""
    for variable in accelerator.visible_devices_envs():
        shown = os.environ.get(variable)
        if shown:
            devices = shown.split(",")
            if slots[-1] < len(devices):
                return [devices[slot].strip() for slot in slots]
    return list(slots)


def make_commands(
    plan: LaunchPlan, placement: NodePlacement, script: str, script_args: Sequence[str]
) -> "list[RankCommand]":
    """Return one command per local rank: the program and script, `--local_rank=N`, the script's own arguments."""
    from deepspeed.launcher.node_agent import RankCommand

    if plan.no_python:
        program = [script]
    else:
        program = [sys.executable, "-u", *(["-m"] if plan.module else []), script]
    shares = _core_shares(plan, placement.num_ranks)
    commands = []
    for local_rank in range(placement.num_ranks):
        cores = shares[local_rank] if shares is not None else None
        environment = dict(placement.environment)
        if cores is not None:
            environment["OMP_NUM_THREADS"] = str(len(cores))
        elif placement.num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = "1"  # like torchrun: otherwise every rank uses every core
        rank_flag = [] if plan.no_local_rank else [f"--local_rank={local_rank}"]
        commands.append(RankCommand([*program, *rank_flag, *script_args], environment, cores))
    return commands


def _core_shares(plan: LaunchPlan, num_ranks: int) -> list[list[int]] | None:
    if not plan.bind_cores_to_rank:
        return None
    from deepspeed.launcher.resources import available_cores, check_cores, parse_core_list, share_cores

    if plan.bind_core_list is None:
        return share_cores(available_cores(), num_ranks)
    cores = parse_core_list(plan.bind_core_list)
    check_cores(cores)
    return share_cores(cores, num_ranks)


def choose_port(asked: int | None) -> int:
    """Return the port for the store: `asked`, or the default, or a free port if the default is taken.

    Raises:
        ConfigError: the port `asked` is taken.
    """
    port = asked if asked is not None else DEFAULT_MASTER_PORT
    if _is_free(port):
        return port
    if asked is not None:
        raise ConfigError(
            f"--master_port {asked}: is in use on this machine; give another, or omit the flag to get a free one"
        )
    return find_free_port()


def find_free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _raise_on_signals(exception: type, note: Callable[[int], None]) -> None:
    """Install handlers that turn signals into an exception in the main thread; the agent then shuts down in order.

    Python ignores exceptions in some places (fork hooks, `__del__`). There the call of `note` still informs the agent.
    """

    def stop(number: int, frame: Any) -> None:
        note(number)
        raise exception(f"signal {number}", signal.Signals(number))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(number, stop)


def _pass_on_signals(pass_on: Callable[[int], None]) -> None:
    """Install handlers that forward the signals for a save or a report to each rank."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: pass_on(number))


class _Orders:
    """`_Orders` reads the orders of the watcher from stdin, in a thread, from the start of the process.

    `_run_agent` sets `agent`. Before the agent's ranks run, `stop` acts as SIGTERM to this process.
    """

    agent: "NodeAgent | None" = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="orders", daemon=True).start()

    def _run(self) -> None:
        unfinished = b""
        while data := os.read(0, 4096):
            *orders, unfinished = (unfinished + data).split(b"\n")
            for order in orders:
                self._obey(order)
        os.kill(os.getpid(), signal.SIGTERM)

    def _obey(self, order: bytes) -> None:
        if order != b"stop":
            os.kill(os.getpid(), int(order))
        elif self.agent is None or not self.agent.end_elsewhere():
            os.kill(os.getpid(), signal.SIGTERM)


def _report(plan: LaunchPlan, report: NodeReport) -> int:
    """Print why this node failed, or send the report to the watcher, and return the exit code."""
    if plan.is_watched:
        sys.stdout.flush()
        write_console(2, report.lines().encode())
    else:
        _say(report.text)
    return report.exit_code


def _say(text: str) -> None:
    """Print a text for the user on stderr. A closed console is ignored, so the exit code does not change."""
    sys.stdout.flush()
    write_console(2, f"{text}\n".encode(errors="replace"))


def start() -> NoReturn:
    """Entry point of the process that `runner.py` becomes."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads ends the process without a traceback
    main(sys.argv[1:])


complete(__name__)

if __name__ == "__main__":
    start()


@contextmanager
def pid_file() -> Iterator[Path]:
    """Create the file of `--save_pid`, `/tmp/<pid>.ds`, and remove it at the end, also when a signal ends the block.

    Raises:
        ConfigError: the file cannot be written, or another user's file has the name.
    """
    path = PID_FOLDER / f"{os.getpid()}.ds"
    _exit_on_signals()
    others = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the `try` below guards the file
    try:
        inode = _write_pid(path)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, others)
        raise ConfigError(
            f"--save_pid: {path} cannot be written ({error.strerror}); remove it, or omit the flag"
        ) from error
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, others)
        yield path
    finally:
        _remove_pid(path, inode)


def _write_pid(path: Path) -> int:
    """Replace the file of an older process with this pid, and return the new file's inode."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(fd, str(os.getpid()).encode())
        return os.fstat(fd).st_ino
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _remove_pid(path: Path, inode: int) -> None:
    """Remove the file unless another process replaced it. A failure only warns and keeps the exit code."""
    try:
        if path.lstat().st_ino == inode:
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        write_console(2, f"deepspeed: warning: --save_pid: {path} cannot be removed ({error.strerror})\n".encode())


def _exit_on_signals() -> None:
    """Install handlers that exit by exception, so that the file is removed, until `_run_agent` installs its own."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
