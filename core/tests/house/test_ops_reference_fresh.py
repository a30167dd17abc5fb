"""docs/reference/ops.md is what the table of ops and the extensions say."""

import subprocess
import sys
from pathlib import Path

GENERATOR = Path(__file__).parents[3] / "docs" / "generate" / "ops.py"


def test_the_page_is_fresh():
    done = subprocess.run([sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
