"""`WholeOnAccess` gathers sharded parameters that other code reads or changes inside `zero.Init`.

The `__init__` of a parent, or `apply`, may initialize the weights of its submodules again in any of torch's ways:
`init.normal_(p)`, `p.data.normal_()`, `p[0] = 0`, `p.data = x`. These submodules are complete, so they are sharded
already. `WholeOnAccess` intercepts every torch function that is called with such a parameter, and gathers the parameter
first, in the dtype in which it was constructed, since random numbers differ by dtype. Existing values are already
rounded to the dtype of the shards: `p.mul_(3)` starts from rounded values.

[Note: until it is not referenced] The result of a function may share memory with the parameter and may be written
later: `row = p.data[0]; row.zero_()`. So a gathered parameter is sharded again only when nothing refers to its memory
any more on any rank, that is when its storage has as many references as right after the gather. The ranks compare this
whenever another parameter is gathered or a module is complete. All arguments of one function stay whole until it ends.
"""

from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from deepspeed.comm.parted import in_call
from deepspeed.comm.values import all_gather_values
from deepspeed.zero.gather import GatheredParameters
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, num_references, shape_of, unit_of

#: properties of a tensor that share its memory; no other property reads values
_VIEWS = {
    getattr(Tensor, name).__get__  # type: ignore[attr-defined]
    for name in ("data", "T", "mT", "H", "mH", "real", "imag")
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_PROPERTY = ("__get__", "__set__", "__delete__")
#: functions that depend on the shape alone; they get the shape of the whole parameter
_OF_SHAPE = {Tensor.shape.__get__, Tensor.ndim.__get__}  # type: ignore[attr-defined]
_OF_SHAPE |= {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__}
#: functions that neither read nor change values
_OF_NO_VALUES = {
    Tensor.requires_grad_,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.element_size,
    Tensor.is_set_to,
}
_OF_NO_VALUES |= {Tensor.__repr__, Tensor.__hash__, torch._has_compatible_shallow_copy_type, torch.is_floating_point}


class WholeOnAccess(TorchFunctionMode):
    """Gathers sharded parameters for torch functions and keeps changes. All ranks call the same functions.

    Args:
        group: all ranks that share parameters; changes of its first rank count.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._first_rank = torch.distributed.get_global_rank(group, 0)
        self._whole: dict[Parameter, _Whole] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA and (args[0] in self._whole or _is_set_by_user(*args)):
            self.gather(args[0])
            self._whole[args[0]].set(args[1])
            return None
        if _reads_values(func):
            self.gather(*args, *kwargs.values())
        elif func in _OF_SHAPE and _is_sharded(args[0]):
            args = (torch.empty(shape_of(args[0]), device="meta"), *args[1:])
        return func(*args, **kwargs)

    def __exit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        super().__exit__(kind, *exc)
        self._shard(list(self._whole.values()), kind, *exc)

    def shard_unreferenced(self, kept: Collection[Parameter] = ()) -> None:
        """Shard the parameters again if nothing refers to their memory; see [Note: until it is not referenced].

        Args:
            kept: parameters that stay whole, because they are arguments of the next function call.
        """
        if not self._whole:
            return
        with torch._C.DisableTorchFunction():
            by_rank = all_gather_values([each.is_referenced() for each in self._whole.values()], self._group)
            referenced = map(any, zip(*by_rank, strict=True))
            held = list(zip(self._whole.values(), referenced, strict=True))
            self._shard([each for each, is_referenced in held if not is_referenced and each.param not in kept])

    def gather(self, *values: Any) -> None:
        """Gather the parameters among `values`, in the dtype in which they were constructed."""
        params = dict.fromkeys(_parameters(values))
        wanted = [param for param in params if _is_sharded(param) and param not in self._whole]
        if not wanted:
            return
        self.shard_unreferenced(kept=params)
        with in_call("zero.Init"):
            for param in wanted:
                self._whole[param] = _Whole(param, self._first_rank)

    def _shard(self, done: "list[_Whole]", *exc: Any) -> None:
        with in_call("zero.Init"):
            for each in done:
                del self._whole[each.param]
                each.shard(*exc)


class _Whole:
    """`_Whole` keeps a parameter whole until `shard` is called, in the dtype in which it was constructed."""

    def __init__(self, param: Parameter, first_rank: int) -> None:
        unit = unit_of(param)
        assert unit is not None
        self.param = param
        self._context = GatheredParameters(param, modifier_rank=first_rank)
        self._context.__enter__()
        self._rounded = param.data
        self._value = self._rounded.to(unit.source_dtype)
        param.data = self._value
        self._num_references = num_references(self._value)

    def is_referenced(self) -> bool:
        return num_references(self._value) > self._num_references

    def set(self, value: Tensor) -> None:
        """Copy the values that are assigned to `param.data`."""
        if value.shape != self._value.shape:
            unit = unit_of(self.param)
            assert unit is not None
            raise ValueError(
                f"zero.Init: parameter {unit.names[0]}: param.data was set to a value of shape {tuple(value.shape)}, "
                f"and the parameter, which is sharded, has the shape {tuple(self._value.shape)}; assign a value of "
                "this shape, or a new torch.nn.Parameter"
            )
        self._value.copy_(value)

    def shard(
        self,
        kind: type[BaseException] | None = None,
        value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Keep this rank's shard of the first rank's values; after an exception, of the former values."""
        if kind is None and not self.param.is_set_to(self._value):  # `param.set_(value)`
            self.set(self.param.data)
        if kind is None and self._rounded is not self._value:
            self._rounded.copy_(self._value)
        self.param.data = self._rounded
        self._context.__exit__(kind, value, traceback)


def _reads_values(func: Callable[..., Any]) -> bool:
    if getattr(func, "__name__", "") in _PROPERTY:
        return func in _VIEWS
    return func not in _OF_SHAPE and func not in _OF_NO_VALUES


def _parameters(values: Any) -> Iterator[Parameter]:
    """Yield the parameters among `values`, also from nested lists and tuples."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _parameters(value)
        elif isinstance(value, Parameter):
            yield value


def _is_sharded(value: Any) -> bool:
    """Return whether `value` is a parameter whose values are not on this rank, or not in the dtype in which it was
    constructed. False for a parameter that the caller has gathered."""
    unit: ParamUnit | None = getattr(value, "ds_unit", None)
    if unit is None or unit.num_contexts > 0:
        return False
    return unit.status is ZeroParamStatus.NOT_AVAILABLE or (not unit.is_sharded and value.dtype != unit.source_dtype)


def _is_set_by_user(param: Any, value: Any) -> bool:
    """Return whether `param.data = value` is an assignment by the user and not the release of the parameter."""
    return _is_sharded(param) and value is not param.ds_unit.nothing
