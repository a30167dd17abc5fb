"""Estimate the peak memory of a rank: persistent memory, and a walk through one step.

The walk visits the moments of a step with the highest memory: the end of the forward, each arrival of a gradient in the
backward, and the update. At each moment the parts sum up to the live memory; the moment with the largest sum is the
estimate. The lifetimes of buffers follow `zero/`, and the activations `blocks.py`. `units_of` groups the parameters
that are reduced and gathered together by the rules of `zero/units.py`, and at stage 3 of `zero/module_units.py`,
applied to names instead of modules.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from deepspeed.pipe.layers import partition_balanced
from deepspeed.planning import blocks
from deepspeed.planning.blocks import Param, PlannedBlock
from deepspeed.planning.shape import Mesh, ModelShape, Share, share_of
from deepspeed.planning.tape import Point, Profile
from deepspeed.planning.training import DEVICE, Library, Training
from deepspeed.zero.bucket import FLUSH_NUMEL
from deepspeed.zero.gradient_reduction import LARGE_NUMEL
from deepspeed.zero.layout import divide_into_units, even_shard_numel
from deepspeed.zero.stages import MAX_IN_FLIGHT
from deepspeed.zero.units import (
    DEVICE_UPDATE_NUMEL,
    DEVICE_WIDENED_NUMEL,
    MIN_BUCKET_NUMEL,
    WIDENED_NUMEL,
    ShardingOptions,
)


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit of parameters, given by their indices in the rank's list, in module order.

    numel: N, with padding; shard: S, the elements that a rank owns; ranks: number of ranks that share the unit.
    is_gathered: whether the weights are sharded too.
    """

    params: tuple[int, ...]
    numel: int
    shard: int
    ranks: int
    is_gathered: bool = False


def units_of(
    params: Sequence[Param], training: Training, replicas: int, expert_replicas: int, library: Library
) -> list[PlannedUnit]:
    """Return the units of a rank, in the order in which a backward fills them.

    Args:
        params: parameters of the rank, in module order; names are paths.
        replicas: number of ranks that average a gradient; expert_replicas: the same for experts.
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
    """Return the indices of the parameters that stage 3 keeps whole."""
    room = training.zero_model_persistence
    whole = set()
    for at in sorted(range(len(params)), key=lambda each: params[each].numel):
        room -= params[at].numel
        if params[at].numel >= training.zero_persistence or room < 0:
            break
        whole.add(at)
    return whole


def _by_module(paths: dict[int, str], params: Sequence[Param], max_numel: int) -> list[list[int]]:
    """Return the groups of `zero.module_units.divide`. In a list of modules, the next part of each path is a number."""
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


_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank at the moment of its peak; the parts add up to `total`.

    weights: the model's weights, or this rank's shard. master_weights: fp32 copies.
    optimizer: optimizer states. gradients: accumulated gradients, and gradients that wait for a bucket.
    gathered: whole weights at stage 3. activations: saved for the backward, and working memory.
    logits: activations of the output layer and the loss.
    buffers: buffers of buckets and of collectives.
    host: additional bytes in host memory (offloaded states).
    moment: "forward", "backward" or "update". stage: index of the pipeline stage.
    """

    weights: int = 0
    master_weights: int = 0
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    host: int = 0
    moment: str = "backward"
    stage: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts: bytes of device memory."""
        return sum(getattr(self, name) for name in PARTS)


#: the fields of `Memory` that add up
PARTS = ("weights", "master_weights", "optimizer", "gradients", "gathered", "activations", "logits", "buffers")


@dataclass(frozen=True, slots=True)
class RankModel:
    """One pipeline stage's part of the model, with the tapes of a micro-batch."""

    params: tuple[Param, ...]
    #: (block, index of its first parameter in `params`), in the order of the forward
    parts: tuple[tuple[PlannedBlock, int], ...]
    has_head: bool
    boundary: int  # bytes of the activations between stages
    constant: int  # bytes that exist once per forward: the rotary table


def estimate_memory(
    shape: ModelShape, mesh: Mesh, training: Training, library: Library = DEVICE, *, stage: int | None = None
) -> Memory:
    """Return the peak of a rank of one pipeline stage; without `stage`, of the stage that needs most."""
    stages = range(mesh.pp) if stage is None else [stage]
    found = (_of_stage(shape, mesh, training, library, each) for each in stages)
    return max(found, key=lambda memory: memory.total)


def rank_model(shape: ModelShape, mesh: Mesh, training: Training, stage: int) -> RankModel:
    """Return the part of the model in pipeline stage `stage`."""
    share = share_of(shape, mesh, training.micro_batch, training.sequence)
    size = training.weight_bytes
    first, middle, last = _blocks(shape, share, size)
    weights = [sum(param.numel for param in block.params) for block in (first, middle, last)]
    cuts = stage_cuts(shape.layers, weights, mesh.pp)
    params: list[Param] = []
    parts: list[tuple[PlannedBlock, int]] = []
    for at in range(cuts[stage], cuts[stage + 1]):
        block = first if at == 0 else last if at == shape.layers + 1 else middle
        prefix = "model." if block is first else f"model.layers.{at - 1}." if block is middle else ""
        parts.append((block, len(params)))
        params += [Param(prefix + each.name, each.numel, each.is_expert) for each in block.params]
    if shape.tied and mesh.pp > 1 and stage == mesh.pp - 1:  # both ends hold the embedding
        params.append(Param("embed_tokens.weight", first.params[0].numel))
    boundary = share.tokens * shape.hidden_size * size
    rotated = int(shape.head_dim * shape.rotary_share) if shape.rotary else 0
    rotation = 2 * share.length * rotated * size
    num_layers = sum(block is middle for block, _ in parts)
    constant = rotation if mesh.pp == 1 else rotation * num_layers  # each layer of a pipeline creates its own
    return RankModel(tuple(params), tuple(parts), cuts[stage + 1] == shape.layers + 2, boundary, constant)


@lru_cache(maxsize=4096)
def _blocks(shape: ModelShape, share: Share, size: int) -> tuple[PlannedBlock, PlannedBlock, PlannedBlock]:
    return blocks.embedding(shape, share, size), blocks.layer(shape, share, size), blocks.head(shape, share, size)


def stage_cuts(layers: int, weights: Sequence[int], stages: int) -> list[int]:
    """Return the stages' boundaries in (embedding, layers, head), balanced by parameters like in PipelineModule."""
    if stages == 1:
        return [0, layers + 2]
    return _cuts(layers, tuple(weights), stages)


@lru_cache(maxsize=4096)
def _cuts(layers: int, weights: tuple[int, ...], stages: int) -> list[int]:
    first, middle, last = weights
    return partition_balanced([first, *[middle] * layers, last], stages)


def in_flight(training: Training, mesh: Mesh, stage: int) -> int:
    """Return how many micro-batches' activations a stage keeps: 1F1B p - stage (arXiv 2104.04473), zero bubble p."""
    if mesh.pp == 1:
        return 1
    depth = mesh.pp if training.schedule == "zero_bubble" else mesh.pp - stage
    if training.schedule == "interleaved":
        depth = mesh.pp + mesh.pp - stage
    return min(training.accumulation, depth)


def estimate_measured(
    params: Sequence[Param], activations: int, mesh: Mesh, training: Training, library: Library = DEVICE
) -> Memory:
    """Return the peak for a model with known parameters and measured activations, instead of a known shape.

    The peak is a lower bound, because it omits the working memory of operations.

    Args:
        params: parameters that a rank trains, in module order.
        activations: bytes that the forward of a micro-batch saves for the backward.
    """
    count = max(len(params), 1)
    points = tuple(
        Point(activations * (at + 1) // count, activations * at // count, (param.name,))
        for at, param in reversed(list(enumerate(params)))
    )
    block = PlannedBlock(tuple(params), Profile(activations, activations, 0, points))
    return _peak(RankModel(tuple(params), ((block, 0),), False, 0, 0), mesh, training, library, 0)


def _of_stage(shape: ModelShape, mesh: Mesh, training: Training, library: Library, stage: int) -> Memory:
    return _peak(rank_model(shape, mesh, training, stage), mesh, training, library, stage)


def _peak(model: RankModel, mesh: Mesh, training: Training, library: Library, stage: int) -> Memory:
    units = units_of(model.params, training, mesh.replicas, mesh.replicas // mesh.ep, library)
    base = _Base(model, units, training, library)
    moments = [*_passes(model, units, training, library, in_flight(training, mesh, stage), base), base.update()]
    peak = max(moments, key=lambda memory: memory.total)
    return dataclasses.replace(peak, stage=stage, host=base.host)


class _Base:
    """`_Base` counts the persistent bytes, and the bytes in the update."""

    def __init__(self, model: RankModel, units: Sequence[PlannedUnit], training: Training, library: Library) -> None:
        stage, size = training.stage, training.weight_bytes
        self.units, self.training, self.library = units, training, library
        owned = sum(unit.shard for unit in units)
        padded = sum(unit.numel for unit in units)
        self.weights = sum(size * (unit.shard if unit.is_gathered else unit.numel) for unit in units)
        if stage == 0:
            self.weights = size * sum(param.numel for param in model.params)
        masters = training.master_bytes * owned
        if training.updates_on_host and not masters:  # the host updates a copy
            masters = _FP32 * owned
        states = training.state_bytes * owned
        #: elements of each hidden matrix of Muon, the largest first, and how many of all this rank owns
        self.matrices: list[int] = []
        self.muon_owned = 0
        if training.is_muon:
            hidden = [param.numel if param.is_hidden_matrix else 0 for param in model.params]
            self.matrices = sorted(filter(None, hidden), reverse=True)
            for unit in units:
                self.muon_owned += unit.shard * sum(hidden[at] for at in unit.params) // max(unit.numel, 1)
            states += _FP32 * (owned - self.muon_owned)
        self.host = 0
        #: bytes of gradients that persist between steps
        self.lasting = 0
        self.pooled = [unit for unit in units if is_pooled(unit, training)]
        alone = [unit for unit in units if not is_pooled(unit, training)]
        self.lasting = training.accumulated_bytes * sum(unit.numel for unit in alone)
        if training.updates_on_host:
            self.host += masters + states + training.accumulated_bytes * owned
            masters = states = 0
        if training.offloads_parameters:
            shards = size * sum(unit.shard for unit in units if unit.is_gathered)
            self.host += shards
            self.weights -= shards
        self.masters, self.states = masters, states
        largest = sorted((unit.numel for unit in self.pooled), reverse=True)
        self.pool = training.accumulated_bytes * sum(largest[:MAX_IN_FLIGHT])
        self.staging = 0
        if library.stages and stage >= 1:
            sent = training.accumulated_bytes * sum(unit.numel for unit in units if unit.ranks > 1)
            self.staging = min(library.kept_bytes, sent)
        self.gathers = size * sum(unit.numel for unit in units if unit.is_gathered)
        self.padded = padded

    def at(self, moment: str, **parts: int) -> Memory:
        """Return the memory at a moment: the persistent parts plus `parts`."""
        return Memory(
            weights=self.weights,
            master_weights=self.masters,
            optimizer=self.states,
            gradients=self.lasting + parts.pop("gradients", 0),
            buffers=self.pool + self.staging + parts.pop("buffers", 0),
            moment=moment,
            **parts,
        )

    def update(self) -> Memory:
        """Return the memory in the update, with reduced gradients, and fp32 copies of a part of them."""
        training = self.training
        shards = 0 if training.updates_on_host else sum(unit.shard for unit in self.pooled)
        largest = max((unit.shard for unit in self.units), default=0)
        on_device = self.library.waits_on_device and not training.updates_on_host
        widened = DEVICE_WIDENED_NUMEL if on_device else WIDENED_NUMEL
        has_kernel = training.has_kernel and not training.is_muon
        wide = _FP32 * (largest if has_kernel else min(largest, widened)) if training.master_bytes else 0
        return self.at("update", gradients=training.accumulated_bytes * shards, buffers=wide + self._of_muon(on_device))

    def _of_muon(self, on_device: bool) -> int:
        """Return the bytes with which Muon finds the directions of a batch; see `MatrixExchange`.

        The directions of its matrices are kept until they are applied: all of them in stage 0, a rank's own in stages 1
        and 2. In stage 3 a rank sends and receives its part, and puts a matrix together. An iteration needs three times
        the matrix.
        """
        if not self.matrices:
            return 0
        training = self.training
        room = DEVICE_UPDATE_NUMEL if on_device else ShardingOptions.update_numel
        if training.master_bytes:
            room = min(room, DEVICE_WIDENED_NUMEL if on_device else WIDENED_NUMEL)
        ranks = max(unit.ranks for unit in self.units)
        share = ranks if training.stage else 1
        batch = min(self.muon_owned, max(room, sum(self.matrices[:ranks]) // share))
        is_put_together = training.stage == 3 and ranks > 1
        return _FP32 * (batch * (2 if is_put_together else 1) + self.matrices[0] * (5 if is_put_together else 3))

    def gathered(self) -> int:
        """Return the bytes of whole weights that stage 3 keeps in a forward or backward."""
        training, size = self.training, self.training.weight_bytes
        numels = sorted((unit.numel for unit in self.units if unit.is_gathered), reverse=True)
        if not numels or all(unit.ranks == 1 for unit in self.units):
            return 0
        total = sum(numels)
        ahead = min(training.zero_prefetch, sum(numels[:2]))
        if total <= training.zero_max_reuse:
            kept = total
        else:  # parameters that are used again within this distance: the last layers, in forward and backward
            kept = training.zero_max_reuse // 2 + numels[0] + ahead
        return size * max(min(total, kept, training.zero_max_live), min(total, numels[0]))


def _passes(
    model: RankModel,
    units: Sequence[PlannedUnit],
    training: Training,
    library: Library,
    num_in_flight: int,
    base: _Base,
) -> Iterator[Memory]:
    """Yield the moments of forward and backward of the last micro-batch, which has the highest memory."""
    keeps = [_kept(block, training, is_layer=_is_layer(model, at)) for at, (block, _) in enumerate(model.parts)]
    extra = model.constant + (0 if model.has_head else model.boundary)
    others = (num_in_flight - 1) * (sum(keeps) + extra)
    gathered = base.gathered()
    walk = _Gradients(model.params, units, training, library, base, adds_up=training.accumulation > 1)
    head = model.parts[-1][0] if model.has_head else None

    def moment(name: str, block: PlannedBlock, live: int) -> Memory:
        is_head = block is head
        activations = others + extra + live_below + (0 if is_head else live)
        return base.at(
            name,
            activations=activations,
            logits=live if is_head else 0,
            gathered=gathered,
            gradients=walk.gradients,
            buffers=walk.buffers,
        )

    live_below = 0
    for (block, _), kept in zip(model.parts, keeps, strict=True):
        yield moment("forward", block, block.profile.forward_peak)
        live_below += kept
    waiting_tied = 0
    for at in reversed(range(len(model.parts))):
        block, first = model.parts[at]
        live_below -= keeps[at]
        again = _is_layer(model, at) and training.checkpoints_activations
        input_bytes = keeps[at] if again else 0
        places = {param.name: first + place for place, param in enumerate(block.params)}
        for point in block.profile.points:
            yield moment("backward", block, point.peak + input_bytes + waiting_tied)
            for name in point.parameters:
                if name in places:
                    walk.arrive(places[name])
                else:  # the gradient of a tied embedding waits for the other use
                    waiting_tied = model.params[0].numel * training.weight_bytes
            yield moment("backward", block, point.live + input_bytes + waiting_tied)
    walk.end()
    if head is not None or model.parts:
        yield moment("backward", model.parts[0][0], 0)


def is_pooled(unit: PlannedUnit, training: Training) -> bool:
    """Return whether the unit's bucket borrows a buffer, and its reduced gradients are sharded."""
    return training.stage >= 2 and unit.ranks > 1


def _is_layer(model: RankModel, at: int) -> bool:
    return ".layers." in model.params[min(model.parts[at][1], len(model.params) - 1)].name


def _kept(block: PlannedBlock, training: Training, *, is_layer: bool) -> int:
    """Return the bytes that a block keeps from forward to backward; a checkpointed layer keeps only its input."""
    return block.profile.output if is_layer and training.checkpoints_activations else block.profile.saved


class _Gradients:
    """Simulates the gradients on their way into buckets, in one backward: `gradients` and `buffers` in bytes, in
    addition to persistent memory."""

    def __init__(
        self,
        params: Sequence[Param],
        units: Sequence[PlannedUnit],
        training: Training,
        library: Library,
        base: _Base,
        *,
        adds_up: bool,
    ) -> None:
        self._params, self._units, self._base = params, units, base
        self._unit_of = {place: at for at, unit in enumerate(units) for place in unit.params}
        self._size, self._accumulated = training.weight_bytes, training.accumulated_bytes
        self._keeps_shards = not training.updates_on_host
        self._library = library
        self._missing = [len(unit.params) for unit in units]
        self._loose: list[int] = [0] * len(units)  # elements in `param.grad`
        self._waiting: list[int] = [0] * len(units)  # elements that wait in the bucket
        self._pooled = {at for at, unit in enumerate(units) if is_pooled(unit, training)}
        self._borrowed: dict[int, int] = {}  # bytes of the buffer of a unit
        self._flying: list[int] = []
        self._shards = self._accumulated * sum(unit.shard for unit in base.pooled) if adds_up else 0
        self._adds_up = adds_up

    @property
    def gradients(self) -> int:
        """Bytes of gradients that wait for buckets, and of reduced shards."""
        return self._size * (sum(self._loose) + sum(self._waiting)) + (self._shards if self._keeps_shards else 0)

    @property
    def buffers(self) -> int:
        """Bytes of bucket buffers beyond the pool of reusable ones."""
        return max(0, sum(self._borrowed.values()) - self._base.pool)

    def arrive(self, place: int) -> None:
        """Process the gradient of the parameter with index `place`."""
        at = self._unit_of[place]
        unit, numel = self._units[at], self._params[place].numel
        self._missing[at] -= 1
        is_first = place == unit.params[0]
        is_large = numel >= LARGE_NUMEL and not self._library.waits_on_device
        if not (is_first or unit.is_gathered or is_large):
            self._loose[at] += numel
            return
        self._waiting[at] += numel
        if is_first:
            self._waiting[at] += self._loose[at]
            self._loose[at] = 0
        if self._waiting[at] >= FLUSH_NUMEL or not self._missing[at]:
            self._flush(at)

    def end(self) -> None:
        """End the backward: flush all remaining gradients."""
        for at in range(len(self._units)):
            if self._waiting[at] or self._loose[at]:
                self._waiting[at] += self._loose[at]
                self._loose[at] = 0
                self._flush(at)

    def _flush(self, at: int) -> None:
        if at in self._pooled:
            self._borrowed.setdefault(at, self._accumulated * self._units[at].numel)
        self._waiting[at] = 0
        if not self._missing[at] and at in self._pooled:
            self._flying.append(at)
            if len(self._flying) > MAX_IN_FLIGHT:
                self._finish(self._flying.pop(0))

    def _finish(self, at: int) -> None:
        self._borrowed.pop(at)
        if not self._adds_up:
            self._shards += self._accumulated * self._units[at].shard
