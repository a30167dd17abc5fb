import pytest
from deepspeed.log import warn_once


@pytest.fixture
def said(capsys):
    """Call it to get the lines logged so far; each test sees its own first warning."""
    warn_once.cache_clear()
    yield lambda: [line.partition("] [rank 0] ")[2] for line in capsys.readouterr().err.splitlines()]
    warn_once.cache_clear()
