"""`GatheredChanges`: what was changed inside a `GatheredParameters` without `modifier_rank` (stage 3).

Nobody says whose changes count there, so they are dropped on every rank: the shards of large parameters were not
touched, and small ones, which every rank keeps whole, get the values back that they had. Dropping alone would be
silent. So a rank that sees a change says so to the others when the context ends, all compare their whole parameters
with the shards, and all raise. A rank sees what torch counts, an in-place operation on a parameter or another
`param.data`. With `zero_optimization.enable_sanity_checks` all compare every time, and find operations on `param.data`
too.

[Note: the outermost context] Of nested contexts the outermost one that holds a parameter looks at it: an outer one with
`modifier_rank` keeps what is changed in an inner one. A load, an update or `safe_set_...` inside is no change of the
user's: then the parameter is not looked at.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed.comm.backend import GroupBackend, host_or_device
from deepspeed.comm.group_backend import group_backend
from deepspeed.comm.values import all_gather_values, named_ranks
from deepspeed.errors import StateError, counted
from deepspeed.log import warn_once
from deepspeed.zero.managed import num_writes
from deepspeed.zero.param_marks import KEPT
from deepspeed.zero.param_unit import ParamUnit, is_rounded, is_same


class GatheredChanges:
    """Made when a context is entered; then `refuse` or not, and `close`.

    Args:
        held: units that the context holds whole, and whether it gathered them.
        small: parameters that every rank keeps whole, in the same order on all ranks.
    """

    def __init__(self, held: Sequence[tuple[ParamUnit, bool]], small: Iterable[Any]) -> None:
        outermost = [(unit, gathers) for unit, gathers in held if unit.num_contexts == 1 and unit.is_sharded]
        self._units = [(unit, unit.num_changes) for unit, _ in outermost]
        self._gathered = {unit for unit, gathers in outermost if gathers}
        self._small = [_KeptValue(param) for param in small if KEPT not in vars(param)]

    def refuse(self) -> None:
        """Raise if parameters were changed. A collective, unless the context has gathered nothing.

        Raises:
            StateError: names them; on every rank of a group that has gathered some.
        """
        found: dict[str, list[_Change]] = {}
        units = [(unit, num_changes) for unit, num_changes in self._units if unit.params]
        all_ranks = [unit.unit_ranks.reduce_group for unit, _ in units] + [kept.ranks for kept in self._small]
        for everyone in dict.fromkeys(all_ranks):  # also where this rank has nothing to look at: its peers may have
            its_units = {unit: num for unit, num in units if unit.unit_ranks.reduce_group is everyone}
            its_small = [kept for kept in self._small if kept.ranks is everyone]
            for change in _changed(everyone, its_units, its_small, self._gathered):
                found.setdefault(change.name, []).append(change)
        real = {name: its for name, its in found.items() if not all(each.is_rounded for each in its)}
        if real:
            raise StateError(
                f"GatheredParameters: found {_listed(real, 'changed')} in a context without modifier_rank. The change "
                "was dropped, since ranks would differ; give modifier_rank=0, or the rank whose changes count"
            )
        if found:
            warn_once(
                f"GatheredParameters: found {_listed(found, 'changed by no more than rounding')} in a context without "
                "modifier_rank, as after adapters were merged and unmerged; the former values stay. If the change "
                "counts, give modifier_rank=0"
            )

    def close(self, *, keeps: bool) -> None:
        """The context ends. `keeps`: what was changed was kept, else it is dropped."""
        for kept in self._small:
            kept.close(keeps=keeps)


class _Change(NamedTuple):
    name: str
    rank: int  # global, that changed it
    is_rounded: bool  # see [Note: up to rounding]


class _KeptValue:
    """The value that a small parameter had when the outermost context around it began."""

    def __init__(self, param: Any) -> None:
        self.param = param
        self.name: str = param.ds_name
        self.ranks = group_backend(param.ds_process_group)
        self.checks_values: bool = param.ds_checks_values
        self._home = param.data
        self._value = self._home.clone()
        self._version = param._version
        self._num_writes = num_writes()
        vars(param)[KEPT] = self

    def was_written(self) -> bool:
        """Whether an engine wrote weights meanwhile."""
        return num_writes() != self._num_writes

    def is_seen(self) -> bool:
        """Whether torch has counted a change."""
        return self.param._version != self._version or not self.param.is_set_to(self._home)

    def is_changed(self) -> bool:
        return not is_same(self.param.data, self._value)

    def is_rounded(self) -> bool:
        return is_rounded(self.param.data, self._value)

    def close(self, *, keeps: bool) -> None:
        vars(self.param).pop(KEPT, None)
        if not keeps and not self.was_written():
            self.param.data = self._home
            self._home.copy_(self._value)


def _changed(
    everyone: GroupBackend, units: Mapping[ParamUnit, int], small: Sequence[_KeptValue], gathered: set[ParamUnit]
) -> list[_Change]:
    """The changes of parameters of `everyone`. `units`: with how many writes of engines each had when the context
    began."""
    compares = any(unit.checks_values for unit in units) or any(kept.checks_values for kept in small)
    has_gathered = any(unit in gathered for unit in units)
    written = [unit.names[0] for unit, num_changes in units.items() if unit.num_changes != num_changes]
    written += [kept.name for kept in small if kept.was_written()]
    own = [unit for unit in units if unit.names[0] not in written]
    seen = {name: False for unit in own for name in unit.seen_changes()}
    of_small = [kept for kept in small if kept.name not in written and kept.is_seen() and kept.is_changed()]
    seen |= {kept.name: kept.is_rounded() for kept in of_small}
    if not compares and not has_gathered:  # peers may not be in this context
        return [_Change(name, torch.distributed.get_rank(), its) for name, its in seen.items()]
    has_seen, has_written = _on_any_rank([bool(seen), bool(written)], everyone)
    if not compares and not has_seen:
        return []
    if has_written:  # by one rank alone, perhaps: then nobody looks at them
        written = [name for theirs in all_gather_values(written, backend=everyone) for name in theirs]
    changes: dict[str, bool] = {}
    for unit in units:
        if unit.names[0] not in written:
            changes |= unit.changes()
    changes |= {kept.name: kept.is_rounded() for kept in small if kept.name not in written and kept.is_changed()}
    members = torch.distributed.get_process_group_ranks(everyone.group)
    by_rank = zip(members, all_gather_values(changes, backend=everyone), strict=True)
    return [_Change(name, rank, its) for rank, theirs in by_rank for name, its in theirs.items()]


def _listed(changes: Mapping[str, Sequence[_Change]], how: str) -> str:
    name, its = next(iter(changes.items()))
    more = f" and {counted(len(changes) - 1, 'other')}" if len(changes) > 1 else ""
    return f"the parameter {name}{more} {how} on {named_ranks(sorted({each.rank for each in its}))}"


def _on_any_rank(values: Sequence[bool], ranks: GroupBackend) -> list[bool]:
    """Return for each value whether it is true on any rank of `ranks`. A collective."""
    flags_N = torch.tensor([float(value) for value in values], device=host_or_device(ranks.group))
    ranks.all_reduce(flags_N, tag="changes").wait()
    return [value > 0 for value in flags_N.tolist()]
