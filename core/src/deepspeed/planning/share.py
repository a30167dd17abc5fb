"""`Mesh` and `Share`: how many ranks lie along each axis, and what of a model and a micro-batch the first rank along
each of them has. The first ranks hold one head, feature or token more where sizes do not divide; so it has the most."""

import math
from dataclasses import dataclass

from deepspeed.errors import counted
from deepspeed.planning.shape import ModelShape
from deepspeed.tensor_parallel.ranges import HeadShare, share_heads, spread


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks along each axis. Experts are divided over `ep` of the dp x sp ranks."""

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.pp * self.dp * self.sp * self.tp

    @property
    def replicas(self) -> int:
        """Ranks that average a gradient: over these ZeRO shards."""
        return self.dp * self.sp

    def __str__(self) -> str:
        axes = {"pp": self.pp, "dp": self.dp, "sp": self.sp, "tp": self.tp, "ep": self.ep}
        return " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "one rank"


@dataclass(frozen=True, kw_only=True)
class Share:
    """`Share` has the sizes that one rank computes with, in elements.

    batch, length: sequences of a micro-batch, and tokens of one of them on this rank.
    query_size, kv_size: features of the query heads, and of the key heads, of this tensor-parallel rank.
    inner, shared_inner: inner width of the MLP or of one expert, and of the shared expert.
    vocab: tokens whose embedding and logits the rank holds.
    experts: how many experts the rank holds.
    sp, tp, ep: ranks along these axes.
    """

    batch: int
    length: int
    query_size: int
    kv_size: int
    inner: int
    shared_inner: int
    vocab: int
    experts: int
    sp: int
    tp: int
    ep: int

    @property
    def tokens(self) -> int:
        """The number of tokens that a micro-batch has on this rank."""
        return self.batch * self.length


def share_of(shape: ModelShape, mesh: Mesh, batch: int, sequence: int) -> Share:
    """The share of the first rank.

    Raises:
        ConfigError: there are fewer heads than tensor-parallel ranks.
    """
    heads = first_heads(shape, mesh.tp)
    is_divided = not shape.experts  # experts are divided over ep, not over tp
    return Share(
        batch=batch,
        length=math.ceil(sequence / mesh.sp),
        query_size=heads.num_queries * shape.head_dim,
        kv_size=heads.num_keys * shape.head_dim,
        inner=_first(shape.intermediate_size, mesh.tp) if is_divided else shape.intermediate_size,
        shared_inner=_first(shape.shared_intermediate_size, mesh.tp),
        vocab=_first(shape.vocab_size, mesh.tp) if mesh.pp == 1 else shape.vocab_size,  # a pipeline's ends stay whole
        experts=shape.experts // mesh.ep,
        sp=mesh.sp,
        tp=mesh.tp,
        ep=mesh.ep,
    )


def first_heads(shape: ModelShape, tp: int) -> HeadShare:
    """The heads of the first tensor-parallel rank."""
    return share_heads(shape.heads, shape.kv_heads, tp, f"{shape.family}, tp {tp}")[0]


def why_not(shape: ModelShape, mesh: Mesh, sequence: int) -> str | None:
    """Return why the model cannot be divided so; None: it can."""
    if shape.layers < mesh.pp:
        return f"pp {mesh.pp}: {counted(shape.layers, 'layer')}"
    if shape.heads < mesh.tp or shape.intermediate_size < mesh.tp:
        return f"tp {mesh.tp}: {counted(shape.heads, 'head')}"
    if sequence % mesh.sp or shape.heads // mesh.tp < mesh.sp:
        heads = counted(shape.heads // mesh.tp, "head")
        return f"sp {mesh.sp}: {counted(sequence, 'token')}, {heads} of a tensor-parallel rank"
    if mesh.sp > 1 and (shape.heads // mesh.tp) % mesh.sp:
        return f"sp {mesh.sp}: {counted(shape.heads // mesh.tp, 'head')}, which cannot be shared evenly"
    if mesh.ep > 1 and (not shape.experts or shape.experts % mesh.ep or mesh.replicas % mesh.ep):
        return f"ep {mesh.ep}: {counted(shape.experts, 'expert')}, dp x sp {mesh.replicas}"
    return None


def _first(total: int, parts: int) -> int:
    start, stop = spread(total, parts)[0]
    return stop - start
