"""Move sharded values between divisions among ranks, given as `Run`s, with one all-to-all per buffer.

`join_parts` builds a whole value from parts that may overlap. A stage-3 file of rank r holds part r of each parameter
that no optimizer trains: one of W parts of ceil(n / W) elements, the last ones padded with zeros.

`PendingTensor` is a tensor of a checkpoint, in such pieces, whose values are copied while training goes on. Code that
changes or moves such values first waits for the copy (`Checkpointer.wait_for_copy`). The object is not a tensor, so
nothing reads its values by mistake.

Shape legend: M numel of a rank before, T after.

This module also handles `state_dict()` and `load_state_dict()` of modules with sharded parameters (stage 3,
`zero.Init`). A sharded parameter is an empty tensor: a plain `state_dict()` would be saved without weights, and a load
would fail with a torch error about shapes for each parameter. `watch` registers hooks on the modules: a plain
`state_dict()` warns once and names how to get whole weights, and a load of sharded parameters raises with a hint.
Neither can gather by itself, since scripts call both on a single rank.

`get_model_state_dict` and `set_model_state_dict` of `torch.distributed.checkpoint.state_dict` are collectives that all
ranks call. They return whole weights, and the values they set are stored in the shards and the fp32 master weights.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from deepspeed.comm.backend import GroupBackend, host_or_device
from deepspeed.comm.values import all_gather_values, dtype_name
from deepspeed.errors import StateError
from deepspeed.log import warn_once
from deepspeed.parallel.model_part import ModelPart, part_held
from deepspeed.zero.layout import Run, in_parameters
from deepspeed.zero.managed import manager_of
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, unit_of, whole
from deepspeed.zero.states import note_write


class _Move(NamedTuple):
    param: int
    start: int
    numel: int
    source: int
    source_offset: int
    target: int
    target_offset: int


def redistribute(
    values_M: Tensor, before: Sequence[Run], after: Sequence[Run], result_T: Tensor, ranks: GroupBackend | None
) -> Tensor:
    """Return this rank's values in the division `after`. A collective over `ranks`.

    Args:
        values_M: 1-D, this rank's values in the division `before`.
        result_T: 1-D, of the same dtype and device; elements that no run covers stay unchanged.
        ranks: None: this rank is owner 0 of everything.

    Returns:
        `result_T`.
    """
    values_M = values_M.detach()  # other programs' files may hold parameters
    for start, values in pieces_of([(0, values_M)], before, after, ranks):
        result_T[start : start + values.numel()] = values
    return result_T


def pieces_of(
    sources: Sequence[tuple[int, Tensor]], before: Sequence[Run], after: Sequence[Run], ranks: GroupBackend | None
) -> list[tuple[int, Tensor]]:
    """Return this rank's values in the division `after`, as pieces. A collective over `ranks`.

    Args:
        sources: this rank's values in the division `before`: offsets and 1-D values, ascending, at least one, with one
            dtype and device. Each run lies within one of them.

    Returns:
        The offset and the values of each piece. Pieces that this rank had before are views of `sources`.
    """
    starts = [start for start, _ in sources]

    def cut(move: _Move) -> Tensor:
        start, values = sources[bisect_right(starts, move.source_offset) - 1]
        return values[move.source_offset - start :][: move.numel]

    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    moves = sorted(_moves(before, after))
    pieces = [(move.target_offset, cut(move)) for move in moves if move.source == move.target == rank]
    if ranks is None or world_size == 1:
        return pieces
    moves = [move for move in moves if move.source != move.target]
    outgoing = [[move for move in moves if move.source == rank and move.target == peer] for peer in range(world_size)]
    incoming = [[move for move in moves if move.target == rank and move.source == peer] for peer in range(world_size)]
    sent = [cut(move) for each in outgoing for move in each] or [sources[0][1].new_empty(0)]
    received = _all_to_all(torch.cat(sent), _sizes(outgoing), _sizes(incoming), ranks)
    start = 0
    for move in (move for each in incoming for move in each):
        pieces.append((move.target_offset, received[start : start + move.numel]))
        start += move.numel
    return pieces


def _all_to_all(sent: Tensor, sizes_out: list[int], sizes_in: list[int], ranks: GroupBackend) -> Tensor:
    """Exchange elements with all ranks: through host memory if the group has a library for it, since every such library
    supports this; else through this rank's device. Bytes are sent, since some libraries do not support every dtype."""
    device = host_or_device(ranks.group)
    width = sent.element_size()
    received = torch.empty(sum(sizes_in), dtype=sent.dtype, device=device)
    ranks.all_to_all(
        received.view(torch.uint8),
        sent.to(device).view(torch.uint8),
        [size * width for size in sizes_in],
        [size * width for size in sizes_out],
    ).wait()
    return received.to(sent.device)


def _sizes(moves: Sequence[Sequence[_Move]]) -> list[int]:
    return [sum(move.numel for move in each) for each in moves]


def _moves(before: Sequence[Run], after: Sequence[Run]) -> Iterator[_Move]:
    """Yield every stretch of elements that lies in one run before and one run after."""
    by_param: dict[int, list[Run]] = {}
    for run in before:
        by_param.setdefault(run.param, []).append(run)
    for new in after:
        for old in by_param.get(new.param, ()):
            start, stop = max(old.start, new.start), min(old.start + old.numel, new.start + new.numel)
            if start < stop:
                source, target = old.offset + start - old.start, new.offset + start - new.start
                yield _Move(new.param, start, stop - start, old.owner, source, new.owner, target)


def join_parts(own: Tensor | None, param: Tensor, ranks: GroupBackend) -> Tensor | None:
    """Join the parts of all ranks to the whole value; None if no rank has a part. A collective over `ranks`.

    Args:
        own: this rank's part, in the shape of its part of `param`; None: this rank has none (of a gradient, say), which
            counts as zeros.
        ranks: the ranks that hold the parts.
    """
    part = part_held(param)
    assert part is not None
    dtype = None if own is None else dtype_name(own.dtype)
    held = all_gather_values((part.to_plain(), dtype), backend=ranks)
    known = [dtype for _, dtype in held if dtype is not None]
    if not known:
        return None
    whole = torch.zeros(part.shape, dtype=getattr(torch, known[0]), device=param.device)
    for source, (plain, has) in enumerate(held):
        theirs = ModelPart.of_plain(plain)
        numel = theirs.own_shape.numel()
        if has is None or numel == 0:
            continue
        flat_N = torch.empty(numel, dtype=whole.dtype, device=whole.device)
        if source == ranks.rank:
            assert own is not None
            flat_N.copy_(own.reshape(-1))
        ranks.broadcast(flat_N, source).wait()
        theirs.put(flat_N.view(theirs.own_shape), whole)
    return whole


def own_part(param: Tensor, whole: Tensor, asked: str) -> Tensor:
    """Return this rank's part of the value `whole`; all of it if the model does not divide `param`.

    Args:
        asked: name of the function that the user called.

    Raises:
        ValueError: if `whole` does not have the shape of the whole parameter.
    """
    part = part_held(param)
    if part is None or part.is_whole:
        return whole
    if whole.shape != part.shape:
        raise ValueError(
            f"{asked}: found a value of shape {tuple(whole.shape)}; the parameter, of which this rank has a part, has "
            f"{tuple(part.shape)} as a whole"
        )
    return part.take(whole)


def saved_part(param: Parameter) -> Tensor:
    """Return the part of a parameter that this rank saves: ceil(n / W) elements if it is sharded, else all of it. A
    collective if the parameter is sharded and not gathered."""
    unit = unit_of(param)
    if unit is None:
        return param.detach()
    with whole(param) as value:
        return part_of(value, unit.unit_ranks.reduce_group)


def part_of(value: Tensor, ranks: GroupBackend) -> Tensor:
    """Return this rank's part of ceil(n / W) elements of a whole parameter, 1-D, padded with zeros."""
    return part_of_parts([value], value.shape, ranks.rank, ranks.world_size)


def part_of_parts(parts: Sequence[Tensor], shape: torch.Size, rank: int, world_size: int) -> Tensor:
    """Return part `rank` of `world_size` of a parameter, 1-D, padded with zeros, from the parts of the ranks that saved
    it. Only the needed ranges are read."""
    numel = shape.numel()
    size, saved_size = math.ceil(numel / world_size), math.ceil(numel / len(parts))
    part = parts[0].new_zeros(size)
    for index, saved in enumerate(parts):
        first = max(index * saved_size, rank * size)
        stop = min((index + 1) * saved_size, (rank + 1) * size, numel)
        if first < stop:
            values = saved.reshape(-1)[first - index * saved_size : stop - index * saved_size]
            part[first - rank * size : stop - rank * size] = values
    return part


def load_parts(unit: ParamUnit, parts: list[Tensor]) -> None:
    """Fill a unit from this rank's part (see `saved_part`) of each of its parameters. A collective."""
    layout = unit.layout
    runs = [
        Run(each.param, each.param_start, each.numel, holder, each.start - layout.shard(each.owner)[0])
        for each in layout.fragments
        for holder in unit.unit_ranks.holders(each.owner)
    ]
    flat = torch.cat([part.reshape(-1).to(unit.device, unit.dtype) for part in parts])
    everyone = unit.unit_ranks.reduce_group
    unit.shards_changed()
    before = in_parameters(layout.numels, everyone.world_size)
    unit.set_shard(redistribute(flat, before, runs, flat.new_zeros(unit.shard_S.numel()), everyone))


def whole_of_parts(part: Tensor, shape: torch.Size, ranks: GroupBackend) -> Tensor:
    """Return a whole parameter on every rank from this rank's part of it (see `saved_part`). A collective."""
    numel = shape.numel()
    everywhere = [Run(0, 0, numel, rank, 0) for rank in range(ranks.world_size)]
    before = in_parameters([numel], ranks.world_size)
    return redistribute(part.reshape(-1), before, everywhere, part.new_zeros(numel), ranks).view(shape)


_COLLECTIVE = "torch.distributed.checkpoint.state_dict"
#: method of library models that calls `state_dict` only for the names of what to load
_NAMES_ONLY = "from_pretrained"
#: attribute of a module with hooks
_MARK = "_ds_state_dict_hooks"
#: attribute of our hooks, which do not translate loaded values
IS_OURS = "_is_of_zero3"

_takes_empty = False


@contextmanager
def as_it_is() -> Iterator[None]:
    """Let the engine call `state_dict` or `load_state_dict` inside with empty sharded parameters."""
    global _takes_empty
    former, _takes_empty = _takes_empty, True
    try:
        yield
    finally:
        _takes_empty = former


def watch(module: Module) -> None:
    """Register the hooks on `module` and on submodules that own sharded parameters. Idempotent."""
    for each in module.modules():
        if _MARK not in each.__dict__ and any(unit_of(param) is not None for param in _own(each).values()):
            handles = [each._register_state_dict_hook(_after_collection)]
            handles.append(each.register_load_state_dict_pre_hook(_before_load))
            each.__dict__[_MARK] = handles


def unwatch(module: Module) -> None:
    """Undo `watch` on modules without sharded parameters."""
    for each in module.modules():
        if all(unit_of(param) is None for param in _own(each).values()):
            handles: Sequence[RemovableHandle] = each.__dict__.pop(_MARK, ())
            for handle in handles:
                handle.remove()


def _after_collection(module: Module, state: Any, prefix: str, metadata: Any) -> None:
    """Hook of `state_dict`, called when it has collected the values of `module`."""
    if _takes_empty:
        return
    named = {prefix + name: param for name, param in _own(module).items() if _is_released_again(param)}
    named = {name: param for name, param in named.items() if name in state and not isinstance(state[name], Parameter)}
    if named and is_called_by_collective():
        for name, param in named.items():
            with whole(param) as value:
                state[name] = value.clone()
        return
    kept = [name for name, param in named.items() if not _is_empty(param)]  # their memory will be freed
    for name in kept:
        state[name] = named[name].detach().clone()
    if len(kept) < len(named) and not _is_called_by(lambda frame: frame.f_code.co_name == _NAMES_ONLY):
        warn_once(
            "state_dict: sharded parameters are empty tensors in it (zero_optimization.stage 3). For whole weights "
            "call engine.save_16bit_model(folder); or on all ranks get_model_state_dict(engine.module) of "
            "torch.distributed.checkpoint.state_dict; or state_dict() inside "
            "deepspeed.zero.GatheredParameters(module.parameters())"
        )


def _before_load(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook of `load_state_dict`, called before `module` loads its values."""
    if _takes_empty:
        return
    own = {name: param for name, param in _own(module).items() if isinstance(state.get(prefix + name), Tensor)}
    if is_called_by_collective():
        for unit in {unit for param in own.values() if (unit := unit_of(param)) is not None}:
            _release(unit)
        for name, param in own.items():
            if _is_empty(param):
                _set_whole(param, prefix + name, state[prefix + name])
                state[prefix + name] = param.detach()
        return
    for name, param in own.items():
        if _is_empty(param):
            raise StateError(
                f"load_state_dict: the parameter {prefix + name!r} is sharded (zero_optimization.stage 3), so it "
                "cannot take a value here. Load a checkpoint with engine.load_checkpoint(folder); or on all ranks call "
                "set_model_state_dict(engine.module, weights) of torch.distributed.checkpoint.state_dict; or load "
                "inside deepspeed.zero.GatheredParameters(module.parameters(), modifier_rank=0)"
            )


setattr(_before_load, IS_OURS, True)


def _set_whole(param: Any, name: str, value: Tensor) -> None:
    """Store this rank's elements of a whole value in the shard and in its master weights."""
    unit: ParamUnit = param.ds_unit
    if value.shape != param.ds_shape:
        raise StateError(
            f"load_state_dict: found a value of shape {tuple(value.shape)} for the parameter {name!r}, which has the "
            f"shape {tuple(param.ds_shape)}"
        )
    note_write()
    unit.set_shard_of(param, value.to(unit.device))
    unit.expect_load(param.ds_index)
    if (sharding := manager_of(param)) is not None:
        sharding.states.wait_for_copy()
        group, place = sharding.units.find(param)
        group.take_changes(place)


def _release(unit: ParamUnit) -> None:
    """Release parameters that were kept gathered for a later use."""
    if unit.status is ZeroParamStatus.NOT_AVAILABLE or unit.num_contexts > 0:
        return
    if unit.hooks is not None:
        unit.hooks.param_coordinator.release_all()
    unit.release()


def _own(module: Module) -> dict[str, Parameter]:
    """Return the module's own parameters without counting it as a read of them."""
    return {name: param for name, param in module._parameters.items() if param is not None}


def _is_released_again(param: Any) -> bool:
    """Return whether `param` is sharded and, if gathered, gathered for a module and not for a user's context."""
    unit = unit_of(param)
    return unit is not None and unit.is_sharded and unit.num_contexts == 0


def _is_empty(param: Any) -> bool:
    unit = unit_of(param)
    return unit is not None and unit.is_sharded and param.shape != param.ds_shape


def is_called_by_collective() -> bool:
    """Return whether a function of `torch.distributed.checkpoint.state_dict` is running."""
    return _is_called_by(lambda frame: frame.f_globals.get("__name__") == _COLLECTIVE)


def _is_called_by(tells: Callable[[FrameType], bool]) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if tells(frame):
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True, eq=False)
class PendingTensor:
    """`PendingTensor` is a tensor of a checkpoint whose values in host memory are copied later.

    Args:
        shape, dtype: the shape and dtype of the whole tensor, which is contiguous.
        pieces: the first element and the values of each piece: 1-D, contiguous, of `dtype`, in host memory. Pieces do
            not overlap; elements outside of all pieces are zero.
        is_held: whether the values stay unchanged until they are copied. Else the save copies them before it returns.
    """

    shape: torch.Size
    dtype: torch.dtype
    pieces: Sequence[tuple[int, Tensor]]
    is_held: bool = True
    _versions: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for _, values in self.pieces:
            assert (values.dim(), values.is_contiguous(), values.device.type) == (1, True, "cpu")
            assert values.dtype == self.dtype, values.dtype
        object.__setattr__(self, "_versions", self._find_versions())

    @classmethod
    def of(cls, tensor: Tensor) -> "PendingTensor":
        """Wrap a contiguous tensor in host memory that the caller does not change until it is copied."""
        return cls(tensor.shape, tensor.dtype, [(0, tensor.detach().view(-1))])

    def joined(self) -> Tensor:
        """Return the tensor in its own memory."""
        result = torch.empty(self.shape, dtype=self.dtype)
        if self.shape.numel():
            self.copy_to(cast("NDArray[np.uint8]", result.view(-1).view(torch.uint8).numpy()))
        return result

    def copy_to(self, target: NDArray[np.uint8]) -> None:
        """Write the bytes of the whole tensor; other threads can run meanwhile.

        Raises:
            StateError: if the values were changed since this object was created.
        """
        end = 0
        for start, values in sorted(self.pieces, key=lambda piece: piece[0]):
            first = start * self.dtype.itemsize
            source = values.view(torch.uint8).numpy()
            target[end:first] = 0
            end = first + source.nbytes
            np.copyto(target[first:end], source)
        target[end:] = 0
        if self._find_versions() != self._versions:
            raise StateError(
                "master weights or optimizer states were changed in place while they were copied for a checkpoint, by "
                "code that is not the engine's; change them with safe_set_*, or call wait_for_checkpoint() before"
            )

    def _find_versions(self) -> tuple[int, ...]:
        """Return torch's counts of in-place writes."""
        return tuple(0 if values.is_inference() else values._version for _, values in self.pieces)
