"""OldQuestions: methods of DeepSpeed's OpBuilder about the torch of this process, under DeepSpeed's names.

Builders written for DeepSpeed call them, or extend them by `super()`. What they answer is torch's word: the core has no
code for any device, and the names are all that it knows of one.
"""

from typing import Any

from packaging.version import Version

from deepspeed.errors import OpUnavailable
from deepspeed.ops.op_builder.against_torch import torch_module, torch_version


class OldQuestions:
    """The part of `OpBuilder` with DeepSpeed's questions about the installed torch."""

    name: str

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
