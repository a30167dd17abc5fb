"""`ds_build`: compile ops before their first use, for a cluster image or before the first job on a machine.

    ds_build                       every op that has a kernel for the current accelerator
    ds_build cpu_adam fused_adam   only these ops
    ds_build --list                show the source of each op; compile nothing

The libraries go to the same folder as at first use (`TORCH_EXTENSIONS_DIR`, see docs/reference/ops-building.md). They
are not loaded, so the device need not be present; `DS_ACCELERATOR` selects it. The output has one line per op. Exit
code 0; 1 if an op failed to build, or a named op has no kernel here; 2 for an unknown name.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.cli.console import make_parser
from deepspeed.errors import ConfigError, DeepSpeedError
from deepspeed.ops import registry
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.compiling import BuildError


class Outcome(NamedTuple):
    """An `Outcome` is the result of building one op.

    Fields:
        op: short name of the op.
        state: "built" (the library exists now), "loaded" (the builder has its own way to compile, and did), "reference"
            (no kernel here), "failed".
        detail: the library, or the reason why there is none.
        seconds: duration of the build.
    """

    op: str
    state: str
    detail: str
    seconds: float


def warm(op: str) -> Outcome:
    """Build `op` like its first use, if possible without loading it.

    Raises:
        ConfigError: there is no op of this name.
    """
    start = time.monotonic()
    resolution = registry.resolve(op)
    builder = resolution.builder
    if builder is None:
        return Outcome(op, "reference", resolution.why(), 0.0)
    try:
        state, detail = _build(builder)
    except Exception as error:  # noqa: BLE001 - a vendor's builder, whatever it raises
        state, detail = "failed", _why(error)
    return Outcome(op, state, detail, time.monotonic() - start)


def _why(error: Exception) -> str:
    """Return the message without the compiler's long command, which is also in the log that the message names."""
    told = str(error).strip() or type(error).__name__
    command = " ".join(error.command) if isinstance(error, BuildError) else ""
    return told.replace(f"; command: {command}", "") if command else told


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    act: Callable[[str], Outcome] = _show if options.list else warm
    try:
        outcomes = [_told(act(op), named=bool(options.ops)) for op in options.ops or registry.op_names()]
    except DeepSpeedError as error:
        sys.stderr.write(f"ds_build: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    wrong = {"failed", "reference"} if options.ops else {"failed"}
    return 1 if not options.list and any(outcome.state in wrong for outcome in outcomes) else 0


def _build(builder: Any) -> tuple[str, str]:
    """Run the builder, and return (state, detail)."""
    if isinstance(builder, OpBuilder) and type(builder).jit_load is OpBuilder.jit_load:
        if type(builder).load is OpBuilder.load:
            path: Path = builder.prepare()
            return "built", str(path)
    builder.load()
    return "loaded", f"{type(builder).__module__}.{type(builder).__qualname__} compiles by itself"


def _show(op: str) -> Outcome:
    resolution = registry.resolve(op)
    if resolution.builder is None:
        return Outcome(op, "reference", resolution.why(), 0.0)
    kind = type(resolution.builder)
    return Outcome(op, resolution.source, f"{kind.__module__}.{kind.__qualname__}", 0.0)


def _told(outcome: Outcome, named: bool) -> Outcome:
    """Print the line of one op; skip ops without a kernel unless they were named."""
    if outcome.state != "reference" or named:
        took = f" ({outcome.seconds:.1f} s)" if outcome.seconds >= 0.1 else ""
        sys.stdout.write(f"{outcome.op}: {outcome.state}{took}: {outcome.detail}\n")
        sys.stdout.flush()
    return outcome


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ds_build", "Compile ops before they are needed.")
    parser.add_argument("ops", nargs="*", metavar="op", help="short names, for example cpu_adam; none: all that can be")
    parser.add_argument("--list", action="store_true", help="only say where each op would come from")
    return parser


if __name__ == "__main__":
    sys.exit(main())
