"""OpBuilder: what every op builder of every extension derives from.

This version names ops and says that it cannot compile them; it builds none itself. A builder that compiles on its own
overrides `is_compatible` and `load`.
"""

from abc import ABC, abstractmethod
from typing import Any

from deepspeed.errors import OpUnavailable


class OpBuilder(ABC):
    """One op: its name, its sources, and the loaded result. Made by `get_accelerator().create_op_builder(...)`.

    Args:
        name: the op's short name, for example `"fused_adam"`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def absolute_name(self) -> str:
        """The import path under which an op built beforehand is found."""

    @abstractmethod
    def sources(self) -> list[str]:
        """The source files, as absolute paths."""

    def include_paths(self) -> list[str]:
        """Folders of headers, as absolute paths."""
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """True when `load` can give the op on this machine."""
        return False

    def load(self, verbose: bool = True) -> Any:
        """The loaded op.

        Raises:
            OpUnavailable: this builder does not compile.
        """
        raise OpUnavailable(
            f"op {self.name!r}: {type(self).__name__} does not override load(), and this version of ds-core "
            "compiles no ops; use the torch reference"
        )
