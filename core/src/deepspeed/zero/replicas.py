"""`ReplicaCheck` checks that copies of the same weights have the same bits on all ranks that hold them.

`watch.compare_weights_every` enables it; `zero_optimization.enable_sanity_checks` compares before every update.
`Training.before_update` calls it. A rank may change a weight on its own, for example inside `GatheredParameters`
without `modifier_rank`, or its memory or kernels may err. It would then train on with other weights, silently. Copies:

    weights that this rank has whole    on the ranks of dp x sp; experts on the ranks with the same experts
    weights of several pipeline stages  on these stages too
    undivided weights, and shards       on tensor-parallel ranks too, if marks declare the division
    shards of MiCS                      on the ranks with the same shard
    secondary shards (hpZ)              on the ranks with the same part

Each copy has a digest, computed on its device and moved to the CPU in one transfer per device. Ranks exchange one
digest of all digests for each set of ranks with copies, and digests of single weights only if two of these differ.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed import log
from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.values import all_gather_values, named_ranks
from deepspeed.config.monitor import WatchConfig
from deepspeed.config.zero import ZeroConfig
from deepspeed.errors import StateError
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import (
    EXPERT_PREFIX,
    division_is_known,
    expert_group_of,
    is_moe_param,
    is_tensor_parallel,
    tied_stages,
)
from deepspeed.zero.param_marks import ZeroParamStatus
from deepspeed.zero.param_unit import ParamUnit, unit_of
from deepspeed.zero.sharding import Sharding

_CHUNK_NUMEL = 2**20
_SPREAD = 0x9E3779B1  # odd, so that places below 2**31 get different factors
_MIX = 0x2545F4914F6CDD1D  # odd, so that no bit of earlier chunks is lost
_MIB = 2**20
_CALL = "comparison of weights"

#: by set of ranks that hold copies, and by weight: its digest; None: it must not be compared now
Digests = dict[str, dict[str, int | None]]


class ReplicaCheck:
    """`ReplicaCheck` compares the copies of one engine's weights. All ranks of the mesh create it together.

    Args:
        key: configuration key, for errors.
        every: number of updates between comparisons.
    """

    def __init__(self, module: torch.nn.Module, mesh: Mesh, sharding: Sharding, *, key: str, every: int) -> None:
        self._module, self._mesh, self._sharding = module, mesh, sharding
        self._key, self._every = key, every
        self._ranks = mesh.ranks(*mesh.layout.axes)
        self._was_reported = False
        group_backend(mesh.norm_group).connect()

    def __call__(self, update: int) -> None:
        """Compare, if it is due. A collective of all ranks of the mesh.

        Args:
            update: the number of the update that follows, from 1.

        Raises:
            StateError: on every rank, for the first weight whose copies differ; names the ranks.
        """
        if update % self._every or len(self._ranks) == 1:
            return
        started_s = time.perf_counter()
        found, num_bytes = self._digests()
        by_rank: list[dict[str, int]] = self._gather({members: _digest_of_all(each) for members, each in found.items()})
        if not self._was_reported:
            self._was_reported = True
            elapsed_ms, sent = (time.perf_counter() - started_s) * 1e3, sum(len(str(each)) for each in by_rank)
            log.announce(
                f"{self._key}: compared {num_bytes / _MIB:.1f} MiB of weights per rank in {elapsed_ms:.1f} ms, with "
                f"{sent} bytes from {len(by_rank)} ranks; every {self._every} updates"
            )
        differing = [members for members in _in_order(by_rank) if len(_values(by_rank, members)) > 1]
        if differing:
            self._refuse(differing, self._gather({members: found.get(members, {}) for members in differing}))

    def _gather(self, own: object) -> list[Any]:
        return all_gather_values(own, backend=group_backend(self._mesh.norm_group), call=_CALL)

    def _refuse(self, differing: Sequence[str], by_rank: Sequence[Digests]) -> None:
        for members in differing:
            for name in _in_order(found[members] for found in by_rank):
                # None: another rank has released it already, or set its own elements, which arrive with the update
                every = zip(self._ranks, (found[members] for found in by_rank), strict=True)
                held = {rank: digests[name] for rank, digests in every if name in digests}
                if None in held.values() or len(set(held.values())) < 2:
                    continue
                (expected, _), *_ = Counter(held.values()).most_common()  # in a tie, the first rank's digest
                others = [rank for rank, digest in held.items() if digest != expected]
                first = next(rank for rank, digest in held.items() if digest == expected)
                raise StateError(
                    f"{self._key}: the parameter {name} must have the same values on all ranks that hold it, and "
                    f"{named_ranks(others)} {'differs' if len(others) == 1 else 'differ'} from rank {first}. Change "
                    "parameters on all ranks alike, or on one inside deepspeed.zero.GatheredParameters(..., "
                    "modifier_rank=0). If nobody changed it, a rank computes or remembers other bits than its peers: "
                    "go on from a checkpoint that is older than the last comparison, and test the memory and the "
                    "device of that rank"
                )

    # ---- what this rank holds -----------------------------------------------------------------------------------

    def _digests(self) -> tuple[Digests, int]:
        """Return the digests of this rank's copies, and the number of bytes of the copies."""
        copies = [(name, sets, value) for name, sets, value in self._copies() if sets]
        waiting = self._sharding.set_locally
        digests = _digests([value for _, _, value in copies])
        found: Digests = {}
        for (name, sets, value), digest in zip(copies, digests, strict=True):
            for members in sets:
                found.setdefault(members, {})[name] = None if value in waiting else digest
        return found, sum(value.nbytes for _, _, value in copies)

    def _copies(self) -> Iterator[tuple[str, list[str], Tensor]]:
        """Yield each copy that this rank has: its name, the sets of ranks that have other copies, and its values."""
        is_known = self._mesh.size("tp") > 1 and division_is_known(self._module)
        for name, param in self._module.named_parameters():
            unit = unit_of(param)
            is_whole = unit is None or not unit.is_sharded
            if is_whole or (unit.status is ZeroParamStatus.AVAILABLE and unit.is_exact):  # type: ignore[union-attr]
                if param.numel() > 0:
                    yield name, self._holders(param, is_known), param
        for unit in self._sharding.units.divided():
            yield from self._copies_of_shards(unit, is_known)

    def _holders(self, param: Tensor, division_known: bool) -> list[str]:
        mesh, expert = self._mesh, expert_group_of(param)
        ep_size = 1 if expert is None else int(expert.removeprefix(EXPERT_PREFIX))
        data = mesh.ranks("dp", "sp") if ep_size == 1 else mesh.experts(ep_size).ranks("edp")
        sets = [*_set_of("edp" if ep_size > 1 else "dp", data)]
        if division_known and expert is None and not is_tensor_parallel(param):
            sets += _set_of("tp", mesh.ranks("tp"))
        if stages := tied_stages(param):
            stage_ranks = mesh.ranks("pp")
            sets += _set_of(f"pp {stages}", [stage_ranks[at] for at in stages])
        return sets

    def _copies_of_shards(self, unit: ParamUnit, division_known: bool) -> Iterator[tuple[str, list[str], Tensor]]:
        name = f"{unit.names[0]} (a shard that begins with it, of {unit.numel // unit.ranks.world_size} elements)"
        sets, replicas, param = [], unit.unit_ranks.replicate_group, unit.params[0]
        if replicas is not None:
            kind = f"pp {tied_stages(param)}" if unit.unit_ranks.is_tied else "copies"
            sets += _set_of(kind, torch.distributed.get_process_group_ranks(replicas.group))
        if division_known and not any(is_tensor_parallel(each) or is_moe_param(each) for each in unit.params):
            sets += _set_of("tp", self._mesh.ranks("tp"))
        if sets:
            yield name, sets, unit.shard_S if unit.offloaded is None else unit.offloaded.load(0, unit.shard_S.numel())
        for near_S in unit.kept_tensors()[1:]:
            yield f"{name}, second copy", _set_of("near", self._mesh.ranks("dp_replicate")), near_S


def create_check(
    zero: ZeroConfig, watch: WatchConfig, module: torch.nn.Module, mesh: Mesh, sharding: Sharding
) -> ReplicaCheck | None:
    """Create the check that the configuration sections enable (a collective), or return None."""
    if zero.enable_sanity_checks:
        return ReplicaCheck(module, mesh, sharding, key="zero_optimization.enable_sanity_checks", every=1)
    if every := watch.compare_weights_every:
        return ReplicaCheck(module, mesh, sharding, key="watch.compare_weights_every", every=every)
    return None


def _set_of(kind: str, members: Sequence[int]) -> list[str]:
    """Return the name of a set of ranks, by its first rank, since sets of a kind are disjoint. Empty for one rank."""
    return [f"{kind} {members[0]}"] if len(members) > 1 else []


def _in_order(by_rank: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for each in by_rank for name in each))


def _values(by_rank: Iterable[dict[str, int]], name: str) -> set[int]:
    return {each[name] for each in by_rank if name in each}


def _digest_of_all(digests: dict[str, int | None]) -> int:
    text = "\n".join(f"{name} {digest}" for name, digest in digests.items())
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _digests(values: Sequence[Tensor]) -> list[int]:
    """Return the digest of each value; wait once per device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        by_device.setdefault(value.device, []).append(place)
    found = [0] * len(values)
    for device, places in by_device.items():
        factors = _factors(device)
        digests = torch.stack([_digest(values[at], factors) for at in places]).tolist()
        for place, digest in zip(places, digests, strict=True):
            found[place] = digest
    return found


def _factors(device: torch.device) -> Tensor:
    """Return an odd number below 2**31 for each place of a chunk."""
    return (torch.arange(1, _CHUNK_NUMEL + 1, device=device).mul_(_SPREAD).bitwise_and_(2**31 - 1)).bitwise_or_(1)


@torch.no_grad()
def _digest(value: Tensor, factors: Tensor) -> Tensor:
    """Return a 0-D int64: the sum of words of at most 32 bits, each times the factor of its place, modulo 2**64. Equal
    bits give equal digests; a change of a single word changes the digest, since its factor is odd."""
    words = value.detach().contiguous().view(-1).view({1: torch.uint8, 2: torch.int16}.get(value.itemsize, torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for chunk in words.split(_CHUNK_NUMEL):
        total.mul_(_MIX).add_(chunk.long().mul_(factors[: chunk.numel()]).sum())
    return total
