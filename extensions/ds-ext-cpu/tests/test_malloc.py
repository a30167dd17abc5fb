"""Large freed blocks go back to the system while that is asked for, unless the user has set a threshold."""

import os
import platform
import subprocess
import sys

import pytest

GLIBC = platform.libc_ver()[0] == "glibc"
pytestmark = pytest.mark.skipif(not GLIBC, reason="another C library")

# A freed block of 16 MiB raises glibc's own threshold: the next block of 8 MiB comes from the heap.
SCRIPT = """
import ctypes, sys, torch
from pathlib import Path
from ds_ext_cpu.malloc import keep_freed_blocks, return_large_blocks

def used_mib():
    return int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) / 1024

done = return_large_blocks(int(sys.argv[1]))
if "and keep" in sys.argv:
    done = keep_freed_blocks()
torch.empty(16 << 20, dtype=torch.uint8)
block = torch.empty(8 << 20, dtype=torch.uint8)
small = [torch.empty(512 << 10, dtype=torch.uint8) for _ in range(8)]
plug = [bytearray(600) for _ in range(1000)]
before = used_mib()
del block
large = before - used_mib()
del small
print(done, round(large), round(before - large - used_mib()))
"""


def run(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={"PATH": "", "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_freed_block_goes_back() -> None:
    assert run(str(1 << 20)) == "True 8 0"


def test_smaller_blocks_go_back_where_that_is_asked_for() -> None:
    assert run(str(128 << 10)) == "True 8 4"


def test_freed_blocks_are_kept_again() -> None:
    assert run(str(128 << 10), "and keep") == "True 0 0"


def test_the_threshold_of_the_user_counts() -> None:
    threshold = str(1 << 20)
    assert run(threshold, MALLOC_MMAP_THRESHOLD_="33554432").startswith("False")
    assert run(threshold, GLIBC_TUNABLES="glibc.malloc.mmap_threshold=33554432").startswith("False")
    assert run(threshold, "and keep", MALLOC_MMAP_THRESHOLD_="33554432").startswith("False")
