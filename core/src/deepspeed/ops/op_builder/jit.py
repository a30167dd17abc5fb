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
import os
import shutil
import time
from pathlib import Path
from typing import Any

from deepspeed.errors import OpUnavailable
from deepspeed.log import logger, report
from deepspeed.ops.op_builder.cache import Cache, Manifest, is_full
from deepspeed.ops.op_builder.compiling import (
    TIMEOUT_VARIABLE,
    BuildError,
    Built,
    compile_spec,
    no_space,
    timeout_s,
)
from deepspeed.ops.op_builder.lock import locked
from deepspeed.ops.op_builder.spec import BuildSpec

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
    try:
        with locked(cache.beside(spec, ".lock"), _Waiting(spec.name)):
            found = cache.find(spec)
            if found is not None:
                return found
            record = cache.failure(spec, asked_at)
            if record is not None:
                raise _failed_elsewhere(spec, record)
            return _build(spec, cache)
    except OSError as error:
        if is_full(error):
            raise BuildError(no_space(spec.name, cache.folder, os.strerror(error.errno or 0))) from error
        raise BuildError(f"op {spec.name!r} cannot be built in {cache.folder}: {error}") from error


def _build(spec: BuildSpec, cache: Cache) -> Path:
    """Compile and install; called with the lock held, where the file system has locks."""
    start = time.monotonic()
    folder = cache.make_build_folder(spec)
    try:
        built = compile_spec(spec, folder, spec.entry, _Progress(spec, cache.folder))
        if dataclasses.replace(spec).source_digest != spec.source_digest:  # of the files as they are now
            raise BuildError(f"op {spec.name!r}: its sources changed while they were compiled; ask again")
        library = cache.install(spec, folder, Manifest.of(spec, built.library, built.commands, _outside(spec, built)))
    except BuildError as error:
        raise _with_command(spec, cache, error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # renamed away, unless something failed
    logger.info("op %r: compiled in %.1f s, kept in %s", spec.name, time.monotonic() - start, library.parent)
    return library


def _outside(spec: BuildSpec, built: Built) -> list[Path]:
    """Files that the compiler read and the scan did not see."""
    known = {os.path.realpath(path) for path in (*spec.sources, *(path for _, path in spec.includes.headers))}
    return sorted(path for path in built.read if path.is_file() and os.path.realpath(path) not in known)


def _with_command(spec: BuildSpec, cache: Cache, error: BuildError) -> BuildError:
    """The error as this process, which ran the compiler, tells it; and the record that keeps others from trying."""
    if not error.command:
        return error
    command = " ".join(error.command)
    log = cache.write_failure(spec, error.first_error or str(error), f"{command}\n\n{error.output}")
    message = f"{error}; command: {command}; all that it said is in {log}"
    return BuildError(message, error.first_error, error.command, error.output)


def _failed_elsewhere(spec: BuildSpec, record: dict[str, Any]) -> BuildError:
    return BuildError(
        f"op {spec.name!r} does not compile: {record.get('error')} (seen by process {record.get('pid')}; all of it is "
        f"in {record.get('log')})",
        str(record.get("error")),
    )


class _Waiting:
    """Says for whom this process waits: once on rank 0, and on every rank after one minute, two, four, ..."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.spoke = False
        self.next_s = _AGAIN_AFTER_S

    def __call__(self, holder: str, waited_s: float) -> None:
        if not self.spoke and waited_s >= _SPEAK_AFTER_S:
            self.spoke = True
            report(f"op {self.op!r}: waiting for {holder}, which compiles it")
        if waited_s >= self.next_s:
            self.next_s *= 2
            report(f"op {self.op!r}: still waiting for {holder}, which compiles it; {_so_far(waited_s)}", [-1])


class _Progress:
    """Says what is being compiled: once on rank 0 when that takes a second, and where it runs after one minute, ..."""

    def __init__(self, spec: BuildSpec, folder: Path) -> None:
        self.spec = spec
        self.folder = folder
        self.spoke = False
        self.start = time.monotonic()
        self.next_s = _AGAIN_AFTER_S

    def __call__(self) -> None:
        if not self.spoke and self.spec.toolchain is not None:
            self.spoke = True
            compiler = self.spec.toolchain.summary
            report(f"op {self.spec.name!r}: compiling, once for this machine ({compiler}; {self.folder})")
        passed_s = time.monotonic() - self.start
        if passed_s >= self.next_s:
            self.next_s *= 2
            report(f"op {self.spec.name!r}: still compiling; {_so_far(passed_s)}", [-1])


def _so_far(passed_s: float) -> str:
    return f"{passed_s:.0f} s so far, and a command is killed after {timeout_s():g} s ({TIMEOUT_VARIABLE})"
