"""Asynchronous saving of one rank: what its writer process does while, and after, the rank goes on."""

import errno
import os
import resource
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, TorchStore, background, layout
from deepspeed.checkpoint.background import BackgroundWriter, Orders, SharedMemory
from deepspeed.checkpoint.save import save_in_background
from deepspeed.checkpoint.tags import saved_tags
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.zero.redistribute import PendingTensor

KEEP_LAST = 2


def states(step):
    model = {"module": {"w": torch.full((500,), float(step))}, "global_steps": step}
    parts = [torch.full((700,), float(step))[10:20], PendingTensor.of(torch.full((700,), float(step)))]
    shard = {"zero_stage": 1, "single_partition_of_fp32_groups": parts}
    return {**model, "dp_world_size": 1, "mp_world_size": 1}, {"optimizer_state_dict": shard}


def save(checkpointer, directory, step, **options):
    model_state, shard_state = states(step)
    checkpointer.save(
        directory, f"global_step{step}", model_state=model_state, shard_state=shard_state, client_state={}, **options
    )
    return model_state["module"]["w"]


def writer_of(checkpointer):
    return checkpointer._background._process._process.pid


@pytest.fixture
def checkpointer():
    made = Checkpointer(background=BackgroundWriter(), keep_last=KEEP_LAST)
    yield made
    made.close()


def test_files_are_those_of_a_synchronous_save_of_the_same_moment(tmp_path, checkpointer):
    save(Checkpointer(), tmp_path / "sync", 1)
    weights = save(checkpointer, tmp_path / "async", 1)
    weights.zero_()  # training goes on
    checkpointer.wait_for_save()
    (found,), (expected,) = saved_tags(tmp_path / "async"), saved_tags(tmp_path / "sync")
    assert found.index.files == expected.index.files
    assert not found.faults(content=True)
    assert sorted(os.listdir(tmp_path / "async")) == sorted(os.listdir(tmp_path / "sync"))


def test_each_save_waits_for_the_one_before_and_old_tags_are_removed(tmp_path, checkpointer):
    for step in range(1, 5):
        save(checkpointer, tmp_path, step)
    found = checkpointer.load(tmp_path)  # waits for the last
    assert found.tag == "global_step4"
    assert [tag.name for tag in saved_tags(tmp_path)] == ["global_step3", "global_step4"]


def test_latest_names_the_former_checkpoint_until_the_new_one_is_whole(tmp_path, checkpointer):
    save(checkpointer, tmp_path, 1)
    checkpointer.wait_for_save()
    save(checkpointer, tmp_path, 2, save_latest=False)
    checkpointer.wait_for_save()
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert Checkpointer().load(tmp_path, "global_step2").tag == "global_step2"


@pytest.mark.parametrize(
    ("is_async", "written"),
    [(True, "as it was"), (False, "as it was"), (True, "relative"), (True, "with dots"), (False, "through a link")],
)
def test_a_save_waits_for_that_of_another_engine_into_the_directory(
    tmp_path, checkpointer, monkeypatch, is_async, written
):
    """Else `latest` would name the checkpoint whose writer ends last."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "inside")
    paths = {"relative": "../", "with dots": tmp_path / "inside" / "..", "through a link": "link"}
    save(checkpointer, tmp_path, 1)
    checkpointer.wait_for_save()
    pid, wait = writer_of(checkpointer), checkpointer.wait_for_save
    begin = BackgroundWriter.write

    def stop_and_write(background, *order, **options):
        os.kill(pid, signal.SIGSTOP)
        begin(background, *order, **options)

    with monkeypatch.context() as patch:
        patch.setattr(BackgroundWriter, "write", stop_and_write)
        save(checkpointer, tmp_path, 2)

    def go_on_and_wait():
        os.kill(pid, signal.SIGCONT)
        wait()

    monkeypatch.setattr(checkpointer, "wait_for_save", go_on_and_wait)
    other = Checkpointer(background=BackgroundWriter() if is_async else None)
    save(other, paths.get(written, tmp_path), 3)
    other.close()
    os.kill(pid, signal.SIGCONT)
    checkpointer.close()
    assert (tmp_path / "latest").read_text() == "global_step3"


def limit_file_size(pid, num_bytes):
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("surfaces", ["wait_for_save", "raise_failure", "close", "save", "load"])
def test_a_disk_that_refuses_is_an_error_with_the_tag(tmp_path, checkpointer, surfaces):
    save(checkpointer, tmp_path, 1)
    checkpointer.wait_for_save()
    limit_file_size(writer_of(checkpointer), 1000)
    save(checkpointer, tmp_path, 2)
    call = {"save": lambda: save(checkpointer, tmp_path, 3), "load": lambda: checkpointer.load(tmp_path)}
    if surfaces == "raise_failure":
        select.select([checkpointer._background._process._process.stdout], [], [])
    with pytest.raises(CheckpointError, match=r"save of .*global_step2 has failed: cannot write .*: File too large"):
        call.get(surfaces, getattr(checkpointer, surfaces))()
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest", "zero_to_fp32.py"]
    checkpointer.raise_failure()  # once only
    checkpointer.wait_for_save()
    if surfaces == "close":
        return
    limit_file_size(writer_of(checkpointer), resource.RLIM_INFINITY)
    save(checkpointer, tmp_path, 3)
    assert checkpointer.load(tmp_path).tag == "global_step3"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])  # while it writes; before
def test_a_writer_that_was_killed_is_an_error_and_the_next_save_starts_another(
    tmp_path, checkpointer, monkeypatch, number
):
    begin = BackgroundWriter.write

    def write(background, *order, **options):
        pid = writer_of(checkpointer)
        os.kill(pid, number)
        begin(background, *order, **options)
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(BackgroundWriter, "write", write)
        save(checkpointer, tmp_path, 2)
    with pytest.raises(CheckpointError, match="global_step2 has failed: .* ended with exit code -9"):
        checkpointer.wait_for_save()
    save(checkpointer, tmp_path, 3)
    assert checkpointer.load(tmp_path).tag == "global_step3"
    assert not layout.unfinished_in(tmp_path)


def test_an_interrupted_save_does_not_hinder_the_next(tmp_path, checkpointer, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, "write_state", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(checkpointer, tmp_path, 1)
    save(checkpointer, tmp_path, 1)
    assert checkpointer.load(tmp_path).tag == "global_step1"
    assert not layout.unfinished_in(tmp_path)


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.fixture
def failing(tmp_path, checkpointer):
    """The directory of a save whose writer cannot write a second one."""
    save(checkpointer, tmp_path, 1)
    checkpointer.wait_for_save()
    limit_file_size(writer_of(checkpointer), 1000)
    return tmp_path


def test_a_wait_that_was_interrupted_is_not_taken_for_done(failing, checkpointer, monkeypatch):
    save(checkpointer, failing, 2)
    for wait in (checkpointer.wait_for_save, lambda: save(checkpointer, failing, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(Orders, "_poll", interrupt)
            patch.setattr(Orders, "has_answer", lambda *_: False)
            with pytest.raises(KeyboardInterrupt):
                wait()
    with pytest.raises(CheckpointError, match="global_step2 has failed"):
        save(checkpointer, failing, 3)
    save(checkpointer, failing, 3)
    with pytest.raises(CheckpointError, match="global_step3 has failed"):
        checkpointer.wait_for_save()


def test_an_interrupt_right_after_the_order_to_write_leaves_the_save_in_flight(failing, checkpointer, monkeypatch):
    def begin_and_interrupt(*arguments):
        save_in_background(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr("deepspeed.checkpoint.checkpointer.save_in_background", begin_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(checkpointer, failing, 2)
    with pytest.raises(CheckpointError, match="global_step2 has failed"):
        checkpointer.wait_for_save()


def test_a_failure_that_a_peer_has_not_raised_is_raised_again_with_it(failing, checkpointer):
    save(checkpointer, failing, 2)
    with pytest.raises(CheckpointError, match="global_step2 has failed"):
        checkpointer._background.finish()  # as `raise_failure` at a step does
    peers = replace(checkpointer._ranks, gather=lambda own: [own, "the save of global_step2 has failed"])
    checkpointer._ranks = peers
    with pytest.raises(CheckpointError, match="rank 1: the save of global_step2 has failed"):
        checkpointer.wait_for_save()


@pytest.mark.parametrize("order", ["create", "join", "write"])
@pytest.mark.parametrize("is_sent", [False, True])
def test_an_interrupted_order_is_given_up(tmp_path, checkpointer, monkeypatch, order, is_sent):
    owner, name = (background._Process, "begin") if order == "write" else (Orders, "send")
    give = getattr(owner, name)

    def interrupted(self, content, *what):
        if content["do"] != order:
            return give(self, content, *what)
        if is_sent:
            give(self, content, *what)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(checkpointer, tmp_path, 1)
    checkpointer.wait_for_save()
    save(checkpointer, tmp_path, 2)
    assert checkpointer.load(tmp_path).tag == "global_step2"
    assert not layout.unfinished_in(tmp_path)


@pytest.mark.parametrize("is_brief", [True, False])
def test_only_a_wait_that_is_noticed_is_announced(tmp_path, checkpointer, monkeypatch, is_brief):
    said, asked = [], []

    def has_answer(orders, number, within_s=0):
        asked.append(within_s)
        return is_brief

    monkeypatch.setattr(background, "announce", said.append)
    save(checkpointer, tmp_path, 1)
    checkpointer._background.wait_for_copy()
    monkeypatch.setattr(Orders, "has_answer", has_answer)
    checkpointer.wait_for_save()
    assert asked == [background._BRIEF_S]
    assert [text.partition(" save")[0] for text in said] == ([] if is_brief else ["waiting for the asynchronous"])


def test_an_answer_is_taken_for_that_of_its_own_order_only():
    program = "import sys\nfor line in sys.stdin: print(line.replace('text', 'error').strip(), flush=True)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        orders = Orders(process)
        first, second = orders.send({"text": "first"}), orders.send({"text": "second"})
        assert orders.has_answer(second, within_s=60)
        errors = [orders.receive(number)["error"] for number in (second, first, second)]
        assert errors == ["second", "first", "second"]
        orders.send({"text": "third"})
        last = orders.send({})
        assert orders.receive(last) == {"number": last}
        process.stdin.close()
        assert orders.receive(9) is None
        assert "ended with exit code 0. What" in orders.error_of_end()


def test_a_copy_that_fails_fails_the_save(tmp_path, checkpointer, monkeypatch):
    def fail(*_):
        raise RuntimeError("no copy")

    save(checkpointer, tmp_path, 1)
    checkpointer.wait_for_save()
    with monkeypatch.context() as patch:
        patch.setattr(PendingTensor, "copy_to", fail)
        save(checkpointer, tmp_path, 2)
        checkpointer.wait_for_copy()
        with pytest.raises(CheckpointError, match="global_step2 has failed: cannot copy this rank's states: no copy"):
            checkpointer.raise_failure()
    checkpointer.wait_for_save()
    assert_whole(tmp_path, "global_step1")
    save(checkpointer, tmp_path, 3)
    assert checkpointer.load(tmp_path).tag == "global_step3"
    assert not layout.unfinished_in(tmp_path)


def test_pieces_are_joined_and_what_they_leave_is_zero(tmp_path, checkpointer):
    """In memory that another save has used, too."""
    for step in (1, 2):
        pieces = [(7, torch.arange(3.0)), (1, torch.full((4,), float(step)))]
        tensors = [PendingTensor(torch.Size([12]), torch.float32, pieces, is_held) for is_held in (True, False)]
        empty = PendingTensor(torch.Size([0]), torch.bfloat16, ())
        whole = PendingTensor.of(torch.full((2, 3), step, dtype=torch.bfloat16))
        model_state, _ = states(step)
        shard_state = {"optimizer_state_dict": {"zero_stage": 1, "parts": [*tensors, empty, whole]}}
        for which, directory in ((checkpointer, tmp_path / "async"), (Checkpointer(), tmp_path / "sync")):
            which.save(directory, "t", model_state=model_state, shard_state=shard_state)
            found = which.load(directory).shard_state["optimizer_state_dict"]["parts"]
            expected = torch.tensor([0.0, *[step] * 4, 0, 0, 0, 1, 2, 0, 0])
            assert all(torch.equal(each, expected) for each in found[:2])
            assert (found[2].dtype, found[2].shape) == (torch.bfloat16, (0,))
            assert torch.equal(found[3], torch.full((2, 3), step, dtype=torch.bfloat16))


def test_memory_that_the_system_refuses_is_an_error_at_the_call(tmp_path, checkpointer, monkeypatch):
    def refuse(descriptor, offset, num_bytes):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(CheckpointError, match="no shared memory for a copy of this rank's states: .*no space"):
            save(checkpointer, tmp_path, 1)
    save(checkpointer, tmp_path, 1)
    assert checkpointer.load(tmp_path).tag == "global_step1"


def test_memory_is_taken_before_it_is_written_to():
    memory = SharedMemory()
    for num_bytes in (10, 2**24, 2**27, 5):
        memory.write(bytes(num_bytes))
        about = os.fstat(memory.fileno())
        assert memory.position <= about.st_blocks * 512 <= about.st_size
    memory.position = 0
    taken = os.fstat(memory.fileno()).st_blocks
    memory.write(bytes(2**27))
    assert os.fstat(memory.fileno()).st_blocks == taken
    memory.close()


@pytest.fixture
def many_files():
    """Descriptors below 1024 are all taken."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    yield
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_trainer_with_many_open_files_saves(tmp_path, many_files):
    checkpointer = Checkpointer(background=BackgroundWriter())
    save(checkpointer, tmp_path, 1)
    checkpointer.raise_failure()
    checkpointer.close()
    assert Checkpointer().load(tmp_path).tag == "global_step1"


def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path, checkpointer):
    (tmp_path / "global_step1").write_text("a file")
    with pytest.raises(CheckpointError, match="it is a file"):
        save(checkpointer, tmp_path, 1)
    assert os.listdir(tmp_path) == ["global_step1"]


def test_another_store_is_refused():
    class Mine(TorchStore):
        pass

    with pytest.raises(ConfigError, match=r"checkpoint.async_save: found true with the store .*Mine"):
        Checkpointer(store=Mine(), background=BackgroundWriter())


PROGRAM = """
import os, signal, sys, threading
from pathlib import Path
from deepspeed.zero.redistribute import PendingTensor
from test_background import BackgroundWriter, Checkpointer, save, writer_of

directory, end = Path(sys.argv[1]), sys.argv[2]
checkpointer = Checkpointer(background=BackgroundWriter(), keep_last=1)
save(checkpointer, directory, 1)
checkpointer.wait_for_save()
begin = BackgroundWriter.write


def stopped_write(background, *order, **options):
    os.kill(writer_of(checkpointer), signal.SIGSTOP)
    begin(background, *order, **options)


copy, has_raised, show = PendingTensor.copy_to, threading.Event(), sys.excepthook


def late_copy(*arguments):
    has_raised.wait()
    copy(*arguments)


def show_and_go_on(*error):
    show(*error)
    has_raised.set()


sys.excepthook = show_and_go_on


if end == "kill":
    BackgroundWriter.write = stopped_write
if "copying" in end:
    PendingTensor.copy_to = late_copy
save(checkpointer, directory, 2)
print(writer_of(checkpointer), flush=True)
if end == "kill":
    checkpointer.wait_for_copy()
if "kill" in end:
    os.kill(os.getpid(), signal.SIGKILL)
raise RuntimeError("the trainer's")
"""


def run_program(directory, end):
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory), end],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_whole(directory, tag):
    assert (directory / "latest").read_text() == tag
    assert not any(found.faults(content=True) for found in saved_tags(directory))
    assert Checkpointer().load(directory).model_state["module"]["w"][0] == int(tag[-1])


def test_the_writer_completes_the_save_of_a_trainer_that_was_killed(tmp_path):
    with run_program(tmp_path, "kill") as program:
        assert program.wait() == -signal.SIGKILL
        assert_whole(tmp_path, "global_step1")
        os.kill(int(program.stdout.read()), signal.SIGCONT)
        assert "Error" not in program.stderr.read()  # its end is the end of the writer
    assert_whole(tmp_path, "global_step2")
    # no prune: another run may be loading the former tag
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "global_step2", "latest", "zero_to_fp32.py"]


def test_the_former_checkpoint_stays_when_a_trainer_was_killed_while_it_copied(tmp_path, checkpointer):
    with run_program(tmp_path, "kill, copying") as program:
        assert program.wait() == -signal.SIGKILL
        assert "Error" not in program.stderr.read()
    assert_whole(tmp_path, "global_step1")
    assert not layout.unfinished_in(tmp_path)
    save(checkpointer, tmp_path, 2)
    checkpointer.wait_for_save()
    assert_whole(tmp_path, "global_step2")


@pytest.mark.parametrize("end", ["raise", "raise, copying"])
def test_an_exception_of_the_trainer_ends_it_after_the_save(tmp_path, end):
    with run_program(tmp_path, end) as program:
        output, errors = program.communicate()
        assert program.returncode == 1
    assert_whole(tmp_path, "global_step2")
    assert "RuntimeError: the trainer's" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int(output), 0)


def test_a_fork_of_the_trainer_leaves_its_save_alone(tmp_path, checkpointer):
    save(checkpointer, tmp_path, 1)
    pid = os.fork()
    if pid == 0:
        checkpointer._background._process.end()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    checkpointer.wait_for_save()
    assert checkpointer.load(tmp_path).tag == "global_step1"


FORKS = """
import os, signal, sys
from pathlib import Path
from test_background import BackgroundWriter, Checkpointer, save, writer_of

checkpointer = Checkpointer(background=BackgroundWriter(), keep_last=1)
save(checkpointer, Path(sys.argv[1]), 1)
pid = os.fork()  # as a worker of a data loader does, after the writer was started
if pid == 0:
    signal.pause()
print(writer_of(checkpointer), pid, flush=True)
if sys.argv[2] == "kill":
    checkpointer.wait_for_copy()  # what was not copied by then is lost with the trainer
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "close":
    checkpointer.close()
"""


@pytest.mark.parametrize("end", ["close", "exit", "kill"])
def test_a_writer_ends_with_its_trainer_though_a_fork_of_that_lives_on(tmp_path, end):
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORKS, str(tmp_path), end]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        writer, fork = map(int, program.stdout.readline().split())
        try:
            watched = os.pidfd_open(writer)
            assert program.wait(60) == (-signal.SIGKILL if end == "kill" else 0)
            assert select.select([watched], [], [], 60)[0], "the writer still runs"
            os.close(watched)
        finally:
            os.kill(fork, signal.SIGKILL)
    assert_whole(tmp_path, "global_step1")
