"""Time from the command to the first line of the first rank: `deepspeed` against `torchrun`, in turn.

    python benchmarks/launcher.py [--ranks 2] [--rounds 9]

The script prints one line and imports nothing, so it measures only the launcher. Target: at most 1.05 x torchrun. On a
busy machine, read the CPU column: the total user and system time of the launcher and its ranks.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple


class Sample(NamedTuple):
    """The seconds of a launch to the first line, and the CPU seconds of all its processes."""

    first_line_s: float
    cpu_s: float


def measure(command: list[str]) -> Sample:
    """Launch once, and wait until it ends."""
    before = os.times()
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        first_line_s = time.perf_counter() - start
        process.stdout.read()
    after = os.times()
    if line.strip() != "first" or process.returncode != 0:
        sys.exit(f"{command[0]} printed {line!r} and ended with exit code {process.returncode}")
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Sample(first_line_s, cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    programs = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first.py"
        script.write_text("import os\nos.write(1, b'first\\n')\n")
        commands = {
            "torchrun": [str(programs / "torchrun"), "--nproc_per_node", str(arguments.ranks), str(script)],
            "deepspeed": [str(programs / "deepspeed"), "--num_accelerators", str(arguments.ranks), str(script)],
        }
        samples: dict[str, list[Sample]] = {name: [] for name in commands}
        for command in commands.values():
            measure(command)  # warms the file cache
        for _ in range(arguments.rounds):
            for name, command in commands.items():
                samples[name].append(measure(command))
    medians = {
        name: Sample(*(statistics.median(column) for column in zip(*rows, strict=True)))
        for name, rows in samples.items()
    }
    for name, median in medians.items():
        first_ratio = median.first_line_s / medians["torchrun"].first_line_s
        cpu_ratio = median.cpu_s / medians["torchrun"].cpu_s
        print(
            f"{name:10s} first line {median.first_line_s * 1e3:6.0f} ms ({first_ratio:.2f} x torchrun)   "
            f"CPU {median.cpu_s * 1e3:6.0f} ms ({cpu_ratio:.2f} x)"
        )


if __name__ == "__main__":
    main()
