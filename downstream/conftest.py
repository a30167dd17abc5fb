"""`launch` starts the script beside a recipe's test on two ranks; `check_losses` compares what two runs wrote.

`test_train.py` starts `train.py`. What the recipes share (a model, its data) is in `shared/`, on the scripts' path. The
figures of all comparisons are printed at the end.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest
from deepspeed.testing import forked
from deepspeed.testing.tiers import swept
from torch.distributed import TCPStore

SHARED = Path(__file__).parent / "shared"
LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_accelerators", "2", "--no_local_rank"],
    "deepspeed, one rank": ["deepspeed", "--num_accelerators", "1", "--no_local_rank"],
    "torchrun": ["python", "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"],
    "accelerate": [
        *("accelerate", "launch", "--use_deepspeed", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--zero_stage", "2", "--gradient_accumulation_steps", "2", "--gradient_clipping", "1.0"),
    ],
    "python": ["python"],  # for a library that starts its own ranks
}
_LIMIT_S = 240.0
_GRACE_S = 30.0  # for what has been told to end
STAGES = {
    "stage 1": ["--stage", "1"],
    "stage 2": ["--stage", "2"],
    "stage 2, bf16": ["--stage", "2", "--bf16"],
    "stage 3": ["--stage", "3"],
    "stage 3, bf16": ["--stage", "3", "--bf16"],
}
_FIGURES = "last loss, that of plain torch, largest relative difference of a step"


class Launch:
    """Runs one script, by a launcher or on forked ranks that have its libraries already.

    Args:
        script: to run.
        commands: a folder of the launchers' commands.
        limit_s: how long a run may take. After it the error says where each rank stands.
    """

    def __init__(self, script: Path, commands: Path, limit_s: float = _LIMIT_S) -> None:
        self.script, self.commands, self.limit_s = script, commands, limit_s
        self._server: forked.Process | None = None
        self._jobs: TextIO
        self._answers: TextIO

    def __call__(self, folder: Path, *flags: str, launcher: str | None = None) -> dict[str, Any]:
        """What the script wrote to `<folder>/result.json`; the ranks' output is in the error if one fails.

        Args:
            folder: given to the script as `--folder`; it is the working directory too.
            flags: the script's other arguments.
            launcher: a name in LAUNCHERS; None forks the ranks.
        """
        folder.mkdir(parents=True, exist_ok=True)
        arguments = ["--folder", str(folder), *flags]
        if launcher is None:
            self._fork(folder, arguments)
        else:
            command, *words = LAUNCHERS[launcher]
            _run([str(self.commands / command), *words, str(self.script), *arguments], folder, self.limit_s)
        return json.loads((folder / "result.json").read_text())

    def verify(self, folder: Path, *flags: str) -> None:
        """Run two steps of the script by `ds_verify`, whose answer is in the error if it finds a difference."""
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(self.commands / "ds_verify"), "--no_local_rank", "--steps", "2", str(self.script)]
        _run([*command, "--folder", str(folder), *flags], folder, self.limit_s)

    def close(self) -> None:
        """End the ranks, and the process that they are forked from."""
        if self._server is not None:
            self._jobs.close()  # at which it ends
            self._server.wait(_GRACE_S)
            self._answers.close()
            self._server = None

    def _fork(self, folder: Path, arguments: list[str]) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
        logs = [str(folder / f"rank{rank}.log") for rank in range(2)]
        environments = [_of_rank(rank, store.port) for rank in range(2)]
        job = {"arguments": arguments, "environments": environments, "directory": str(folder), "logs": logs}
        answer = json.loads(self._ask(json.dumps({**job, "limit_s": self.limit_s})))
        codes, late = answer["codes"], answer["late"]
        if codes != [0, 0] or late:
            texts = [f"[rank {rank}]\n{Path(log).read_text()[-6000:]}" for rank, log in enumerate(logs)]
            ended = f"ended with {codes}"
            if late:
                ranks = ", ".join(map(str, late))
                ended = f"did not end within {self.limit_s:g} s on rank {ranks}; the ranks {ended}"
            raise AssertionError(f"{self.script} {' '.join(arguments)} {ended}\n" + "\n".join(texts))

    def _ask(self, line: str) -> str:
        if self._server is None:
            self._server = self._start()
            assert self._answer(_LIMIT_S) == "ready\n", f"{self.script} could not be imported"
        self._jobs.write(line + "\n")
        self._jobs.flush()
        return self._answer(self.limit_s)

    def _start(self) -> forked.Process:
        """Itself a fork of a process that has torch: libraries that build on torch are left to import."""
        jobs, theirs = os.pipe(), os.pipe()
        command = [str(SHARED / "forking.py"), str(self.script)]
        try:
            return forked.start(0, command, _environment(), jobs[0], theirs[1], errors=sys.__stderr__.fileno())
        finally:
            os.close(jobs[0])
            os.close(theirs[1])
            self._jobs, self._answers = os.fdopen(jobs[1], "w"), os.fdopen(theirs[0])

    def _answer(self, limit_s: float) -> str:
        """Of the process that the ranks are forked from, which ends them after the limit by itself."""
        if not select.select([self._answers], [], [], limit_s + _GRACE_S)[0]:
            self.close()
            raise AssertionError(f"{SHARED / 'forking.py'} {self.script} did not answer within {limit_s:g} s")
        return self._answers.readline()


def _run(command: list[str], folder: Path, limit_s: float) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=_environment(), text=True, **pipes) as process:
        ended = "ended"
        try:
            output = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit_s:g} s, and ended after Ctrl-C"
            output = _interrupt(process)
    if process.returncode != 0 or ended != "ended":
        raise AssertionError("\n".join([f"{' '.join(command)} {ended} with {process.returncode}", *output]))


def _interrupt(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What the process had written in the end. Launchers pass SIGINT on: ranks show where they were."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _environment() -> dict[str, str]:
    """This process's, without a launcher's variables; libraries may not ask the network for anything."""
    launcher_names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher_names}
    return environment | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SHARED), environment.get("PYTHONPATH")])),
    }


def _of_rank(rank: int, port: int) -> dict[str, str]:
    """What torchrun gives each rank; its store is in the test's process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "recipe",
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`stage_flags`: the script's flags for each of STAGES."""
    if "stage_flags" in metafunc.fixturenames:
        cases = swept(STAGES, lambda case: case == "stage 3")
        metafunc.parametrize("stage_flags", cases, indirect=True)


@pytest.fixture
def stage_flags(request: pytest.FixtureRequest) -> list[str]:
    """The script's flags for one of STAGES."""
    return STAGES[request.param]


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, warm_python: Callable[..., Path]) -> Iterator[Launch]:
    """`launch(folder, "--stage", "2")` for the script beside the test file."""
    name = request.path.name.removeprefix("test_")
    launch = Launch(request.path.with_name(name), warm_python())
    yield launch
    launch.close()


@pytest.fixture
def create_launch(warm_python: Callable[..., Path]) -> Iterator[Callable[..., Launch]]:
    """`create_launch(script, limit_s=...)`: a `Launch` that ends with the test."""
    made: list[Launch] = []

    def create(script: Path, limit_s: float) -> Launch:
        made.append(Launch(script, warm_python(), limit_s))
        return made[-1]

    yield create
    for each in made:
        each.close()


@dataclass(frozen=True)
class Plain:
    """A run of the script beside the test file without DeepSpeed."""

    folder: Path
    result: dict[str, Any]  # what it wrote


@pytest.fixture(scope="module")
def plain(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """What the runs with DeepSpeed are compared with."""
    folder = tmp_path_factory.mktemp("plain")
    return Plain(folder, launch(folder, "--stage", "none"))


@pytest.fixture
def check_losses(request: pytest.FixtureRequest) -> Callable[[list[float], list[float], float], None]:
    """`check_losses(found, expected, rel)`: asserts that each loss is the expected one within a relative tolerance."""

    def check(found: list[float], expected: list[float], rel: float) -> None:
        assert len(found) == len(expected)
        largest = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
        request.node.user_properties.append((_FIGURES, f"{found[-1]:.5f}  {expected[-1]:.5f}  {largest:.1e}"))
        assert found == pytest.approx(expected, rel=rel)
        assert expected[-1] < expected[0] - 0.3, f"the plain run learned nothing: {expected}"

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    lines = [f"{text}  {each.nodeid}" for each in reports for name, text in each.user_properties if name == _FIGURES]
    if lines:
        terminalreporter.section(_FIGURES)
    for line in lines:
        terminalreporter.write_line(line)
