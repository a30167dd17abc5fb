"""The report on a failed rank: the cause last, and nothing else taken for it."""

import signal
import threading

import pytest
from deepspeed.comm.failure import PeerFailed
from deepspeed.errors import CommError, ConfigError
from deepspeed.launcher import failure
from deepspeed.launcher.failure import (
    RankEnd,
    describe_failure,
    describe_job,
    describe_standing,
    exit_code_of,
    find_traceback,
    may_be_a_consequence,
)
from deepspeed.uncaught import Uncaught

SIMPLE = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: boom'
CHAINED = (
    'Traceback (most recent call last):\n  File "a.py", line 1\nKeyError: 1\n\n'
    "During handling of the above exception, another exception occurred:\n\n" + SIMPLE
)


class PeerLeft(PeerFailed):
    """As an extension names its own kind."""


def test_exit_codes():
    assert exit_code_of(3) == 3
    assert exit_code_of(-signal.SIGKILL) == 137


def test_traceback_stands_last():
    text = describe_failure(1, 42, 1, "some warning\n" + SIMPLE + "\n")
    assert text.startswith("deepspeed: rank 1 (pid 42) ended with exit code 1; ")
    assert text.endswith(SIMPLE)
    assert "some warning" not in text


def test_signal_is_named_last():
    assert "rank 1 (pid 42) was killed by SIGKILL" in describe_failure(1, 42, -9, "")
    text = describe_failure(0, 42, -signal.SIGABRT, "terminate called\n")
    assert text.splitlines()[1] == "terminate called"
    assert "SIGABRT" in text.splitlines()[-1]


def test_without_a_traceback_the_last_lines_are_shown():
    text = describe_failure(0, 42, 3, "".join(f"line {n}\n" for n in range(100)))
    assert "line 99" in text
    assert "line 80\n" in text
    assert "line 79\n" not in text
    assert "exit code 3" in text.splitlines()[-1]


def test_what_the_console_shows_already_is_not_repeated():
    text = describe_failure(1, 42, 1, f"{SIMPLE}\n[W1121 ProcessGroup.cpp] not destroyed\n", shown=True)
    assert "Traceback" not in text
    assert text.endswith("stopped. Its last words on stderr, shown above: ValueError: boom")
    assert text.count("\n") == 0
    prefixed = "\n".join("[rank1]: " + line for line in CHAINED.splitlines())
    assert describe_failure(1, 42, 1, prefixed, shown=True).endswith("shown above: ValueError: boom")
    assert describe_failure(1, 42, 1, "usage\nno such flag\n", shown=True).endswith("shown above: no such flag")
    assert describe_failure(0, 42, -9, "", shown=True).endswith("was killed by SIGKILL; the other ranks were stopped.")


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize(
    "words",
    [
        "train.py: error: unrecognized arguments: --local_rank=1",
        SIMPLE.replace("boom", "Some specified arguments are not used by the HfArgumentParser: ['--local_rank=1']"),
    ],
)
def test_a_script_that_does_not_take_the_local_rank_is_told_the_flag(words, shown):
    text = describe_failure(1, 42, 2, f"usage: train.py\n{words}\n", shown=shown)
    assert "The launcher adds --local_rank to the script's arguments" in text
    assert "--no_local_rank" in text
    assert "--no_local_rank" not in describe_failure(1, 42, 1, f"local_rank is 1\n{SIMPLE}\n", shown=shown)


def test_chained_exceptions_stay_together():
    assert find_traceback("noise\n" + CHAINED) == CHAINED


def test_an_earlier_traceback_that_was_logged_is_left_out():
    logged = SIMPLE.replace("boom", "caught and logged")
    assert find_traceback(f"{logged}\nretrying\n{SIMPLE}") == SIMPLE


def test_teardown_noise_is_not_the_cause():
    aside = "Exception ignored in: <function A.__del__ at 0x1>\n" + SIMPLE.replace("boom", "teardown")
    assert find_traceback(f"{SIMPLE}\n{aside}\n") == SIMPLE


def test_the_prefix_of_torch_is_understood():
    prefixed = "\n".join("[rank1]: " + line for line in SIMPLE.splitlines())
    assert find_traceback(f"{prefixed}\n[W1121 ProcessGroup.cpp] not destroyed\n") == prefixed


def end(rank, return_code=1, error=None, stderr=""):
    try:
        raise error or RuntimeError
    except Exception as caught:  # noqa: BLE001 - any, with a traceback
        uncaught = Uncaught.of(caught)
    return RankEnd(rank, 42, return_code, uncaught if error else None, stderr, shown=True)


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (end(0, error=CommError("rank 1 is gone")), True),
        (end(0, error=PeerFailed("rank 0 cannot finish a collective: rank 1 failed")), True),
        (end(0, error=PeerLeft("rank 1 left a collective")), True),
        (end(0, error=RuntimeError("[tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")), True),
        (end(0, stderr=SIMPLE.replace("ValueError: boom", "torch.distributed.DistBackendError: lost\n")), True),
        (end(0, -signal.SIGABRT, stderr="terminate called\n  what(): remote process exited\n"), True),
        (end(0, error=ValueError("boom")), False),
        (end(0, stderr=SIMPLE), False),
        (end(0, -signal.SIGKILL, stderr="RuntimeError: Connection closed by peer\n"), False),
        (end(0), False),
    ],
)
def test_what_may_be_a_consequence(ended, expected):
    assert may_be_a_consequence(ended) is expected


def test_the_report_on_a_job_ends_with_the_cause():
    lost = RuntimeError("Connection closed by peer\n(and more)")
    text = describe_job(end(2, error=ValueError("boom")), [end(0, error=lost), end(1, error=lost), end(3, -15)])
    first, second, *_, last = text.splitlines()
    assert first == "deepspeed: rank 0, 1 failed as well: RuntimeError: Connection closed by peer"
    assert second == "deepspeed: rank 2 (pid 42) ended with exit code 1; the other ranks were stopped. Its traceback:"
    assert last == "ValueError: boom"


STACKS = """\
Thread 0x00007f01 (most recent call first):
  File "threading.py", line 331 in wait
  File "threading.py", line 995 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "data.py", line 7 in read, with a comma
  File "train.py", line 12 in <module>

Thread 0x00007f03 (most recent call first):
  <no Python frame>
""".splitlines()


def test_a_rank_that_did_not_come_is_shown_where_it_stands():
    lost = CommError("ranks [1] have not come")
    others = [end(1, -15)._replace(stacks=STACKS), end(2, error=lost)._replace(stacks=STACKS)]
    text = describe_job(end(0, error=lost), others)
    assert text.splitlines()[:4] == [
        "deepspeed: rank 1 (pid 42) had not ended; it was here (data.py:7 in the script's own code):",
        '  File "train.py", line 12, in <module>',
        '  File "data.py", line 7, in read, with a comma',
        "deepspeed: rank 0 (pid 42) ended with exit code 1; the other ranks were stopped. Its traceback:",
    ]


def test_the_innermost_calls_of_a_deep_stack_are_shown():
    deep = ["Current thread 0x7f (most recent call first):", *(f'  File "a.py", line {at} in f' for at in range(30))]
    (text,) = describe_standing([end(1, -15)._replace(stacks=deep)])
    lines = text.splitlines()
    assert lines[1:3] == ["  ... 18 calls", '  File "a.py", line 11, in f']
    assert lines[-1] == '  File "a.py", line 0, in f'
    assert lines[0].endswith("it was here (a.py:0 in the script's own code):")
    inside = [f'  File "{file}", line 3 in wait' for file in (threading.__file__, pytest.__file__, failure.__file__)]
    (text,) = describe_standing([end(1, -15)._replace(stacks=[deep[0], *inside * 5, *deep[6:]])])
    assert text.splitlines()[0].endswith("it was here (a.py:5 in the script's own code):")
    assert "a.py" not in "".join(text.splitlines()[1:])  # which is among the calls that are left out
    (text,) = describe_standing([end(1, -15)._replace(stacks=[deep[0], *inside])])
    assert text.splitlines()[0].endswith("had not ended; it was here:")
    assert describe_standing([end(1, -15), end(2, -15)._replace(stacks=["what a script wrote"])]) == []


def test_a_config_error_of_all_ranks_is_one_line():
    wrong = ConfigError("bf16.enable: no such key")
    assert describe_job(end(1, error=wrong), [end(0, error=wrong)]) == f"deepspeed: error: {wrong} (rank 1)"
