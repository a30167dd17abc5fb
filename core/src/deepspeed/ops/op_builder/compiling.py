"""Runs the commands of a build: compiles the sources in parallel, then links; or runs cmake for a CMake project.

Each command has a time limit, `DS_COMPILE_TIMEOUT` (seconds, default 1800), because all ranks of a node wait for it.
"""

import contextlib
import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from deepspeed.errors import ConfigError, OpUnavailable
from deepspeed.ops.op_builder.spec import BuildSpec
from deepspeed.ops.op_builder.toolchain import Toolchain
from deepspeed.plugins import admission

TIMEOUT_VARIABLE = "DS_COMPILE_TIMEOUT"
DEFAULT_TIMEOUT_S = 1800.0
#: how long to wait for a process that has ended or was killed, and for its output
_LAST_WORDS_S = 5.0
_TICK_S = 1.0
_POLL_S = 0.02

_ERROR = re.compile(r"(?i)(?:^|[\s:(])(?:fatal |internal compiler |cmake )?error\b|undefined reference|cannot find -l")
#: messages of a compiler that cannot write: the disk or the quota is full, or a file is larger than the limit
_FULL = re.compile(
    "|".join(
        [*map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)), signal.strsignal(signal.SIGXFSZ) or "SIGXFSZ"]
    )
)


class BuildError(OpUnavailable):
    """A command of a build failed.

    Attributes:
        first_error: the first line of the output with an error.
        command: the argument list.
        output: the full output of the command.
    """

    def __init__(self, message: str, first_error: str = "", command: Sequence[str] = (), output: str = "") -> None:
        super().__init__(message)
        self.first_error = first_error
        self.command = tuple(command)
        self.output = output


class Built(NamedTuple):
    """A finished build that is not yet in the cache.

    Fields:
        library: the file.
        commands: the commands that were run.
    """

    library: Path
    commands: list[list[str]]


def compile_spec(spec: BuildSpec, folder: Path, library_name: str, on_tick: Callable[[], None] | None = None) -> Built:
    """Build `spec` in `folder`.

    Args:
        spec: the build; it needs a toolchain.
        folder: an empty folder on the library's final file system. The compiler's temporary files go there too.
        library_name: file name without suffix; also the name of a Python module (`TORCH_EXTENSION_NAME`).
        on_tick: called about once a second while commands run.

    Raises:
        BuildError: a command failed, or exceeded the time limit.
        ConfigError: `DS_COMPILE_TIMEOUT` is not a positive number.
    """
    if spec.toolchain is None:
        raise OpUnavailable(f"op {spec.name!r}: there is no compiler to build it with")
    runner = _Runner(spec.name, folder, on_tick)
    compile_it = _compile_sources if spec.cmake_dir is None else _compile_project
    return compile_it(spec, spec.toolchain, runner, library_name)


def timeout_s() -> float:
    """Return the time limit of one command in seconds, from `DS_COMPILE_TIMEOUT`.

    Raises:
        ConfigError: the variable is not a positive number.
    """
    return admission.timeout_s(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S, ConfigError)


def run_commands(op: str, folder: Path, commands: list[list[str]]) -> None:
    """Run commands in `folder`, several at a time.

    Raises:
        BuildError: the first failure.
    """
    _Runner(op, folder).run(commands)


def _compile_sources(spec: BuildSpec, toolchain: Toolchain, runner: "_Runner", library_name: str) -> Built:
    assert spec.compile_command is not None
    assert spec.link_command is not None
    flags = [
        *spec.compile_flags,
        *(f"-I{path}" for path in spec.include_paths),
        *(option for path in spec.system_include_paths for option in ("-isystem", str(path))),
    ]
    if spec.op_namespace is None:
        flags.append(f"-DTORCH_EXTENSION_NAME={library_name}")
    objects = [runner.folder / f"{index}_{source.stem}.o" for index, source in enumerate(spec.sources)]
    compiles = [
        spec.compile_command(toolchain, source, to, flags) for source, to in zip(spec.sources, objects, strict=True)
    ]
    library = runner.folder / f"{library_name}.so"
    searched = [f"-L{path}" for path in spec.library_paths]
    link = spec.link_command(toolchain, objects, library, [*searched, *spec.link_flags])
    runner.run(compiles)
    runner.run([link])
    if not library.is_file():
        raise BuildError(f"op {spec.name!r}: the link wrote no {library}: {' '.join(link)}", command=link)
    for path in objects:
        path.unlink()
        path.with_suffix(".d").unlink(missing_ok=True)  # the compiler's list of headers, if a flag requests it
    return Built(library, [*compiles, link])


def _compile_project(spec: BuildSpec, toolchain: Toolchain, runner: "_Runner", library_name: str) -> Built:
    """Configure and build `cmake_dir`. The project must write one library to `CMAKE_LIBRARY_OUTPUT_DIRECTORY`."""
    cmake = shutil.which("cmake")
    if cmake is None or spec.cmake_dir is None:
        raise OpUnavailable(f"op {spec.name!r} is a CMake project, and there is no cmake on PATH")
    work, out = runner.folder / "work", runner.folder / "out"
    runner.environment["CXX"] = shlex.join(toolchain.command)
    torch_cmake = [str(path.parent / "share" / "cmake") for path in spec.library_paths]
    configure = [
        *(cmake, "-S", str(spec.cmake_dir), "-B", str(work), "-DCMAKE_BUILD_TYPE=Release"),
        f"-DCMAKE_PREFIX_PATH={';'.join(torch_cmake)}",
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}",
        "-DCMAKE_POSITION_INDEPENDENT_CODE=ON",
        f"-DDS_OP_NAME={library_name}",
        f"-DDS_TORCH_INCLUDE={';'.join(str(path) for path in spec.system_include_paths)}",
        f"-DDS_TORCH_LIBRARIES={';'.join(str(path) for path in spec.library_paths)}",
        *spec.compile_flags,
    ]
    build = [cmake, "--build", str(work), "--parallel", str(_num_jobs(os.cpu_count() or 1))]
    runner.run([configure])
    runner.run([build])
    found = sorted(out.glob("*.so"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise BuildError(
            f"op {spec.name!r}: {spec.cmake_dir} must leave one shared library in CMAKE_LIBRARY_OUTPUT_DIRECTORY; "
            f"found {names}",
            command=build,
        )
    library = found[0].rename(runner.folder / f"{library_name}.so")
    shutil.rmtree(work)
    shutil.rmtree(out)
    return Built(library, [configure, build])


class _Runner:
    """Runs commands in a folder, several at a time. No command keeps running after a failure or an interrupt."""

    def __init__(self, op: str, folder: Path, on_tick: Callable[[], None] | None = None) -> None:
        self.op = op
        self.folder = folder
        self.on_tick = on_tick or (lambda: None)
        self.limit_s = timeout_s()
        # the compiler's temporary files go to the same folder as the result, so only one file system can be full
        self.environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}

    def run(self, commands: list[list[str]]) -> None:
        """Run all commands. The first failure kills the others and is raised.

        A worker thread starts the commands. Ctrl-C is raised in the main thread, where it could arrive between the
        start of a command and its registration in `running`.

        Raises:
            BuildError: a command failed; the error has the first error line and the command.
        """
        stop = threading.Event()
        with ThreadPoolExecutor(1, "ds_build") as executor:
            try:
                all_of_them = executor.submit(self._run, commands, stop)
                while not wait([all_of_them], _TICK_S).done:
                    self.on_tick()
            finally:
                stop.set()
        all_of_them.result()

    def _run(self, commands: list[list[str]], stop: threading.Event) -> None:
        waiting, running = list(commands), list[_Command]()
        try:
            while (waiting or running) and not stop.is_set():
                while waiting and len(running) < _num_jobs(len(commands)):
                    running.append(_Command(waiting.pop(0), self))
                running[0].wait(_POLL_S)
                running = [command for command in running if not command.has_ended()]
        finally:
            for command in running:
                command.kill()


class _Command:
    """One running command, and its output.

    A thread reads the output, so that no other code waits for the end of the pipe: a background process that the
    compiler starts (such as the server of a compiler cache) may keep the pipe open.
    """

    def __init__(self, argv: list[str], runner: _Runner) -> None:
        self.argv, self.runner = argv, runner
        self.deadline = time.monotonic() + runner.limit_s
        try:
            # The child stays in our process group and session, so that a kill of the whole rank also kills the child.
            self.child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=runner.folder,
                env=runner.environment,
            )
        except OSError as error:
            reason = f"op {runner.op!r}: {argv[0]} cannot be started: {error.strerror}"
            raise BuildError(reason, command=argv) from error
        self.chunks: list[bytes] = []
        self.reader = threading.Thread(target=self._read, name="ds_build_output", daemon=True)
        self.reader.start()

    def wait(self, seconds: float) -> None:
        """Wait until the command ends, but at most `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(seconds)

    def has_ended(self) -> bool:
        """Return whether the command has ended.

        Raises:
            BuildError: the command failed, or exceeded the time limit.
        """
        status = self.child.poll()
        if status is None and time.monotonic() >= self.deadline:
            raise self._late()
        if status:
            raise self._failure(status)
        return status is not None

    def kill(self) -> None:
        """Kill the command and its descendants: a compiler driver that is killed alone leaves its compiler running."""
        import psutil

        if self.child.poll() is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended meanwhile
            process = psutil.Process(self.child.pid)
            for member in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        self.wait(_LAST_WORDS_S)  # with a limit: the process may be in an uninterruptible system call

    def _read(self) -> None:
        assert self.child.stdout is not None
        with self.child.stdout as pipe:
            self.chunks.extend(iter(lambda: os.read(pipe.fileno(), 1 << 16), b""))

    def _output(self) -> str:
        self.reader.join(_LAST_WORDS_S)
        return b"".join(self.chunks).decode(errors="replace")

    def _late(self) -> BuildError:
        self.kill()
        late = f"{self.argv[0]} did not finish within {self.runner.limit_s:g} s"
        message = f"op {self.runner.op!r}: {late} and was killed ({TIMEOUT_VARIABLE}=<seconds> waits longer)"
        return BuildError(message, f"{late} ({TIMEOUT_VARIABLE})", self.argv, self._output())

    def _failure(self, status: int) -> BuildError:
        op, output = self.runner.op, self._output()
        full = _FULL.search(output)
        if full or status == -signal.SIGXFSZ:
            reason = full.group() if full else os.strerror(errno.EFBIG)
            return BuildError(no_space(op, self.runner.folder.parent, reason), reason, (), output)
        first = first_error(output) or f"exit code {status} and no message"
        return BuildError(f"op {op!r} does not compile: {first}", first, self.argv, output)


def first_error(output: str) -> str:
    """Return the first line of a compiler's output that contains an error, else the first line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if _ERROR.search(line)), lines[0] if lines else "")


def no_space(op: str, folder: Path, reason: str) -> str:
    """Return the message for a full disk."""
    advice = "make room there, or set TORCH_EXTENSIONS_DIR to another folder"
    return f"op {op!r} cannot be built: {reason} in {folder}; {advice}"


def _num_jobs(num_commands: int) -> int:
    """Return the number of parallel commands: at most `$MAX_JOBS`, else one per CPU that this process may use."""
    asked = os.environ.get("MAX_JOBS", "")
    is_number = asked.isdecimal() and len(asked) < 10
    limit = int(asked) if is_number and int(asked) > 0 else len(os.sched_getaffinity(0))
    return max(1, min(num_commands, limit))
