"""The tiers of `nebula`: tags are copied from the directory of the saves to a farther folder or URL, each whole or not
at all, and a load takes the newest one that is whole from the nearest tier."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, layout
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.layout import location
from deepspeed.checkpoint.persistence import Persistence, copy_tag
from deepspeed.checkpoint.tags import saved_tags
from deepspeed.errors import CheckpointError
from deepspeed.testing.tiers import swept

MODEL = layout.model_file(0)
FILE_SYSTEM = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}  # audit events


@pytest.fixture
def near(tmp_path):
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path):
    return tmp_path / "far"


def save(directory, step, checkpointer=None, **options):
    state = {"module": {"w": torch.full((300,), float(step))}, "global_steps": step}
    state |= {"dp_world_size": 1, "mp_world_size": 1}
    (checkpointer or Checkpointer()).save(
        directory, f"global_step{step}", model_state=state, shard_state=None, **options
    )
    return Path(directory) / f"global_step{step}"


def names(directory):
    return [tag.name for tag in saved_tags(directory)]


def damage(directory, step):
    path = directory / f"global_step{step}" / MODEL
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def said(lines):
    """Call it to get the warnings so far."""
    return lambda: [text for level, text in lines if level == "WARNING"]


@pytest.fixture
def persistence(far, clock):
    return Persistence(str(far), 100, keep_last=2, clock=clock)


def let_copy(persistence):
    """Wait for the copy that runs, and look at what became of it."""
    if persistence._running is not None:
        wait([persistence._running[1]])
    persistence.look()


@pytest.mark.parametrize("kind", ["folder", "url"])
def test_a_copy_is_the_same_save(near, far, kind):
    if kind == "url":
        pytest.importorskip("upath")
        far = location(f"memory://{uuid.uuid4().hex}")
    folder = save(near, 1)
    copy_tag(folder, far, save_latest=True, keep_last=None)
    (copy,), (own,) = saved_tags(far), saved_tags(near)
    assert copy.index == own.index
    assert not copy.faults(content=True)
    assert Checkpointer().load(str(far)).model_state["module"]["w"][0] == 1
    before = (copy.folder / MODEL).stat()
    copy_tag(folder, far, save_latest=True, keep_last=None)  # it is there, so nothing is written
    assert (copy.folder / MODEL).stat() == before


def test_the_newest_tag_is_copied_after_each_interval(near, far, persistence, clock):
    persistence.offer(save(near, 1), save_latest=True)  # the first at once
    let_copy(persistence)
    assert names(far) == ["global_step1"]
    for now, step in ((50, 2), (99, 3)):
        clock.now = now
        persistence.offer(save(near, step), save_latest=True)
        let_copy(persistence)
    assert names(far) == ["global_step1"]
    clock.now = 100
    persistence.look()  # no save need come
    let_copy(persistence)
    assert names(far) == ["global_step1", "global_step3"]
    clock.now = 199
    persistence.offer(save(near, 4), save_latest=True)
    let_copy(persistence)
    assert names(far) == ["global_step1", "global_step3"]
    persistence.finish()  # the end of the run does not wait for the interval
    assert names(far) == ["global_step3", "global_step4"]  # keep_last
    assert (far / "latest").read_text() == "global_step4"
    assert names(near) == [f"global_step{step}" for step in (1, 2, 3, 4)]
    persistence.finish()  # there is nothing more to copy


def test_a_copy_that_fails_is_made_again_and_costs_no_earlier_one(near, far, persistence, clock, said):
    persistence.offer(save(near, 1), save_latest=True)
    let_copy(persistence)
    (far / "global_step2").write_text("in the way")
    persistence.offer(save(near, 2), save_latest=True)
    clock.now = 100
    persistence.look()
    let_copy(persistence)
    (message,) = said()
    assert "cannot copy" in message
    assert "global_step2: it is a file" in message
    assert "tried again after 100 seconds" in message
    assert Checkpointer().load(far).tag == "global_step1"
    with pytest.raises(CheckpointError, match="cannot copy .*near/global_step2 to .*far: .* it is a file"):
        persistence.finish()
    persistence.offer(save(near, 2), save_latest=True)
    (far / "global_step2").unlink()
    clock.now = 300
    persistence.look()
    let_copy(persistence)
    assert Checkpointer().load(far).tag == "global_step2"


def test_a_damaged_tag_is_not_copied(near, far):
    copy_tag(save(near, 1), far, save_latest=True, keep_last=1)
    folder = save(near, 2)
    damage(near, 2)
    with pytest.raises(CheckpointError, match="global_step2/mp_rank_00_model_states.pt is damaged"):
        copy_tag(folder, far, save_latest=True, keep_last=1)
    assert names(far) == ["global_step1"]
    assert not layout.unfinished_in(far)
    assert Checkpointer().load(far).tag == "global_step1"


def test_a_copy_is_not_named_by_latest_if_the_save_was_not_or_a_later_one_is(near, far):
    first, second = save(near, 1), save(near, 2, save_latest=False)
    copy_tag(first, far, save_latest=True, keep_last=None)
    copy_tag(second, far, save_latest=False, keep_last=None)
    assert (far / "latest").read_text() == "global_step1"
    third = save(near, 3)
    copy_tag(third, far, save_latest=True, keep_last=None)
    shutil.rmtree(far / "global_step1")
    copy_tag(first, far, save_latest=True, keep_last=None)  # of a run that was slow to end
    assert (far / "latest").read_text() == "global_step3"


@pytest.mark.parametrize("stride", swept([7, 1], lambda stride: stride == 7))
def test_every_kill_between_the_tiers_leaves_a_whole_version(near, far, stride):
    """A process that copies is killed before a touch of the file system: before each, or before each seventh."""
    copy_tag(save(near, 1), far, save_latest=True, keep_last=1)
    pristine = shutil.copytree(far, far.with_name("pristine"))
    folder, exits, tags = save(near, 2), [], []
    while not exits or exits[-1] != 0:
        shutil.rmtree(far)
        shutil.copytree(pristine, far)
        exits.append(killed_while_it_copies(folder, far, stride * len(exits)))
        found = Checkpointer().load(far)
        tags.append(found.tag)
        assert found.model_state["module"]["w"][0] == int(found.tag[-1])
        assert not any(tag.faults(content=True) for tag in saved_tags(far))
        assert load(far, far.with_name("nothing")).tag == found.tag
        copy_tag(save(near, 3), far, save_latest=True, keep_last=1)  # as the next run does
        assert names(far) == ["global_step3"]
        assert not layout.unfinished_in(far)
    assert set(exits[:-1]) == {-signal.SIGKILL}
    assert tags == sorted(tags)
    assert set(tags) == {"global_step1", "global_step2"}
    assert len(exits) > 30 / stride


def killed_while_it_copies(folder, far, num_touches):
    """Fork a process that copies and is killed before one touch more than `num_touches`; return its exit code."""
    if (child := os.fork()) == 0:
        seen = []

        def touch(event, _):
            if event in FILE_SYSTEM:
                seen.append(event)
                if len(seen) > num_touches:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(touch)
        try:
            copy_tag(folder, far, save_latest=True, keep_last=1)
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def writing(far, keep_last, interval_s=1000):
    persistent = {"directory": str(far), "interval_s": interval_s, "keep_last": 2}
    return Checkpointer(background=BackgroundWriter(persistent=persistent), keep_last=keep_last)


def test_the_writer_process_keeps_both_tiers(near, far):
    checkpointer = writing(far, keep_last=1)
    for step in range(1, 5):
        save(near, step, checkpointer)
    checkpointer.wait_for_save()
    assert names(near)[-1] == "global_step4"
    checkpointer.close()  # the last tag is copied without waiting for the interval
    assert names(far) == ["global_step1", "global_step4"]
    assert (far / "latest").read_text() == (near / "latest").read_text() == "global_step4"
    assert not any(tag.faults(content=True) for tag in saved_tags(far))


def test_the_end_of_a_run_says_that_the_last_tag_cannot_be_copied(near, far):
    checkpointer = writing(far, keep_last=1)
    far.write_text("no folder")
    save(near, 1, checkpointer)
    with pytest.raises(CheckpointError, match="cannot copy .*global_step1 to .*far: cannot prepare .*"):
        checkpointer.close()
    assert Checkpointer().load(near).tag == "global_step1"


def test_saves_into_the_persistent_path_itself_are_not_copied(near):
    checkpointer = writing(near, keep_last=1)
    for step in (1, 2):
        save(near, step, checkpointer)
    checkpointer.close()
    assert names(near) == ["global_step2"]


PROGRAM = """
import os, signal, sys
from test_persistence import save, writing

near, far = sys.argv[1:]
checkpointer = writing(far, keep_last=2)
for step in (1, 2):
    save(near, step, checkpointer)
checkpointer.wait_for_copy()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_writer_copies_the_last_tag_of_a_trainer_that_was_killed(near, far):
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(near), str(far)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr  # its pipes end with the writer
    assert "Error" not in done.stderr
    assert names(far) == ["global_step1", "global_step2"]
    assert Checkpointer().load(far).tag == "global_step2"


# --- a load


def copied(near, far, *steps):
    for step in steps:
        copy_tag(save(near, step), far, save_latest=True, keep_last=None)


def load(near, far, tag=None):
    return Checkpointer().load_nearest([str(near), str(far)], tag)


def test_a_load_takes_the_nearer_of_two_copies_and_the_newer_of_two_tags(near, far, said):
    copied(near, far, 1, 2)
    assert load(near, far).path == str(near / "global_step2" / MODEL)
    save(near, 3)
    assert load(near, far).tag == "global_step3"
    shutil.rmtree(near / "global_step3")
    shutil.rmtree(near / "global_step2")
    assert load(near, far).path == str(far / "global_step2" / MODEL)
    assert load(near, far, "global_step1").path == str(near / "global_step1" / MODEL)
    assert said() == []


def test_a_load_passes_over_what_is_not_whole(near, far, said):
    copied(near, far, 1, 2)
    save(near, 3)
    damage(near, 3)
    assert load(near, far).path == str(near / "global_step2" / MODEL)
    (near / "global_step2" / MODEL).unlink()
    assert load(near, far).path == str(far / "global_step2" / MODEL)
    assert load(near, far, "global_step2").path == str(far / "global_step2" / MODEL)
    damage(far, 2)
    assert load(near, far).path == str(near / "global_step1" / MODEL)
    assert any("global_step3" in message and "is damaged" in message for message in said())
    damage(near, 1)
    damage(far, 1)
    with pytest.raises(CheckpointError, match="no tag there is whole.*global_step3.*is damaged"):
        load(near, far)


def test_a_load_finds_the_farther_tier_when_the_nearer_is_lost(near, far):
    copied(near, far, 1)
    shutil.rmtree(near)
    assert load(near, far).path == str(far / "global_step1" / MODEL)


def test_a_load_leaves_a_tag_that_latest_does_not_name_yet(near, far):
    copied(near, far, 1)
    save(near, 2, save_latest=False)
    assert load(near, far).tag == "global_step1"
    assert load(near, far, "global_step2").tag == "global_step2"


def test_a_load_finds_nothing_where_nothing_was_saved(near, far):
    assert load(near, far) is None
    with pytest.raises(CheckpointError, match="no checkpoint 'global_step1'"):
        load(near, far, "global_step1")


def test_a_tier_that_cannot_be_read_matters_only_without_another(near, tmp_path, said):
    save(near, 1)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "latest").mkdir()  # no file
    assert load(near, tmp_path / "far").tag == "global_step1"
    assert "Its tags are not looked at" in said()[-1]
    with pytest.raises(CheckpointError, match="latest is a folder"):
        load(tmp_path / "nothing", tmp_path / "far")


def test_ranks_load_the_same_copy(near, far, make_training, make_ranks):
    """One rank's file is damaged in the nearer tier, so all ranks take the farther."""
    training, ranks = make_training(), make_ranks(2)
    ranks.save(training, near, "global_step1")
    copy_tag(near / "global_step1", far, save_latest=True, keep_last=None)
    path = near / "global_step1" / layout.shard_file(1, 0)
    path.write_bytes(path.read_bytes()[:-1])
    for found in ranks(lambda checkpointer, rank: checkpointer.load_nearest([str(near), str(far)])):
        assert found.path.startswith(str(far))
