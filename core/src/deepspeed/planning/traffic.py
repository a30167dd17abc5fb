"""Bytes that a rank sends in a step, by what they are for; and an estimate of the time of a step.

A ring sends 2 (W - 1) / W of the tensor in an all-reduce, and half of that in a reduce-scatter or an all-gather
(Patarasuk and Yuan 2009); an all-to-all sends (W - 1) / W. What is sent when: ZeRO arXiv 1910.02054, section 7; tensor
parallelism 1909.08053, section 3; Ulysses 2309.14509, section 3.2; experts `moe/dispatch.py`.
"""

from dataclasses import dataclass

from deepspeed.planning.memory import rank_model
from deepspeed.planning.shape import Mesh, ModelShape, first_heads, share_of
from deepspeed.planning.training import Training


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends in a step.

    reduce: of gradients; gather: of weights (ZeRO). tp: sums of activations, and logits. pp: activations and their
    gradients, to the next stage and the one before. sp: queries, keys, values, contexts. ep: rows of experts.
    """

    reduce: float = 0
    gather: float = 0
    tp: float = 0
    pp: float = 0
    sp: float = 0
    ep: float = 0

    @property
    def total(self) -> float:
        """All of it."""
        return self.reduce + self.gather + self.tp + self.pp + self.sp + self.ep


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`Machine` has the speeds that turn bytes and operations into seconds.

    ranks_per_node: neighbors that share the fast links.
    intra, inter: bytes per second that a rank sends within a node, and between nodes.
    flops: operations per second that a rank sustains in matrix products.
    """

    ranks_per_node: int = 8
    intra: float = 200e9
    inter: float = 25e9
    flops: float = 150e12


def estimate_traffic(shape: ModelShape, mesh: Mesh, training: Training) -> Traffic:
    """Estimate the traffic of the first rank; in a pipeline, of the stage (first, middle or last) that holds most."""
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
    sums = layers * (4 + 2 * again) + 1  # of a layer; and of the embedding, or of the output layer's input
    logits = share.tokens * shape.vocab_size * size if model.has_head else 0
    heads = first_heads(shape, mesh.tp)
    exchanged = share.tokens * (2 * heads.num_queries + 2 * heads.num_keys) * shape.head_dim * size
    rows = hidden * shape.experts_per_token
    return Traffic(
        reduce=gradients,
        gather=ring * size * gathers,
        tp=steps * _part(mesh.tp) * (2 * sums * hidden + logits),
        pp=0 if mesh.pp == 1 else steps * hidden * (2 if mesh.pp > 2 else 1),
        sp=steps * layers * (2 + again) * exchanged * _part(mesh.sp),
        ep=steps * layers * (4 + 2 * again) * rows * _part(mesh.ep),
    )


def gathers_of_stage3(training: Training, numel: int) -> int:
    """All-gathers of a weight in a step: one where weights stay whole until they change, else two per micro-batch."""
    stays = numel <= min(training.zero_max_live, training.zero_max_reuse)
    return 1 if stays else 2 * training.accumulation


def idle_share(mesh: Mesh, training: Training) -> float:
    """The part of a step in which a stage of an ideal 1F1B pipeline waits: (p - 1) / (m + p - 1)."""
    return (mesh.pp - 1) / (training.accumulation + mesh.pp - 1)


def compute_seconds(shape: ModelShape, mesh: Mesh, training: Training, machine: Machine) -> float:
    """Return the seconds that the matrix products of a step take.

    They take 6 operations per weight and token, and 12 per pair of tokens that attend, layer and feature; a third more
    with activation checkpointing (arXiv 2104.04473, section 5.1).
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
    """Compute, idle time and all messages one after the other: what overlaps makes it shorter."""
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
