"""The reference pages of hooks and accelerator say what the code says."""

import subprocess
import sys
from pathlib import Path

GENERATOR = Path(__file__).parents[3] / "docs" / "generate" / "plugins.py"


def test_pages_equal_the_docstrings():
    done = subprocess.run([sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
