"""MachineQuestions: what builders ask of the machine before they say that they are compatible."""

import platform
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.errors import OpUnavailable
from deepspeed.log import logger
from deepspeed.ops.op_builder import compiling
from deepspeed.ops.op_builder.toolchain import find_compiler

_PORTABLE = {"x86_64": "-march=x86-64", "amd64": "-march=x86-64", "aarch64": "-march=armv8-a"}


class MachineQuestions:
    """The part of `OpBuilder` with DeepSpeed's small questions."""

    name: str
    reason: str | None
    error_log: str | None

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """Whether a program, or one of several, is on PATH.

        Args:
            cmd: a name, several of them with `|` between (`"c++|g++"`), or a list.
        """
        names = [name.strip() for name in cmd.split("|")] if isinstance(cmd, str) else list(cmd)
        found = any(shutil.which(name) for name in names)
        if not found:
            self.warning(f"{self.name} needs the command {' or '.join(names)}, which is not on PATH")
        return found

    def has_function(
        self, funcname: str, libraries: Sequence[str], library_dirs: Sequence[str] | None = None, verbose: bool = False
    ) -> bool:
        """Whether a program that calls C function `funcname` links with `libraries`. False without a compiler."""
        program = f'extern "C" char {funcname}();\nint main() {{ return {funcname}(); }}\n'
        with tempfile.TemporaryDirectory(prefix="ds_has_function_") as name:
            folder = Path(name)
            (folder / "asked.cpp").write_text(program)
            try:
                toolchain = find_compiler()
                command = [
                    *(*toolchain.command, "asked.cpp", "-o", "asked"),
                    *(f"-L{path}" for path in library_dirs or ()),
                    *(f"-l{library}" for library in libraries),
                ]
                compiling.run_commands(self.name, folder, [command])
            except OpUnavailable as error:
                if verbose:
                    logger.warning("%s", error)
                return False
        return True

    def strip_empty_entries(self, args: Sequence[Any]) -> list[Any]:
        """`args` without empty strings and None."""
        return [entry for entry in args if entry is not None and len(str(entry)) > 0]

    def cpu_arch(self) -> str:
        """The compiler flag for the CPU: the oldest of this architecture, so that the library runs on every one.

        DeepSpeed answers `-march=native` here. A kernel that wants more compiles its loops several times and chooses
        when it runs.
        """
        return _PORTABLE.get(platform.machine().lower(), "-fPIC")

    def simd_width(self) -> str:
        """The macro for the vector width that `cpu_arch` allows: `-D__SCALAR__`."""
        return "-D__SCALAR__"

    def warning(self, msg: str) -> None:
        """Log why something of this op is not there, and keep it as the reason."""
        self.error_log = self.reason = msg
        logger.warning("op %r: %s", self.name, msg)
