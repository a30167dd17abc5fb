"""TorchModule: the way from an accelerator to torch's own module for its device. The root of all faces."""

from types import ModuleType
from typing import Any

import torch

from deepspeed.errors import PluginError


class TorchModule:
    """Answers by `torch.get_device_module(self._name)`; the error says what to override when torch has no answer."""

    _name: str = ""
    _communication_backend_name: str = ""
    _compile_backend: str = "inductor"

    def _module(self) -> ModuleType:
        """torch's module for the device, for example `torch.cpu`.

        Raises:
            PluginError: `_name` is not set, or torch has no such module (the vendor's package was not imported).
        """
        if not self._name:
            raise PluginError(f"{type(self).__name__} has no `_name`; set it to the device type of torch")
        try:
            return torch.get_device_module(self._name)
        except RuntimeError as error:
            raise PluginError(
                f"{type(self).__name__}: torch {torch.__version__} has no module torch.{self._name}; "
                "import the vendor's package that registers it before the accelerator is built"
            ) from error

    def _has(self, name: str) -> bool:
        return hasattr(self._module(), name)

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call `torch.<device>.<name>`.

        Raises:
            NotImplementedError: that module has no such function.
        """
        return self._attribute(name)(*args, **kwargs)

    def _attribute(self, name: str) -> Any:
        module = self._module()
        if not hasattr(module, name):
            raise NotImplementedError(
                f"{type(self).__name__}: torch.{self._name} of torch {torch.__version__} has no {name!r}; "
                "the accelerator must override the method that needs it"
            )
        return getattr(module, name)
