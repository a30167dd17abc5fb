"""`VendorOpBuilder`: the base class of builders whose ops call operators of the installed `torch_npu`."""

from abc import abstractmethod
from typing import Any, ClassVar

from deepspeed.errors import PluginError
from deepspeed.ops.op_builder import OpBuilder

from ds_ext_npu import vendor


class VendorOpBuilder(OpBuilder):
    """A builder without sources: `load` returns Python functions, or torch operators registered from Python.

    A subclass defines `NAME`, the vendor's operators that it calls (`calls`), and the method `operators`.
    """

    calls: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__(self.NAME)

    @abstractmethod
    def operators(self) -> Any:
        """Return the op; its attributes are the functions that core calls. Called by `load` after the check."""

    def absolute_name(self) -> str:
        return f"ds_ext_npu.op_builder.{self.NAME}_op"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether torch_npu can be imported and has all operators in `calls`."""
        self.reason = self._lack()
        if self.reason is not None and verbose:
            self.warning(self.reason)
        return self.reason is None

    def load(self, verbose: bool = False) -> Any:
        """Return the op; nothing is compiled.

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
