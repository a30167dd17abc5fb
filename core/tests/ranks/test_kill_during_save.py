"""Two ranks that save and prune again and again are killed with SIGKILL at random moments; what is on disk is always
whole: each tag has an index that fits its files.

This file is also the program that runs them (`main`). It imports torch once and forks both ranks again for each kill:
"self" kills one rank before a random touch of the file system, and the other must notice; "parent" kills both upon a
random sign of life, wherever they are by then; "each" kills the publishing rank before every touch of one save in turn,
writes excepted. Trials follow each other in one directory, so each also meets what the former one left behind.

With asynchronous saves, "writer" kills one rank's writer process before a random touch of the file system: the ranks
fail with the save, or go on with another writer where it was complete all the same, and say so of every save;
"trainers" kills both ranks, whose writers then complete the save by themselves; "all" kills the writers with them.
"""

import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import Checkpointer, TorchStore, background, consolidate, layout
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.durable import SequentialFile
from deepspeed.checkpoint.store import prune
from deepspeed.checkpoint.tags import saved_tags
from deepspeed.errors import CheckpointError
from deepspeed.testing.tiers import swept

WORLD_SIZE = 2
NUMEL = 20_000
FAILED = 3  # exit code
SURVIVED = 5  # exit code after `SAVES_AFTER_DEATH`
SAVES_AFTER_DEATH = 2  # that a rank makes whose writer was killed when the save was complete
KEEP_LAST = 2  # so each save also removes a tag
FILE_SYSTEM = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}  # audit events


def run_program(directory, kills, kind):
    command = [sys.executable, __file__, str(directory), str(kills), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kills", swept([4, 100], lambda kills: kills == 4))
def test_every_kill_leaves_a_whole_checkpoint(tmp_path, kills):
    """`kills`: of each of the two random kinds."""
    trials = run_program(tmp_path, kills, "synchronous")
    by_kind = Counter(trial["kind"] for trial in trials)
    assert by_kind["self"] == by_kind["parent"] == kills
    assert by_kind["each"] > 20
    for trial in trials:
        assert trial["found_by_rank"] == [trial["found"]] * WORLD_SIZE, trial
        assert trial["completed"] <= trial["found"] <= trial["completed"] + 1, trial
        assert -signal.SIGKILL in trial["exits"], trial
    # The kills met saves in the middle, not only the pauses between them.
    assert sum(trial["unfinished"] for trial in trials) >= len(trials) // 4


@pytest.mark.parametrize("kills", swept([3, 70], lambda kills: kills == 3))
def test_every_kill_during_asynchronous_saves_leaves_a_whole_checkpoint(tmp_path, kills):
    """`kills`: of each kind."""
    trials = run_program(tmp_path, kills, "asynchronous")
    assert Counter(trial["kind"] for trial in trials) == {"writer": kills, "trainers": kills, "all": kills}
    for trial in trials:
        assert trial["found_by_rank"] == [trial["found"]] * WORLD_SIZE, trial
        # a save that has returned is complete when the next one returns
        assert trial["completed"] - 1 <= trial["found"] <= trial["completed"] + 1, trial
        allowed = (FAILED, SURVIVED) if trial["kind"] == "writer" else (-signal.SIGKILL,)
        assert trial["exits"][0] in allowed, trial
        assert trial["exits"] == trial["exits"][:1] * WORLD_SIZE, trial
        assert trial["kind"] != "trainers" or not trial["unfinished"], trial
        # what was reported as done is there, and what was reported as failed is not
        assert all(step <= trial["found"] for done in trial["done"] for step in done), trial
        if trial["kind"] == "writer":
            assert trial["failed"] == [[trial["found"] + 1] if FAILED in trial["exits"] else []] * WORLD_SIZE, trial


# --- one rank, in a process of its own


def save(checkpointer, directory, tag, step):
    """A checkpoint whose every number is the step, so that files of two steps cannot be taken for one."""
    model_state = {
        "module": {"w": torch.full((NUMEL,), float(step))},
        "param_shapes": [{"w": torch.Size([NUMEL])}],
        "global_steps": step,
        "dp_world_size": WORLD_SIZE,
        "mp_world_size": 1,
    }
    part = torch.full((NUMEL // WORLD_SIZE,), float(step))
    shard = {"zero_stage": 2, "partition_count": WORLD_SIZE, "single_partition_of_fp32_groups": [part]}
    checkpointer.save(
        directory,
        tag,
        model_state=model_state if checkpointer.writes_model else None,
        shard_state={"optimizer_state_dict": shard},
        client_state={"epoch": step},
    )


def watch_file_system(touch):
    """Call `touch` before everything that this process does to files; `touch("write")` before a write."""
    sys.addaudithook(lambda event, args: touch() if event in FILE_SYSTEM else None)
    real_fsync = os.fsync
    os.fsync = lambda descriptor: (touch(), real_fsync(descriptor))[1]

    real_write = SequentialFile.write
    SequentialFile.write = lambda file, data: (touch("write"), real_write(file, data))[1]


#: a writer process that dies before its n-th touch of the file system
WRITER = """
import os, signal, sys
sys.path[:] = sys.argv[1:-2]
from deepspeed.checkpoint.writer import main
touches = 0
def touch(event, args=()):
    global touches
    is_touch = event in {events}
    touches += is_touch
    if is_touch and touches == {moment}:
        os.kill(os.getpid(), signal.SIGKILL)
real_fsync = os.fsync
os.fsync = lambda descriptor: (touch("open"), real_fsync(descriptor))[1]
sys.addaudithook(touch)
main()
"""


def run_rank(rank, peer, directory, first_step, tag, kill_at, progress, kill_writer_at=None):
    """Save until killed, or until the other rank is gone.

    `kill_at`: (n, counts writes) dies before its n-th touch of a file; None does not.
    `kill_writer_at`: saves are asynchronous, and its writer dies before its n-th touch of a file; 0: does not. Then the
    rank ends when the save has failed, or `SAVES_AFTER_DEATH` saves later.
    """
    moment, counts_writes = kill_at or (0, True)
    touches = 0

    def touch(what="name"):
        nonlocal touches
        touches += what == "name" or counts_writes
        os.write(progress, b".")
        if touches == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    answers = peer.makefile()

    def gather(text):
        peer.sendall(json.dumps(text).encode() + b"\n")
        answer = answers.readline()
        if not answer:
            raise CheckpointError("the other rank is gone")
        return [text, json.loads(answer)] if rank == 0 else [json.loads(answer), text]

    options, first = {}, None
    if kill_writer_at is not None:
        plain, background._START = background._START, WRITER.format(events=FILE_SYSTEM, moment=kill_writer_at)
        writer = BackgroundWriter()
        first = writer._started()
        background._START = plain
        options = {"background": writer}
    checkpointer = Checkpointer(gather=gather, dp_rank=rank, dp_world_size=WORLD_SIZE, keep_last=KEEP_LAST, **options)
    watch_file_system(touch)

    @contextmanager
    def said(step, only_failure=False):
        """Let the program know that this rank says of an asynchronous save that it is done, or has failed."""
        letter = "" if only_failure else "D"
        try:
            yield
        except CheckpointError:
            letter = "F"
            raise
        finally:
            if first is not None and letter:
                os.write(progress, f"{letter}{rank}:{step};".encode())

    last = None
    for step in range(first_step, first_step + 1000):
        with said(step - 1):
            checkpointer.wait_for_save()
        if last == step - 1:
            os._exit(SURVIVED)
        with said(step, only_failure=True):
            save(checkpointer, directory, tag or f"global_step{step}", step)
        if rank == 0:
            os.write(progress, b"S")
        if first is not None and last is None and any(gather(None if first.is_alive() else "its writer is dead")):
            last = step + SAVES_AFTER_DEATH


# --- the program that starts, kills and looks


def fork_ranks(directory, first_step, tag, kill_at, kill_writer_at=None, output=2):
    """Start both ranks; gives their process ids and the end of a pipe: a dot per touch, an S per finished save."""
    kill_writer_at = kill_writer_at or {}
    ends = socket.socketpair()
    read, write = os.pipe()
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read)
                ends[1 - rank].close()
                os.dup2(output, 2)
                run_rank(
                    rank, ends[rank], directory, first_step, tag, kill_at.get(rank), write, kill_writer_at.get(rank)
                )
            except (CheckpointError, OSError):
                os._exit(FAILED)
            finally:
                os._exit(4)
        pids.append(pid)
    os.close(write)
    for end in ends:
        end.close()
    return pids, read


def kill_once(directory, first_step, tag, kill_at=None, kill_upon=None):
    """Run both ranks up to a kill; gives what is to be known of it.

    `kill_at`: by rank, see `run_rank`. `kill_upon`: the number of signs of life upon which to kill both.
    """
    pids, read = fork_ranks(directory, first_step, tag, kill_at or {})
    completed, seen = first_step - 1, 0
    while sign := os.read(read, 1):
        completed += sign == b"S"
        seen += 1
        if seen == kill_upon:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    os.close(read)
    exits = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    unfinished = bool(layout.unfinished_in(directory))
    by_rank = look(directory)
    return {
        "completed": completed,
        "exits": exits,
        "unfinished": unfinished,
        "found": by_rank[0],
        "found_by_rank": by_rank,
    }


def kill_asynchronous(directory, first_step, tag, rng, kind):
    """As `kill_once`, for two ranks with writer processes."""
    moment = rng.randint(1, 60)  # a save is near 20 touches
    victim = rng.randrange(WORLD_SIZE) if kind == "writer" else None
    # an end that writers inherit too: it is read to its end when all have ended
    output_read, output = os.pipe()
    moments = {rank: moment if rank == victim else 0 for rank in range(WORLD_SIZE)}
    pids, read = fork_ranks(directory, first_step, tag, {}, moments, output)
    os.close(output)
    num_saves, signs = 0, b""
    wanted = rng.randint(2, 4)
    while sign := os.read(read, 1):
        signs += sign
        num_saves += sign == b"S"
        if kind != "writer" and num_saves == wanted:
            time.sleep(0.05 * rng.random())  # the kill is to meet any moment of the writers
            writers = [int(pid) for rank in pids for pid in children_of(rank)] if kind == "all" else []
            for pid in (*pids, *writers):
                os.kill(pid, signal.SIGKILL)
            wanted = None
    os.close(read)
    exits = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    with open(output_read) as output:
        printed = output.read()
    assert "Traceback" not in printed, printed
    unfinished = bool(layout.unfinished_in(directory))
    by_rank = look(directory)
    return {
        "completed": first_step - 1 + num_saves,
        "done": said_by_ranks("D", signs, first_step),
        "failed": said_by_ranks("F", signs, first_step),
        "exits": exits,
        "unfinished": unfinished,
        "found": by_rank[0],
        "found_by_rank": by_rank,
    }


def said_by_ranks(letter, signs, first_step):
    """By rank, the steps of this trial of which `said` has let the program know."""
    found = [[] for _ in range(WORLD_SIZE)]
    for rank, step in re.findall(rf"{letter}(\d):(\d+);", signs.decode()):
        if int(step) >= first_step:
            found[int(rank)].append(int(step))
    return found


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def look(directory):
    """The step that each rank finds; raises when anything is not whole or not of one step, in any tag."""
    for tag in saved_tags(directory):
        assert tag.index is not None, tag
        assert not tag.faults(content=True), tag
    found = []
    for rank in range(WORLD_SIZE):
        checkpoint = Checkpointer(dp_rank=rank, dp_world_size=WORLD_SIZE).load(directory)
        step = checkpoint.model_state["global_steps"]
        (part,) = checkpoint.shard_state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        assert checkpoint.client_state == {"epoch": step}
        assert (checkpoint.model_state["module"]["w"] == step).all()
        assert (part == step).all(), f"rank {rank}: shard of step {part[0]}, model of step {step}"
        found.append(step)
    weights = consolidate.get_fp32_state_dict_from_zero_checkpoint(directory)["w"]
    assert (weights == found[0]).all()
    return found


def count_touches(directory):
    """How often one save of one rank touches files, measured over three saves under new tags."""
    pids, read = fork_ranks(directory, 1, None, {})
    signs = b""
    while signs.count(b"S") < 3:
        signs += os.read(read, 1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(read)
    return len(signs) // (3 * WORLD_SIZE)


def main_asynchronous(directory, kills):
    rng = random.Random(2024)
    count_touches(directory)  # leaves a whole checkpoint to begin with
    step = look(directory)[0]
    for trial in range(kills):
        for kind in ("writer", "trainers", "all"):
            outcome = kill_asynchronous(directory, step + 1, "same" if trial % 2 else None, rng, kind)
            print(json.dumps({"kind": kind, **outcome}))
            step = outcome["found"]
            prune(directory, KEEP_LAST, TorchStore())


def main(directory, kills):
    rng = random.Random(2024)
    touches_per_save = count_touches(directory / "rehearsal")
    directory = directory / "checkpoints"
    count_touches(directory)  # leaves a whole checkpoint to begin with
    step = look(directory)[0]

    def run(kind, tag, **kill):
        nonlocal step
        trial = kill_once(directory, step + 1, tag, **kill)
        print(json.dumps({"kind": kind, **trial}))
        was_saved, step = trial["completed"] > step, trial["found"]
        prune(directory, KEEP_LAST, TorchStore())  # a kill left a tag too many; saves of a trial are alike
        return was_saved

    for trial in range(kills):
        tag = "same" if trial % 2 else None  # every other trial replaces one tag again and again
        moment = rng.randint(1, 3 * touches_per_save)
        run("self", tag, kill_at={rng.randrange(WORLD_SIZE): (moment, True)})
        run("parent", tag, kill_upon=moment * WORLD_SIZE)
    for tag in ("same", None):
        touch = 1
        while not run("each", tag, kill_at={0: (touch, False)}):
            touch += 1


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # or the first collection of each fork would copy every page: half of the program's time
    program = {"synchronous": main, "asynchronous": main_asynchronous}[sys.argv[3]]
    program(Path(sys.argv[1]), int(sys.argv[2]))
