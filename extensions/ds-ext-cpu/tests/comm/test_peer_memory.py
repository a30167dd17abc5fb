"""Reading another process's memory: what comes, and what the kernel says when nothing can."""

import ctypes
import errno
import os
import subprocess
import sys

import pytest
import torch
from ds_ext_cpu.comm.peer_memory import is_supported, read_memory

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs Linux on x86-64")

CHILD = """
import ctypes, sys
words = (ctypes.c_int64 * 4)(3, 1, 4, 1)
print(ctypes.addressof(words), flush=True)
sys.stdin.read()
"""


def test_the_words_of_a_child():
    target = torch.zeros(4, dtype=torch.int64)
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        address = int(child.stdout.readline())
        read_memory(child.pid, address + 8, target.data_ptr(), 24)
        child.communicate()
    assert target.tolist() == [1, 4, 1, 0]
    with pytest.raises(ProcessLookupError):
        read_memory(child.pid, address, target.data_ptr(), 8)


def test_an_address_where_nothing_is():
    target = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        read_memory(os.getpid(), 8, target.data_ptr(), 8)


def test_a_range_that_ends_beyond_the_memory():
    """The kernel copies what there is and says so; the rest is asked for again, and is the error."""
    mmap = ctypes.CDLL(None).mmap
    mmap.restype, mmap.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long),
    )
    page = os.sysconf("SC_PAGE_SIZE")
    readable, private_anonymous = 1, 0x22
    address = mmap(None, 2 * page, readable, private_anonymous, -1, 0)
    assert ctypes.CDLL(None).munmap(ctypes.c_void_p(address + page), ctypes.c_size_t(page)) == 0
    target = torch.ones(2 * page, dtype=torch.uint8)
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        read_memory(os.getpid(), address, target.data_ptr(), 2 * page)
    assert not target[:page].any()
    assert target[page:].all()


def test_nothing_is_nothing():
    read_memory(os.getpid(), 0, 0, 0)
