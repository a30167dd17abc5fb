"""docs/reference/compatibility.md says what the tables say."""

import subprocess
import sys
from pathlib import Path

GENERATOR = Path(__file__).parents[3] / "docs" / "generate" / "compatibility.py"


def test_the_page_equals_the_tables():
    done = subprocess.run([sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
