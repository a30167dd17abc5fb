"""Runs a build's commands: every source by itself and side by side, then the link; a CMake project by cmake.

Each command has a limit on its time, `DS_COMPILE_TIMEOUT` (seconds, 1800 unless set): all ranks of a node wait for it.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from deepspeed.errors import ConfigError, OpUnavailable
from deepspeed.ops.op_builder.spec import BuildSpec
from deepspeed.ops.op_builder.toolchain import Toolchain
from deepspeed.plugins import probing

TIMEOUT_VARIABLE = "DS_COMPILE_TIMEOUT"
DEFAULT_TIMEOUT_S = 1800.0
#: how long a process that has ended, or was killed, is waited for
_LAST_WORDS_S = 5.0

_ERROR = re.compile(r"(?i)(?:^|[\s:(])(?:fatal |internal compiler |cmake )?error\b|undefined reference|cannot find -l")
#: how a compiler tells that it cannot write: the disk, the user's quota, the limit on a file's size
_FULL = re.compile(
    "|".join(
        [*map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)), signal.strsignal(signal.SIGXFSZ) or "SIGXFSZ"]
    )
)


class BuildError(OpUnavailable):
    """A command of a build failed.

    Attributes:
        first_error: the first line of the output that speaks of an error.
        command: the argument list.
        output: all that it printed.
    """

    def __init__(self, message: str, first_error: str = "", command: Sequence[str] = (), output: str = "") -> None:
        super().__init__(message)
        self.first_error = first_error
        self.command = tuple(command)
        self.output = output


@dataclass(frozen=True)
class Built:
    """A finished build, not yet in the cache.

    Attributes:
        library: the file.
        commands: what was run.
        read: every file that the compiler says it read and that is no system header.
    """

    library: Path
    commands: list[list[str]]
    read: frozenset[Path]


def compile_spec(spec: BuildSpec, folder: Path, library_name: str, on_tick: Callable[[], None] = lambda: None) -> Built:
    """Build `spec` in `folder`.

    Args:
        spec: with a toolchain.
        folder: empty, on the file system where the library shall stay; temporary files of the compiler go there too.
        library_name: file name without suffix; for a Python module also its name (`TORCH_EXTENSION_NAME`).
        on_tick: called about once a second while commands run.

    Raises:
        BuildError: a command failed, or took longer than the limit.
        ConfigError: `DS_COMPILE_TIMEOUT` is no positive number.
    """
    if spec.toolchain is None:
        raise OpUnavailable(f"op {spec.name!r}: there is no compiler to build it with")
    runner = _Runner(spec.name, folder, on_tick)
    if spec.cmake_dir is not None:
        return _compile_project(spec, spec.toolchain, runner, library_name)
    return _compile_sources(spec, spec.toolchain, runner, library_name)


def timeout_s() -> float:
    """How long one command of a build may take, in seconds.

    Raises:
        ConfigError: the variable holds no positive number.
    """
    return probing.timeout_s(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S, ConfigError)


def run_commands(op: str, folder: Path, commands: list[list[str]]) -> None:
    """Run commands in `folder`, several at a time.

    Raises:
        BuildError: the first that failed.
    """
    _Runner(op, folder, lambda: None).run(commands)


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
    read = _dependencies(path.with_suffix(".d") for path in objects)
    for path in [*objects, *(path.with_suffix(".d") for path in objects)]:
        path.unlink(missing_ok=True)
    return Built(library, [*compiles, link], read)


def _compile_project(spec: BuildSpec, toolchain: Toolchain, runner: "_Runner", library_name: str) -> Built:
    """Configure and build `cmake_dir`; the project leaves one shared library in `CMAKE_LIBRARY_OUTPUT_DIRECTORY`."""
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
    return Built(library, [configure, build], frozenset())


class _Output(threading.Thread):
    """Reads what a process prints, in a thread, so that nothing waits for the end of the pipe.

    A process that the compiler starts and leaves running (the server of a compiler cache) may hold it open for long.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        super().__init__(name="ds_build_output", daemon=True)
        assert child.stdout is not None
        self.pipe = child.stdout
        self.read: list[bytes] = []
        self.start()

    def run(self) -> None:
        with self.pipe:
            while chunk := os.read(self.pipe.fileno(), 1 << 16):
                self.read.append(chunk)

    def text(self) -> str:
        """All that was printed; called when the process has ended."""
        self.join(_LAST_WORDS_S)
        return b"".join(self.read).decode(errors="replace")


class _Runner:
    """Runs commands in a folder, and ends them when we are ended."""

    def __init__(self, op: str, folder: Path, on_tick: Callable[[], None]) -> None:
        self.op = op
        self.folder = folder
        self.on_tick = on_tick
        self.running: set[subprocess.Popen[bytes]] = set()
        self.guard = threading.Lock()
        self.stopped = False
        self.limit_s = timeout_s()
        # the compiler's temporary files go where the result goes: one place that can be full, and it has a name
        self.environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}

    def run(self, commands: list[list[str]]) -> None:
        """Run all of them, several at a time. The first failure ends the others and is raised.

        Raises:
            BuildError: with the first error and the command.
        """
        with ThreadPoolExecutor(_num_jobs(len(commands)), thread_name_prefix="ds_build") as pool:
            waiting: set[Future[None]] = {pool.submit(self._run_one, command) for command in commands}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=1.0, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    if waiting:
                        self.on_tick()
            except BaseException:  # also Ctrl-C: nothing of ours compiles on when nobody waits for it
                for future in waiting:
                    future.cancel()
                self._end()
                raise

    def _run_one(self, command: list[str]) -> None:
        child = self._start(command)
        if child is None:
            return
        output = _Output(child)
        try:
            child.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            _kill_with_descendants(child)
            raise self._took_too_long(command, output.text()) from None
        finally:
            with self.guard:
                self.running.discard(child)
        if child.returncode != 0 and not self.stopped:
            raise self._failure(command, child.returncode, output.text())

    def _start(self, command: list[str]) -> subprocess.Popen[bytes] | None:
        try:
            with self.guard:
                if self.stopped:
                    return None
                # It stays in our process group and session, so that what ends all of a rank's processes ends it too.
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env=self.environment,
                )
                self.running.add(child)
                return child
        except OSError as error:
            raise BuildError(
                f"op {self.op!r}: {command[0]} cannot be started: {error.strerror}", command=command
            ) from error

    def _took_too_long(self, command: list[str], output: str) -> BuildError:
        return BuildError(
            f"op {self.op!r}: {command[0]} did not finish within {self.limit_s:g} s and was killed "
            f"({TIMEOUT_VARIABLE}=<seconds> waits longer)",
            f"{command[0]} did not finish within {self.limit_s:g} s ({TIMEOUT_VARIABLE})",
            command,
            output,
        )

    def _failure(self, command: list[str], returncode: int, output: str) -> BuildError:
        if _FULL.search(output) or returncode == -signal.SIGXFSZ:
            full = _FULL.search(output)
            said = full.group() if full else os.strerror(errno.EFBIG)
            return BuildError(no_space(self.op, self.folder.parent, said), said, (), output)
        first = first_error(output) or f"exit code {returncode} and no message"
        return BuildError(f"op {self.op!r} does not compile: {first}", first, command, output)

    def _end(self) -> None:
        with self.guard:
            self.stopped = True
            running = list(self.running)
        for child in running:
            _kill_with_descendants(child)


def _kill_with_descendants(child: subprocess.Popen[bytes]) -> None:
    """Kill a compiler driver and all that it started: killed alone, it would leave its compiler proper running."""
    import psutil

    try:
        process = psutil.Process(child.pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:  # it ended meanwhile
        return
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # in a system call that no signal interrupts
        child.wait(_LAST_WORDS_S)


def first_error(output: str) -> str:
    """The first line of a compiler's output that speaks of an error; else the first line of all."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if _ERROR.search(line)), lines[0] if lines else "")


def no_space(op: str, folder: Path, said: str) -> str:
    """What is told when a disk is full."""
    return (
        f"op {op!r} cannot be built: {said} in {folder}; make room there, or set TORCH_EXTENSIONS_DIR to another folder"
    )


def _num_jobs(num_commands: int) -> int:
    """At most `$MAX_JOBS` at a time, else one per CPU that this process may use."""
    asked = os.environ.get("MAX_JOBS", "")
    limit = int(asked) if asked.isdigit() and int(asked) > 0 else len(os.sched_getaffinity(0))
    return max(1, min(num_commands, limit))


def _dependencies(files: Iterable[Path]) -> frozenset[Path]:
    """The files that Makefile rules (`-MMD`) name; a compiler that writes none has none."""
    found = set()
    for file in files:
        if file.is_file():
            rule = file.read_text(errors="replace").replace("\\\n", " ").partition(": ")[2]
            found |= {Path(name.replace("\\ ", " ")) for name in re.findall(r"(?:\\ |\S)+", rule)}
    return frozenset(found)
