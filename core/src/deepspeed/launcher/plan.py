"""The first process (`runner.py`) sends a plan to the per-node process (`launch.py`), and gets failure reports back.

`LaunchPlan` travels as one word of a command line: URL-safe base64 of JSON, which passes unchanged through any shell.
`NodeReport` comes back from a watched node (`multinode/start.py`), as marked lines on stderr.

Every rank gets the environment variables of a file with lines `NAME=VALUE`. The file is `.deepspeed_env` in the home
directory and in the working directory (the latter wins), or the one file that `DS_ENV_FILE` names. `runner.main` reads
it before the ranks start; its values override the environment. `exported` selects the variables for other hosts.
"""

import base64
import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspeed.errors import ConfigError

if TYPE_CHECKING:
    import argparse

DEFAULT_MASTER_PORT = 29500
DEFAULT_GRACE_S = 30.0  # torch's agent waits the same time
# `python -m` would search the working directory first, so that a user's `random.py` would shadow Python's own.
# Under PYTHONSAFEPATH Python adds no such folder, and the first entry of sys.path has to stay.
NODE_PROCESS = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    "from deepspeed.launcher.launch import start; start()"
)
_PIECE_CHARS = 1000  # characters of a report per line: pipes write lines this short atomically
# pdsh puts the host before each line
_PIECE = re.compile(rb"^(?:(?P<host>\S+): )?\x1e(?P<sign>[+.])(?P<piece>[\w=-]*)\r?\n?$")


class ElasticLimits(NamedTuple):
    """`ElasticLimits` bounds a job that goes on when nodes are lost; `min_nodes` is 0 for any other job."""

    min_nodes: int = 0
    max_nodes: int = 0
    max_restarts: int = 0


class LaunchPlan(NamedTuple):
    """A `LaunchPlan` holds the options of the command line, validated except for checks that need the accelerator.

    `include` and `exclude` are slots of this node. At most one of `num_ranks`, `include`, `exclude` is set; if none
    is, every slot is used. `num_slots` is the number of slots in the hostfile. With `log_only` the
    console gets the output only if there is no log file.
    """

    num_ranks: int | None = None
    include: Sequence[int] | None = None
    exclude: Sequence[int] | None = None
    num_slots: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    module: bool = False
    no_python: bool = False
    no_local_rank: bool = False
    bind_cores_to_rank: bool = False
    bind_core_list: str | None = None
    log_dir: str | None = None
    log_only: bool = False
    save_pid: bool = False
    grace_s: float = DEFAULT_GRACE_S
    num_nodes: int = 1
    slots_of_nodes: Sequence[Sequence[int]] | None = None
    run_id: str = "deepspeed"
    is_watched: bool = False
    min_nodes: int = 0
    max_nodes: int = 0
    max_restarts: int = 0

    @classmethod
    def of_command(cls, args: "argparse.Namespace", **others: Any) -> "LaunchPlan":
        """Create a plan from the flags that every launcher shares, and from the fields `others`."""
        return cls(
            module=args.module,
            no_python=args.no_python,
            no_local_rank=args.no_local_rank,
            bind_cores_to_rank=args.bind_cores_to_rank,
            bind_core_list=args.bind_core_list,
            log_dir=args.log_dir or args.enable_each_rank_log,
            log_only=args.enable_each_rank_log is not None,
            grace_s=args.grace_period,
            **others,
        )

    def with_limits(self, limits: ElasticLimits) -> "LaunchPlan":
        """Return a copy of the plan with these limits."""
        return self._replace(**limits._asdict())

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on when nodes are lost, with `min_nodes` to `max_nodes`."""
        return self.min_nodes > 0

    def on_node(self, node_rank: int) -> "LaunchPlan":
        """Return a copy of the plan with the slots of node `node_rank`."""
        if self.slots_of_nodes is None:
            return self
        return self.with_slots(self.slots_of_nodes[node_rank if len(self.slots_of_nodes) > 1 else 0])

    def with_slots(self, slots: Sequence[int]) -> "LaunchPlan":
        """Return a copy of the plan with these slots of a hostfile, given in ascending order."""
        count = slots[-1] + 1
        return self._replace(
            num_ranks=None, exclude=None, num_slots=count, include=None if len(slots) == count else slots
        )

    def encode(self) -> str:
        return _encode(self._asdict())

    @classmethod
    def decode(cls, word: str) -> "LaunchPlan":
        return cls(**json.loads(base64.urlsafe_b64decode(word)))


class NodeReport(NamedTuple):
    """A `NodeReport` is the failure report that a node sends to the process that watches it.

    Args:
        text: the text to print last.
        exit_code: the code for the shell.
        is_consequence: whether another node may be to blame.
    """

    text: str
    exit_code: int
    is_consequence: bool

    def lines(self) -> str:
        """Return the report as lines that `ReportReader` recognizes."""
        word = _encode(self._asdict())
        pieces = [word[start : start + _PIECE_CHARS] for start in range(0, len(word), _PIECE_CHARS)]
        signs = "+" * (len(pieces) - 1) + "."
        return "".join(f"\x1e{sign}{piece}\n" for sign, piece in zip(signs, pieces, strict=True))


class NodeFailure(NamedTuple):
    """A `NodeFailure` says why a node ended its ranks, for the other nodes (`nodes.py`, `membership.py`).

    Args:
        node_rank: the rank of that node.
        rank: the rank that failed there; None where it is not known.
        exit_code: the code that the shell gets.
        is_consequence: whether the failure may be another rank's fault.
        words: the exception, or another description of the failure.
        stopped_by: the signal that told that node to end; 0 for none.
    """

    node_rank: int
    rank: int | None
    exit_code: int
    is_consequence: bool
    words: str
    stopped_by: int = 0

    def __str__(self) -> str:
        who = f"node {self.node_rank}" if self.rank is None else f"rank {self.rank} on node {self.node_rank}"
        if self.stopped_by:
            return f"{who} was told to end ({signal.Signals(self.stopped_by).name})"
        return f"{who} failed{f': {self.words}' if self.words else ''}"


class ReportReader:
    """Collects the reports of nodes from the lines of their stderr."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, NodeReport]] = []  # host and report, in order of arrival
        self._pieces: dict[str, bytes] = {}

    def take(self, host: str, line: bytes) -> bool:
        """Collect `line` if it is part of a report; return whether it is. A host before the line replaces `host`."""
        match = _PIECE.match(line)
        if match is None:
            return False
        host = match["host"].decode() if match["host"] else host
        word = self._pieces.pop(host, b"") + match["piece"]
        if match["sign"] == b"+":
            self._pieces[host] = word
        else:
            self.reports.append((host, NodeReport(**json.loads(base64.urlsafe_b64decode(word)))))
        return True

    def cause(self) -> tuple[str, NodeReport] | None:
        """Return host and report to print: the first report that is no consequence, else the first, or None."""
        own = [entry for entry in self.reports if not entry[1].is_consequence]
        return next(iter(own or self.reports), None)


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """Encode host -> slots as URL-safe base64 of JSON. Documented for tools that build their own commands."""
    return _encode(world_info)


def _encode(value: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]

# `[A-Z]+CL_`: the collective library of any device vendor
_EXPORTED = re.compile(r"[A-Z]+CL_|PYTHON|MV2|UCX|MLFLOW|DS_|DEEPSPEED_")


def exported(environment: Mapping[str, str], from_files: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for ranks on other hosts: a part of `environment`, and the files' variables, which win."""
    travelling = {name: value for name, value in environment.items() if _EXPORTED.match(name)}
    return dict(sorted({**travelling, **from_files}.items()))


def read_environment_files() -> dict[str, str]:
    """Return the variables of all existing files. A `DS_ENV_FILE` that contains a folder names exactly one file.

    Raises:
        ConfigError: a line has no `=`, or `DS_ENV_FILE` names a file that does not exist.
    """
    asked = os.environ.get("DS_ENV_FILE")
    name = asked or ".deepspeed_env"
    folders = [""] if os.path.dirname(name) else DEEPSPEED_ENVIRONMENT_PATHS
    files = [path for path in (os.path.join(folder, name) for folder in folders) if os.path.isfile(path)]
    if asked and not files:
        raise ConfigError(f"DS_ENV_FILE={asked}: no such file; unset it, or write lines NAME=VALUE into it")
    variables: dict[str, str] = {}
    for path in files:
        variables.update(_read(path))
    return variables


def _read(path: str) -> dict[str, str]:
    variables = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            name, equals, value = text.partition("=")
            if not equals or not name.strip():
                raise ConfigError(f"{path}, line {number}: found {text!r}; write NAME=VALUE")
            variables[name.strip()] = value.strip()
    return variables
