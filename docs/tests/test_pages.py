"""Documentation stays true: links lead somewhere, blocks run, generated pages equal their source."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.testing import forked
from deepspeed.testing.tiers import swept

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "core/*.md", "extensions/*/*.md", "compat/*/*.md")
    for path in ROOT.glob(pattern)
)
LIMIT_S = 280  # far above what a block needs, for a loaded machine
# deepspeed_names.py needs DeepSpeed's sdists, and `nox -s deepspeed` runs it
GENERATORS = sorted({*(ROOT / "docs/generate").glob("*.py")} - {ROOT / "docs/generate/deepspeed_names.py"})
TESTS_OF_THE_HOUSE = "".join(path.read_text() for path in (ROOT / "core/tests/house").glob("test_*_fresh.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    """(mark, text) of the page's blocks that run: `python`, and `sh run`; other marks are for reading only."""
    found = re.findall(r"^```(python|sh run)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [(mark, text) for mark, text in found]


def as_session(page: Path, folder: Path) -> str:
    """The page as a session in a terminal: Python blocks up to the next shell block are one script, so what they define
    is gone after it, and what the shell exports stays."""
    lines = ["set -euo pipefail"]
    for number, (mark, group) in enumerate(itertools.groupby(blocks(page), key=lambda block: block[0])):
        text = "\n".join(each for _, each in group)
        if mark == "python":
            (folder / f"script{number}.py").write_text(text)
            text = f"python script{number}.py"
        lines.append(text)
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose)]
    missing = [t for t in targets if t and "://" not in t and not (page.parent / t).exists()]
    assert not missing, f"{name_of(page)} links to {missing}"


def check_end(page: Path, code: int, output: str) -> None:
    """The blocks ran, and show nobody a key that is deprecated."""
    assert code == 0, f"{name_of(page)}:\n{output}"
    told = [line for line in output.splitlines() if "is deprecated; write" in line]
    assert not told, f"{name_of(page)} uses what is deprecated: {told}"


def run_in_shell(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """As the page's reader has it: each script is an interpreter of its own."""
    words = ["bash", "-c", as_session(page, folder)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)  # noqa: PLW1510
    check_end(page, done.returncode, f"{done.stdout}\n{done.stderr}")


def run_by_fork(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Its blocks as one script, by a fork of a process that has torch already: its imports take longer than it does."""
    script = folder / "script.py"
    script.write_text("\n".join(text for _, text in blocks(page)))
    check_end(page, *fork([str(script)], folder, environment))


def fork(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """`python *command` in a fork of a process that has torch: its exit code and output."""
    log = folder / "log"
    with open(os.devnull) as nothing, log.open("wb") as output:
        job = forked.start(0, command, environment, nothing.fileno(), output.fileno())
    try:
        code = job.wait(LIMIT_S)
    finally:
        job.kill()
    return code, log.read_text()


def is_forked(page: Path) -> bool:
    return {mark for mark, _ in blocks(page)} == {"python"} and page != ROOT / "README.md"


WITH_BLOCKS = [page for page in PAGES if blocks(page)]
WAYS = [(page, run_in_shell) for page in WITH_BLOCKS]
WAYS += [(page, run_by_fork) for page in WITH_BLOCKS if is_forked(page)]


@pytest.mark.parametrize(
    ("page", "run"),
    swept(WAYS, lambda page, run: is_forked(page) is (run is run_by_fork)),
    ids=lambda value: name_of(value) if isinstance(value, Path) else value.__name__,
)
def test_blocks_run(page: Path, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python) -> None:
    launcher_names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher_names}
    folders = [str(Path(sys.executable).parent), environment["PATH"]]
    if run is run_in_shell and page != ROOT / "README.md":  # `ds_verify` starts six interpreters
        modules = ["transformers.trainer"] if "from transformers import" in page.read_text() else []
        folders.insert(0, str(warm_python(*modules)))
    environment |= {"CHECKOUT": str(ROOT), "PATH": os.pathsep.join(folders)}
    monkeypatch.chdir(tmp_path)
    run(page, tmp_path, environment)


@pytest.mark.parametrize(
    "generator", swept(GENERATORS, lambda path: f'"{path.name}"' not in TESTS_OF_THE_HOUSE), ids=name_of
)
def test_generated_pages_equal_their_source(generator: Path, tmp_path: Path) -> None:
    code, output = fork([str(generator), "--check"], tmp_path, dict(os.environ))
    assert code == 0, f"{name_of(generator)} --check:\n{output}"
