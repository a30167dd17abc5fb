"""VendorOpBuilder: an op made of calls of operators that are in `torch_npu` already."""

from abc import abstractmethod
from typing import Any, ClassVar

from deepspeed.errors import PluginError
from deepspeed.ops.op_builder import OpBuilder

from ds_ext_npu import vendor


class VendorOpBuilder(OpBuilder):
    """A builder without sources: `load` gives Python functions, or torch operators registered from Python.

    A subclass says `NAME`, which of the vendor's operators it calls (`calls`), and gives the op (`operators`).
    """

    calls: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__(self.NAME)

    @abstractmethod
    def operators(self) -> Any:
        """The op, with what core's front calls as attributes. Called by `load` once the vendor's package is there."""

    def absolute_name(self) -> str:
        return f"ds_ext_npu.op_builder.{self.NAME}_op"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the installed torch_npu can be imported and has the operators that are called."""
        self.reason = self._lack()
        if self.reason is not None and verbose:
            self.warning(self.reason)
        return self.reason is None

    def load(self, verbose: bool = False) -> Any:
        """The op; nothing is compiled for it.

        Raises:
            OpUnavailable: `is_compatible()` is False.
        """
        self._check_compatible()
        return self.operators()

    def _lack(self) -> str | None:
        try:
            package = vendor.load()
        except PluginError as error:
            return str(error)
        missing = [name for name in self.calls if not hasattr(package, name)]
        version = getattr(package, "__version__", "of no version")
        return f"torch_npu {version} has no {', '.join(missing)}; install a newer one" if missing else None
