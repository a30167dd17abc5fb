"""`Units` lays out one rank's part of the model in units: which parameters, whose shards, in which sub-groups.

`Sharding.attach` fills it and takes over the parameters, one optimizer group after the other. `gradient_memory.py`
holds the units' gradients. The stage decides which rank owns which elements of a unit (`stages.py`).

Legend: N padded numel of a unit, S numel of a shard, W ranks.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.values import all_gather_values, check_same, named_ranks
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once
from deepspeed.ops.optimizer import KernelOptimizer
from deepspeed.optim import takes_only_sparse
from deepspeed.optim.traits import is_muon, phase_settings
from deepspeed.zero.layout import divide_into_units
from deepspeed.zero.managed import manager_of
from deepspeed.zero.module_units import ModuleUnits, Stage3Options
from deepspeed.zero.param_unit import ParamUnit, shape_of, unit_of
from deepspeed.zero.placement import Placement
from deepspeed.zero.stages import STAGES, ZeroStage
from deepspeed.zero.unit import Unit, adopt_state, described, divide, settings_of
from deepspeed.zero.unit_groups import UnitGroups, UnitRanks
from deepspeed.zero.update import UpdateBatch, takes_one_pass, takes_one_pass_of

#: elements whose gradients are widened to fp32 at once: 2 MiB, which fit in a core's cache. Measured for Adam on 25 M
#: bf16 parameters, one thread: 20.7 ms at 2**19, 27 at 2**20, 32 from 2**21
WIDENED_NUMEL = 2**19
#: the same in device memory, a buffer of 64 MiB: for a shorter part, a call of the optimizer costs the CPU more than
#: the device
DEVICE_WIDENED_NUMEL = 2**24
#: elements updated in one call in device memory, about half a millisecond of its bandwidth; the all-gather starts after
#: it
DEVICE_UPDATE_NUMEL = 2**26

#: minimum bucket size. Small models get buckets of a third of their size, so that some overlap the backward
MIN_BUCKET_NUMEL = 2**18


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """`ShardingOptions` holds as plain values the parts of the configuration that a stage needs."""

    stage: ZeroStage = STAGES[0]
    model_dtype: torch.dtype | None = None  # target dtype of the parameters; None leaves them
    accumulation_dtype: torch.dtype | None = None  # of gradients between backwards; None: the parameter's dtype
    wire_dtype: torch.dtype | None = None  # of gradients in collectives; None: the accumulation dtype
    bucket_numel: int = 500_000_000  # upper bound; the backend may prefer less
    update_numel: int = 4 * 2**20  # fp32 elements that are updated, and then gathered, at once
    sub_group_numel: int = sys.maxsize  # the user's limit for `update_numel`
    overlap: bool = True  # launch a bucket when it is full, not when the backward is over
    allows_unused: bool = True  # skip parameters without gradient; False: raise an error that names them
    predivide_factor: float | None = None  # divides gradients before the sum; W / this divides them after it
    groups: UnitGroups | None = None  # of the units; None: all use the whole data-parallel group
    model_ranks: tuple[GroupBackend, ...] = ()  # one per axis (tp, pp) along which the caller divided the model
    counts_replicated: bool = True  # count parameters in the norm that tensor-parallel peers also have
    device: torch.device | None = None  # target device of the parameters (stage 3 moves them shard by shard)
    placement: Placement = field(default_factory=Placement)  # of master weights, states and reduced gradients
    partitioning: Stage3Options = field(default_factory=Stage3Options)  # of sharded parameters

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of `dtype` are summed, before or after the model's dtype
        was applied to the parameters."""
        return self.accumulation_dtype or self.model_dtype or dtype if dtype.is_floating_point else dtype


class Units(list[Unit]):
    """`Units` is the list of one engine's units in the order of their creation, by their index.

    Attributes:
        params: the attached parameters, in the order of the units.
        named_parameters: all parameters of the module, including those that are not attached.
        optimizer: the user's optimizer, whose groups hold the units' shards; None: the engine only evaluates.
        saved_groups: attached parameters, by index, in the groups of a checkpoint.
        keeps_params_whole: whether a parameter has a single owner, because the optimizer may not be elementwise.
        modules: the sharded parameters' units by module (stage 3).
    """

    def __init__(self, options: ShardingOptions, backend: GroupBackend, group: ProcessGroup | None) -> None:
        super().__init__()
        self.params: list[Parameter] = []
        self.named_parameters: list[tuple[str, Parameter]] = []
        self.saved_groups: list[list[int]] = []
        self.keeps_params_whole = False
        self.ranks = options.groups or UnitGroups(UnitRanks.over(backend))
        self._options = options
        self._stage = options.stage
        self._backend = backend
        self._group = group
        self._placement = options.placement
        self.modules: ModuleUnits | None = None
        if options.stage.divides_parameters:
            self.modules = self._divide(Module())  # empty until `attach`
        self.optimizer: Optimizer | None = None
        self._is_muon = False
        self._given_params: list[list[Parameter]] = []  # by optimizer group, before it held master weights
        self._widens = False  # gradients are copied to fp32 before the update, part by part
        self._bucket_bytes = 0  # preferred by the backend
        self._total_numel = 0  # trainable elements
        self._positions: dict[int, int] = {}  # id of a parameter -> its position in the model

    def find(self, param: Parameter) -> tuple[Unit, int]:
        """Return the unit of a parameter and the parameter's index in it.

        Raises:
            KeyError: if the parameter is not attached.
        """
        for unit in self:
            for index, candidate in enumerate(unit.params):
                if candidate is param:
                    return unit, index
        raise KeyError(f"parameter of shape {tuple(shape_of(param))} is not managed by this engine")

    def name_of(self, param: Tensor) -> str:
        """Return the name of a parameter in the module, for errors."""
        return next((name for name, other in self.named_parameters if other is param), "?")

    def position(self, unit: Unit) -> int:
        """Return the position in the model of a unit's first parameter."""
        return min(self._positions.get(id(param), 0) for param in unit.params)

    def saved_parameters(self) -> list[list[Parameter]]:
        """Return the attached parameters in the order and the groups of a checkpoint."""
        return [[self.params[place] for place in group] for group in self.saved_groups]

    def divided(self) -> Sequence[ParamUnit]:
        """Return the units of sharded parameters (stage 3), including those that do not train."""
        return () if self.modules is None else self.modules.all

    # ---- building -----------------------------------------------------------------------------------------------

    def attach(self, module: Module, optimizer: Optimizer | None, *, is_elementwise: bool) -> None:
        """Lay out the parameters of `module` that `optimizer` updates; see `Sharding.attach`. The optimizer's groups
        get shards in place of parameters.

        Raises:
            ConfigError: if a parameter is not in the module; on every rank if ranks differ.
        """
        self.optimizer = optimizer
        self._is_muon = is_muon(optimizer)
        # only stage 3 cuts the matrices of Muon, since its units are too small to divide between parameters
        self.keeps_params_whole = not is_elementwise and not (self._is_muon and self._stage.divides_parameters)
        groups = optimizer.param_groups if optimizer is not None else []
        if self.keeps_params_whole and optimizer is not None and any(group["params"] for group in groups):
            self._stage.refuse_not_elementwise(optimizer)
        if self._stage.divides_parameters:
            self.modules = self._divide(module, [param for group in groups for param in group["params"]])
        self._positions = {id(param): place for place, param in enumerate(module.parameters())}
        self.named_parameters = list(module.named_parameters())
        free = [param for param in module.parameters() if not manager_of(param)]
        groups = groups if optimizer is not None else [{"params": free}]
        self._agree([group["params"] for group in groups])
        if optimizer is not None:
            self._prepare_placement(optimizer)
        for index, param_group in enumerate(groups):
            for param in param_group["params"]:
                self._refuse_foreign(index, param)
        for index, param_group in enumerate(groups):
            self._hold_group(index, param_group["params"])
        self._hold_rest()

    def add_group(self, param_group: dict[str, Any]) -> None:
        """Lay out one more param group; `param_group` as in torch's `Optimizer.add_param_group`."""
        optimizer = self.optimizer
        assert optimizer is not None
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        if self.keeps_params_whole:
            self._stage.refuse_not_elementwise(optimizer)
        self._refuse_attached(len(optimizer.param_groups), params)
        added = f"{self._described(params)}; {settings_of(param_group)}"
        check_same({"the added group of parameters": added}, self._group)
        type(optimizer).add_param_group(optimizer, {**param_group, "params": params})
        last = len(optimizer.param_groups) - 1
        self._hold_group(last, optimizer.param_groups[last]["params"])
        self._hold_rest()

    def give_back(self) -> None:
        """Return the original parameters to the optimizer, and drop the states of shards."""
        optimizer, self.optimizer = self.optimizer, None
        if optimizer is None:
            return
        given = {id(param) for params in self._given_params for param in params}
        for shard in (shard for unit in self for shard in unit.shards):
            if id(shard.master) not in given:
                optimizer.state.pop(shard.master, None)
        for param_group, params in zip(optimizer.param_groups, self._given_params, strict=False):
            param_group["params"] = params
        self._given_params = []

    def drop(self) -> None:
        """Drop all units."""
        self.clear()
        self.params = []

    def _divide(self, module: Module, trained: Sequence[Parameter] = ()) -> ModuleUnits:
        options, device, dtype = self._options.partitioning, self._options.device, self._options.model_dtype
        return ModuleUnits(module, self.ranks, options, trained, device=device, dtype=dtype)

    def _prepare_placement(self, optimizer: Optimizer) -> None:
        key = 'zero_optimization.offload_optimizer.device: found "nvme"'
        if self._placement.fetches and self.ranks.has_replicas:
            raise ConfigError(
                f"{key} with mics_shard_size, or with modules that pipeline stages share: gradients of several copies "
                'of the weights are added up in memory; set device to "cpu", or omit mics_shard_size'
            )
        if self._placement.fetches and takes_only_sparse(optimizer):
            raise ConfigError(
                f"{key} with {type(optimizer).__name__}, which takes sparse gradients only; set device to "
                '"cpu", or use AdamW'
            )
        numel = -(-self._total_numel // self._backend.world_size)
        gradient_dtype = self._options.gradient_dtype(torch.float32)
        self._placement.prepare(optimizer, numel, gradient_dtype, max_sub_group_numel=self._batch_numel())

    def _refuse_foreign(self, index: int, param: Tensor) -> None:
        if id(param) in self._positions:
            return
        where = f"optimizer.param_groups[{index}]: a parameter of shape {tuple(param.shape)}"
        if not isinstance(param, Parameter):  # a fragment of a parameter
            raise ConfigError(
                f"{where} is what an engine that was not destroyed left there; call destroy() on that engine, or build "
                "a new optimizer"
            )
        if param.requires_grad:
            raise ConfigError(f"{where} is not in the model given to initialize(); give parameters of that model")

    def _agree(self, param_groups: Sequence[Sequence[Parameter]]) -> None:
        """Check that ranks agree on the facts that determine the layout, and agree on those that may differ.

        Raises:
            ConfigError: on every rank; names the ranks that differ.
        """
        options, optimizer = self._options, self.optimizer
        dtypes = (options.model_dtype, options.accumulation_dtype, options.wire_dtype)
        facts = {
            "zero_optimization.stage": f"{self._stage.number}, offloaded: {self._placement.is_offloaded}",
            "the optimizer": f"{type(optimizer).__name__}, whole parameters: {self.keeps_params_whole}",
            "the optimizer's parameters": "; ".join(map(self._described, param_groups)),
            "the optimizer's settings": "; ".join(
                map(settings_of, [*optimizer.param_groups, phase_settings(optimizer)] if optimizer else ())
            ),
            "the dtypes of parameters, gradient accumulation and communication": str(dtypes),
            "reduce_bucket_size": str(options.bucket_numel),
            "gradient_predivide_factor": str(options.predivide_factor),
            **self._stage.facts(),
        }
        if self._stage.divides_parameters:
            facts |= options.partitioning.facts()
        check_same(facts, self._group)
        if isinstance(optimizer, KernelOptimizer):
            optimizer.uses_kernel = True  # an earlier engine may have set it to False
        has_kernel = not isinstance(optimizer, KernelOptimizer) or optimizer.has_kernel
        widens = options.model_dtype is not None and not self._will_take_one_pass(optimizer)
        can = self._backend.capabilities
        preferred = can.preferred_bucket_bytes if self._stage.divides_states else can.preferred_all_reduce_bytes
        by_rank = all_gather_values([has_kernel, widens, preferred], self._group)
        self._widens = any(numbers[1] for numbers in by_rank)
        self._bucket_bytes = min(numbers[2] for numbers in by_rank)
        trained = (param for params in param_groups for param in params if param.requires_grad)
        self._total_numel = sum(shape_of(param).numel() for param in trained)
        lacking = [rank for rank, numbers in enumerate(by_rank) if not numbers[0]]
        if isinstance(optimizer, KernelOptimizer) and 0 < len(lacking) < self._backend.world_size:
            self._use_reference(optimizer, lacking)

    def _will_take_one_pass(self, optimizer: Optimizer | None) -> bool:
        """Return whether one pass will update the master weights, which do not exist yet. They may be on another device
        than the weights are now: stage 3 shards a model from host memory. If master weights are offloaded, return
        whether the CPU kernel takes the weights themselves; if not, they are widened in short parts."""
        device = self._options.device
        if optimizer is None or device is None or self._placement.is_offloaded:
            return takes_one_pass(optimizer)
        return takes_one_pass_of(optimizer, [[torch.empty(0, device=device)] for _ in optimizer.param_groups])

    def _use_reference(self, optimizer: KernelOptimizer, lacking: list[int]) -> None:
        """Use the torch reference on all ranks, since a kernel on some of them would round differently."""
        optimizer.uses_kernel = False
        warn_once(
            f"optimizer: {named_ranks(lacking)} of {self._backend.world_size} cannot load the kernel of "
            f"{type(optimizer).__name__}, so all ranks step with its torch reference, which is slower; ds_report there "
            "says why"
        )

    def _described(self, params: Sequence[Parameter]) -> str:
        """Describe the trainable parameters by their positions in the module."""
        return described((str(self._positions.get(id(param))), param) for param in params if param.requires_grad)

    def _hold_group(self, index: int, params: Sequence[Parameter]) -> None:
        """Split one optimizer group by dtype and by the ranks that share parameters; lay out each part in units."""
        if self.modules is not None:
            self.modules.drop(params)
        self._refuse_attached(index, params)
        parts: dict[tuple[torch.dtype, UnitRanks], list[Parameter]] = {}
        for param in params:
            if param.requires_grad and shape_of(param).numel() > 0:
                parts.setdefault((param.dtype, self.ranks.of(param)), []).append(param)
        first = len(self)
        for alike in parts.values():
            self._hold_units(index, alike)
            place = {id(param): position for position, param in enumerate(self.params)}
            self.saved_groups.append([place[id(param)] for param in alike])
        self._given_params.append(list(params))
        if self.optimizer is not None:
            masters = [shard.master for unit in self[first:] for shard in unit.shards]
            self.optimizer.param_groups[index]["params"] = masters

    def _hold_units(self, index: int, params: Sequence[Parameter]) -> None:
        """Lay out parameters of one dtype that the same ranks share: sharded parameters in one unit per module, all
        others in runs of neighbors."""
        if self.modules is not None:
            for sharded in self.modules.create_for(params):
                self._hold(sharded.params, index, sharded)
                sharded.source_S = None
            params = [param for param in params if unit_of(param) is None]
        if not params:
            return
        if self.ranks.of(params[0]).is_tied:  # other pipeline stages hold them with other neighbors
            for param in params:
                self._hold([param], index)
            return
        numels = [param.numel() for param in params]
        positions = [self._positions.get(id(param), 0) for param in params]
        for run in divide_into_units(numels, positions, self._unit_numel(params)):
            self._hold([params[place] for place in run], index)

    def _hold(self, params: Sequence[Parameter], param_group: int, sharded: ParamUnit | None = None) -> None:
        """Create one unit; `sharded`: the weights of its parameters, if these are sharded (stage 3)."""
        ranks = self.ranks.of(params[0])
        numels = [shape_of(param).numel() for param in params]
        keeps_whole, max_numel = self.keeps_params_whole, self._max_fragment_numel()
        unit = Unit(
            params,
            index=len(self),
            first_index=len(self.params),
            param_group=param_group,
            layout=self._stage.layout(
                numels, ranks.world_size, keeps_params_whole=keeps_whole, max_fragment_numel=max_numel
            ),
            ranks=ranks,
            model_dtype=self._options.model_dtype,
            is_flat=sharded is None and self._stage.divides_states,
            keeps_params_whole=keeps_whole,
            has_optimizer=self.optimizer is not None,
            placement=self._placement.of_unit(sum(numels)),
            sharded=sharded,
            is_joint=self._is_joint(param_group, ranks),
        )
        self.append(unit)
        self.params.extend(params)
        if self.optimizer is not None:
            adopt_state(self.optimizer, unit)
            sub_groups = divide(unit.shards, sys.maxsize if unit.is_joint else self._batch_numel())
            unit.placement.put_away(self.optimizer, sub_groups, self._options.gradient_dtype(unit.dtype))
            unit.forget_masters()

    def _is_joint(self, param_group: int, ranks: UnitRanks) -> bool:
        """Return whether no rank alone updates matrices of Muon: several have parts or copies of each."""
        if not self._is_muon or self.optimizer is None or not self.optimizer.param_groups[param_group]["use_muon"]:
            return False
        return self._stage.divides_parameters or (not self._stage.divides_states and ranks.world_size > 1)

    def _hold_rest(self) -> None:
        """Create units for parameters outside of all param groups (stage 3)."""
        if self.modules is not None:
            self.modules.create_rest(self.params)

    def _unit_numel(self, params: Sequence[Parameter]) -> int:
        """Return the maximum numel of a unit of these parameters."""
        wish = min(self._bucket_bytes // self._options.gradient_dtype(params[0].dtype).itemsize, self._third())
        numel = min(self._options.bucket_numel, wish)
        largest = max(param.numel() for param in params)
        world_size = self.ranks.of(params[0]).world_size
        return max(numel, largest * world_size) if self.keeps_params_whole and self._stage.divides_states else numel

    def _third(self) -> int:
        return max(MIN_BUCKET_NUMEL, self._total_numel // 3)

    def _refuse_attached(self, index: int, params: Sequence[Parameter]) -> None:
        attached = {id(param) for param in self.params}
        own: set[int] = set()
        for param in params:
            if id(param) in own:
                raise ConfigError(
                    f"optimizer.param_groups[{index}]: a parameter of shape {tuple(shape_of(param))} is in it twice; "
                    "give each parameter once"
                )
            own.add(id(param))
            if id(param) in attached:
                raise ConfigError(
                    f"optimizer.param_groups[{index}]: a parameter of shape {tuple(param.shape)} is in two groups; put "
                    "it in one"
                )

    def _max_fragment_numel(self) -> int | None:
        """Return the maximum numel of a fragment if updates widen gradients or send weights in parts; else None."""
        is_divided = (self._widens or self._placement.is_offloaded) and not self.keeps_params_whole
        return self._batch_numel() if is_divided else None

    def _batch_numel(self) -> int:
        device = self._options.device
        on_device = device is not None and device.type != "cpu" and not self._placement.is_offloaded
        update, widened = self._options.update_numel, WIDENED_NUMEL
        if on_device:
            update, widened = max(update, DEVICE_UPDATE_NUMEL), DEVICE_WIDENED_NUMEL
        numel = min(update, self._options.sub_group_numel)
        return min(widened, numel) if self._widens and not self._placement.fetches else numel

    def batches(self) -> Iterator[UpdateBatch]:
        """Yield the batches of an update in order, so that few buffers are alive at once. A batch with a joint unit has
        whole units, the same on all ranks."""
        is_one = not self._stage.divides_states and not self._widens  # nothing to gather
        room = self._batch_numel()
        batch = UpdateBatch([], [])
        numel = num_matrices = 0
        last: Unit | None = None
        for unit in self:
            # a sub-group is within one unit
            ends = unit.placement is not batch.placement or unit.placement.fetches or _are_apart(last, unit)
            if unit.is_joint and numel + unit.layout.shard_numel > room and num_matrices >= unit.ranks.world_size:
                ends = True
            if ends:
                if batch.finished:
                    yield batch
                batch, numel, num_matrices = UpdateBatch([], [], unit.placement), 0, 0
            last = unit
            is_started = False
            for shard in unit.shards:
                if batch.shards and numel + shard.fragment.numel > room and not (is_one or unit.is_joint):
                    yield batch
                    batch, numel = UpdateBatch([], [], unit.placement), 0
                if not is_started:
                    batch.started.append(unit.index)
                    is_started = True
                batch.shards.append(shard)
                numel += 0 if unit.is_joint else shard.fragment.numel
            if not is_started:  # this rank owns no shard of it
                batch.started.append(unit.index)
            if unit.is_joint:
                numel += unit.layout.shard_numel
                num_matrices += len(unit.params)
            batch.finished.append(unit.index)
        yield batch


def _are_apart(one: Unit | None, other: Unit) -> bool:
    """Return whether two units, of which one is joint, cannot be in one batch: what the ranks exchange differs."""
    if one is None or not (one.is_joint or other.is_joint):
        return False
    is_same_dtype = torch.promote_types(one.dtype, torch.float32) == torch.promote_types(other.dtype, torch.float32)
    return not (one.is_joint and other.is_joint and one.ranks == other.ranks and is_same_dtype)
