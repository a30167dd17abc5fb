"""Just in time: from a BuildSpec to a finished shared library, built at most once per machine, user and content.

    find in the cache ── there and whole ──> its path
          │ not
    take the lock (others wait) ── built meanwhile ──> its path
          │                     └─ failed meanwhile ─> BuildError, without a second compile
    compile in a temporary folder ──> rename it ──> its path

Whoever dies on the way leaves a temporary folder that the next builder removes, and no lock. Nothing here knows what
the library is for; loading it is `loading.py`.
"""

import dataclasses
import math
import os
import shutil
import time
from pathlib import Path

from deepspeed.errors import OpUnavailable
from deepspeed.log import logger, report
from deepspeed.ops.op_builder.cache import Cache, Manifest, is_full, locked
from deepspeed.ops.op_builder.compiling import TIMEOUT_VARIABLE, BuildError, compile_spec, no_space, timeout_s
from deepspeed.ops.op_builder.spec import BuildSpec
from deepspeed.ops.op_builder.toolchain import Toolchain

__all__ = ["BuildError", "build", "find"]

_SPEAK_AFTER_S = 3.0
_AGAIN_AFTER_S = 60.0


def find(spec: BuildSpec) -> Path | None:
    """The finished library of `spec` if the cache has it; nothing is built.

    Raises:
        OpUnavailable: the cache's folder cannot be used.
    """
    return Cache.open().find(spec)


def build(spec: BuildSpec) -> Path:
    """The finished library of `spec`, built if no process of this machine and user has built it before.

    Called by `OpBuilder.jit_load`, at once by all ranks of a node: one compiles, the others wait.

    Raises:
        OpUnavailable: the cache's folder cannot be used, or there is no compiler.
        BuildError: the build failed: the compiler's first error and its command in the process that ran it; the others
            of the same job (one launch on one machine, or this process) say the error and where all of it is, and
            compile nothing.
    """
    asked_at = time.time()
    cache = Cache.open()
    found = cache.find(spec)
    if found is not None:
        return found
    if spec.toolchain is None:
        raise OpUnavailable(f"op {spec.name!r} has to be compiled, and there is no compiler")
    progress = _Progress(spec.name, _SPEAK_AFTER_S)

    def on_wait(holder: str, waited_s: float) -> None:
        progress(f"waiting for {holder}, which compiles it", waited_s)

    try:
        with locked(cache.beside(spec, ".lock"), on_wait):
            found = cache.find(spec)
            if found is not None:
                return found
            failure = cache.failure(spec, asked_at)
            if failure is not None:
                seen = f"(seen by process {failure.pid}; all of it is in {failure.log})"
                raise BuildError(f"op {spec.name!r} does not compile: {failure.error} {seen}", failure.error)
            return _build(spec, spec.toolchain, cache)
    except OSError as error:
        if is_full(error):
            raise BuildError(no_space(spec.name, cache.folder, os.strerror(error.errno or 0))) from error
        raise BuildError(f"op {spec.name!r} cannot be built in {cache.folder}: {error}") from error


def _build(spec: BuildSpec, toolchain: Toolchain, cache: Cache) -> Path:
    """Compile and install; called with the lock held, where the file system has locks."""
    start, progress = time.monotonic(), _Progress(spec.name, 0.0)

    def on_tick() -> None:
        where = f", once for this machine ({toolchain.summary}; {cache.folder})"
        progress("compiling", time.monotonic() - start, where)

    folder = cache.make_build_folder(spec)
    try:
        built = compile_spec(spec, folder, spec.entry, on_tick)
        if dataclasses.replace(spec).source_digest != spec.source_digest:  # of the files as they are now
            raise BuildError(f"op {spec.name!r}: its sources changed while they were compiled; build it again")
        library = cache.install(spec, folder, Manifest.of(spec, built.library, built.commands))
    except BuildError as error:
        raise _with_command(spec, cache, error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # renamed away, unless something failed
    logger.info("op %r: compiled in %.1f s, kept in %s", spec.name, time.monotonic() - start, library.parent)
    return library


def _with_command(spec: BuildSpec, cache: Cache, error: BuildError) -> BuildError:
    """The error as this process, which ran the compiler, raises it; and the record that keeps others from trying."""
    if not error.command:
        return error
    command = " ".join(error.command)
    log = cache.write_failure(spec, error.first_error or str(error), f"{command}\n\n{error.output}")
    message = f"{error}; command: {command}; all of its output is in {log}"
    return BuildError(message, error.first_error, error.command, error.output)


class _Progress:
    """Reports that a build takes long: once on rank 0, and on every rank after one minute, two, four, ...

    Args:
        op: its short name.
        after_s: when rank 0 reports.
    """

    def __init__(self, op: str, after_s: float) -> None:
        self.op = op
        self.after_s = after_s
        self.again_s = _AGAIN_AFTER_S

    def __call__(self, doing: str, passed_s: float, remark: str = "") -> None:
        if passed_s >= self.after_s:
            self.after_s = math.inf
            report(f"op {self.op!r}: {doing}{remark}")
        if passed_s >= self.again_s:
            self.again_s *= 2
            so_far = f"{passed_s:.0f} s so far, and a command is killed after {timeout_s():g} s ({TIMEOUT_VARIABLE})"
            report(f"op {self.op!r}: still {doing}; {so_far}", [-1])
