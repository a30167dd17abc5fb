"""A shared file system whose locks lock nothing: builders of one content run at once, and none disturbs another."""

import ctypes
import os
import select
import signal
import time
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import jit
from deepspeed.ops.op_builder.cache import has_owner, owner_has_ended, owner_mark, started_at

# flock that says yes to everybody, as with NFS's local_lock between two machines
NO_LOCKS = "import fcntl\nfcntl.flock = lambda *_: None\nprint(ask())"
MANY = 4


@pytest.fixture
def gate(workshop, monkeypatch):
    """The first MANY compiles each say that they began, and go on when they are told. Returns the two ends."""
    began, resume = workshop.folder / "began", workshop.folder / "resume"
    os.mkfifo(began)
    os.mkfifo(resume)
    first = " || ".join(f'mkdir "{workshop.folder}/{index}"' for index in range(MANY))
    before = f'if {{ {first}; }} 2>/dev/null; then echo x > "{began}"; read x < "{resume}"; fi'
    monkeypatch.setenv("CXX", str(workshop.compiler(before=before, name="gated")))
    ends = os.open(began, os.O_RDWR), os.open(resume, os.O_RDWR)
    yield ends
    for end in ends:
        os.close(end)


def wait_for_compiles(began):
    """Until MANY compile at one time."""
    for _ in range(MANY):
        assert select.select([began], [], [], 60)[0], "a builder did not begin to compile"
        assert os.read(began, 2) == b"x\n"


def test_builders_at_once_and_one_of_them_killed(workshop, gate):
    began, resume = gate
    builders = [workshop.start(NO_LOCKS) for _ in range(MANY)]
    wait_for_compiles(began)
    killed, *others = builders
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    killed.communicate()

    late = workshop.run(NO_LOCKS).strip()  # finishes while the others compile
    working = sorted(workshop.cache.glob("*.tmp"))
    assert len(working) == len(others)  # the dead one's is gone, and no other

    os.write(resume, b"\n" * MANY)
    told = [builder.communicate(timeout=120) for builder in others]
    assert [builder.returncode for builder in others] == [0] * len(others), told
    libraries = [late, *(out.strip() for out, _ in told)]
    assert [ctypes.CDLL(library).x() for library in libraries] == [1] * MANY
    assert list(workshop.cache.glob("*.tmp")) == []
    assert str(jit.find(workshop.spec())) == late
    assert set(libraries) == {late}  # who finished later took what was there


def test_a_damaged_library_is_replaced_by_all_at_once(workshop, gate):
    """A builder that finds damage removes nothing that another one has just finished."""
    began, resume = gate
    library = Path(workshop.run(NO_LOCKS, CXX=str(workshop.compiler())).strip())
    library.write_bytes(b"damaged")
    builders = [workshop.start(NO_LOCKS) for _ in range(MANY)]
    wait_for_compiles(began)
    os.write(resume, b"\n" * MANY)
    told = [builder.communicate(timeout=120) for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * MANY, told
    assert [ctypes.CDLL(out.strip()).x() for out, _ in told] == [1] * MANY


def leftover(workshop, owner):
    workshop.cache.mkdir(mode=0o700, exist_ok=True)
    folder = workshop.cache / f"{workshop.spec().entry}.{owner}.abc.tmp"
    folder.mkdir()
    (folder / "0_x.o").write_bytes(b"half of it")
    return folder


def make_old(folder, days):
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - days * 24 * 3600,) * 2)


def test_leftovers_of_another_machine_stay_for_a_day(workshop):
    fresh, old = (leftover(workshop, f"0123456789ab-{pid}-1") for pid in (1, 2))
    make_old(old, days=2)
    jit.build(workshop.spec())
    assert (fresh.exists(), old.exists()) == (True, False)


def test_what_is_no_builders_is_left_alone(workshop):
    """The folder may be shared with torch's own extensions."""
    workshop.cache.mkdir(mode=0o700)
    theirs = workshop.cache / "theirs.tmp"
    theirs.mkdir()
    make_old(theirs, days=300)
    jit.build(workshop.spec())
    assert theirs.exists()


def test_a_damaged_library_is_removed_a_day_after(workshop):
    library = jit.build(workshop.spec())
    library.write_bytes(b"damaged")
    again = jit.build(workshop.spec())
    assert library.exists()
    again.write_bytes(b"damaged, too")
    make_old(library.parent, days=2)
    jit.build(workshop.spec())
    assert (library.exists(), again.exists()) == (False, True)


def test_an_owner_is_read_from_a_name_and_known_to_live():
    machine, pid, started = owner_mark().split("-")
    assert has_owner(f"x_0.{machine}-{pid}-{started}.rest.tmp")
    assert not owner_has_ended(f"x_0.{machine}-{pid}-{started}.rest.tmp")
    assert owner_has_ended(f"x_0.{machine}-{pid}-1.rest.tmp")  # the id is used again
    assert not owner_has_ended(f"x_0.0123456789ab-{pid}-1.rest.tmp")  # of another machine: unknown
    assert not has_owner("x_0.abc.tmp")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert started_at(child) is None  # a zombie
    os.waitpid(child, 0)
    assert started_at(child) is None
