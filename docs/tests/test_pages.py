"""Documentation stays true: links lead somewhere, python blocks run, generated pages equal their source."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "core/*.md", "extensions/*/*.md", "compat/*/*.md")
    for path in ROOT.glob(pattern)
)
LIMIT_S = 280  # far above what a block needs, for a loaded machine
GENERATORS = sorted((ROOT / "docs/generate").glob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_blocks(page: Path) -> list[str]:
    """The page's blocks marked exactly `python`; `python fragment` and other marks are for reading only."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose)]
    missing = [t for t in targets if t and "://" not in t and not (page.parent / t).exists()]
    assert not missing, f"{name_of(page)} links to {missing}"


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text("\n".join(python_blocks(page)))
    launcher_names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher_names}
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "blocks.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{name_of(page)}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("generator", GENERATORS, ids=name_of)
def test_generated_pages_equal_their_source(generator: Path) -> None:
    done = subprocess.run([sys.executable, str(generator), "--check"], capture_output=True, text=True, timeout=LIMIT_S)  # noqa: PLW1510
    assert done.returncode == 0, f"{name_of(generator)} --check:\n{done.stdout}\n{done.stderr}"
