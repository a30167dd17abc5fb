"""Cost of loading `cpu_adam`: the first build on a machine, and a later load in a new process.

    python benchmarks/jit.py [--rounds 5] [--no-peer]

The peer is the same kernel with the usual binding of PyTorch extensions (`jit_peer.cpp`: torch/extension.h, pybind11),
loaded by `torch.utils.cpp_extension.load`. A cold build is the user CPU seconds of the compiler and its children, with
an empty cache folder; other processes do not count. A warm load is the milliseconds in a new process from after
`import torch` to the loaded op, and the CPU time of the process and its children. A busy machine increases only the
first figure. The peer is built once, because a build takes 40 s.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = """
from ds_ext_cpu.op_builder import CPUAdamBuilder
CPUAdamBuilder().load().adam_step_
"""
PEER = f"""
from torch.utils.cpp_extension import load
load("jit_peer", [{str(Path(__file__).with_name("jit_peer.cpp"))!r}], extra_cflags=["-O3"]).adam_step_
"""
FRAME = """
import json, resource, time
import torch
def cpu_s():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
cpu, wall = cpu_s(), time.perf_counter()
{program}
print(json.dumps({{
    "wall_ms": (time.perf_counter() - wall) * 1e3,
    "cpu_ms": (cpu_s() - cpu) * 1e3,
    "children_user_s": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime,
}}))
"""


def run(program: str, cache: str) -> dict[str, float]:
    """Run a new process, and return its measurements."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": cache, "PYTHONPYCACHEPREFIX": f"{cache}/python"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # use bytecode, as an installed package does
    done = subprocess.run(
        [sys.executable, "-c", FRAME.format(program=program)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measure(name: str, program: str, cold_rounds: int, rounds: int) -> tuple[float, float, float]:
    """Print and return the medians of (cold user s, warm wall ms, warm CPU ms)."""
    cold, warm = [], []
    for index in range(cold_rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(run(program, cache)["children_user_s"])
            if index == cold_rounds - 1:
                warm = [run(program, cache) for _ in range(1 + rounds)][1:]
    wall = statistics.median(one["wall_ms"] for one in warm)
    least = min(one["wall_ms"] for one in warm)
    cpu = statistics.median(one["cpu_ms"] for one in warm)
    build = statistics.median(cold)
    print(
        f"{name:34s} cold build {build:6.2f} s user CPU   warm load {wall:6.1f} ms (least {least:6.1f}, CPU {cpu:6.1f})"
        " beyond import torch"
    )
    return build, wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="warm loads, and a third as many cold builds of ours")
    parser.add_argument("--no-peer", action="store_true", help="leave out the build that takes 40 s")
    options = parser.parse_args()
    ours = measure("cpu_adam (stable ABI)", OURS, max(1, options.rounds // 3), options.rounds)
    print(f"  limits: {ours[0]:.2f} of 4 s, {ours[1]:.0f} of 60 ms")
    if not options.no_peer:
        peer = measure("cpp_extension.load, extension.h", PEER, 1, options.rounds)
        ratios = [mine / its for mine, its in zip(ours, peer, strict=True)]
        print(f"  ours / peer: cold build {ratios[0]:.2f}x, warm load {ratios[1]:.2f}x (CPU {ratios[2]:.2f}x)")


if __name__ == "__main__":
    main()
