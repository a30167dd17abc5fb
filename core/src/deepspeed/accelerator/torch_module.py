"""TorchModule: the way from an accelerator to what torch knows of its device. The root of all faces.

Two places are asked: the device's own module, `torch.xyz`, and where that lacks a name `torch.accelerator`, which
answers for the one kind of device that this process has, whatever it is.
"""

from types import ModuleType
from typing import Any

import torch

from deepspeed.errors import PluginError

# What `torch.accelerator` calls differently than the modules of devices do.
_GENERIC_NAMES = {
    "current_device": "current_device_index",
    "device": "device_index",
    "mem_get_info": "get_memory_info",
    "set_device": "set_device_index",
}


class TorchModule:
    """Answers by torch; the error says what to override when torch has no answer."""

    _name: str = ""
    _communication_backend_name: str = ""
    _compile_backend: str = "inductor"

    def _module(self) -> ModuleType:
        """Return torch's module for the device, for example `torch.cpu`.

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
        return self._find(name) is not None

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call `torch.<device>.<name>`, or its like in `torch.accelerator`.

        Raises:
            NotImplementedError: torch has no such function.
        """
        return self._attribute(name)(*args, **kwargs)

    def _attribute(self, name: str) -> Any:
        found = self._find(name)
        if found is None:
            raise NotImplementedError(
                f"{type(self).__name__}: neither torch.{self._name} nor torch.accelerator of torch {torch.__version__} "
                f"has {name!r} for this device; the accelerator must override the method that needs it"
            )
        return found

    def _find(self, name: str) -> Any:
        """Return what torch has under `name`, or None."""
        found = getattr(self._module(), name, None)
        if found is None and self._is_torchs_accelerator():
            if name in ("Stream", "Event"):
                return getattr(torch, name)  # made without an argument they are of torch's accelerator
            found = getattr(torch.accelerator, _GENERIC_NAMES.get(name, name), None)
        return found

    def _is_torchs_accelerator(self) -> bool:
        """Whether `torch.accelerator` speaks of this device."""
        current = torch.accelerator.current_accelerator()
        return current is not None and current.type == self._name
