"""The record of a run: how the failure of a rank is told in one line."""

import pytest
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.recording import Recorder, _without_frames, judge


def fail_far_down():
    try:
        {}["key"]
    except KeyError as error:
        raise ValueError("boom\nand more of it") from error


def test_a_rank_is_told_by_its_exception_and_not_by_its_frames():
    with pytest.raises(ValueError, match="boom") as caught:
        run_ranks(1, fail_far_down)
    assert "Traceback" in str(caught.value)
    told = _without_frames(f"ValueError: {caught.value}")
    wanted = "ValueError: [rank 0 of 1] fail_far_down failed: ValueError: boom and more of it"
    assert " ".join(told.split()) == wanted


def test_of_several_ranks_the_first_is_told():
    frames = 'failed:\nTraceback (most recent call last):\n  File "a.py", line 1\n'
    message = f"E: [rank 1 of 2] f {frames}A: first\n[rank 0 of 2] f {frames}B: second"
    assert " ".join(_without_frames(message).split()) == "E: [rank 1 of 2] f failed: A: first"


@pytest.mark.parametrize(
    "message",
    [
        "assert 1 == 2",
        "E: [rank 0 of 1] f failed:\nthe process was killed by SIGKILL\n[rank 0] last output:\n(none)",
        "an error that quotes a\nTraceback (most recent call last):\n  File",
    ],
)
def test_other_messages_stay_as_they_are(message):
    assert _without_frames(message) == message


MEASURES = """
def test_share(record_property):
    record_property("figure", {"what": "x", "share": 0.2})
    record_property("other", 1)
    assert False, "too slow"
"""


def test_what_a_test_measured_is_noted_though_it_failed(tmp_path):
    (tmp_path / "test_measures.py").write_text(MEASURES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    recorder = Recorder(level=3)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "--import-mode=importlib"]
    pytest.main([*options, "-c", str(tmp_path / "pytest.ini"), str(tmp_path)], plugins=[recorder])
    (test,) = recorder.tests.values()
    assert test["outcome"] == "failed"
    assert test["figures"] == [{"what": "x", "share": 0.2}]
    assert judge([{**test, "level": 3}], 3, False)["levels"]["3"]["figures"] == test["figures"]
