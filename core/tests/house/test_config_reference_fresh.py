"""docs/reference/config.md is what the models say."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_is_fresh():
    spec = importlib.util.spec_from_file_location("generate_config", ROOT / "docs" / "generate" / "config.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = ROOT / "docs" / "reference" / "config.md"
    assert page.read_text(encoding="utf-8") == generator.render(), "stale: run python docs/generate/config.py"
