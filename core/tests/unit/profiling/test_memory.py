"""see_memory_usage prints when it is forced, and only then."""

import re

from deepspeed.runtime.utils import see_memory_usage


def test_forced(capsys):
    see_memory_usage("before the step", force=True)
    line = capsys.readouterr().err
    assert re.search(r"before the step \| allocated \d+\.\d\d GiB, peak \d+\.\d\d GiB \| host \d+\.\d\d GiB", line)


def test_not_forced_or_another_rank(capsys, monkeypatch):
    see_memory_usage("quiet")
    monkeypatch.setenv("RANK", "1")
    see_memory_usage("not here", force=True)
    assert capsys.readouterr().err == ""
