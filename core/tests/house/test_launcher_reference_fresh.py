"""docs/reference/launcher.md is what the argument parser says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_is_fresh():
    spec = importlib.util.spec_from_file_location("generate_launcher", ROOT / "docs" / "generate" / "launcher.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = ROOT / "docs" / "reference" / "launcher.md"
    assert page.read_text(encoding="utf-8") == generator.render(), "stale: run python docs/generate/launcher.py"
