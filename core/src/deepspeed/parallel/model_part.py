"""Marks record which part of a whole parameter a rank holds if tensor or expert parallelism divides the model.

The layers that divide a parameter mark it. Norms, checkpoints and consolidated weights read only the mark, not the
layers:

    mark_part(linear.weight, ModelPart(torch.Size([12, 4]), dim=0, ranges=((0, 2), (4, 6))))

Here the rank holds rows 0, 1, 4 and 5 of a [12, 4] weight, in this order, as for a fused query-key-value weight. A
parameter without a mark is whole on every rank that has a parameter of this name.

`PipelineModule` sets another mark (`mark_tied`) on parameters that several pipeline stages hold copies of. These stages
sum the gradients of such a parameter.

Some parameters are sharded before a model is divided: `zero.Init` releases the weights of a module as it is built. Code
that divides a model changes such parameters through the object that sharded them, and does not handle shards itself:

    reshard(linear.weight, part.take, mesh.gradient_group())

Parameters with the attribute `allreduce` set to False belong to experts, as documented. `deepspeed.moe.utils` has these
functions. The layers of `deepspeed.moe` mark their experts; any other layer may do the same:

    param.allreduce = False
    param.group_name = "ep_size_2"      # the experts are divided over two ranks

Gradients of experts are summed over the ranks that hold the same experts (`zero/unit_groups.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from deepspeed.errors import ConfigError


class Reshard(Protocol):
    """Replace the values of a sharded parameter, and the ranks that hold its shards."""

    def __call__(self, param: Parameter, take: Callable[[Tensor], Tensor], group: ProcessGroup) -> None:
        """`reshard` for one parameter."""


def whole_shape(param: Tensor) -> torch.Size:
    """Return the shape of a parameter's weight, even if the parameter is sharded and its own shape is empty."""
    shape: torch.Size = getattr(param, "ds_shape", param.shape)
    return shape


def is_sharded(param: Tensor) -> bool:
    """Whether the parameter is sharded, so another object holds its weight."""
    return hasattr(param, "ds_id")


def can_reshard(param: Tensor) -> bool:
    """Whether a sharded parameter may still get other values: no engine owns it."""
    return _of(param) is not None


def reshard(param: Parameter, take: Callable[[Tensor], Tensor], group: ProcessGroup) -> None:
    """Replace the value of a sharded parameter, and shard it over other ranks. Only this weight is whole meanwhile.

    A collective of the ranks that hold the shards now; they call it for the same parameters in the same order.

    Args:
        take: returns the new value for the current value.
        group: the ranks that hold the new value, which is equal on all of them.
    """
    change = _of(param)
    assert change is not None, "asked for by can_reshard"
    change(param, take, group)


def _of(param: Tensor) -> Reshard | None:
    unit: Any = getattr(param, "ds_unit", None)
    return getattr(unit, "reshard", None)


_MARK = "ds_model_part"
_NAMES = "ds_whole_names"
_COUNTED = "ds_counted_numel"


@dataclass(frozen=True)
class ModelPart:
    """A part of a whole parameter.

    Args:
        shape: the shape of the whole parameter.
        dim: the dim along which it is divided.
        ranges: the [start, stop) ranges along `dim` that this rank holds, in the order in which it holds them.
        name: the name of the whole parameter in an undivided model, if different from the name here: an expert may be
            the third of its layer, and the first of its rank. "": the name here.
    """

    shape: torch.Size
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    name: str = ""

    @classmethod
    def all_of(cls, shape: torch.Size, name: str = "") -> "ModelPart":
        """Return the part that is the whole parameter. With a name, other ranks hold other parameters like it."""
        return cls(shape, ranges=((0, shape[0]),) if shape else (), name=name)

    @classmethod
    def all_elements(cls, shape: torch.Size) -> "ModelPart":
        """Return the part that has all elements, to read from files. A scalar gets the shape [1]."""
        return cls.all_of(shape or torch.Size([1]))

    @property
    def own_shape(self) -> torch.Size:
        """The shape of the part that this rank holds."""
        if self.is_whole:
            return self.shape
        own = list(self.shape)
        own[self.dim] = sum(stop - start for start, stop in self.ranges)
        return torch.Size(own)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds the whole parameter."""
        return not self.shape or self.ranges == ((0, self.shape[self.dim]),)

    def to_plain(self) -> dict[str, Any]:
        """Return the part as JSON values, for a file or a peer."""
        return {"shape": list(self.shape), "dim": self.dim, "ranges": [*map(list, self.ranges)], "name": self.name}

    @classmethod
    def of_plain(cls, value: Mapping[str, Any]) -> "ModelPart":
        """Return the part from the values of `to_plain`.

        Raises:
            KeyError, TypeError, ValueError, IndexError: `value` is no valid part.
        """
        shape, dim = torch.Size(value["shape"]), int(value["dim"])
        ranges = tuple((int(start), int(stop)) for start, stop in value["ranges"])
        if dim < 0 or any(not 0 <= start <= stop <= shape[dim] for start, stop in ranges):
            raise ValueError(f"ranges {ranges} along {dim} of shape {tuple(shape)}")
        if any(one[1] > other[0] for one, other in pairwise(sorted(ranges))):
            raise ValueError(f"ranges {ranges} overlap")
        return cls(shape, dim, ranges, str(value["name"]))

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole parameter: a view for one range, a copy for several ranges."""
        assert whole.shape == self.shape, (whole.shape, self)
        if self.is_whole:
            return whole
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def put(self, own: Tensor, whole: Tensor) -> None:
        """Write this rank's part into the whole parameter."""
        if self.is_whole:
            whole.copy_(own)
            return
        at = 0
        for start, stop in self.ranges:
            whole.narrow(self.dim, start, stop - start).copy_(own.narrow(self.dim, at, stop - start))
            at += stop - start


def mark_part(param: Tensor, part: ModelPart, *, over: str = "tp") -> None:
    """Mark which part of a whole parameter `param` is.

    Args:
        over: the axis over which the parameter is divided: "tp", or "ep" for experts. An expert's parameter that is
            whole on its rank has `part.name`.
    """
    assert whole_shape(param) == part.own_shape, (whole_shape(param), part)
    setattr(param, _MARK, part)
    if over == "tp" and not part.is_whole:
        param.tensor_model_parallel = True  # type: ignore[attr-defined]  # Megatron's mark, which norms read


def mark_names(module: Module, whole_names: Mapping[str, str]) -> None:
    """Record the names in a whole model of the parameters and buffers in `module`, such as whole experts.

    The module keeps these names. A parameter's mark has one name, but the parameter may have several; a buffer has no
    mark, since a forward may replace it by another tensor.
    """
    setattr(module, _NAMES, dict(whole_names))


def mark_counted(param: Tensor, numel: int) -> None:
    """Mark that norms count only the first `numel` elements of `param` on this rank: an earlier rank also holds the
    others, for example if ranks share a key and value head."""
    setattr(param, _COUNTED, numel)


def counted_numel(param: Tensor) -> int | None:
    """Return how many leading elements of `param` norms count on this rank; None: all."""
    return getattr(param, _COUNTED, None)


def part_held(param: Tensor) -> ModelPart | None:
    """Return the mark of a parameter; None: the parameter is whole here."""
    return getattr(param, _MARK, None)


def parts_held(module: Module) -> Mapping[str, ModelPart]:
    """Return the marks of a module's parameters and buffers, by their names on this rank."""
    marked = ((name, part_held(param)) for name, param in module.named_parameters(remove_duplicate=False))
    parts = {name: part for name, part in marked if part is not None}
    for path, each in module.named_modules(remove_duplicate=False):
        names: Mapping[str, str] = getattr(each, _NAMES, {})
        buffers = dict(each.named_buffers(remove_duplicate=False)) if names else {}
        for name, whole_name in names.items():
            here = f"{path}.{name}".lstrip(".")
            if name in buffers:
                parts[here] = ModelPart.all_of(buffers[name].shape, whole_name)
            elif here in parts:
                parts[here] = replace(parts[here], name=whole_name)
    return parts


def whole_names(module: Module) -> list[str]:
    """Return the names in the undivided model for the entries of the module's state dict."""
    parts = parts_held(module)
    return [parts[name].name or name if name in parts else name for name in module.state_dict(keep_vars=True)]


def division_is_known(module: Module) -> bool:
    """Whether every divided parameter has a mark. Parameters of the user's own layers may have no mark, or only
    Megatron's."""
    divided = [param for param in module.parameters() if getattr(param, "tensor_model_parallel", False)]
    return bool(divided) and all(part_held(param) is not None for param in divided)


def is_tensor_parallel(param: Tensor) -> bool:
    """Whether tensor-parallel ranks hold different parts of the parameter, according to Megatron's mark."""
    return bool(getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False))


_TIED = "ds_tied_stages"


def mark_tied(param: Tensor, stages: tuple[int, ...]) -> None:
    """Mark that two or more stages hold copies of `param`."""
    assert len(stages) > 1, stages
    setattr(param, _TIED, stages)


def tied_stages(param: Tensor) -> tuple[int, ...]:
    """Return the stages that hold copies of a parameter; empty if only one stage holds it."""
    return getattr(param, _TIED, ())


ParamGroup = dict[str, Any]

#: prefix of the name of a group of experts; the number of ranks over which they are divided follows
EXPERT_PREFIX = "ep_size_"


_group_being_built: str | None = None


@contextmanager
def building_experts(ep_size: int) -> Iterator[None]:
    """Treat modules built inside as experts that are divided over `ep_size` ranks. `zero.Init` marks their parameters
    before it shards them."""
    global _group_being_built
    before, _group_being_built = _group_being_built, f"{EXPERT_PREFIX}{ep_size}"
    try:
        yield
    finally:
        _group_being_built = before


def mark_if_built_as_expert(param: Tensor) -> None:
    """Mark a parameter as an expert's if it is made inside `building_experts`."""
    if _group_being_built is not None and not is_moe_param(param):
        mark_as_expert(param, _group_being_built)


def mark_as_expert(param: Tensor, group_name: str) -> None:
    """Mark a parameter as an expert's, of a group such as "ep_size_2"."""
    param.allreduce = False  # type: ignore[attr-defined]
    param.group_name = group_name  # type: ignore[attr-defined]


class ModuleOfExperts(Module):
    """A module in which all parameters and buffers belong to experts. `copy.deepcopy` drops the marks of parameters, so
    a copy sets them again. Buffers have no marks, since a forward may replace them by other tensors."""

    def mark_as_experts(self, ep_size: int) -> None:
        """Mark the parameters of experts that are divided over `ep_size` ranks; called once they exist."""
        self.ep_size = ep_size
        for param in self.parameters():
            mark_as_expert(param, f"{EXPERT_PREFIX}{ep_size}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_as_experts(self.ep_size)


def is_moe_param(param: Tensor) -> bool:
    """Whether the parameter is an expert's."""
    return getattr(param, "allreduce", True) is False


def expert_group_of(param: Tensor) -> str | None:
    """Return the group name of an expert's parameter; None for a parameter that is not an expert's."""
    return str(getattr(param, "group_name", None)) if is_moe_param(param) else None


def expert_groups(module: Module) -> dict[str, str]:
    """Return the expert group names, by the names of the experts' parameters and buffers."""
    named = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    found = {name: group for name, tensor in named if (group := expert_group_of(tensor)) is not None}
    for path, each in module.named_modules(remove_duplicate=False):
        if isinstance(each, ModuleOfExperts):
            buffers = each.named_buffers(path, remove_duplicate=False)
            found.update({name: f"{EXPERT_PREFIX}{each.ep_size}" for name, _ in buffers})
    return found


def expert_sizes(module: Module) -> dict[str, int]:
    """Return the number of ranks over which experts are divided, by the name of their group.

    Raises:
        ConfigError: for an expert's parameter without a valid group name.
    """
    sizes: dict[str, int] = {}
    for path, param in module.named_parameters():
        if not is_moe_param(param):
            continue
        name = getattr(param, "group_name", None)
        size = str(name).removeprefix(EXPERT_PREFIX)
        if size == name or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"parameter {path}: it is marked as an expert's (allreduce=False), and its group_name is {name!r}; "
                f'give the number of ranks over which the experts are divided, such as "{EXPERT_PREFIX}2"'
            )
        sizes[str(name)] = int(size)
    return dict(sorted(sizes.items()))


def is_moe_param_group(param_group: ParamGroup) -> bool:
    """Whether the parameter group is marked as a group of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split the parameters into two lists: shared parameters, and parameters of experts."""
    shared: list[Tensor] = []
    experts: list[Tensor] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def split_params_grads_into_shared_and_expert_params(group: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split the gradients of the parameters into two lists, like `split_params_into_shared_and_expert_params`."""
    shared, experts = split_params_into_shared_and_expert_params(param for param in group if param.grad is not None)
    return [param.grad for param in shared if param.grad is not None], [
        param.grad for param in experts if param.grad is not None
    ]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: ParamGroup | Sequence[ParamGroup], max_group_size: int | float = 178956971
) -> list[ParamGroup]:
    """Return the optimizer's groups, followed by separate groups for experts.

    A group of experts has the options of the group that the experts were in, `moe: True`, and the group name as `name`
    ("ep_size_2"). The experts are removed from the given groups, in place. Groups without experts stay unchanged.

    Args:
        param_groups: one group or several.
        max_group_size: maximum numel of a group of experts; a single larger parameter gets its own group.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    found: list[ParamGroup] = []
    for group in groups:
        group["params"] = _listed(group["params"])
        shared, experts = split_params_into_shared_and_expert_params(group["params"])
        if not experts:
            continue
        options = {key: value for key, value in group.items() if key != "params"}
        group["params"] = shared
        for name in dict.fromkeys(str(expert_group_of(param)) for param in experts):
            own = [param for param in experts if expert_group_of(param) == name]
            found += [{**options, "name": name, "moe": True, "params": part} for part in _cut(own, max_group_size)]
    return groups + found


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Return parameters or parameter groups for an optimizer, with any experts in separate groups.

    The input is returned unchanged if a group is already marked as a group of experts (`moe`), or without experts.

    Raises:
        ConfigError: `model_parameters` is not a list.
    """
    if not isinstance(model_parameters, list):
        raise ConfigError(f"configure_moe_param_groups: found {type(model_parameters).__name__}; give a list")
    if all(isinstance(each, Tensor) for each in model_parameters):
        if not any(map(is_moe_param, model_parameters)):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": model_parameters, "name": "dense-params"}
        )
    if any(is_moe_param_group(group) for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


def _listed(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    return params if isinstance(params, list) else list(params)  # a generator can be read only once


def _cut(params: Iterable[Tensor], max_numel: int | float) -> list[list[Tensor]]:
    """Group consecutive parameters, with at most `max_numel` elements per group unless one parameter is larger."""
    parts: list[list[Tensor]] = []
    room: int | float = 0
    for param in params:
        numel = getattr(param, "ds_numel", param.numel())
        if not parts or numel > room:
            parts.append([])
            room = max_numel
        parts[-1].append(param)
        room -= numel
    return parts
