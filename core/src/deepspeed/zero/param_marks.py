"""Set the attributes that libraries read on the parameters of a stage-3 model: `ds_id`, `ds_shape`, `ds_status`, ...

Every parameter of the model has them: parameters of a unit (`param_unit.py`), and small parameters that stay whole.
"""

import enum
import itertools
from collections.abc import Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.nn import Parameter

from deepspeed.comm.backend import GroupBackend
from deepspeed.errors import StateError

if TYPE_CHECKING:
    from deepspeed.zero.param_unit import ParamUnit


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's documented states; libraries compare them with `param.ds_status`.

    In stages 0, 1 and 2 parameters are whole and carry no `ds_status`.

        NOT_AVAILABLE --launch--> INFLIGHT --finish--> AVAILABLE --release--> NOT_AVAILABLE
    """

    AVAILABLE = 1  # whole on this rank
    NOT_AVAILABLE = 2  # this rank has only its shard
    INFLIGHT = 3  # the all-gather was issued


#: the legal moves; `ParamUnit._move` is the only writer
LEGAL_MOVES = {
    (ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.INFLIGHT),
    (ZeroParamStatus.INFLIGHT, ZeroParamStatus.AVAILABLE),
    (ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE),
}


_ids = itertools.count()
#: attribute of a module of `zero.Init`: the handle of a hook that refuses its forward until an engine has the module
WITHOUT_ENGINE = "_ds_without_engine"
#: attribute of a small parameter that a context holds; see `gather.py`
KEPT = "_ds_kept_value"


def reset_ids() -> None:
    """Count ids from 0 again; called between tests, whose ranks may have had different numbers of parameters."""
    global _ids
    _ids = itertools.count()


def mark(param: Parameter, unit: "ParamUnit", index: int) -> None:
    """Give a parameter of a unit its attributes."""
    _set(param, unit.ranks, ds_unit=unit, ds_index=index, ds_tensor=unit.shard_of(index), ds_shape=unit.shapes[index])
    param.ds_status = unit.status  # type: ignore[attr-defined]
    param.set_ = MethodType(_set_memory, param)  # type: ignore[assignment]


def mark_whole(param: Parameter, ranks: GroupBackend, name: str, *, checks_values: bool) -> None:
    """Give a parameter that every rank keeps whole its attributes: it is its own shard and always available.

    Args:
        checks_values: whether read-only contexts compare its values (`enable_sanity_checks`).
    """
    _set(param, ranks, ds_persist=True, ds_tensor=param, ds_shape=param.shape)
    param.ds_name, param.ds_checks_values = name, checks_values  # type: ignore[attr-defined]


def unmark(param: Parameter) -> None:
    """Remove the attributes."""
    for name in _MARKS:
        param.__dict__.pop(name, None)


def _set(param: Parameter, ranks: GroupBackend, **attributes: Any) -> None:
    common = {
        "ds_id": param.ds_id if hasattr(param, "ds_id") else next(_ids),
        "ds_numel": attributes["ds_shape"].numel(),
        "ds_status": ZeroParamStatus.AVAILABLE,
        "ds_persist": False,
        "ds_active_sub_modules": set(),
        "ds_process_group": ranks.group,
        "ds_world_size": ranks.world_size,
        "partition_numel": MethodType(_partition_numel, param),
        "all_gather": MethodType(_all_gather, param),
        "partition": MethodType(_partition, param),
        "ds_summary": MethodType(_summary, param),
        "__deepcopy__": MethodType(_deepcopy, param),
        "__reduce_ex__": MethodType(_reduce, param),
    }
    for name, value in {**common, **attributes}.items():
        setattr(param, name, value)


_MARKS = (
    "ds_unit", "ds_index", "ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor", "ds_persist",
    "ds_active_sub_modules", "ds_process_group", "ds_world_size", "partition_numel", "all_gather", "partition",
    "ds_name", "ds_checks_values", "ds_summary", "ds_z3_leaf_module", "__deepcopy__",
    "__reduce_ex__", "set_",
)  # fmt: skip


def _partition_numel(param: Any) -> int:
    """Return how many elements of this parameter this rank keeps."""
    numel: int = param.ds_tensor.numel()
    return numel


def _all_gather(param: Any, param_list: Sequence[Any] | None = None, **_: Any) -> None:
    """Gather this parameter, or those of `param_list`. A collective."""
    for each in [param] if param_list is None else param_list:
        if (unit := getattr(each, "ds_unit", None)) is not None:
            unit.gather()


def _partition(param: Any, param_list: Sequence[Any] | None = None, has_been_updated: bool = False, **_: Any) -> None:
    """Keep only this rank's shard of this parameter, or of those in `param_list`.

    Args:
        has_been_updated: whether the whole weights were changed, identically on all ranks.
    """
    for each in [param] if param_list is None else param_list:
        unit = getattr(each, "ds_unit", None)
        if unit is not None and unit.status is ZeroParamStatus.AVAILABLE:
            if has_been_updated:
                unit.take_from_full()
            unit.accept_changes()
            unit.release()


def _set_memory(param: Any, *source: Any, **keys: Any) -> Any:
    """Run `Tensor.set_`, except `param.set_(param)` of `torch.nn.utils.parametrize`, which torch counts as a change."""
    is_itself = len(source) == 1 and source[0] is param and not keys
    return param if is_itself else Parameter.set_(param, *source, **keys)  # type: ignore[call-overload]


def _deepcopy(param: Any, memo: dict[int, Any]) -> Parameter:
    """Return a copy that is a plain parameter.

    Raises:
        StateError: if `param` is sharded, since the copy would be empty.
    """
    _require_whole(param, "copy.deepcopy")
    copied: Parameter = Parameter.__deepcopy__(param, memo)
    return copied


def _reduce(param: Any, protocol: int) -> Any:
    """Return how `param` is pickled: as a plain parameter that owns its memory.

    Raises:
        StateError: if `param` is sharded, since the pickled parameter would be empty.
    """
    _require_whole(param, "pickle and torch.save")
    plain = Parameter(param.detach().clone(), param.requires_grad)
    plain.__dict__.update({name: value for name, value in vars(param).items() if name not in (*_MARKS, KEPT)})
    return plain.__reduce_ex__(protocol)


def _require_whole(param: Any, asked: str) -> None:
    if param.shape != param.ds_shape:
        raise StateError(
            f"{asked}: the parameter {param.ds_unit.names[param.ds_index]} of shape {tuple(param.ds_shape)} is "
            "sharded, so its copy would be empty; copy or save the module inside "
            "deepspeed.zero.GatheredParameters(module.parameters()), where the copy is a plain, whole module, or call "
            "engine.save_16bit_model(folder), which writes the whole weights"
        )


def _summary(param: Any, **_: Any) -> dict[str, Any]:
    """Return facts about the parameter for a log: its id, status, and sizes whole and as a shard."""
    return {
        "id": param.ds_id,
        "status": param.ds_status.name,
        "numel": param.numel(),
        "ds_numel": param.ds_numel,
        "shape": tuple(param.shape),
        "ds_shape": tuple(param.ds_shape),
        "requires_grad": param.requires_grad,
        "ds_tensor.shape": tuple(param.ds_tensor.shape),
    }
