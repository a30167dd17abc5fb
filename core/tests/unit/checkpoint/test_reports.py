"""The reports of writer processes: of this machine, and of others whose locks are not seen."""

import fcntl
import os

import pytest
from deepspeed.checkpoint import layout, writer
from deepspeed.checkpoint.store import remove_reports
from deepspeed.checkpoint.writer import COMMITTER, Report, create_reports


@pytest.fixture
def folder(tmp_path):
    create_reports(tmp_path / "tag")
    return tmp_path / "tag"


@pytest.fixture
def elsewhere(folder, monkeypatch):
    """A report of another machine, whose lock is not seen here."""
    with monkeypatch.context() as patch:
        patch.setattr(writer, "machine", lambda: "another-boot")
        made = Report(folder, "1", 30)
    fcntl.flock(made._descriptor, fcntl.LOCK_UN)
    return made


def on_look(monkeypatch, *calls):
    """Call them one by one between the looks of a wait."""
    left = list(calls)
    monkeypatch.setattr("time.sleep", lambda seconds: left.pop(0)())
    return left


def nothing():
    pass


def test_a_writer_whose_lock_is_not_seen_is_waited_for_until_it_has_read_the_outcome(folder, elsewhere, monkeypatch):
    committer = Report(folder, COMMITTER, 30)
    left = on_look(monkeypatch, nothing, lambda: elsewhere.write({"files": []}))
    assert committer.wait_for("1") == {"files": []}
    assert not left
    committer.write({})
    outcomes = []
    left = on_look(monkeypatch, nothing, lambda: outcomes.append(elsewhere.wait_for(COMMITTER)), elsewhere.leave)
    committer.leave()
    assert not left
    assert outcomes == [{}]
    assert not layout.writers_folder(folder).exists()


def test_a_writer_of_another_machine_of_which_nothing_is_heard_is_given_up(folder, elsewhere, monkeypatch):
    committer = Report(folder, COMMITTER, 0)
    assert committer.wait_for("1") == {"error": "nothing was heard of its writer process for 0 s"}
    committer._limit_s = 30
    on_look(monkeypatch)  # it is not waited for again
    committer.leave()
    assert not layout.writers_folder(folder).exists()


def test_a_writer_of_this_machine_is_dead_when_its_lock_is_free(folder, monkeypatch):
    committer, other = Report(folder, COMMITTER, 30), Report(folder, "1", 30)
    left = on_look(monkeypatch, nothing, lambda: os.close(other._descriptor))
    assert committer.wait_for("1") == {"error": "its writer process ended before its files were written"}
    assert not left
    committer.leave()
    assert not layout.writers_folder(folder).exists()


def test_a_report_that_a_process_has_just_made_is_not_taken_for_dead(folder, monkeypatch):
    committer, path = Report(folder, COMMITTER, 30), layout.writers_folder(folder) / "1.json"
    path.touch()  # neither locked nor signed yet
    on_look(monkeypatch, nothing, lambda: Report(folder, "1", 30).write({"files": []}))
    assert committer.wait_for("1") == {"files": []}


def test_reports_of_living_processes_stay(folder):
    Report(folder, "1", 30)
    remove_reports(layout.writers_folder(folder))
    assert layout.writers_folder(folder).is_dir()


def test_a_failure_is_read_after_its_writer_has_left(folder):
    """The committer may be writing its own files meanwhile."""
    committer, other = Report(folder, COMMITTER, 30), Report(folder, "1", 30)
    other.write({"error": "the disk is full"})
    other.leave()
    assert committer.wait_for("1") == {"error": "the disk is full"}
    committer.leave()
    assert not layout.writers_folder(folder).exists()
