"""User CPU and memory of `import deepspeed` and of a rank up to its first step, in fresh interpreters.

    python benchmarks/import_time.py

The peers are an interpreter that imports nothing, one that imports torch, and a first step of plain torch. The programs
take turns. The figures are the child's user CPU time and peak resident memory (`wait4`), so other processes do not
count. The output also shows whether torch was loaded: `import deepspeed` alone must not load torch.
"""

import argparse
import os
import statistics
import subprocess
import sys
from typing import NamedTuple

MODEL = "import torch; model = torch.nn.Linear(8, 8); "
PROGRAMS = {
    "nothing": "pass",
    "import deepspeed": "import deepspeed",
    "import torch": "import torch",
    "import deepspeed; deepspeed.initialize": "import deepspeed; deepspeed.initialize",
    "first step, torch.optim.Adam": MODEL + "adam = torch.optim.Adam(model.parameters()); "
    "model(torch.ones(1, 8)).sum().backward(); adam.step()",
    "first step, deepspeed, ZeRO stage 2": MODEL + "import deepspeed; "
    "section = {'train_batch_size': 1, 'optimizer': {'type': 'Adam'}, 'zero_optimization': {'stage': 2}}; "
    "engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=section); "
    "engine.backward(engine(torch.ones(1, 8)).sum()); engine.step()",
}


class Cost(NamedTuple):
    """The cost of one run of a program."""

    user_ms: float
    peak_mib: float


def cost_of(program: str) -> Cost:
    """Run `program` once, and return its cost."""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{program}: exit code {process.returncode}")
    return Cost(usage.ru_utime * 1e3, usage.ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    costs: dict[str, list[Cost]] = {name: [] for name in PROGRAMS}
    for _ in range(1 + rounds):
        for name, program in PROGRAMS.items():
            costs[name].append(cost_of(program))
    for name, values in costs.items():
        user, peak = (statistics.median(column) for column in zip(*values[1:], strict=True))
        print(f"{name:40s} {user:7.0f} ms user CPU {peak:7.0f} MiB")
    loads_torch = subprocess.run(
        [sys.executable, "-c", "import deepspeed, sys; sys.exit('torch' in sys.modules)"], check=False
    )
    print(f"`import deepspeed` loads torch: {'yes' if loads_torch.returncode else 'no'}")


if __name__ == "__main__":
    main()
