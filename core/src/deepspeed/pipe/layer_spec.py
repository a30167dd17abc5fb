"""`LayerSpec`: how to build a layer, so that only the rank whose stage it is in builds it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module

from deepspeed.errors import ConfigError


class LayerSpec:
    """A module's class and its arguments.

        layers = [LayerSpec(torch.nn.Linear, 16, 64), LayerSpec(torch.nn.ReLU), LayerSpec(torch.nn.Linear, 64, 4)]

    Args:
        typename: a subclass of `torch.nn.Module`.
        *module_args: its arguments.
        **module_kwargs: its named arguments.

    Raises:
        ConfigError: `typename` is no such class.
    """

    def __init__(self, typename: type[Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, Module)):
            raise ConfigError(f"{type(self).__name__}: found {typename!r}; give a subclass of torch.nn.Module")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.global_rank = -1

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *given])})"

    def build(self, log: bool = False) -> Module:
        """A new module; `log` is accepted for compatibility."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def num_parameters(self) -> int:
        """Elements of the parameters that train; the module is built without memory."""
        with torch.device("meta"):
            module = self.build()
        return count_parameters(module)


class TiedLayerSpec(LayerSpec):
    """A layer that shares one module with all others of the same key, whatever stages they are in.

    Every stage that has one of them holds the module. It starts from the weights that the first of these stages has
    drawn, and gradients of all its parameters are summed over the stages, so that the copies stay equal.

    Args:
        key: names the shared module.
        typename: its class.
        *module_args: its arguments.
        forward_fn: called as `forward_fn(module, inputs)` instead of the module itself.
        tied_weight_attr: what the layers share, for example "weight" or ["word.weight", "bias"]; it must exist. All
            other parameters of the module are shared too, as they are on one rank.
        **module_kwargs: named arguments of the class.

    Raises:
        ConfigError: the key is no name for parameters.
    """

    def __init__(
        self,
        key: str,
        typename: type[Module],
        *module_args: Any,
        forward_fn: Callable[[Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        if not isinstance(key, str) or not key or "." in key:
            raise ConfigError(f"TiedLayerSpec: found the key {key!r}; give a name without dots")
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def check(self, module: Module) -> None:
        """Raises ConfigError if the module has no tied weight of that name."""
        for path in self.tied_weight_attr:
            found: Any = module
            for name in path.split("."):
                found = getattr(found, name, None)
            if not isinstance(found, torch.Tensor):
                has = ", ".join(name for name, _ in module.named_parameters()) or "none"
                raise ConfigError(
                    f"TiedLayerSpec({self.key!r}): {self.typename.__name__} has no tensor {path!r}; its parameters are "
                    f"{has}, so give one of them as tied_weight_attr"
                )


def count_parameters(module: Module) -> int:
    """Elements of the parameters that train."""
    return sum(param.numel() for param in module.parameters() if param.requires_grad)
