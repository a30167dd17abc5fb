"""The name of a group that its members make alone."""

import threading

from deepspeed.comm.members import _named
from torch.distributed import distributed_c10d


def asked(ranks=(0, 1)):
    return distributed_c10d._hash_ranks_to_str(list(ranks))


def test_each_thread_gets_the_name_of_its_own_group():
    torchs_function, torchs_name = distributed_c10d._hash_ranks_to_str, asked()
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
    assert asked() == torchs_name
    may_leave.set()
    thread.join()
    assert names == [torchs_name, "b"]
    assert distributed_c10d._hash_ranks_to_str is torchs_function
