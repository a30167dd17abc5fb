"""Just-in-time builds: compile a BuildSpec to a shared library, at most once per machine, user and content.

    find in the cache ── found and intact ──> its path
          │ not found
    take the lock (others wait) ── built meanwhile ──> its path
          │                     └─ failed meanwhile ─> BuildError, without a second compile
    compile in a temporary folder ──> rename it ──> its path

A process that dies during a build leaves no lock, only a temporary folder, which the next build removes. `loading.py`
loads the library.
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
    """Return the library of `spec` if the cache has it, else None. Builds nothing.

    Raises:
        OpUnavailable: the cache's folder cannot be used.
    """
    return Cache.open().find(spec)


def build(spec: BuildSpec) -> Path:
    """Return the library of `spec`. Build it if no process of this user on this machine has built it before.

    All ranks of a node call this at once through `OpBuilder.jit_load`: one rank compiles, the others wait.

    Raises:
        OpUnavailable: the cache's folder cannot be used, or there is no compiler.
        BuildError: the build failed. In the process that ran the compiler, the message has the first error and the
            command. The other processes of the same job (one launch on one machine) do not compile; their message has
            the first error and the path of the full output.
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
    """Compile and install. The caller holds the lock if the file system supports locks."""
    start, progress = time.monotonic(), _Progress(spec.name, 0.0)

    def on_tick() -> None:
        where = f", once for this machine ({toolchain.summary}; {cache.folder})"
        progress("compiling", time.monotonic() - start, where)

    folder = cache.make_build_folder(spec)
    try:
        built = compile_spec(spec, folder, spec.entry, on_tick)
        if dataclasses.replace(spec).source_digest != spec.source_digest:  # `replace` drops the cached digest
            raise BuildError(f"op {spec.name!r}: its sources changed while they were compiled; build it again")
        library = cache.install(spec, folder, Manifest.of(spec, built.library, built.commands))
    except BuildError as error:
        raise _with_command(spec, cache, error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # `install` renamed the folder, unless the build failed
    logger.info("op %r: compiled in %.1f s, kept in %s", spec.name, time.monotonic() - start, library.parent)
    return library


def _with_command(spec: BuildSpec, cache: Cache, error: BuildError) -> BuildError:
    """Add the command to the error, and record the failure so that other processes of the job do not compile."""
    if not error.command:
        return error
    command = " ".join(error.command)
    log = cache.write_failure(spec, error.first_error or str(error), f"{command}\n\n{error.output}")
    message = f"{error}; command: {command}; all of its output is in {log}"
    return BuildError(message, error.first_error, error.command, error.output)


class _Progress:
    """Reports a slow build: once on rank 0, and on every rank after one minute, two, four, ...

    Args:
        op: the short name of the op.
        after_s: the time in seconds after which rank 0 reports.
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
