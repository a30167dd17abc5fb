"""DeepSpeedQuestions: what DeepSpeed's OpBuilder answers about the machine and its torch, under DeepSpeed's names.

Builders written for DeepSpeed call these methods, or extend them by `super()`. What they say of a device is torch's
answer: the core has no code for any, and the names are all that it knows of one.
"""

import platform
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from deepspeed.errors import OpUnavailable
from deepspeed.log import logger
from deepspeed.ops.op_builder import compiling
from deepspeed.ops.op_builder.spec import torch_module, torch_version
from deepspeed.ops.op_builder.toolchain import find_compiler

_PORTABLE = {"x86_64": "-march=x86-64", "amd64": "-march=x86-64", "aarch64": "-march=armv8-a"}


class DeepSpeedQuestions:
    """The part of `OpBuilder` that only builders call."""

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

    # ----- the installed torch ----------------------------------------------------------------------------------------

    def nvcc_args(self) -> list[str]:
        """Flags for a device's compiler: none in the base. `compile_command` of a device's builder says what counts."""
        return []

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether this torch was built with that toolkit."""
        return getattr(torch_module().version, "hip", None) is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """(major, minor) of the toolkit that this torch was built with; (0, 0) for any other torch."""
        stated = getattr(torch_module().version, "hip", None)
        release = Version(stated.partition("-")[0]).release if stated else ()
        return (release[0], release[1]) if len(release) > 1 else (0, 0)

    def hipify_extension(self) -> None:
        """Called before sources are compiled; a builder that translates its sources overrides it."""

    @staticmethod
    def validate_torch_version(torch_info: dict[str, Any]) -> None:
        """Refuse an op that was built with another torch.

        Args:
            torch_info: of the build, as `deepspeed.git_version_info.torch_info`.

        Raises:
            OpUnavailable: major or minor version differ.
        """
        built, found = str(torch_info["version"]), ".".join(map(str, torch_version().release[:2]))
        if built != found:
            raise OpUnavailable(f"the op was built with torch {built}, and this is torch {found}; build it again")

    validate_torch_op_version = validate_torch_version
