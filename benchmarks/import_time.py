"""User CPU of `import deepspeed` in a fresh interpreter, beside an interpreter that imports nothing and one with torch.

    python benchmarks/import_time.py

The programs take turns; the figure is user CPU time of the child (RUSAGE_CHILDREN), so another process on the machine
does not count. It also says whether torch was loaded, which `import deepspeed` alone must not do.
"""

import argparse
import resource
import statistics
import subprocess
import sys

PROGRAMS = {
    "nothing": "pass",
    "import deepspeed": "import deepspeed",
    "import torch": "import torch",
    "import deepspeed; deepspeed.initialize": "import deepspeed; deepspeed.initialize",
}


def user_cpu_ms(program: str) -> float:
    """User CPU milliseconds of one run of `program`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", program], check=True)
    return (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(1 + rounds):
        for name, program in PROGRAMS.items():
            times[name].append(user_cpu_ms(program))
    floor = statistics.median(times["nothing"][1:])
    for name, values in times.items():
        median = statistics.median(values[1:])
        print(f"{name:40s} {median:7.0f} ms user CPU, {median - floor:7.0f} ms beyond the interpreter's")
    loads_torch = subprocess.run(
        [sys.executable, "-c", "import deepspeed, sys; sys.exit('torch' in sys.modules)"], check=False
    )
    print(f"`import deepspeed` loads torch: {'yes' if loads_torch.returncode else 'no'}")


if __name__ == "__main__":
    main()
