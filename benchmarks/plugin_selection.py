"""Time to select the accelerator in a fresh process, with every extension installed and no device present.

    python benchmarks/plugin_selection.py [--extra 6]

Prints medians over fresh interpreters, in wall and CPU milliseconds. Some interpreters import nothing before:

    import      `deepspeed.plugins` and its dependencies (pluggy, importlib_metadata); no torch
    offers      `plugin_manager().offers()`: reads entry points, imports and probes every plugin

The others import `torch` before, as every training program does:

    choice      `get_accelerator()`: all of the above, and creates the accelerator

Targets: less than 50 ms for offers and for choice. The path contains all extensions of this repository, installed or
not, and `--extra` stand-ins for vendors. Each stand-in is a package with an API range and a probe that finds no device
under /dev.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GOAL_MS = 50.0
EXTENSIONS = Path(__file__).parents[1] / "extensions"

VENDOR = """
import glob
from deepspeed.plugins import Offer, hookimpl
DS_PLUGIN_API = ">=1,<2"
@hookimpl
def ds_probe():
    found = glob.glob("/dev/{name}*")
    return Offer("{name}", 100, bool(found), f"{{len(found)}} devices")
@hookimpl
def ds_accelerator():
    import {name}_that_is_not_there
"""

FRAME = """
import json, sys, time
marks = {}
def mark(name, start=[]):
    now = time.perf_counter(), time.process_time()
    if start:
        marks[name] = [(after - before) * 1e3 for before, after in zip(start, now)]
    start[:] = time.perf_counter(), time.process_time()
"""
WITHOUT_TORCH = (
    FRAME
    + """
mark("start")
from deepspeed.plugins import plugin_manager
mark("import")
offers = plugin_manager().offers()
mark("offers")
print(json.dumps({"ms": marks, "torch": "torch" in sys.modules, "offers": [[o.name, o.available] for o in offers]}))
"""
)
WITH_TORCH = (
    FRAME
    + """
import torch
mark("start")
from deepspeed.accelerator import get_accelerator
get_accelerator()
mark("choice")
print(json.dumps({"ms": marks}))
"""
)


def install(folder: Path, num_vendors: int) -> list[str]:
    """Install the repository's extensions and `num_vendors` stand-ins in `folder`, and return the search path."""
    for index in range(num_vendors):
        name = f"vendor{index}"
        (folder / f"ds_ext_{name}.py").write_text(VENDOR.format(name=name))
        announce(folder, name, f"ds_ext_{name}")
    sources = [str(folder)]
    for source in sorted(EXTENSIONS.glob("ds-ext-*/src")):
        name = source.parent.name.removeprefix("ds-ext-")
        if (source / f"ds_ext_{name}" / "plugin.py").exists():
            announce(folder, name, f"ds_ext_{name}.plugin")
            sources.append(str(source))
    return sources


def announce(folder: Path, name: str, module: str) -> None:
    """Write the metadata of a distribution with the accelerator `name`."""
    info = folder / f"ds_ext_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ds-ext-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[deepspeed.accelerators]\n{name} = {module}\n")


def run_once(program: str, sources: list[str]) -> dict[str, Any]:
    """Run `program` in a fresh interpreter, and return its measurements."""
    path = os.pathsep.join(filter(None, [*sources, os.environ.get("PYTHONPATH")]))
    left_out = ("DS_ACCELERATOR", "PYTHONDONTWRITEBYTECODE")  # the dropped first round writes bytecode
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**variables, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": f"{sources[0]}/bytecode", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--extra", type=int, default=6, help="stand-ins for extensions")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sources = install(Path(name), options.extra)
        programs = (WITHOUT_TORCH, WITH_TORCH)
        turns = [[run_once(program, sources) for program in programs] for _ in range(1 + options.rounds)][1:]
    first = turns[0][0]
    found = ", ".join(f"{plugin}{'' if available else ' (no device)'}" for plugin, available in first["offers"])
    print(f"{len(first['offers'])} accelerators: {found}; asking them loads torch: {'yes' if first['torch'] else 'no'}")
    for part in ("import", "offers", "choice"):
        wall, cpu = (
            statistics.median({**bare["ms"], **loaded["ms"]}[part][kind] for bare, loaded in turns) for kind in (0, 1)
        )
        note = "" if part == "import" else f"   goal {GOAL_MS:.0f}: {'met' if wall < GOAL_MS else 'missed'}"
        print(f"{part:8s} {wall:7.1f} ms wall {cpu:7.1f} ms CPU{note}")


if __name__ == "__main__":
    main()
