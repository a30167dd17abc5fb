"""How an engine and the user's module lead to each other.

`ModuleWrapper`: a module around the user's, whose attributes are also its own. Base of the engines.
`GenerateOfModule`: `module.generate`, which scripts call on the module, leads to the engine.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any, cast

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


class GenerateOfModule:
    """What `module.generate` is while an engine has the module: a call leads to the engine.

    It keeps no engine alive. When the engine is gone or destroyed, and in a copy of the module, the model's own
    `generate` is called.

    Args:
        call: the engine's method that is called with the model's own `generate`, and what that is given as a tuple and
            a dict; None: it is that of a copy.
        former: what the instance had in this place; None: its class has the method.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any] | None, former: Callable[..., Any] | None) -> None:
        self._module, self._former = weakref.ref(module), former
        self._call = None if call is None else weakref.WeakMethod(call)

    @property
    def leads(self) -> bool:
        """Whether a call leads to an engine."""
        return self._call is not None and self._call() is not None

    @property
    def own(self) -> Callable[..., Any]:
        """The model's own `generate`."""
        if isinstance(self._former, GenerateOfModule):
            return self._former.own
        if self._former is not None:
            return self._former
        module: Any = self._module()
        return cast(Callable[..., Any], type(module).generate.__get__(module))

    def put_back(self) -> None:
        """The engine leaves the module; what the instance had before is there again."""
        self._call = None
        module = self._module()
        if module is not None and vars(module).get("generate") is self:
            del vars(module)["generate"]
            if self._former is not None:
                vars(module)["generate"] = self._former

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        call = None if self._call is None else self._call()
        return self.own(*inputs, **kwargs) if call is None else call(self.own, inputs, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    def __reduce__(self) -> tuple[Any, ...]:
        return GenerateOfModule, (self._module(), None, self._former)  # as the copied module has it


def lead_generate(module: nn.Module, call: Callable[..., Any]) -> GenerateOfModule:
    """From now on `module.generate` calls this method of an engine; see `GenerateOfModule`."""
    if isinstance(found := vars(module).get("generate"), GenerateOfModule) and not found.leads:
        found.put_back()  # that of an engine that was dropped, or of which this module was a copy
    leading = GenerateOfModule(module, call, vars(module).get("generate"))
    vars(module)["generate"] = leading
    return leading
