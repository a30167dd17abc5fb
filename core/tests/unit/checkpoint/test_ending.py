"""What each of two ranks says of an asynchronous save in which a writer process was killed, against what is on disk."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, background, layout, writer
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.index import read_index
from deepspeed.checkpoint.tags import read_latest
from deepspeed.checkpoint.writer import COMMITTER, Ending, Report, create_reports
from deepspeed.errors import CheckpointError
from deepspeed.testing.tiers import swept

OTHER = "1"

#: a writer process that kills itself with SIGKILL before or after a call
WRITER = """
import functools, os, signal, sys
sys.path[:] = sys.argv[1:-2]
from deepspeed.checkpoint import store, writer

def dies(call, is_after):
    @functools.wraps(call)
    def die(*arguments, **options):
        if is_after:
            call(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    return die

owner, name, is_after = {moment}
setattr(owner, name, dies(getattr(owner, name), is_after))
writer.main()
"""
BEFORE_FILES = "writer, 'write_file', False"
BEFORE_REPORT = "writer.Report, 'write', False"
AFTER_REPORT = "writer.Report, 'write', True"
BEFORE_PLACE = "store.FolderStore, 'commit', False"
BEFORE_LATEST = "store, 'write_latest', False"
BEFORE_RESULT = "writer, 'put_in_place', True"
BEFORE_ANSWER = "writer.Report, 'leave', True"
BEFORE_ANSWER_OF_COMMITTER = "store.FolderStore, 'discard', True"


def writer_that_dies(monkeypatch, moment):
    with monkeypatch.context() as patch:
        if moment is not None:
            patch.setattr(background, "_START", WRITER.replace("{moment}", moment))
        made = BackgroundWriter(limit_s=60)
        made._started()
        return made


def states(step):
    model = {"module": {"w": torch.full((50,), float(step))}, "global_steps": step}
    shard = {"zero_stage": 1, "partition_count": 2}
    return {**model, "dp_world_size": 2, "mp_world_size": 1}, {"optimizer_state_dict": shard}


def begin(folder, committer, other, step, save_latest=True):
    """Both ranks begin a save, whose number is in its file and in the moment that the index gives."""
    model_state, shard_state = states(step)
    files = {
        COMMITTER: {layout.model_file(0): model_state, layout.shard_file(0, 0): shard_state},
        OTHER: {layout.shard_file(1, 0): shard_state},
    }
    facts = {"tag": folder.name, "at": f"2026-01-0{step}T00:00:00+00:00", "global_steps": step, "zero_stage": 1}
    commit = {"others": [OTHER], "facts": facts, "save_latest": save_latest, "keep_last": None}
    committer.create(folder)
    ranks = {COMMITTER: committer, OTHER: other}
    staged = {name: each.stage(folder, name, files[name]) for name, each in ranks.items()}
    for name, each in reversed(ranks.items()):
        order = commit if name == COMMITTER else None
        each.write(staged[name], order, folder=folder, name=name, began=facts["at"], save_latest=save_latest)


def error_of(writer):
    """What the end of the save raises; empty where it raises nothing."""
    try:
        writer.finish()
    except CheckpointError as error:
        return str(error)
    return ""


def save(folder, monkeypatch, step, victim="", moment=None, **options):
    """A save in which a writer dies at a moment; gives what each rank raises."""
    committer = writer_that_dies(monkeypatch, moment if victim == COMMITTER else None)
    other = writer_that_dies(monkeypatch, moment if victim == OTHER else None)
    begin(folder, committer, other, step, **options)
    errors = error_of(committer), error_of(other)
    exits = [each._process._process.poll() for each in (committer, other)]
    assert (-signal.SIGKILL in exits) == (moment is not None), "the writer did not die"
    for each in (committer, other):
        each.close()
    return errors


def step_in(directory):
    """The step that a load finds by `latest`."""
    if (found := Checkpointer(dp_world_size=2).load(directory)) is None:
        return None
    return found.model_state["global_steps"]


MOMENTS = [
    (COMMITTER, BEFORE_FILES, False),
    (COMMITTER, BEFORE_PLACE, False),
    (COMMITTER, BEFORE_RESULT, True),
    (COMMITTER, AFTER_REPORT, True),
    (COMMITTER, BEFORE_ANSWER, True),
    (COMMITTER, BEFORE_ANSWER_OF_COMMITTER, True),
    (OTHER, BEFORE_FILES, False),
    (OTHER, BEFORE_REPORT, False),
    (OTHER, AFTER_REPORT, True),
    (OTHER, BEFORE_ANSWER, True),
]


#: with each former save, a save that is lost and one that is complete
LOST_AND_SAVED = [(COMMITTER, BEFORE_PLACE, False), (COMMITTER, BEFORE_RESULT, True)]


@pytest.mark.parametrize(
    ("former", "victim", "moment", "is_saved"),
    swept(
        [(former, *each) for former in ("none", "another tag", "this tag") for each in MOMENTS],
        lambda former, *each: former == "another tag" or each in LOST_AND_SAVED,
    ),
)
def test_ranks_report_what_came_of_a_save_whose_writer_was_killed(
    tmp_path, monkeypatch, victim, moment, is_saved, former
):
    folder = tmp_path / "tag"
    if former != "none":
        assert save(folder if former == "this tag" else tmp_path / "former", monkeypatch, 1) == ("", "")
    errors = save(folder, monkeypatch, 2, victim, moment)
    assert step_in(tmp_path) == (2 if is_saved else None if former == "none" else 1)
    if is_saved:
        assert errors == ("", "")
    else:
        assert all(f"the asynchronous save of {folder} has failed" in error for error in errors)
        own = errors[0] if victim == COMMITTER else errors[1]
        assert "of this rank has ended with exit code -9: " in own
        assert "not known" not in "".join(errors)
    assert save(folder, monkeypatch, 3) == ("", "")
    assert step_in(tmp_path) == 3
    assert not layout.unfinished_in(tmp_path)


def test_a_committer_killed_before_latest_has_failed_and_the_error_says_what_is_whole(tmp_path, monkeypatch):
    save(tmp_path / "former", monkeypatch, 1)
    for error in save(tmp_path / "tag", monkeypatch, 2, COMMITTER, BEFORE_LATEST):
        assert "has failed" in error
        assert f"{tmp_path / 'tag'} is whole, but `latest` names former: load it by its tag, or save again" in error
    assert read_latest(tmp_path) == "former"
    assert read_index(tmp_path / "tag").saved["global_steps"] == 2


def test_a_save_without_latest_is_complete_when_it_is_in_its_place(tmp_path, monkeypatch):
    errors = save(tmp_path / "tag", monkeypatch, 1, COMMITTER, BEFORE_RESULT, save_latest=False)
    assert errors == ("", "")


def test_a_rank_whose_writer_died_does_not_wait_for_the_committer_at_a_step(tmp_path, monkeypatch):
    committer, other = writer_that_dies(monkeypatch, None), writer_that_dies(monkeypatch, AFTER_REPORT)
    pid = committer._process._process.pid
    send = committer._started().begin

    def stop_and_begin(*arguments):
        os.kill(pid, signal.SIGSTOP)
        send(*arguments)

    monkeypatch.setattr(committer._process, "begin", stop_and_begin)
    begin(tmp_path / "tag", committer, other, 1)
    other._process._process.wait()
    other.raise_failure()
    assert not other._process.has_answer()
    os.kill(pid, signal.SIGCONT)
    assert (error_of(committer), error_of(other)) == ("", "")
    for each in (committer, other):
        each.close()


def test_a_rank_whose_writer_died_hears_of_the_failure_of_the_committer(tmp_path, monkeypatch):
    committer, other = writer_that_dies(monkeypatch, None), writer_that_dies(monkeypatch, AFTER_REPORT)
    resource.prlimit(committer._process._process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    begin(tmp_path / "tag", committer, other, 1)
    errors = error_of(committer), error_of(other)
    assert "File too large" in errors[0]
    assert "has failed: the writer process of this rank has ended with exit code -9: the committing rank" in errors[1]
    for each in (committer, other):
        each.close()


@pytest.fixture
def ending(tmp_path):
    """Of a rank whose writer died when its files were written."""
    create_reports(tmp_path / "tag")
    report = Report(tmp_path / "tag", OTHER, 30)
    report.write({"files": []})
    os.close(report._descriptor)
    return Ending(str(tmp_path / "tag"), OTHER, "2026-01-01T00:00:00+00:00", True, 0)


@pytest.mark.parametrize("latest", ["former", ""])
def test_a_committer_that_may_still_commit_leaves_it_unknown(ending, monkeypatch, latest):
    with monkeypatch.context() as patch:
        patch.setattr(writer, "machine", lambda: "another-boot")
        report = Report(Path(ending.folder), COMMITTER, 30)
    if latest:
        Path(ending.folder).with_name("latest").write_text(latest)
    assert ending.look_without_writer() is None
    result = ending.wait_without_writer()
    assert result["is_known"] is False
    names = "`latest` names former" if latest else "there is no `latest`"
    assert result["error"].endswith(f"for 0 s; whether it was committed is not known; {names}")
    os.close(report._descriptor)


def test_a_result_of_a_save_that_another_has_replaced_is_not_taken_for_success(ending):
    report = Report(Path(ending.folder), COMMITTER, 30)
    report.write({})
    result = ending.look_without_writer()
    assert result["is_known"] is False
    assert "is of another save now, or gone" in result["error"]
    os.close(report._descriptor)


def test_an_index_that_cannot_be_read_leaves_it_unknown(ending):
    Path(ending.folder).mkdir()
    (Path(ending.folder) / layout.INDEX_FILE).write_text("{}")
    result = ending.look_without_writer()
    assert result["is_known"] is False
    assert "whether it was committed is not known: " in result["error"]


def test_an_unknown_end_is_not_called_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Ending, "look_without_writer", lambda ending: {"error": "its end is not known", "is_known": False}
    )
    committer, other = save(tmp_path / "tag", monkeypatch, 1, OTHER, AFTER_REPORT)
    assert committer == ""
    assert f"the asynchronous save of {tmp_path / 'tag'} may have failed: the writer process" in other
