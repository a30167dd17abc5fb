"""`ModuleWrapper`: a module around the user's, whose attributes are also its own. Base of the engines."""

from typing import Any

from torch import nn

from deepspeed.errors import AbsentMemberError


class ModuleWrapper(nn.Module):
    """Attributes that it does not have are looked up in `module`, so that libraries take it for the model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            try:
                return getattr(module, name)
            except AbsentMemberError:
                raise
            except AttributeError:
                raise AttributeError(
                    f"neither {type(self).__name__} nor the wrapped {type(module).__name__} has {name!r}"
                ) from None
