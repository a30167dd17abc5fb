"""The name of a group that its members make alone."""

import threading

from deepspeed.comm.own_group import _named
from torch.distributed import distributed_c10d


def asked(ranks=(0, 1)):
    return distributed_c10d._process_group_name(list(ranks), use_hashed_name=True)


def test_each_thread_gets_the_name_of_its_own_group():
    torchs_function = distributed_c10d._process_group_name
    is_inside, may_leave, names = threading.Event(), threading.Event(), []

    def make_another():
        names.append(asked())  # while the first thread is inside
        with _named("b"):
            is_inside.set()
            may_leave.wait()
            names.append(asked())

    thread = threading.Thread(target=make_another)
    with _named("a"):
        thread.start()
        is_inside.wait()
        assert asked() == "a"
    assert asked() not in ("a", "b")
    may_leave.set()
    thread.join()
    assert names[0] not in ("a", "b")
    assert names[1] == "b"
    assert distributed_c10d._process_group_name is torchs_function
