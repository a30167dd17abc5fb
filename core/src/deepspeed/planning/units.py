"""The units of ZeRO that a rank would have: which parameters are reduced and gathered together, and how many elements.

By the rules of `zero/units.py`, and in stage 3 of `zero/module_units.py`, applied to names instead of modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.planning.blocks import Param
from deepspeed.planning.training import Library, Training
from deepspeed.zero.layout import divide_into_units, even_shard_numel
from deepspeed.zero.units import MIN_BUCKET_NUMEL


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """Parameters, by their places among those of the rank, in the order of the module.

    numel: N, padding included; shard: S, what a rank owns; ranks: that share it.
    is_gathered: its weights are sharded too.
    """

    params: tuple[int, ...]
    numel: int
    shard: int
    ranks: int
    is_gathered: bool = False


def units_of(
    params: Sequence[Param], training: Training, replicas: int, expert_replicas: int, library: Library
) -> list[PlannedUnit]:
    """The units of a rank, in the order in which a backward fills them.

    Args:
        params: of the rank, in the order of the module; names are paths.
        replicas: ranks over which gradients are averaged; expert_replicas: those of experts.
    """
    small = list(range(len(params)))
    units: list[PlannedUnit] = []
    if training.stage == 3:
        whole = _persistent(params, training)
        max_numel = min(training.zero_prefetch, library.bucket_bytes // 4)
        paths = {at: param.name for at, param in enumerate(params) if at not in whole}
        for places in _by_module(paths, params, max_numel):
            for expert in (False, True):
                alike = [at for at in places if params[at].is_expert is expert]
                if alike:
                    units.append(_unit(alike, params, expert_replicas if expert else replicas, is_gathered=True))
        small = [at for at in range(len(params)) if at in whole]
    total = sum(param.numel for param in params)
    preferred = library.bucket_bytes if training.stage else library.all_reduce_bytes
    room = min(preferred // training.accumulated_bytes, max(MIN_BUCKET_NUMEL, total // 3), training.zero_bucket)
    for expert in (False, True):
        places = [at for at in small if params[at].is_expert is expert]
        runs = divide_into_units([params[at].numel for at in places], places, room)
        ranks = expert_replicas if expert else replicas
        units += [_unit([places[at] for at in run], params, ranks if training.stage else 1) for run in runs]
    return sorted(units, key=lambda unit: -unit.params[0])


def _unit(places: Sequence[int], params: Sequence[Param], ranks: int, *, is_gathered: bool = False) -> PlannedUnit:
    numel = sum(params[at].numel for at in places)
    shard = numel if ranks == 1 and not is_gathered else even_shard_numel(numel, ranks)
    return PlannedUnit(tuple(places), shard * ranks, shard, ranks, is_gathered)


def _persistent(params: Sequence[Param], training: Training) -> set[int]:
    """Places of the parameters that stage 3 keeps whole."""
    room = training.zero_model_persistence
    whole = set()
    for at in sorted(range(len(params)), key=lambda each: params[each].numel):
        room -= params[at].numel
        if params[at].numel >= training.zero_persistence or room < 0:
            break
        whole.add(at)
    return whole


def _by_module(paths: dict[int, str], params: Sequence[Param], max_numel: int) -> list[list[int]]:
    """The runs that `zero.module_units.divide` gives. A list of modules has a number as the next part of a path."""
    found: list[list[int]] = []

    def visit(places: list[int], depth: int) -> None:
        own = [at for at in places if paths[at].count(".") == depth]
        below: dict[str, list[int]] = {}
        for at in places:
            if at not in own:
                below.setdefault(paths[at].split(".")[depth], []).append(at)
        if own:
            found.append(own)
        for child in below.values():
            numel = sum(params[at].numel for at in child)
            parts = {paths[at].split(".")[depth + 1] for at in child}
            is_list = all(part.isdigit() for part in parts)
            if numel <= max_numel and not is_list:
                found.append(child)
            else:
                visit(child, depth + 1)

    visit(list(paths), 0)
    return found
