"""`MatrixExchange` lets one rank find the update of each matrix that several ranks have parts or copies of.

Muon orthogonalizes whole matrices (Newton-Schulz), which takes longer than all else of an update. So the matrices of a
batch are divided over the ranks by cost, and each is gathered, orthogonalized and scattered once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed.zero.layout import Fragment
from deepspeed.zero.unit import ParamShard, Unit

if TYPE_CHECKING:
    from deepspeed.ops.muon import Muon


@dataclass(frozen=True, slots=True)
class _Matrix:
    """`_Matrix` is one parameter that a single rank orthogonalizes."""

    unit: Unit
    place: int  # index of the parameter in its unit
    fragments: tuple[Fragment, ...]  # of all ranks, in order
    rank: int  # of the rank that orthogonalizes it

    @property
    def shape(self) -> torch.Size:
        return self.unit.shapes[self.place]


class _ExchangePlan:
    """`_ExchangePlan` says which rank orthogonalizes which matrices of a batch, and where their elements are on the
    way. All ranks derive the same plan from the layout of the units.

    The most expensive matrix comes first (`Muon.cost`), and each goes to the rank that has the least work until then.
    """

    def __init__(self, optimizer: "Muon", units: Sequence[Unit], used: Sequence[bool]) -> None:
        first = units[0]
        self.used = list(used)
        self.ranks = first.ranks.shard_group
        self.device = first.device
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        #: whether each rank has all momenta, as in stage 0; else each has its fragments
        self.are_copies = first.layout.world_size < self.ranks.world_size
        named = [(unit, place) for unit in units for place in range(len(unit.params))]
        wanted = [each for each, is_used in zip(named, used, strict=True) if is_used]
        costs = [optimizer.cost(unit.params[place], unit.shapes[place]) for unit, place in wanted]
        rank_of = _divide_work(costs, self.ranks.world_size)
        fragments: dict[tuple[int, int], list[Fragment]] = {}
        for unit in units:
            for fragment in unit.layout.fragments:
                fragments.setdefault((unit.index, fragment.param), []).append(fragment)
        self.matrices = [
            _Matrix(unit, place, tuple(fragments[unit.index, place]), rank)
            for rank in range(self.ranks.world_size)
            for (unit, place), its_rank in zip(wanted, rank_of, strict=True)
            if its_rank == rank
        ]
        own = self.ranks.rank
        self.own = [matrix for matrix in self.matrices if matrix.rank == own]
        shards = {(unit.index, shard.fragment.start): shard for unit in units for shard in unit.shards}
        owner = 0 if self.are_copies else own
        self.leaving = [
            (matrix, shards[matrix.unit.index, fragment.start])
            for matrix in self.matrices
            for fragment in matrix.fragments
            if fragment.owner == owner
        ]
        arriving = [
            (source, matrix, fragment)
            for source in range(self.ranks.world_size)
            for matrix in self.own
            for fragment in matrix.fragments
            if fragment.owner == source
        ]
        world_size = self.ranks.world_size
        self.leaving_numels, self.arriving_numels = [0] * world_size, [0] * world_size
        #: by matrix of this rank, where each fragment begins in what arrives
        self.places: dict[int, list[tuple[int, Fragment]]] = {id(matrix): [] for matrix in self.own}
        for matrix, shard in self.leaving:
            self.leaving_numels[matrix.rank] += shard.fragment.numel
        starts = accumulate((fragment.numel for _, _, fragment in arriving), initial=0)
        for start, (source, matrix, fragment) in zip(starts, arriving, strict=False):
            self.arriving_numels[source] += fragment.numel
            self.places[id(matrix)].append((start, fragment))


def _divide_work(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Return a rank for each item, so that ranks get about equal sums of costs."""
    loads, ranks = [0] * num_ranks, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda each: -costs[each]):
        ranks[item] = min(range(num_ranks), key=loads.__getitem__)
        loads[ranks[item]] += costs[item]
    return ranks


class MatrixExchange:
    """`MatrixExchange` lets one rank orthogonalize each matrix of Muon, instead of every rank that has a part of it.

    It is `Muon.matrices` during an update. `OptimizerUpdate` calls `begin` for each batch, Muon then calls
    `directions` once, and `OptimizerUpdate` calls `end` after the last batch. Momentum never moves, only what follows
    from it. E are the elements of a batch's matrices and W the ranks that share them; a rank sends and receives

        stage 0     fp32 directions          all-gather: E / W sent, E received
        1, 2        nothing                  each matrix has a single owner, which orthogonalizes it
        3           fp32 updates, and        all-to-all to the matrix's rank: E / W each way
                    fp32 directions          all-to-all back: E / W each way

    Besides, a rank holds these buffers during a batch, and one matrix with what its iteration needs (about three of its
    size). A batch is as long as other optimizers' batches, but has at least as many matrices as ranks, if the model
    has them, so that no rank is idle. MiCS: each copy of the model does all of this by itself.

    If optimizer states are offloaded, updates go to the device of the weights, which orthogonalizes them, and
    directions return to the host: 8 bytes per element of this rank.

    Args:
        optimizer: whose `matrices` is set.
        units: all units of the engine.
        used: by parameter, whether any rank has a gradient for it.
    """

    def __init__(self, optimizer: "Muon", units: Sequence[Unit], used: list[bool]) -> None:
        self._optimizer = optimizer
        self._units = list(units)
        self._unit_of = [unit for unit in units for _ in unit.params]  # by index of a parameter
        self._used = used
        self._alone: list[ParamShard] = []
        self._plan: _ExchangePlan | None = None
        self._plans: dict[tuple[int, ...], _ExchangePlan] = {}  # by indices of units

    def begin(self, shards: Sequence[ParamShard], finished: Sequence[int]) -> bool:
        """Begin the update of a batch: `shards` of this rank, and the units that end in it. Return whether the ranks
        communicate in it, with or without own shards.
        """
        self._optimizer.matrices = self
        self._alone = [
            shard
            for shard in shards
            if self._group(shard)["use_muon"] and self._used[shard.index] and not self._unit_of[shard.index].is_joint
        ]
        self._plan = self._plan_of([unit for index in finished if (unit := self._units[index]).is_joint])
        return self._plan is not None

    def end(self) -> None:
        """End the update, after which a step of the optimizer again takes whole matrices."""
        self._optimizer.matrices, self._alone, self._plan = None, [], None

    def _plan_of(self, units: list[Unit]) -> _ExchangePlan | None:
        used = [self._used[unit.first_index + place] for unit in units for place in range(len(unit.params))]
        if not any(used):
            return None
        key = tuple(unit.index for unit in units)
        found = self._plans.get(key)
        if found is None or found.used != used:
            found = self._plans[key] = _ExchangePlan(self._optimizer, units, used)
        return found

    def _group(self, shard: ParamShard) -> dict[str, Any]:
        group: dict[str, Any] = self._optimizer.param_groups[shard.param_group]
        return group

    def directions(self) -> dict[Tensor, Tensor]:
        """Return the directions of this rank's shards, by master weight, in their shapes."""
        found = {shard.master: self._alone_direction(shard) for shard in self._alone}
        if self._plan is not None:
            found |= self._of_copies(self._plan) if self._plan.are_copies else self._of_parts(self._plan)
        return found

    def _alone_direction(self, shard: ParamShard) -> Tensor:
        unit, master = self._unit_of[shard.index], shard.master
        update = self._advance(shard).to(unit.device).view(unit.shapes[shard.fragment.param])
        return self._direction(unit, shard.fragment.param, update).to(master.device).reshape(master.shape)

    def _advance(self, shard: ParamShard) -> Tensor:
        return self._optimizer.advance(shard.master, self._group(shard))

    def _direction(self, unit: Unit, place: int, update: Tensor) -> Tensor:
        group = self._optimizer.param_groups[unit.param_group]
        return self._optimizer.direction(update, group, unit.params[place])

    def _of_copies(self, plan: _ExchangePlan) -> dict[Tensor, Tensor]:
        rank, world_size = plan.ranks.rank, plan.ranks.world_size
        numels: list[list[int]] = [[] for _ in range(world_size)]
        for matrix in plan.matrices:
            numels[matrix.rank].append(matrix.shape.numel())
        room = max(map(sum, numels))
        starts = [iter(accumulate(its, initial=index * room)) for index, its in enumerate(numels)]
        gathered = torch.empty(world_size * room, dtype=plan.dtype, device=plan.device)
        found = {}
        for matrix, shard in plan.leaving:
            update = self._advance(shard)
            own = gathered.narrow(0, next(starts[matrix.rank]), matrix.shape.numel()).view(shard.master.shape)
            if matrix.rank == rank:
                own.copy_(self._direction(matrix.unit, matrix.place, update.to(plan.dtype)))
            found[shard.master] = own
        part = gathered.narrow(0, rank * room, room)
        plan.ranks.all_gather(gathered, part, tag="directions of Muon").wait()
        return found

    def _of_parts(self, plan: _ExchangePlan) -> dict[Tensor, Tensor]:
        sent = torch.empty(sum(plan.leaving_numels), dtype=plan.dtype, device=plan.device)
        parts = sent.split([shard.fragment.numel for _, shard in plan.leaving])
        for part, (_, shard) in zip(parts, plan.leaving, strict=True):
            part.copy_(self._advance(shard).view(-1))
        received = torch.empty(sum(plan.arriving_numels), dtype=plan.dtype, device=plan.device)
        arriving, leaving = plan.arriving_numels, plan.leaving_numels
        plan.ranks.all_to_all(received, sent, arriving, leaving, tag="updates of Muon").wait()
        for matrix in plan.own:
            whole = received.new_empty(matrix.shape.numel())
            for start, fragment in plan.places[id(matrix)]:
                whole.narrow(0, fragment.param_start, fragment.numel).copy_(received.narrow(0, start, fragment.numel))
            direction = self._direction(matrix.unit, matrix.place, whole.view(matrix.shape)).reshape(-1)
            for start, fragment in plan.places[id(matrix)]:
                received.narrow(0, start, fragment.numel).copy_(
                    direction.narrow(0, fragment.param_start, fragment.numel)
                )
        plan.ranks.all_to_all(sent, received, leaving, arriving, tag="directions of Muon").wait()
        if not plan.leaving:
            return {}
        back = sent.to(plan.leaving[0][1].master.device).split([shard.fragment.numel for _, shard in plan.leaving])
        return {shard.master: part.view(shard.shape) for part, (_, shard) in zip(back, plan.leaving, strict=True)}
