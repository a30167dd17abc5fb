"""`launch` starts the script beside a recipe's test on two ranks; `check_losses` compares what two runs wrote.

`test_train.py` starts `train.py`. What the recipes share (a model, its data) is in `shared/`, on the scripts' path. The
figures of all comparisons are printed at the end.
"""

import json
import os
import select
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
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "deepspeed": [str(BIN / "deepspeed"), "--num_accelerators", "2", "--no_local_rank"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"],
    "accelerate": [
        *(str(BIN / "accelerate"), "launch", "--use_deepspeed", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--zero_stage", "2", "--gradient_accumulation_steps", "2", "--gradient_clipping", "1.0"),
    ],
    "python": [sys.executable],  # for a library that starts its own ranks
}
_TIMEOUT_S = 240.0
STAGES = {
    "stage 1": ["--stage", "1"],
    "stage 2": ["--stage", "2"],
    "stage 2, bf16": ["--stage", "2", "--bf16"],
    "stage 3": ["--stage", "3"],
    "stage 3, bf16": ["--stage", "3", "--bf16"],
}
_FIGURES = "last loss, that of plain torch, largest relative difference of a step"


class Launch:
    """Runs one script, by a launcher or on forked ranks that have its libraries already."""

    def __init__(self, script: Path) -> None:
        self.script = script
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
            _run([*LAUNCHERS[launcher], str(self.script), *arguments], folder)
        return json.loads((folder / "result.json").read_text())

    def close(self) -> None:
        """End the ranks, and the process that they are forked from."""
        if self._server is not None:
            self._jobs.close()  # at which it ends
            self._server.wait(_TIMEOUT_S)
            self._answers.close()
            self._server = None

    def _fork(self, folder: Path, arguments: list[str]) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
        logs = [str(folder / f"rank{rank}.log") for rank in range(2)]
        environments = [_of_rank(rank, store.port) for rank in range(2)]
        job = {"arguments": arguments, "environments": environments, "directory": str(folder), "logs": logs}
        codes = json.loads(self._ask(json.dumps(job)))
        if codes != [0, 0]:
            texts = [f"[rank {rank}]\n{Path(log).read_text()[-6000:]}" for rank, log in enumerate(logs)]
            raise AssertionError(f"{self.script} {' '.join(arguments)} ended with {codes}\n" + "\n".join(texts))

    def _ask(self, line: str) -> str:
        if self._server is None:
            self._server = self._start()
            assert self._answer() == "ready\n", f"{self.script} could not be imported"
        self._jobs.write(line + "\n")
        self._jobs.flush()
        return self._answer()

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

    def _answer(self) -> str:
        if not select.select([self._answers], [], [], _TIMEOUT_S)[0]:
            self.close()
            raise AssertionError(f"{self.script} did not end within {_TIMEOUT_S:g} s")
        return self._answers.readline()


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"


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
def launch(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """`launch(folder, "--stage", "2")` for the script beside the test file."""
    name = request.path.name.removeprefix("test_")
    launch = Launch(request.path.with_name(name))
    yield launch
    launch.close()


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
