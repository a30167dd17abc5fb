"""Measure the rate of a disk with fio, and the bytes that this process read and wrote."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Bytes(NamedTuple):
    """Numbers of bytes read and written."""

    read: float
    written: float

    @property
    def total(self) -> float:
        return self.read + self.written


def passed() -> Bytes:
    """Return the bytes that all threads of this process read from and wrote to block devices."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return Bytes(float(found["read_bytes"]), float(found["write_bytes"]))


def fio(
    files: Sequence[Path],
    kind: str,
    num_bytes: int,
    *,
    block_kib: int = 1024,
    depth: int = 8,
    engine: str = "io_uring",
    jobs_per_file: int = 1,
    read_percent: int = 50,
) -> Bytes:
    """Return the bytes per second that fio reads and writes with O_DIRECT, in all files at once.

    Args:
        files: existing files.
        kind: read, write, or readwrite, which mixes both.
        num_bytes: size of each file.
        depth: requests in flight per job.
        engine: "io_uring"; "threads": `depth` times the jobs, with one request each.
        read_percent: share of reads in readwrite.
    """
    how = ["--ioengine=io_uring", f"--iodepth={depth}"]
    jobs = jobs_per_file
    if engine == "threads":
        how, jobs = ["--ioengine=psync", "--thread"], jobs_per_file * depth
    share = num_bytes // jobs >> 12 << 12
    command = ["fio", "--direct=1", f"--rw={kind}", f"--rwmixread={read_percent}", f"--bs={block_kib}k", *how]
    command += [f"--numjobs={jobs}", f"--size={share}", f"--offset_increment={share}", "--overwrite=1"]
    command += ["--group_reporting", "--output-format=json"]
    command += [f"--{key}={value}" for path in files for key, value in (("name", path.name), ("filename", path))]
    allowed = set(range(os.cpu_count() or 1))  # a rank has one core, but fio may use all cores
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, allowed)
    )
    found = json.loads(done.stdout)["jobs"]
    return Bytes(*(sum(float(job[one]["bw_bytes"]) for job in found) for one in ("read", "write")))
