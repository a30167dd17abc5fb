"""What `launch` says of a script that does not end: where each rank stands."""

import re

import pytest

#: forked, one rank waits on a thread; the other one in a call
HANGING = """
import os, threading
import torch

def wait_for_a_thread():
    threading.Event().wait()

def wait_in_a_call():
    threading.Thread(target=wait_for_a_thread, daemon=True).start()
    os.read(os.pipe()[0], 1)

def main():
    print("rank", os.environ["RANK"], "began", flush=True)
    {"0": wait_for_a_thread, "1": wait_in_a_call}[os.environ["RANK"]]()
"""
ONE_ENDS = """
import os, threading

def main():
    if os.environ["RANK"] == "1":
        threading.Event().wait()
"""


def test_ranks_that_hang_say_where(create_launch, tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    launch = create_launch(tmp_path / "hanging.py", limit_s=1)
    with pytest.raises(AssertionError) as caught:
        launch(tmp_path / "run", "--stage", "none")
    text = str(caught.value)
    assert "--stage none did not end within 1 s on rank 0, 1; the ranks ended with [-9, -9]" in text
    one, other = text.partition("[rank 1]")[::2]
    assert "rank 0 began" in one
    assert "in wait_for_a_thread" in one
    assert "rank 1 began" in other
    assert {"wait_for_a_thread", "wait_in_a_call"} <= set(re.findall(r"in (\w+)$", other, re.MULTILINE))


def test_a_rank_that_hangs_alone_is_named_and_the_next_run_goes_on(create_launch, tmp_path):
    (tmp_path / "one_ends.py").write_text(ONE_ENDS)
    launch = create_launch(tmp_path / "one_ends.py", limit_s=1)
    for _ in range(2):
        with pytest.raises(AssertionError, match=r"did not end within 1 s on rank 1; the ranks ended with \[0, -9\]"):
            launch(tmp_path / "run")


def test_a_launcher_that_hangs_is_interrupted(create_launch, tmp_path):
    script = "import os\nos.mkfifo(os.environ['FIFO'])\nopen(os.environ['FIFO']).read()\n"
    (tmp_path / "waiting.py").write_text(f"import os\nos.environ['FIFO'] = {str(tmp_path / 'fifo')!r}\n{script}")
    launch = create_launch(tmp_path / "waiting.py", limit_s=5)
    with pytest.raises(AssertionError, match="did not end within 5 s") as caught:
        launch(tmp_path / "run", launcher="python")
    assert "KeyboardInterrupt" in str(caught.value)
