"""A directory that holds more than one job's saves: symbolic links, other jobs, files that are not there."""

import errno
import fcntl
import os
import signal

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, TorchStore, layout, store
from deepspeed.checkpoint.tags import write_latest, write_script
from deepspeed.errors import CheckpointError

NAME = layout.model_file(0)


def stage(folder, value=1):
    """A save up to its commit; gives what commits it."""
    store = TorchStore()
    store.create(folder)
    sizes = {NAME: store.save({"module": value}, folder, NAME)}
    return store, lambda: store.commit(folder, sizes)


def save(folder, value=1):
    stage(folder, value)[1]()


def value_in(folder):
    return torch.load(folder / NAME, weights_only=True)["module"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- symbolic links -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["global_step10", "nowhere"])
def test_a_tag_that_is_a_link_is_replaced_and_its_target_stays(tmp_path, target):
    save(tmp_path / "global_step10")
    (tmp_path / "global_step10" / "notes.txt").write_text("mine")
    (tmp_path / "best").symlink_to(target)
    save(tmp_path / "best", 2)
    save(tmp_path / "global_step11", 3)
    assert not (tmp_path / "best").is_symlink()
    assert [value_in(tmp_path / tag) for tag in ("global_step10", "best", "global_step11")] == [1, 2, 3]
    assert names(tmp_path / "global_step10") == [NAME, "notes.txt"]
    assert names(tmp_path) == ["best", "global_step10", "global_step11"]


def test_what_an_earlier_version_left_of_a_link_breaks_no_save(tmp_path):
    save(tmp_path / "global_step10")
    save(tmp_path / "best", 2)
    (tmp_path / ".best.former").symlink_to("global_step10")
    (tmp_path / ".best.staging").symlink_to("global_step10")
    save(tmp_path / "best", 3)
    assert names(tmp_path) == ["best", "global_step10"]
    assert names(tmp_path / "global_step10") == [NAME]


def test_a_link_is_loaded(make_training, tmp_path):
    training = make_training(world_size=1)
    Checkpointer().save(tmp_path, "a", model_state=training.model_state(), shard_state=training.shard_state(0))
    (tmp_path / "best").symlink_to("a")
    assert Checkpointer().load(tmp_path, "best").tag == "best"


def test_a_file_with_the_tags_name_stays(tmp_path):
    (tmp_path / "best").write_text("mine")
    with pytest.raises(CheckpointError, match="it is a file"):
        save(tmp_path / "best")
    assert (tmp_path / "best").read_text() == "mine"


# ---- other jobs -----------------------------------------------------------------------------------------------------


def test_two_jobs_save_into_one_directory(tmp_path):
    _, commit_first = stage(tmp_path / "first")
    store, commit_second = stage(tmp_path / "second", 2)
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* is saving it now"):
        stage(tmp_path / "first", 3)
    commit_first()
    store.discard(tmp_path / "second")
    assert names(tmp_path) == ["first"]
    with pytest.raises(AssertionError):
        commit_second()
    assert value_in(tmp_path / "first") == 1


@pytest.mark.parametrize("write", [lambda folder: write_latest(folder.parent, folder.name), write_script])
def test_two_jobs_write_a_file_that_their_tags_share(tmp_path, monkeypatch, write):
    """The second writes it from beginning to end while the first is about to move its own into place."""
    real_fsync, others = os.fsync, [tmp_path / "second"]

    def fsync(descriptor):
        real_fsync(descriptor)
        if others:
            write(others.pop())

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "first")
    assert not others
    assert names(tmp_path) in (["latest"], ["zero_to_fp32.py"])
    if (tmp_path / "latest").exists():
        assert (tmp_path / "latest").read_text() == "first"


def test_a_save_that_goes_on_is_no_leftover(tmp_path, lines, monkeypatch):
    """The files of another job's save come and go while this one looks through the directory."""
    killed_save(tmp_path / "a")
    real_lexists = os.path.lexists

    def lexists(path):
        is_there = real_lexists(path)
        if str(path).endswith(".a.lock"):
            path.unlink(missing_ok=True)
        return is_there

    monkeypatch.setattr(os.path, "lexists", lexists)
    save(tmp_path / "b")
    assert "b" in names(tmp_path)
    assert not lines


def killed_save(folder):
    """What a process leaves that SIGKILL ended in a save."""
    pid = os.fork()
    if pid == 0:
        TorchStore().create(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert names(folder.parent) == [f".{folder.name}.lock", f".{folder.name}.staging"]


@pytest.mark.parametrize("next_tag", ["a", "b"])
def test_what_a_killed_job_left_is_removed_by_the_next_save(tmp_path, next_tag):
    killed_save(tmp_path / "a")
    save(tmp_path / next_tag)
    assert names(tmp_path) == [next_tag]


def pretend_other_machine(folder):
    layout.lock_file(folder).write_text("another-boot\nprocess 7 on elsewhere\nx\n")


def age(folder):
    for path in (layout.staging_folder(folder), layout.lock_file(folder)):
        os.utime(path, (0, 0))


def test_a_save_of_another_machine_is_left_alone_until_it_is_old(tmp_path):
    killed_save(tmp_path / "a")
    pretend_other_machine(tmp_path / "a")
    save(tmp_path / "b")
    assert names(tmp_path) == [".a.lock", ".a.staging", "b"]
    age(tmp_path / "a")
    save(tmp_path / "b")
    assert names(tmp_path) == ["b"]


def test_without_locks_only_what_is_old_is_removed(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    _, commit_first = stage(tmp_path / "first")
    save(tmp_path / "second", 2)
    commit_first()
    assert names(tmp_path) == ["first", "second"]

    _, commit_third = stage(tmp_path / "third", 3)
    save(tmp_path / "third", 4)  # another job under the same tag, which nothing can refuse here
    with pytest.raises(CheckpointError, match="began to save the same tag"):
        commit_third()
    assert value_in(tmp_path / "third") == 4


def test_a_save_that_another_job_completes_meanwhile_is_no_leftover(tmp_path, lines, monkeypatch):
    _, commit_first = stage(tmp_path / "first")
    commits = [commit_first]

    class Watched(type(tmp_path)):
        """A staging folder that is renamed right after it was seen."""

        def is_dir(self):
            is_there = super().is_dir()
            if commits:
                commits.pop()()
            return is_there

    staging_folder = layout.staging_folder
    monkeypatch.setattr(layout, "staging_folder", lambda path: Watched(staging_folder(path)))
    save(tmp_path / "second", 2)
    assert lines == []
    assert names(tmp_path) == ["first", "second"]


def test_leftovers_that_cannot_be_removed_do_not_stop_a_save(tmp_path, lines, monkeypatch):
    killed_save(tmp_path / "a")

    def refuse(path):
        raise PermissionError(errno.EACCES, "not yours", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    save(tmp_path / "b")
    assert value_in(tmp_path / "b") == 1
    assert "cannot remove what an earlier save left of" in lines[-1][1]


# ---- every rank's file is there -------------------------------------------------------------------------------------


class LosingStore(TorchStore):
    """What it writes is not what the other ranks see."""

    def __init__(self, lose):
        self.lose = lose

    def save(self, state, folder, name):
        size = super().save(state, folder, name)
        self.lose(layout.staging_folder(folder) / name)
        return size


@pytest.mark.parametrize(
    ("lose", "words"),
    [(lambda path: path.unlink(), "it is missing"), (lambda path: os.truncate(path, 100), "it has 100 bytes")],
)
def test_a_file_that_is_not_there_as_it_was_written_is_not_committed(make_ranks, make_training, tmp_path, lose, words):
    ranks, training = make_ranks(2), make_training(seed=3)
    ranks.save(training, tmp_path, "a")

    def save(checkpointer, rank):
        if rank:
            checkpointer.store = LosingStore(lose)
        model_state = training.model_state() if checkpointer.writes_model else None
        checkpointer.save(tmp_path, "b", model_state=model_state, shard_state=training.shard_state(rank))

    for outcome in ranks(save):
        assert isinstance(outcome, CheckpointError)
        assert words in str(outcome)
        assert layout.shard_file(1, 0) in str(outcome)
    assert [found.tag for found in ranks.load(tmp_path)] == ["a", "a"]
    assert names(tmp_path) == ["a", "latest", "zero_to_fp32.py"]


@pytest.mark.parametrize("text", ["", f"a machine\nprocess 1 on a host{store._TIDIES}\n0\n"], ids=["new", "tidies"])
def test_a_save_waits_for_a_job_that_only_tidies_up(tmp_path, monkeypatch, text):
    """Another job's save looks at every lock file beside its own, and holds it meanwhile."""
    path = layout.lock_file(tmp_path / "tag")
    path.write_text(text)
    looks = []
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def let_go(seconds):
            looks.append(seconds)
            if len(looks) == 3:
                path.unlink()
                fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr("time.sleep", let_go)
        store = TorchStore()
        store.create(tmp_path / "tag")
    assert len(looks) == 3
    store.discard(tmp_path / "tag")


def test_a_save_does_not_wait_forever(tmp_path, monkeypatch):
    path = layout.lock_file(tmp_path / "tag")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is saving it now"):
            TorchStore().create(tmp_path / "tag")
