"""The names `deepspeed.ops.op_builder.<X>Builder`: each refers to the current accelerator's builder when it is used.

A name cannot be a class: there is none before an accelerator is chosen, and `set_accelerator` changes the class.
Vendors' code and DeepSpeed's tests call a name, derive from it, and read `FusedAdamBuilder.NAME`.
"""

from functools import cache
from typing import Any

from deepspeed.errors import OpUnavailable


class BuilderName:
    """The name of a builder. `builder_name` creates one object per name.

        FusedAdamBuilder()              an instance of the current accelerator's builder, or OpUnavailable
        FusedAdamBuilder.NAME           an attribute of the builder class
        class Mine(FusedAdamBuilder)    derives from the builder class at this moment
        isinstance(x, FusedAdamBuilder) whether x is an instance of any class with this name

    The first use, in any of these ways, chooses the accelerator. The class itself is
    `get_accelerator().get_op_builder("FusedAdamBuilder")`.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __package__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the first builder of this name that works on this machine, else of the first one.

        Raises:
            OpUnavailable: no source has such a builder; the message gives every reason.
        """
        from deepspeed.ops import registry

        return registry.create_builder(self.__name__, *args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # inspect, copy and others read these from every object
            raise AttributeError(f"{self!r} has no attribute {attribute!r}")
        try:
            return getattr(self._class(), attribute)
        except OpUnavailable as error:
            raise AttributeError(f"{self.__name__}.{attribute}: {error}") from error

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._class(),)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._classes())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._classes())

    def __repr__(self) -> str:
        return f"<op builder name {self.__module__}.{self.__name__}>"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return builder_name, (self.__name__,)

    def _classes(self) -> tuple[Any, ...]:
        from deepspeed.ops.implementations import implemented

        return tuple(found.builder_class for found in implemented(self.__name__))

    def _class(self) -> Any:
        """Return the class that a call would instantiate. Raises OpUnavailable if there is none."""
        classes = self._classes()
        return classes[0] if len(classes) == 1 else type(self())


@cache
def builder_name(name: str) -> BuilderName:
    """Return the only `BuilderName` object for `name`."""
    return BuilderName(name)
