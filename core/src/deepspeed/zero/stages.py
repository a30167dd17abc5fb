r"""`ZeroStage` says what each stage of ZeRO (0 to 3) divides among the ranks, and what follows from that.

Each stage divides what the previous one does, and one thing more. Bytes per parameter on one of W ranks with Adam,
without buffers in flight (ZeRO, arXiv 1910.02054, section 5):

    stage   divided               fp32         bf16, fp16    gradients are        weights are
    0       nothing               16           16            all-reduced          updated everywhere
    1       optimizer states      8 + 8/W      4 + 12/W      reduce-scattered     all-gathered after the update
    2       and gradients         4 + 12/W     2 + 14/W      reduce-scattered     all-gathered after the update
    3       and parameters        16/W         16/W          reduce-scattered     gathered when a module uses them

Everything else is the same in all stages: `Sharding` makes the step, `Units` lays parameters out, `Gradients` reduces
gradients. They ask the `ZeroStage` where the stages of this table differ.

[Note: one order of sums] A floating-point sum depends on its order. `FixedOrder` uses the order of one binary tree over
the micro-batches of a step, whichever rank computes them:

    micro-batch            0   1   2   3   4   5        k W + r: the one that is number k of its step on rank r of W
    over the ranks         \   /   \   /   \   /        in every backward
    on a rank                \       /       /          `PartialSums`: as many tensors as the number of pairs has bits
                               \          /             when the step ends

The lower levels are sums over ranks (a power of two), the upper levels are sums over a rank's consecutive backwards. So
sums are bitwise equal for all numbers of ranks and accumulation steps with the same product. For bf16 and fp16, sums
are computed in fp32 from gradients that were not rounded before. Each rank sums its part of a bucket at every stage; in
stage 0 these sums are gathered when the step ends. With two ranks any reduce-scatter has this order; with more ranks
the parts go through an all-to-all, which moves as many bytes.

Legend: N padded numel of a unit, S numel of a shard, W ranks.

`LocalGradients` is stage 0 for an optimizer that averages more than gradients over the ranks in its step.

Such an optimizer (`deepspeed.optim.one_bit`) decides before each backward whether the step needs this rank's own
gradients. If so, buckets are filled as usual, and no reduction is sent.

[Note: the norm of own gradients] Ranks must agree on the norm, which decides whether a step is skipped and how much is
clipped. If gradients differ, the norm is the root of the mean of their squared norms. It is at least the norm of the
average, and inf or nan if the norm of some rank is.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.comm.backend import DONE, Followed, Work
from deepspeed.errors import ConfigError
from deepspeed.optim import looks_at_whole
from deepspeed.optim.one_bit import OneBitOptimizer
from deepspeed.optim.traits import unwrapped
from deepspeed.parallel.mesh import Mesh
from deepspeed.zero import quantized
from deepspeed.zero.layout import UnitLayout, even_shard_numel
from deepspeed.zero.placement import exact_norm
from deepspeed.zero.unit import Unit
from deepspeed.zero.unit_groups import UnitGroups, UnitRanks

if TYPE_CHECKING:
    from deepspeed.zero.replicas import OuterSteps
    from deepspeed.zero.units import Units

#: reductions in flight at once, and buffers kept for reuse, if gradients are divided. It limits what this rank starts
#: but may be exceeded if peers are late, since a hook never waits for a peer
MAX_IN_FLIGHT = 2


@dataclass(frozen=True)
class ZeroStage:
    """`ZeroStage` says what is divided among the ranks, and derives from it the operations on one unit."""

    number: int
    divides_states: bool = False
    divides_gradients: bool = False
    divides_parameters: bool = False
    reduces_every_backward: bool = False  # else gradients are reduced once, at the end of a step
    quantizes_gradients: bool = False  # gradients are sent in int4 (`zero_quantized_gradients`)
    feedback: quantized.ErrorFeedback | None = None  # error feedback for int4 (`zeropp_loco_param`); of one engine

    #: whether sums are bitwise the same for every number of ranks (`FixedOrder`)
    fixes_order: ClassVar[bool] = False

    def facts(self) -> dict[str, str]:
        """Return how gradients are sent, as text by configuration key; all ranks must agree."""
        found = self.feedback
        return {
            "zero_quantized_gradients": str(self.quantizes_gradients),
            "zeropp_loco_param": "none" if found is None else f"err_beta {found.beta}, reset_T {found.reset_steps}",
        }

    # ---- the layout of a unit -----------------------------------------------------------------------------------

    def layout(
        self, numels: Sequence[int], world_size: int, *, keeps_params_whole: bool, max_fragment_numel: int | None
    ) -> UnitLayout:
        """Return which rank owns which elements of a unit; if nothing is divided, every rank owns all.

        Args:
            numels: numels of its parameters.
            world_size: number of ranks that share it.
            keeps_params_whole: whether a parameter has a single owner, for optimizers that are not elementwise.
            max_fragment_numel: maximum of elements of one parameter that are updated as one tensor.
        """
        if not self.divides_states:
            return UnitLayout.single(numels, max_fragment_numel)
        if keeps_params_whole:
            return UnitLayout.whole(numels, world_size)
        return UnitLayout.even(numels, world_size, max_fragment_numel)

    def result(self, unit: Unit) -> tuple[int, int]:
        """Return [start, stop) of a bucket's buffer [N] that holds this rank's sums after a reduction."""
        return (unit.shard_slice.start, unit.shard_slice.stop) if self.divides_states else (0, unit.layout.padded_numel)

    def contributed(self, unit: Unit) -> tuple[int, int]:
        """Return [start, stop) of the same buffer that this rank adds to a second reduction of the same step, so that
        each sum is added by one rank."""
        return self.result(unit) if self.divides_states or unit.ranks.rank == 0 else (0, 0)

    def lends_buffers(self, unit: Unit) -> bool:
        """Return whether a unit's bucket borrows its buffer for one reduction and keeps this rank's sums elsewhere.
        A single rank whose gradients are not offloaded has a shard of N elements and borrows no buffer."""
        is_alone = unit.ranks.world_size == 1 and not unit.placement.is_offloaded
        return self.divides_gradients and not is_alone

    def refuse_not_elementwise(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that needs whole parameters if parameters are divided.

        Raises:
            ConfigError: names the alternatives.
        """
        if not self.divides_parameters:
            return
        name = type(optimizer).__name__
        if looks_at_whole(optimizer):
            other = ", or deepspeed.ops.muon.Muon" if name == "Muon" else ""
            raise ConfigError(
                f"zero_optimization.stage 3: the update of {name} looks at whole parameters, and this stage holds "
                f"shards of them; use stage 1 or 2{other}"
            )
        raise ConfigError(
            f"zero_optimization.stage 3: the update of {name} is not known to be elementwise, and this stage holds "
            "shards of parameters. If the update of each element depends on that element alone, give the class "
            f"{name} is_elementwise = True; else use stage 1 or 2"
        )

    @property
    def shows_gradients(self) -> bool:
        """Whether `param.grad` shows the average over the ranks after a backward; else nobody reads it there."""
        return not self.divides_states

    # ---- the step of a unit -------------------------------------------------------------------------------------

    def begin_backward(self, presum_divisor: float, world_size: int) -> float:
        """Begin a backward; return the factor by which its gradients become terms of an average over the ranks.

        `Bucket` multiplies gradients by the factor as it stores them, before `reduce` sums them over the ranks.

        Args:
            presum_divisor: divides gradients before the sum; the update applies the rest of the division.
        """
        return 1.0 / presum_divisor

    def reduce(self, unit: Unit, wire_N: Tensor) -> Work:
        """Start to sum a bucket over the ranks of its unit, into the `result` part of `wire_N`."""
        shards, tag = unit.ranks.shard_group, unit.index
        if not self.divides_states:
            return shards.all_reduce(wire_N, tag=tag)
        is_small = self.divides_parameters and unit.sharded is None  # below the persistence threshold of stage 3
        if self.quantizes_gradients and not is_small:
            return quantized.reduce_scatter(shards, wire_N[unit.shard_slice], wire_N, tag=tag, feedback=self.feedback)
        return shards.reduce_scatter(wire_N[unit.shard_slice], wire_N, tag=tag)

    def gather_sums(self, unit: Unit, sums_N: Tensor) -> Work:
        """Start to gather the sums of a step from the `result` parts of all ranks, if every rank needs all sums."""
        return DONE

    def gather_weights(self, unit: Unit) -> Work | None:
        """Start to all-gather the weights of a unit that was just updated; None if no rank needs others' weights."""
        if not self.divides_states or unit.sharded is not None:
            return None
        assert unit.flat_N is not None
        return unit.ranks.shard_group.all_gather(unit.flat_N, unit.flat_N[unit.shard_slice], tag=unit.index)

    def part_for_norm(self, unit: Unit, reduced: Tensor) -> Tensor:
        """Return a unit's gradients that this rank counts in the norm: its shard, or its share of whole gradients."""
        own = reduced if self.divides_states else reduced.tensor_split(unit.ranks.world_size)[unit.ranks.rank]
        return _counted(own, unit.ranks)

    def counts_for_norm(self, unit: Unit) -> bool:
        """Return whether this rank, among those with the same gradients of a unit, counts them in the norm."""
        is_first = unit.ranks.replicate_group is None or unit.ranks.replicate_group.rank == 0
        return is_first and (self.divides_states or unit.ranks.rank == 0)

    def shown_gradient(self, gradient: Tensor) -> Tensor:
        """Return the average over the ranks of a parameter's whole reduced gradient. A collective."""
        return gradient

    def finish_update(self) -> Collection[Tensor]:
        """Finish an update; return the master weights that this step changed. A collective."""
        return ()

    # ---- rounding errors that are still to be sent ----------------------------------------------------------------

    def rounding(self, units: "Units") -> dict[str, Any] | None:
        """Return the rounding errors that this rank has not sent yet, for a checkpoint; None if nothing is rounded."""
        return None

    def restore_rounding(self, units: "Units", saved: Mapping[str, Any] | None) -> None:
        """Restore this rank's result of `rounding`; None: no errors, because other weights or states were loaded."""
        self.drop_errors()

    def warn_if_apart(self, call: str) -> None:
        """Warn if replicas differ, of which `call` takes or leaves one rank's weights; only `LocalSteps` lets them."""

    def drop_errors(self) -> None:
        """Forget the errors of quantized gradients and free their memory."""
        if self.feedback is not None:
            self.feedback.drop()

    @property
    def held_bytes(self) -> int:
        """Bytes of the errors of quantized gradients."""
        return 0 if self.feedback is None else self.feedback.held_bytes


#: by `zero_optimization.stage`
STAGES = (
    ZeroStage(0),
    ZeroStage(1, divides_states=True),
    ZeroStage(2, divides_states=True, divides_gradients=True, reduces_every_backward=True),
    ZeroStage(3, divides_states=True, divides_gradients=True, divides_parameters=True, reduces_every_backward=True),
)


@dataclass(frozen=True)
class FixedOrder(ZeroStage):
    """`FixedOrder` is a stage that reduces after every backward, in one order; see [Note: one order of sums]."""

    fixes_order: ClassVar[bool] = True

    @classmethod
    def of(cls, stage: ZeroStage, world_size: int) -> "FixedOrder":
        """Return `stage` with this order, for `world_size` ranks (a power of two)."""
        assert world_size & (world_size - 1) == 0, world_size
        asked = {field.name: getattr(stage, field.name) for field in dataclasses.fields(ZeroStage)}
        return cls(**asked | {"reduces_every_backward": True})

    def layout(
        self, numels: Sequence[int], world_size: int, *, keeps_params_whole: bool, max_fragment_numel: int | None
    ) -> UnitLayout:
        layout = super().layout(
            numels, world_size, keeps_params_whole=keeps_params_whole, max_fragment_numel=max_fragment_numel
        )
        if self.divides_states:
            return layout
        padded_numel = even_shard_numel(layout.numel, world_size) * world_size  # ranks sum equal parts
        return UnitLayout(layout.numels, layout.offsets, padded_numel, 1, max_fragment_numel)

    def result(self, unit: Unit) -> tuple[int, int]:
        numel = unit.layout.padded_numel // unit.ranks.world_size
        return unit.ranks.rank * numel, (unit.ranks.rank + 1) * numel

    def lends_buffers(self, unit: Unit) -> bool:
        return True

    @property
    def shows_gradients(self) -> bool:
        """False: the sums are partial until the step ends."""
        return False

    def reduce(self, unit: Unit, wire_N: Tensor) -> Work:
        ranks, own_S = unit.ranks.shard_group, wire_N[slice(*self.result(unit))]
        if ranks.world_size == 1:
            return DONE
        if ranks.world_size == 2:
            return ranks.reduce_scatter(own_S, wire_N, tag=unit.index)
        parts_N = ranks.allocate(wire_N.numel(), wire_N.dtype, wire_N.device)
        work = ranks.all_to_all(parts_N, wire_N, tag=unit.index)
        parts_WS = parts_N.view(ranks.world_size, -1)
        return Followed(work, lambda: tree_sum(parts_WS, own_S), in_poll=wire_N.device.type == "cpu")

    def gather_sums(self, unit: Unit, sums_N: Tensor) -> Work:
        if self.divides_states:
            return DONE
        return unit.ranks.shard_group.all_gather(sums_N, sums_N[slice(*self.result(unit))], tag=unit.index)


def _counted(gradients_S: Tensor, ranks: UnitRanks) -> Tensor:
    """Return the gradients that this rank counts in the norm: ranks with copies of them each count a part."""
    copies = ranks.replicate_group
    return gradients_S if copies is None else gradients_S.tensor_split(copies.world_size)[copies.rank]


def tree_sum(parts_WS: Tensor, sum_S: Tensor) -> None:
    """Write the sum of the rows of `parts_WS` (a power of two) to `sum_S`, adding neighbors first. The rows are
    overwritten."""
    stride = 1
    while stride < len(parts_WS):
        parts_WS[:: 2 * stride].add_(parts_WS[stride :: 2 * stride])
        stride *= 2
    sum_S.copy_(parts_WS[0])


@dataclass(frozen=True)
class LocalGradients(ZeroStage):
    """`LocalGradients` is stage 0 that sums gradients over the ranks only in steps for which `optimizer` wants sums."""

    optimizer: OneBitOptimizer = field(kw_only=True)

    @property
    def shows_gradients(self) -> bool:
        """False: only some steps would show averages."""
        return False

    def begin_backward(self, presum_divisor: float, world_size: int) -> float:
        self.optimizer.begin_phase()
        factor = super().begin_backward(presum_divisor, world_size)
        return world_size * factor if self.optimizer.keeps_gradients else factor

    def contributed(self, unit: Unit) -> tuple[int, int]:
        return self.result(unit) if self.optimizer.keeps_gradients else super().contributed(unit)

    def reduce(self, unit: Unit, wire_N: Tensor) -> Work:
        return DONE if self.optimizer.keeps_gradients else super().reduce(unit, wire_N)

    def part_for_norm(self, unit: Unit, reduced: Tensor) -> Tensor:
        if not self.optimizer.keeps_gradients:
            return super().part_for_norm(unit, reduced)
        own = exact_norm(_counted(reduced, unit.ranks)) / math.sqrt(unit.ranks.world_size)
        return own.reshape(1)  # [Note: the norm of own gradients]

    def shown_gradient(self, gradient: Tensor) -> Tensor:
        ranks = self.optimizer.ranks
        if not self.optimizer.keeps_gradients or ranks is None:
            return gradient
        mean_N = gradient.reshape(-1).to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        ranks.all_reduce(mean_N, tag="gradient").wait()
        return mean_N.div_(ranks.world_size).view(gradient.shape)

    def finish_update(self) -> Collection[Tensor]:
        return self.optimizer.finish_update()

    def rounding(self, units: "Units") -> dict[str, Any] | None:
        found = {name: self.optimizer.rounding.get(master) for name, master in _masters(units)}
        return {name: [each.worker, each.server] for name, each in found.items() if each is not None} or None

    def restore_rounding(self, units: "Units", saved: Mapping[str, Any] | None) -> None:
        self.optimizer.restore_rounding({master: (saved or {}).get(name) for name, master in _masters(units)})


@dataclass(frozen=True)
class LocalSteps(ZeroStage):
    """`LocalSteps` is stage 0 of ranks whose groups have one rank each, so that nothing is reduced; `outer` averages
    their copies of the model every few steps."""

    outer: "OuterSteps" = field(kw_only=True)

    def reduce(self, unit: Unit, wire_N: Tensor) -> Work:
        return DONE

    def rounding(self, units: "Units") -> dict[str, Any] | None:
        return self.outer.own_state()

    def restore_rounding(self, units: "Units", saved: Mapping[str, Any] | None) -> None:
        self.outer.restore_own(saved)

    def warn_if_apart(self, call: str) -> None:
        self.outer.warn_if_apart(call)


def stage_of(optimizer: Optimizer, stage: int, mesh: Mesh, units: UnitGroups) -> LocalGradients:
    """Return the stage for an optimizer that averages over the ranks by itself; the optimizer joins the ranks.

    Raises:
        ConfigError: if parameters or states are divided among ranks, so that ranks lack what others average.
    """
    optimizer = unwrapped(optimizer)
    assert isinstance(optimizer, OneBitOptimizer)
    _refuse(optimizer, stage, mesh, units)
    optimizer.join(units.dense.reduce_group)
    return LocalGradients(0, optimizer=optimizer)


def _masters(units: "Units") -> list[tuple[str, Tensor]]:
    """Return the names of the parameters with the optimizer's master weights."""
    names = {id(param): name for name, param in units.named_parameters}
    return [(names[id(units.params[shard.index])], shard.master) for unit in units for shard in unit.shards]


def _refuse(optimizer: Optimizer, stage: int, mesh: Mesh, units: UnitGroups) -> None:
    name = type(optimizer).__name__
    if stage > 0:
        raise ConfigError(
            f"zero_optimization.stage: found {stage} with {name}, whose ranks average the momentum of whole "
            "parameters, and ZeRO divides it among them; set stage to 0, or use AdamW"
        )
    if mesh.size("tp") > 1:
        raise ConfigError(
            f"optimizer: found {name} with {mesh.size('tp')} tensor-parallel ranks, whose gradients have another norm "
            "on each; use AdamW, or no tensor parallelism"
        )
    if units.divides_experts:
        raise ConfigError(
            f"optimizer: found {name} for a model whose experts are divided over ranks, which then have no momentum to "
            "average with all others; use AdamW, or an ep_size of 1"
        )
