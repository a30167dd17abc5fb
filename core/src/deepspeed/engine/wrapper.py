"""Parts through which an engine and the user's module reach each other.

`ModuleWrapper`: a module around the user's module that also has its attributes. Base of the engines.
`GenerateOfModule`, `ZeroGradOfModule`: replace a method of the module, so that scripts that call it reach the engine.
`ending_together`: context in which ranks ask each other over the engine's group whether all have their tokens.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import nn

from deepspeed.comm import GroupBackend
from deepspeed.errors import AbsentMemberError

#: method of transformers' models: whether a rank must go on; with `synced_gpus`, as long as any rank must
_GOES_ON = "_has_unfinished_sequences"


class ModuleWrapper(nn.Module):
    """`ModuleWrapper` looks up attributes that it lacks in `module`, so that libraries take it for the model."""

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


class MethodOfModule:
    """`MethodOfModule` replaces the module's method `name` while an engine has the module, and calls the engine.

    It keeps no engine alive. If the engine is gone or destroyed, and in a copy of the module, it calls the model's own
    method.

    Args:
        call: the engine's method that is called with the model's own method, and its arguments as a tuple and a dict;
            None: the object belongs to a copy of the module.
        former: the instance's former method; None: only its class has one.
    """

    name: ClassVar[str]

    def __init__(self, module: nn.Module, call: Callable[..., Any] | None, former: Callable[..., Any] | None) -> None:
        self._module, self._former = weakref.ref(module), former
        self._call = None if call is None else weakref.WeakMethod(call)

    @classmethod
    def lead(cls, module: nn.Module, call: Callable[..., Any]) -> "MethodOfModule":
        """Let the module's method call this method of an engine from now on, and return what replaces it."""
        if isinstance(found := vars(module).get(cls.name), cls) and not found.leads:
            found.put_back()  # it belongs to an engine that is gone, or to the module of which this is a copy
        vars(module)[cls.name] = leading = cls(module, call, vars(module).get(cls.name))
        return leading

    @property
    def leads(self) -> bool:
        """Whether a call leads to an engine."""
        return self._call is not None and self._call() is not None

    @property
    def own(self) -> Callable[..., Any]:
        """The model's own method."""
        if isinstance(self._former, MethodOfModule):
            return self._former.own
        if self._former is not None:
            return self._former
        module: Any = self._module()
        return cast(Callable[..., Any], getattr(type(module), self.name).__get__(module))

    def put_back(self) -> None:
        """Restore the instance's former method; the engine leaves the module."""
        self._call = None
        module = self._module()
        if module is not None and vars(module).get(self.name) is self:
            del vars(module)[self.name]
            if self._former is not None:
                vars(module)[self.name] = self._former

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        call = None if self._call is None else self._call()
        return self.own(*inputs, **kwargs) if call is None else call(self.own, inputs, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)


class GenerateOfModule(MethodOfModule):
    """`GenerateOfModule` replaces `module.generate`: the ranks of a model generate together."""

    name = "generate"

    def __reduce__(self) -> tuple[Any, ...]:
        return GenerateOfModule, (self._module(), None, self._former)  # as the copied module has it


class ZeroGradOfModule(MethodOfModule):
    """`ZeroGradOfModule` replaces `module.zero_grad`: the engine may keep gradients that this cannot drop."""

    name = "zero_grad"

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module(), self.name)  # of a copy, and of a file that is read without this package


@contextmanager
def ending_together(module: nn.Module, backend: GroupBackend) -> Iterator[None]:
    """Let `generate` with `synced_gpus`, called inside, ask over `backend` whether all its ranks have their tokens.

    If a rank fails, its peers are released there; in transformers' own all-reduce they would wait for that rank.
    """

    def goes_on(this_peer_finished: bool, synced_gpus: bool, device: torch.device, **_: Any) -> bool:
        if not synced_gpus:
            return not this_peer_finished
        unfinished = torch.full((1,), float(not this_peer_finished), device=device)
        backend.all_reduce(unfinished).wait()
        return unfinished.item() > 0

    models = [each for each in module.modules() if hasattr(type(each), _GOES_ON) and _GOES_ON not in vars(each)]
    for each in models:
        vars(each)[_GOES_ON] = goes_on
    try:
        yield
    finally:
        for each in models:
            del vars(each)[_GOES_ON]
