"""`ReplicaCheck` checks that copies of the same weights have the same bits on all ranks that hold them.

`watch.compare_weights_every` enables it; `zero_optimization.enable_sanity_checks` compares before every update.
`Training.before_update` calls it. A rank may change a weight on its own, for example inside `GatheredParameters`
without `modifier_rank`, or its memory or kernels may err. It would then train on with other weights, silently. Copies:

    weights that this rank has whole    on the ranks of dp x sp; experts on the ranks with the same experts
    weights of several pipeline stages  on these stages too
    undivided weights, and shards       on tensor-parallel ranks too, if marks declare the division
    shards of MiCS                      on the ranks with the same shard
    secondary shards (hpZ)              on the ranks with the same part

`OuterSteps` averages copies that train apart (`local_sgd`).

Each copy has a digest, computed on its device and moved to the CPU in one transfer per device. Ranks exchange one
digest of all digests for each set of ranks with copies, and digests of single weights only if two of these differ.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from deepspeed import log
from deepspeed.comm.backend import GroupBackend
from deepspeed.comm.give_up import follow, standing
from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.values import all_gather_values, named_ranks
from deepspeed.config.monitor import WatchConfig
from deepspeed.config.training import LocalSGDConfig
from deepspeed.config.zero import ZeroConfig
from deepspeed.errors import CheckpointError, StateError, counted
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import (
    EXPERT_PREFIX,
    division_is_known,
    expert_group_of,
    is_moe_param,
    is_tensor_parallel,
    tied_stages,
)
from deepspeed.precision.policy import LossScaler
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


class OuterSteps:
    """`OuterSteps` averages copies of a model that each rank trains alone for `sync_every` steps.

    Source: Douillard et al., "DiLoCo" (arXiv 2311.08105), algorithm 1. The anchors are the weights with which all ranks
    have begun; after the steps

        delta   = anchor - mean of the ranks' weights
        buffer  = momentum * buffer + delta
        anchor  = anchor - lr * (delta + momentum * buffer)     with nesterov; else anchor - lr * buffer
        weights = anchor

    With lr 1 and momentum 0 the weights become their mean: local SGD (Stich, arXiv 1805.09767). The states of the inner
    optimizer stay on their rank.

    Args:
        section: the configuration.
        ranks: the data-parallel ranks.
    """

    def __init__(self, section: LocalSGDConfig, ranks: GroupBackend) -> None:
        self._section, self._ranks = section, ranks
        self._anchors: dict[str, Tensor] = {}  # by the name of the parameter
        self._momentum: dict[str, Tensor] = {}
        self._sharding: Sharding  # set by `follow`, as is `_loss_scaler`
        self._loss_scaler: LossScaler
        self._step = 0  # the last step that this object has seen

    def follow(self, sharding: Sharding, loss_scaler: LossScaler) -> None:
        """Average the weights of `sharding` from now on. All ranks call it together."""
        self._sharding, self._loss_scaler = sharding, loss_scaler
        sharding.backends.append(self._ranks)
        self._ranks.connect()

    def before_update(self, update: int) -> None:
        """Keep the weights with which a round begins, if there are none yet; see `Training.before_update`."""
        self._keep_anchors()

    def after_update(self, step: int, *, applied: bool, scale: float) -> None:
        """Average if it is due, whether or not this rank has skipped its step; see `Training.after_update`."""
        self._step = step
        if step % self._section.sync_every == 0:
            self._average_all()

    def warn_if_apart(self, call: str) -> None:
        """Warn if the last step was no average, so that each replica has weights of its own when `call` takes them."""
        every, step = self._section.sync_every, self._step
        if step % every == 0 or self._ranks.world_size == 1:
            return
        fits = max(number for number in range(1, every) if step % number == 0)
        log.warn_once(
            f"local_sgd: {call}: found {counted(step % every, 'step')} since the last average of the replicas, which "
            "have weights of their own now, and those of the other ranks are lost where only one rank's are taken; end "
            f"at a multiple of sync_every ({every}) steps, or set local_sgd.sync_every to {fits} for {step} steps"
        )

    def _masters(self) -> list[list[tuple[str, Tensor]]]:
        """Return by unit the names of the parameters and the optimizer's tensors."""
        units = self._sharding.units
        names = {id(param): name for name, param in units.named_parameters}
        return [[(names[id(units.params[shard.index])], shard.master) for shard in unit.shards] for unit in units]

    def _keep_anchors(self) -> None:
        if len(self._anchors) == len(self._sharding.units.params):
            return
        self._sharding.states.take_outside_changes()
        for name, master in chain.from_iterable(self._masters()):
            if name not in self._anchors:
                self._anchors[name] = master.detach().clone()

    def _average_all(self) -> None:
        sharding = self._sharding
        sharding.states.wait_for_copy()
        sharding.states.take_outside_changes()
        if self._ranks.world_size > 1:  # a rank has told its failures to nobody, as nobody waits for it in a step
            follow(all_gather_values(standing(), self._ranks.group))
        try:
            for masters in self._masters():
                self._average(masters)
            sharding.weights_from_masters()
        except BaseException as error:
            sharding.states.break_by(error)
            sharding.gradients.abandon()
            raise

    @torch.no_grad()
    def _average(self, masters: list[tuple[str, Tensor]]) -> None:
        """Make the outer step of one unit. A collective of one all-reduce."""
        if not masters:
            return
        first = _real(masters[0][1])
        sizes = [_real(master).numel() for _, master in masters]
        delta_N = self._ranks.allocate(sum(sizes), first.dtype, first.device)
        deltas = delta_N.split(sizes)
        for (name, master), delta in zip(masters, deltas, strict=True):
            torch.sub(_real(self._anchors[name]).view(-1), _real(master).reshape(-1), out=delta)
        self._ranks.all_reduce(delta_N, tag="local_sgd").wait()
        delta_N.div_(self._ranks.world_size)
        lr, momentum = self._section.outer_lr, self._section.outer_momentum
        for (name, master), delta in zip(masters, deltas, strict=True):
            anchor = self._anchors[name]
            anchor_N, step = _real(anchor).view(-1), delta
            if momentum:
                if name not in self._momentum:
                    self._momentum[name] = torch.zeros_like(anchor)
                buffer_N = _real(self._momentum[name]).view(-1)
                buffer_N.mul_(momentum).add_(delta)
                step = delta.add_(buffer_N, alpha=momentum) if self._section.nesterov else buffer_N
            anchor_N.sub_(step, alpha=lr)
            master.copy_(anchor)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks have alike, for the model file."""
        self._keep_anchors()
        return {"ranks": self._ranks.world_size, "anchors": self._anchors, "momentum": self._momentum}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a state that `load_state_dict` could not take."""
        shapes = {name: master.shape for name, master in chain.from_iterable(self._masters())}
        for kind in ("anchors", "momentum"):
            for name, value in state.get(kind, {}).items():
                if name in shapes and (not isinstance(value, Tensor) or value.shape != shapes[name]):
                    found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    raise CheckpointError(
                        f"local_sgd: found {kind} of {found} for {name}, which has the shape {tuple(shapes[name])}. "
                        "Load another tag, or the weights alone with load_module_only=True."
                    )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the anchors and the outer momentum of a checkpoint."""
        masters = dict(chain.from_iterable(self._masters()))

        def own(kind: str) -> dict[str, Tensor]:
            found = state.get(kind, {})
            return {name: found[name].to(masters[name], copy=True) for name in masters if name in found}

        self._anchors, self._momentum = own("anchors"), own("momentum")
        if (saved := state.get("ranks")) not in (None, self._ranks.world_size):
            log.warn_once(
                f"local_sgd: the checkpoint is of {saved} ranks, and this run has {self._ranks.world_size}: each rank "
                "goes on with the first rank's weights and states of the inner optimizer, in the round that was begun"
            )

    def own_state(self) -> dict[str, Any]:
        """Return what this rank alone has: its weights, and the states of its optimizer."""
        named = list(chain.from_iterable(self._masters()))
        optimizer = self._sharding.optimizer
        assert optimizer is not None
        own = {
            "weights": {name: master.detach() for name, master in named},
            "states": {name: dict(optimizer.state.get(master, {})) for name, master in named},
            "loss_scaler": self._loss_scaler.state_dict(),
        }
        return {"local_sgd": own}

    @torch.no_grad()
    def restore_own(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the result of `own_state` over the first rank's; None: go on with that, in a new round, unless
        `load_state_dict` follows."""
        self._anchors, self._momentum = {}, {}
        own = (saved or {}).get("local_sgd")
        if own is None:
            return
        optimizer = self._sharding.optimizer
        assert optimizer is not None
        for name, master in chain.from_iterable(self._masters()):
            if name in own["weights"]:
                master.copy_(own["weights"][name])
                _restore_state(optimizer.state, master, own["states"][name])
        self._loss_scaler.load_state_dict(own["loss_scaler"])
        self._sharding.weights_from_masters()


def _restore_state(states: dict[Tensor, Any], master: Tensor, saved: Mapping[str, Any]) -> None:
    """Set one parameter's state of the optimizer, in the memory that it has."""
    if not saved:
        states.pop(master, None)
        return
    former = states.get(master, {})
    restored = {}
    for key, value in saved.items():
        has_memory = isinstance(value, Tensor) and isinstance(found := former.get(key), Tensor)
        if has_memory and found.shape == value.shape:
            restored[key] = found.copy_(value)
        elif isinstance(value, Tensor):
            restored[key] = value.to(master.device, copy=True) if value.dim() else value.clone()
        else:
            restored[key] = value
    states[master] = restored


def _real(value: Tensor) -> Tensor:
    """Return a tensor as real numbers, which every library sums."""
    value = value.detach()
    return torch.view_as_real(value) if value.is_complex() else value


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
