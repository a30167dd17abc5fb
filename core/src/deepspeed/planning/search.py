"""`plan` estimates every mesh and ZeRO stage for a number of ranks, and sorts those that fit by the time per token.

`estimate_traffic` counts the bytes that a rank sends in a step, by purpose; `step_seconds` estimates their time. A ring
sends 2 (W - 1) / W of the tensor in an all-reduce, and half of that in a reduce-scatter or an all-gather (Patarasuk and
Yuan 2009); an all-to-all sends (W - 1) / W. Sources of the volumes: ZeRO arXiv 1910.02054, section 7; tensor
parallelism 1909.08053, section 3; Ulysses 2309.14509, section 3.2; experts `moe/dispatch.py`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from deepspeed.errors import ConfigError, counted
from deepspeed.planning.blocks import Param
from deepspeed.planning.memory import Memory, estimate_memory, rank_model
from deepspeed.planning.shape import Mesh, ModelShape, first_heads, read_shape, share_of, why_not
from deepspeed.planning.training import DEVICE, Library, Training


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends in a step.

    reduce: gradients; gather: weights (ZeRO), and what Muon sends. tp: sums of activations, and logits. pp:
    activations and their gradients, to the next and the previous stage. sp: queries, keys, values, contexts. ep: rows
    for experts.
    """

    reduce: float = 0
    gather: float = 0
    tp: float = 0
    pp: float = 0
    sp: float = 0
    ep: float = 0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.reduce + self.gather + self.tp + self.pp + self.sp + self.ep


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`Machine` has the speeds that convert bytes and operations to seconds.

    ranks_per_node: number of ranks that share the fast links.
    intra, inter: bytes per second that a rank sends within a node, and between nodes.
    flops: operations per second that a rank sustains in matrix products.
    """

    ranks_per_node: int = 8
    intra: float = 200e9
    inter: float = 25e9
    flops: float = 150e12


def estimate_traffic(shape: ModelShape, mesh: Mesh, training: Training) -> Traffic:
    """Estimate the traffic of the first rank; in a pipeline, of the largest stage among first, middle and last."""
    steps, size, replicas = training.accumulation, training.weight_bytes, mesh.replicas
    share = share_of(shape, mesh, training.micro_batch, training.sequence)
    models = [rank_model(shape, mesh, training, stage) for stage in sorted({0, mesh.pp // 2, mesh.pp - 1})]
    model = max(models, key=lambda each: sum(param.numel for param in each.params))
    dense = sum(param.numel for param in model.params if not param.is_expert)
    experts = sum(param.numel for param in model.params if param.is_expert)
    ring = dense * _part(replicas) + experts * _part(replicas // mesh.ep)
    reductions = steps if training.stage >= 2 else 1
    gradients = ring * training.accumulated_bytes * reductions * (2 if training.stage == 0 else 1)
    gathers = {0: 0, 1: 1, 2: 1}.get(training.stage, gathers_of_stage3(training, dense + experts))
    layers = sum(".layers." in model.params[first].name for _, first in model.parts)
    again = int(training.checkpoints_activations)
    hidden = share.tokens * shape.hidden_size * size
    sums = layers * (4 + 2 * again) + 1  # per layer, plus one for the embedding or the output layer's input
    logits = share.tokens * shape.vocab_size * size if model.has_head else 0
    heads = first_heads(shape, mesh.tp)
    exchanged = share.tokens * (2 * heads.num_queries + 2 * heads.num_keys) * shape.head_dim * size
    rows = hidden * shape.experts_per_token
    return Traffic(
        reduce=gradients,
        gather=ring * size * gathers + _exchanged_by_muon(model.params, mesh, training),
        tp=steps * _part(mesh.tp) * (2 * sums * hidden + logits),
        pp=0 if mesh.pp == 1 else steps * hidden * (2 if mesh.pp > 2 else 1),
        sp=steps * layers * (2 + again) * exchanged * _part(mesh.sp),
        ep=steps * layers * (4 + 2 * again) * rows * _part(mesh.ep),
    )


def _exchanged_by_muon(params: Sequence[Param], mesh: Mesh, training: Training) -> float:
    """Return the bytes of the fp32 updates and directions of matrices that a rank sends; see `MatrixExchange`."""
    if not training.is_muon or training.stage in (1, 2):
        return 0
    sent = 0.0
    for param in params:
        if param.is_hidden_matrix:
            ranks = mesh.replicas // mesh.ep if param.is_expert else mesh.replicas
            sent += _part(ranks) * param.numel * (4 if training.stage == 0 else 8 / ranks)
    return sent


def gathers_of_stage3(training: Training, numel: int) -> int:
    """Return the all-gathers per weight and step: 1 if weights stay whole until the update, else 2 per micro-batch."""
    stays = numel <= min(training.zero_max_live, training.zero_max_reuse)
    return 1 if stays else 2 * training.accumulation


def idle_share(mesh: Mesh, training: Training) -> float:
    """Return the idle fraction of an ideal 1F1B pipeline: (p - 1) / (m + p - 1)."""
    return (mesh.pp - 1) / (training.accumulation + mesh.pp - 1)


def compute_seconds(shape: ModelShape, mesh: Mesh, training: Training, machine: Machine) -> float:
    """Return the seconds that the matrix products of a step take.

    They take 6 operations per weight and token, and 12 per attending pair of tokens, layer and feature; with activation
    checkpointing a third more (arXiv 2104.04473, section 5.1).
    """
    tokens = training.micro_batch * training.accumulation * mesh.dp * training.sequence
    inner = shape.intermediate_size * (shape.experts_per_token or 1) + shape.shared_intermediate_size
    mlp = (3 if shape.gated else 2) * shape.hidden_size * inner
    attention = shape.hidden_size * (2 * shape.query_size + 2 * shape.kv_size)
    weights = shape.layers * (mlp + attention) + shape.hidden_size * shape.vocab_size
    scores = shape.layers * shape.query_size * training.sequence * (1 if shape.is_causal_lm else 2)
    operations = tokens * (6 * weights + 6 * scores)
    return operations * (4 / 3 if training.checkpoints_activations else 1) / mesh.ranks / machine.flops


def step_seconds(shape: ModelShape, mesh: Mesh, training: Training, machine: Machine, traffic: Traffic) -> float:
    """Return the sum of compute time, idle time and all messages. Overlap, which is not modeled, makes it shorter."""
    spans = {"tp": mesh.tp, "sp": mesh.tp * mesh.sp, "dp": mesh.tp * mesh.sp * mesh.dp, "pp": mesh.ranks}
    spans["ep"] = mesh.tp * mesh.ep
    rate = {axis: machine.intra if span <= machine.ranks_per_node else machine.inter for axis, span in spans.items()}
    sent = {
        "dp": traffic.reduce + traffic.gather,
        **{axis: getattr(traffic, axis) for axis in ("tp", "pp", "sp", "ep")},
    }
    messages = sum(num_bytes / rate[axis] for axis, num_bytes in sent.items())
    return compute_seconds(shape, mesh, training, machine) / (1 - idle_share(mesh, training)) + messages


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks


STAGES = (0, 1, 2, 3)
#: minimum tokens per part of a sequence, unless the user fixes sp
_MIN_LENGTH = 1024


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One mesh and training. Memory and traffic are those of the rank that needs most; seconds are estimates."""

    mesh: Mesh
    training: Training
    memory: Memory
    traffic: Traffic
    idle_share: float
    step_seconds: float

    @property
    def tokens(self) -> int:
        """The number of tokens per step, over all ranks."""
        training = self.training
        return training.micro_batch * training.accumulation * training.sequence * self.mesh.dp

    @property
    def seconds_per_token(self) -> float:
        """The seconds per token, by which choices are sorted."""
        return self.step_seconds / self.tokens

    def config(self) -> dict[str, Any]:
        """Return the sections of a DeepSpeed configuration that this choice decides."""
        mesh, training = self.mesh, self.training
        axes = {axis: size for axis in ("pp", "sp", "tp") if (size := getattr(mesh, axis)) > 1}
        zero: dict[str, Any] = {"stage": training.stage}
        defaults = Training()
        keys = {
            "zero_bucket": "reduce_bucket_size",
            "zero_prefetch": "stage3_prefetch_bucket_size",
            "zero_max_live": "stage3_max_live_parameters",
            "zero_max_reuse": "stage3_max_reuse_distance",
            "zero_persistence": "stage3_param_persistence_threshold",
            "zero_model_persistence": "stage3_model_persistence_threshold",
        }
        for field, key in keys.items():
            if getattr(training, field) != getattr(defaults, field):
                zero[key] = getattr(training, field)
        if training.updates_on_host:
            zero["offload_optimizer"] = {"device": "cpu"}
        if training.offloads_parameters and training.stage == 3:
            zero["offload_param"] = {"device": "cpu"}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": training.micro_batch,
            "gradient_accumulation_steps": training.accumulation,
            "zero_optimization": zero,
        }
        if training.precision != "fp32":
            config[training.precision] = {"enabled": True}
        if axes:
            config["mesh"] = {"dp": mesh.dp, **axes}
        if mesh.tp > 1:
            config["tensor_parallel"] = {"autotp_size": mesh.tp}
        if mesh.ep > 1:
            config["expert_parallel"] = {"enabled": True, "autoep_size": mesh.ep}
        if mesh.pp > 1 and training.schedule != "1f1b":
            config["pipeline"] = {"schedule": training.schedule}
        return config


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`Plan` lists the choices that `plan` found.

    shape, parameters: the model's shape and number of parameters.
    ranks, limit: the number of ranks, and the limit in bytes of device memory per rank.
    fitting: choices that fit, best first. others: the rest, smallest memory first.
    advice: if nothing fits, pairs of a change and the closest choice with this change.
    """

    shape: ModelShape
    parameters: int
    ranks: int
    limit: int
    fitting: tuple[Choice, ...]
    others: tuple[Choice, ...]
    advice: tuple[tuple[str, Choice], ...] = ()

    @property
    def best(self) -> Choice | None:
        """The fastest choice that fits, or None."""
        return self.fitting[0] if self.fitting else None


def plan(
    model: ModelShape | Mapping[str, Any] | str | Path,
    *,
    ranks: int,
    memory: int,
    training: Training | None = None,
    stages: Sequence[int] = STAGES,
    axes: Mapping[str, int] | None = None,
    global_batch: int | None = None,
    machine: Machine | None = None,
    library: Library = DEVICE,
) -> Plan:
    """Estimate every mesh and stage.

    Args:
        model: see `read_shape`.
        ranks: total number of ranks.
        memory: bytes of device memory per rank that training may use.
        training: micro-batch, precision and so on; its stage and accumulation are replaced.
        stages: ZeRO stages to try.
        axes: fixed sizes of "pp", "dp", "sp", "tp", "ep".
        global_batch: sequences per step; default: `ranks` micro-batches.
        machine: speeds for the estimated seconds.
        library: properties of the collectives' buffers.

    Raises:
        ConfigError: no mesh fits `ranks`, the axes and the model; the message says why.
    """
    shape, training, machine = read_shape(model), training or Training(), machine or Machine()
    fixed = dict(axes or {})
    if ranks < 1 or memory < 1:
        raise ConfigError(f"plan: found ranks {ranks} and memory {memory}; both are integers >= 1")
    if unknown := set(fixed) - {"pp", "dp", "sp", "tp", "ep"}:
        raise ConfigError(f"plan: axes: found {', '.join(sorted(unknown))}; the axes are pp, dp, sp, tp, ep")
    if unknown_stages := set(stages) - set(STAGES):
        raise ConfigError(f"plan: stages: found {sorted(unknown_stages)}; the stages are 0, 1, 2, 3")
    batch = ranks * training.micro_batch if global_batch is None else global_batch
    refused: list[str] = []
    choices: list[Choice] = []
    for mesh in meshes(shape, ranks, training, fixed, machine, refused):
        accumulation, rest = divmod(batch, mesh.dp * training.micro_batch)
        if rest or not accumulation:
            refused.append(
                f"dp {mesh.dp}: a batch of {counted(batch, 'sequence')} is no multiple of dp x micro-batch "
                f"{training.micro_batch}"
            )
            continue
        for stage in _useful(stages, mesh):
            own = dataclasses.replace(training, stage=stage, accumulation=accumulation)
            choices.append(_choice(shape, mesh, own, machine, library))
    if not choices:
        reasons = "; ".join(sorted(set(refused))[:5]) or f"the sizes {fixed} do not divide {ranks}"
        raise ConfigError(f"plan: no mesh of {counted(ranks, 'rank')} fits {shape.family} ({reasons})")
    fitting = sorted((each for each in choices if each.memory.total <= memory), key=lambda each: each.seconds_per_token)
    others = sorted((each for each in choices if each.memory.total > memory), key=lambda each: each.memory.total)
    advice = () if fitting else tuple(_advice(shape, others[0], memory, machine, library))
    return Plan(
        shape=shape,
        parameters=count_parameters(shape),
        ranks=ranks,
        limit=memory,
        fitting=tuple(fitting),
        others=tuple(others),
        advice=advice,
    )


@lru_cache(maxsize=64)
def count_parameters(shape: ModelShape) -> int:
    """Return the number of elements in all parameters of the model."""
    if shape.parameters is not None:
        return shape.parameters
    return sum(param.numel for param in rank_model(shape, Mesh(), Training(sequence=1), 0).params)


def meshes(
    shape: ModelShape, ranks: int, training: Training, fixed: Mapping[str, int], machine: Machine, refused: list[str]
) -> Iterator[Mesh]:
    """Yield every mesh of `ranks` ranks that can divide the model. Unless fixed, tp stays within a node, and sp leaves
    parts of at least 1024 tokens. The reasons against other meshes are appended to `refused`."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    by_axis: dict[str, list[int]] = {}
    for axis in ("pp", "sp", "tp"):
        by_axis[axis] = [fixed[axis]] if axis in fixed else sizes
    if "tp" not in fixed:
        by_axis["tp"] = [size for size in sizes if size <= machine.ranks_per_node]
    if "sp" not in fixed:
        by_axis["sp"] = [size for size in sizes if size == 1 or training.sequence // size >= _MIN_LENGTH]
    for pp in by_axis["pp"]:
        for sp in by_axis["sp"]:
            for tp in by_axis["tp"]:
                dp, rest = divmod(ranks, pp * sp * tp)
                if rest or not dp or fixed.get("dp", dp) != dp:
                    continue
                experts = [fixed["ep"]] if "ep" in fixed else [size for size in sizes if (dp * sp) % size == 0]
                for ep in experts if shape.experts else [fixed.get("ep", 1)]:
                    mesh = Mesh(pp=pp, dp=dp, sp=sp, tp=tp, ep=ep)
                    reason = why_not(shape, mesh, training.sequence)
                    if reason is None:
                        yield mesh
                    else:
                        refused.append(reason)


def _useful(stages: Sequence[int], mesh: Mesh) -> Sequence[int]:
    """Return the stages to compare. With one replica all stages are the same, so only the lowest one is returned."""
    return stages if mesh.replicas > 1 else [min(stages)]


def _choice(shape: ModelShape, mesh: Mesh, training: Training, machine: Machine, library: Library) -> Choice:
    memory = max(
        (
            estimate_memory(shape, mesh, training, library, stage=stage)
            for stage in sorted({0, 1 % mesh.pp, mesh.pp - 1})
        ),
        key=lambda each: each.total,
    )
    traffic = estimate_traffic(shape, mesh, training)
    return Choice(
        mesh=mesh,
        training=training,
        memory=memory,
        traffic=traffic,
        idle_share=idle_share(mesh, training),
        step_seconds=step_seconds(shape, mesh, training, machine, traffic),
    )


def _advice(
    shape: ModelShape, closest: Choice, memory: int, machine: Machine, library: Library
) -> Iterator[tuple[str, Choice]]:
    """Yield the closest choice with one change, with all useful changes, and with twice the ranks, if it needs less."""
    training = closest.training
    changes: list[tuple[str, dict[str, Any]]] = []
    if not training.checkpoints_activations:
        changes.append(("activation checkpointing", {"checkpoints_activations": True}))
    if training.micro_batch > 1:
        steps = training.accumulation * training.micro_batch
        changes.append(("a micro-batch of 1", {"micro_batch": 1, "accumulation": steps}))
    if training.stage == 3 and training.zero_max_reuse:
        changes.append(("stage3_max_reuse_distance 0", {"zero_max_reuse": 0}))
    if training.precision == "fp32":
        changes.append(("bf16", {"precision": "bf16"}))
    if not training.offloads_optimizer and closest.training.stage:
        changes.append(("offload_optimizer to the host", {"offloads_optimizer": True}))
    together: dict[str, Any] = {}
    names: list[str] = []
    for name, change in changes:
        choice = _choice(shape, closest.mesh, dataclasses.replace(training, **change), machine, library)
        if choice.memory.total < closest.memory.total:
            names.append(name)
            together.update(change)
            yield name, choice
    if len(names) > 1:
        yield "all of these", _choice(shape, closest.mesh, dataclasses.replace(training, **together), machine, library)
    double = dataclasses.replace(closest.mesh, dp=2 * closest.mesh.dp)
    choice = _choice(shape, double, training, machine, library)
    if choice.memory.total < closest.memory.total:
        yield f"{counted(double.ranks, 'rank')}", choice
