"""`Unit` holds parameters that are reduced and updated together, with weights, master weights and shards.

`Units` (`units.py`) builds it, cuts its shards into sub-groups, and gives the shards the optimizer's existing state.

Legend: N padded numel of the unit, S numel of this rank's shard.

`synchronize_module` makes every rank start from the weights of the group's first rank. It runs before a stage is
attached, so that fp32 master weights are copied from the same values on all ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend, broadcast_together, serves
from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.values import check_same
from deepspeed.errors import ConfigError
from deepspeed.parallel.model_part import expert_groups, tied_stages
from deepspeed.zero.layout import Fragment, UnitLayout
from deepspeed.zero.param_unit import ParamUnit, shape_of, unit_of
from deepspeed.zero.placement import MASTER, Placement, StoredPart
from deepspeed.zero.unit_groups import UnitGroups, UnitRanks

#: scalar states per parameter; those of a 0-D parameter have the shape of its moments
_NUMBERS = ("step", "mu_product")


@dataclass(slots=True)
class ParamShard:
    """`ParamShard` is one tensor that the optimizer updates: the owned fragment of one parameter."""

    index: int  # of the parameter among all attached ones
    param_group: int  # index of the optimizer's param group
    fragment: Fragment
    weight: Tensor  # the model's memory of this fragment, in the shape of `master`
    master: Tensor  # the optimizer's tensor; shares memory with `weight` unless that has low precision or is elsewhere
    grad: Tensor | None  # the reduced gradient, in the shape of `master`; set by the stage
    stored: StoredPart | None = None  # the values of `weight` if it is offloaded; `weight` may then be on meta
    has_master: bool = field(init=False)  # the optimizer works on a copy, in higher precision or in other memory
    placement: Placement = field(default_factory=Placement)  # of master weight, states and gradient
    shape: torch.Size = field(init=False)  # of `master`, even while `master` has no memory

    def __post_init__(self) -> None:
        self.shape = self.master.shape
        self.has_master = self.master.data_ptr() != self.weight.data_ptr() or self.master.device != self.weight.device

    def load_weight(self) -> Tensor:
        """Return the values of `weight`, 1-D, wherever they are stored; read-only."""
        return self.weight.detach().view(-1) if self.stored is None else self.stored.load()


class Unit:
    """`Unit` holds parameters of one optimizer group and one dtype.

    Args:
        params: trainable parameters with at least one element.
        index: index of the unit in its engine.
        first_index: index of its first parameter among all attached parameters.
        param_group: index of the group in `optimizer.param_groups`.
        layout: which rank owns which elements; in stage 0 one owner has everything.
        ranks: the groups over which the gradients are summed.
        model_dtype: target dtype of the parameters; None leaves it.
        is_flat: whether the parameters become views of one buffer, so that one collective can gather them.
        keeps_params_whole: whether shards keep the shape of their parameter; needs cuts between parameters.
        has_optimizer: without an optimizer there are no master weights.
        placement: where the master weights are kept.
        sharded: the sharded weights (stage 3), already in the model's dtype.
        is_joint: whether ranks find the update of its matrices together (`MatrixExchange`).
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        *,
        index: int,
        first_index: int,
        param_group: int,
        layout: UnitLayout,
        ranks: UnitRanks,
        model_dtype: torch.dtype | None,
        is_flat: bool,
        keeps_params_whole: bool,
        has_optimizer: bool = True,
        placement: Placement | None = None,
        sharded: ParamUnit | None = None,
        is_joint: bool = False,
    ) -> None:
        self.params = list(params)
        self.shapes = [shape_of(param) for param in params]
        self.is_joint = is_joint
        self.sharded = sharded
        self.index = index
        self.first_index = first_index
        self.param_group = param_group
        self.layout = layout
        self.ranks = ranks
        self.rank = ranks.rank if layout.world_size > 1 else 0  # rank as an owner of shards
        source_dtype = sharded.source_dtype if sharded is not None else params[0].dtype
        self.dtype = model_dtype if model_dtype is not None and source_dtype.is_floating_point else source_dtype
        self.shard_slice = slice(*layout.shard(self.rank))  # this rank's elements of a buffer over the whole unit
        is_low = self.dtype in (torch.bfloat16, torch.float16) and model_dtype is not None
        self.placement = placement = placement or Placement()
        self.flat_N = self._allocate_flat() if is_flat else None
        needs_master = has_optimizer and (is_low or placement.fetches or not self._has_weights_in(placement))
        self.master_S = self._create_masters(placement, is_low=is_low) if needs_master else None
        if sharded is None:
            self._place_weights()
        self.shards = [self._create_shard(fragment, keeps_params_whole) for fragment in layout.owned_by(self.rank)]

    def _has_weights_in(self, placement: Placement) -> bool:
        """Return whether the weights are in the memory in which the optimizer works."""
        if self.sharded is None or not self.sharded.is_offloaded:
            return not placement.is_offloaded
        return placement.is_offloaded and not self.sharded.shard_S.is_meta

    def _allocate_flat(self) -> Tensor:
        """Allocate the buffer [N]; the parameters become views of it."""
        flat_N = self.ranks.shard_group.allocate(self.layout.padded_numel, self.dtype, self.params[0].device)
        for start, stop in self.layout.gaps:
            flat_N[start:stop].zero_()
        return flat_N

    def _create_masters(self, placement: Placement, *, is_low: bool) -> Tensor:
        """Create the master weights [S] from the user's weights before these are rounded."""
        layout, dtype = self.layout, torch.float32 if is_low else self.dtype
        master_S = placement.allocate(layout.shard_numel, dtype, self.params[0].device, crosses=not is_low)
        master_S[layout.shard_numel - layout.padding(self.rank) :].zero_()
        for fragment in layout.owned_by(self.rank):
            self._slice(master_S, fragment).copy_(self._initial(fragment))
        return master_S

    def _place_weights(self) -> None:
        """Move the parameters into the flat buffer, or convert each to the model's dtype, contiguous."""
        for param, offset in zip(self.params, self.layout.offsets, strict=True):
            if self.flat_N is not None:
                home = self.flat_N.narrow(0, offset, param.numel()).view(param.shape)
                home.copy_(param.data)
                param.data = home
            elif param.dtype != self.dtype or not param.is_contiguous():
                # fused optimizers need the same layout for weight and gradient
                param.data = param.data.to(self.dtype).contiguous()

    def _create_shard(self, fragment: Fragment, keeps_params_whole: bool) -> ParamShard:
        param = self.params[fragment.param]
        index = self.first_index + fragment.param
        if self.sharded is None and self.flat_N is None and self.master_S is None:
            # fp32 without sharding: the parameter is the master weight
            return ParamShard(index, self.param_group, fragment, param.data, param, None, placement=self.placement)
        weight = _elements(param, fragment) if self.sharded is None else self._slice(self.sharded.shard_S, fragment)
        master = weight if self.master_S is None else self._slice(self.master_S, fragment)
        if keeps_params_whole:
            assert fragment.numel == param.numel(), fragment
            weight, master = weight.view(param.shape), master.view(param.shape)
        stored, placement = self._stored(fragment), self.placement
        return ParamShard(index, self.param_group, fragment, weight, master.detach(), None, stored, placement)

    def _stored(self, fragment: Fragment) -> StoredPart | None:
        """Return the part of the offloaded shard with the fragment's weights; None if they are not offloaded."""
        if self.sharded is None or self.sharded.offloaded is None:
            return None
        return StoredPart(self.sharded.offloaded, fragment.start - self.shard_slice.start, fragment.numel)

    def _initial(self, fragment: Fragment) -> Tensor:
        """Return the fragment's weights as the user gave them."""
        if self.sharded is None:
            return _elements(self.params[fragment.param], fragment)
        assert self.sharded.source_S is not None
        return self._slice(self.sharded.source_S, fragment)

    def forget_masters(self) -> None:
        """Drop the buffer of all master weights; shards keep their parts, which may have been moved already."""
        self.master_S = None

    def _slice(self, buffer_S: Tensor, fragment: Fragment) -> Tensor:
        return buffer_S.narrow(0, fragment.start - self.shard_slice.start, fragment.numel)

    @property
    def device(self) -> torch.device:
        """The device of the whole weights."""
        return self.params[0].device if self.sharded is None else self.sharded.device

    def masters_from_weights(self) -> None:
        """Set the master weights from the model's weights, which were loaded."""
        for shard in self.shards:
            if shard.has_master:
                self.placement.write(shard, MASTER, shard.master, shard.load_weight())

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer works on copies that do not share memory with the (whole) parameters."""
        return not self._is_sharded and any(shard.has_master for shard in self.shards)

    @property
    def is_free(self) -> bool:
        """Whether the optimizer updates the parameters themselves, whatever their memory: stage 0 in fp32."""
        return self.sharded is None and self.flat_N is None and not any(shard.has_master for shard in self.shards)

    @property
    def _is_sharded(self) -> bool:
        return self.sharded is not None and self.sharded.is_sharded

    def homes(self) -> list[tuple[Parameter, Tensor]]:
        """Return each parameter with the memory in which the engine keeps its weights; empty for sharded ones."""
        if self._is_sharded or self.is_free:
            return []
        return [(param, param.data) for param in self.params]

    def take_changes(self, place: int | None = None) -> None:
        """Copy weights that were changed from outside into the master weights. A master weight that rounds to its
        weight is left unchanged, so that it keeps its precision.

        Args:
            place: place of the parameter that was changed; None: all may have changed.
        """
        for shard in self.shards:
            if shard.has_master and place in (None, shard.fragment.param):
                master = self._master(shard).view(-1)
                weight = shard.load_weight().to(master.device)
                new = torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype))
                self.placement.write(shard, MASTER, shard.master, new)

    def weights_from_masters(self) -> None:
        """Set the model's weights to the rounded master weights."""
        for shard in self.shards:
            if shard.has_master and shard.stored is not None:
                shard.stored.store(self._master(shard))
            elif shard.has_master:
                shard.weight.view(-1).copy_(self._master(shard).view(-1))

    def _master(self, shard: ParamShard) -> Tensor:
        master: Tensor = self.placement.read(shard, MASTER, shard.master)
        return master


def _elements(param: Parameter, fragment: Fragment) -> Tensor:
    """Return the fragment's elements of the parameter's memory, 1-D."""
    flat = param.data.reshape(-1) if not param.data.is_contiguous() else param.data.view(-1)
    return flat.narrow(0, fragment.param_start, fragment.numel)


@dataclass(frozen=True, eq=False)
class SubGroup:
    """`SubGroup` holds consecutive shards of this rank's shard of a unit, of one dtype and one optimizer group.

    Attributes:
        shards: at least one.
        start: offset of the first of them from the beginning of this rank's shard, in elements.
        numel: total number of elements.
    """

    shards: tuple[ParamShard, ...]
    start: int
    numel: int

    def starts(self) -> Iterator[tuple[ParamShard, int]]:
        """Yield each shard with its offset from the beginning of the sub-group, in elements."""
        start = 0
        for shard in self.shards:
            yield shard, start
            start += shard.fragment.numel


def divide(shards: Sequence[ParamShard], max_numel: int) -> list[SubGroup]:
    """Divide a unit's shards into sub-groups of at most `max_numel` elements; a longer shard is one by itself."""
    runs: list[list[ParamShard]] = []
    numel = 0
    for shard in shards:
        if not runs or numel + shard.fragment.numel > max_numel:
            runs.append([])
            numel = 0
        runs[-1].append(shard)
        numel += shard.fragment.numel
    first = shards[0].fragment.start if shards else 0
    return [
        SubGroup(tuple(run), run[0].fragment.start - first, sum(shard.fragment.numel for shard in run)) for run in runs
    ]


def adopt_state(optimizer: Optimizer, unit: Unit) -> None:
    """Give each shard its part of the state that the user's optimizer has for the whole parameter, if any.

    Adagrad creates state in its constructor; other optimizers have state if they stepped before `initialize`.

    Raises:
        ConfigError: for a state (other than Adagrad's) that was created from an empty parameter, which `zero.Init` had
            sharded.
    """
    whole = {id(param): optimizer.state.pop(param) for param in unit.params if param in optimizer.state}
    for shard in unit.shards:
        state = whole.get(id(unit.params[shard.fragment.param]))
        if state:
            shape = shape_of(unit.params[shard.fragment.param])
            optimizer.state[shard.master] = {
                name: _initial_state(optimizer, name, shard) if _is_empty(value) else _share(name, value, shard, shape)
                for name, value in state.items()
            }


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 0


def _initial_state(optimizer: Optimizer, name: str, shard: ParamShard) -> Tensor:
    initial = optimizer.defaults.get("initial_accumulator_value")
    if name != "sum" or initial is None:
        raise ConfigError(
            f"initialize: {type(optimizer).__name__} was built with parameters that zero.Init had sharded, and made "
            f"its state {name!r} of empty tensors; name the optimizer in the configuration, or build it inside "
            "deepspeed.zero.GatheredParameters(model.parameters())"
        )
    return torch.full_like(shard.master, initial)


def _share(name: str, value: Any, shard: ParamShard, shape: torch.Size) -> Any:
    if not isinstance(value, Tensor) or value.shape != shape or (value.dim() == 0 and name in _NUMBERS):
        return owned_copy(value, shard.master.device)
    start = shard.fragment.param_start
    values = value.detach().reshape(-1)[start : start + shard.fragment.numel]
    return values.to(shard.master.dtype, copy=True).view(shard.master.shape)


def owned_copy(value: Any, device: torch.device) -> Any:
    """Return a copy that the optimizer may change. Scalars, such as Adam's `step`, stay on their device."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.dim() == 0 else value.to(device, copy=True)


#: tensors below this many bytes are broadcast together
_SMALL_BYTES = 2**20
_TAG = "first weights"


def synchronize_module(
    module: torch.nn.Module,
    group: ProcessGroup | None = None,
    experts: Mapping[str, ProcessGroup] | None = None,
) -> None:
    """Broadcast parameters and buffers from the first rank of `group`. No-op on one rank.

    Args:
        experts: by `param.group_name`, the ranks that hold the same experts; experts' parameters and buffers are
            broadcast from the first of these ranks.

    Raises:
        ConfigError: on every rank, if the module's tensors are not the same by name, shape and dtype.
    """
    if torch.distributed.get_world_size(group) == 1:
        return
    named = [*module.named_parameters(), *module.named_buffers()]
    check_same({"the module": described(named)}, group)
    by_group: dict[ProcessGroup | None, list[Tensor]] = {}
    of_experts = expert_groups(module)
    for path, tensor in named:
        if tensor.numel() > 0 and unit_of(tensor) is None:
            name = of_experts.get(path)
            members = group if name is None or experts is None else experts[name]
            by_group.setdefault(members, []).append(tensor.data)
    for members, tensors in by_group.items():
        ranks = group_backend(members)
        ranks.connect()
        _synchronize(tensors, ranks)


def synchronize_tied(module: torch.nn.Module, units: UnitGroups) -> None:
    """Broadcast the parameters that several pipeline stages hold from the first of these stages.

    Raises:
        ConfigError: on every rank that holds them, if they differ in name, shape or dtype.
    """
    for stages, ranks in units.tied.items():
        assert ranks.replicate_group is not None
        ranks.replicate_group.connect()
        named = [(name, param) for name, param in module.named_parameters() if tied_stages(param) == stages]
        check_same(
            {f"the modules that the stages {', '.join(map(str, stages))} share": described(named)},
            ranks.replicate_group.group,
        )
        _synchronize([param.data for _, param in named], ranks.replicate_group)


def _synchronize(tensors: list[Tensor], ranks: GroupBackend) -> None:
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    works = []
    for tensor in tensors:
        if tensor.nbytes >= _SMALL_BYTES and not serves(ranks.group, tensor.device):
            broadcast_together([tensor], ranks, 0, tag=_TAG)
        elif tensor.nbytes >= _SMALL_BYTES and tensor.is_contiguous():
            works.append(ranks.broadcast(tensor.view(-1), 0, tag=_TAG))
        else:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for work in works:
        work.wait()
    for same_kind in small.values():
        broadcast_together(same_kind, ranks, 0, tag=_TAG)


def described(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return names, shapes and dtypes as text."""
    return ", ".join(f"{name} {tuple(shape_of(tensor))} {tensor.dtype}" for name, tensor in tensors)


def settings_of(group: Mapping[str, Any]) -> str:
    """Return an optimizer's param group as text, without parameters: learning rate and other plain values."""
    shown = []
    for name, value in sorted(group.items()):
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if name != "params" and isinstance(plain, bool | int | float | str | tuple):
            shown.append(f"{name} {plain}")
    return ", ".join(shown)
