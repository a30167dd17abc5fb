"""GShard's masks of capacity, for layers that dispatch by einsum: `top1gating`, `top2gating` and `topkgating`.

    loss, combine_TEC, dispatch_TEC, counts = top2gating(logits_TE, capacity_factor=1.0, min_capacity=4)
    rows_ECH = torch.einsum("tec,th->ech", dispatch_TEC.to(x_TH.dtype), x_TH)
    y_TH = torch.einsum("tec,ech->th", combine_TEC, experts(rows_ECH))

`deepspeed.moe.sharded_moe` has these functions, which Megatron's layers call. The choices, weights and losses are those
of `gate.py`, in training. `MoE` itself needs no masks, which grow with the square of the tokens.

Shape legend: T tokens, E experts, K choices of a token, C capacity, H width.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.group_backend import group_backend
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError
from deepspeed.log import warn_once
from deepspeed.moe.gate import Routing, TopKGate

#: loss, scalar; combine weights [T, E, C], fp32, differentiable; whether a token has a place, [T, E, C], bool; choices
#: by expert before any was dropped, [E], int64
Masks = tuple[Tensor, Tensor, Tensor, Tensor]


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: ProcessGroup | None = None,
    *,
    use_tutel: bool = False,
) -> Masks:
    """The likeliest expert of each token.

    Args:
        logits: [T, E].
        capacity_factor: C is this times T / E.
        min_capacity: at least so many places.
        used_token: [T], 0 for tokens that go to no expert.
        noisy_gate_policy: None or "RSample".
        drop_tokens: False: C is the largest number of choices that an expert got.
        use_rts: draw which of too many tokens stay; else the first.
        ep_group: without dropping, C is the largest of these ranks: a collective of them.
        use_tutel: accepted with a warning, as in `MoE`.
    """
    if use_tutel:
        warn_once("top1gating: found use_tutel True, ignored: masks are returned, as without Tutel")
    gate = _gate(
        logits,
        1,
        capacity_factor=capacity_factor,
        min_capacity=min_capacity,
        noisy_gate_policy=noisy_gate_policy,
        drop_tokens=drop_tokens,
        use_rts=use_rts,
    )
    return _masks(gate, logits, ep_group, used_token)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
) -> Masks:
    """Two experts of each token; C is `capacity_factor` times 2 T / E.

    Args:
        top2_2nd_expert_sampling: draw the second expert; for the other arguments see `top1gating`.
    """
    gate = _gate(
        logits,
        2,
        capacity_factor=capacity_factor,
        min_capacity=min_capacity,
        drop_tokens=drop_tokens,
        top2_2nd_expert_sampling=top2_2nd_expert_sampling,
    )
    return _masks(gate, logits, ep_group)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    drop_policy: str = "probs",
) -> Masks:
    """The k likeliest experts of each token, k from 3; C is `capacity_factor` times k T / E.

    Args:
        drop_policy: "probs": an expert keeps its likeliest choices; for the other arguments see `top1gating`.

    Raises:
        ConfigError: for another policy, or a k that has a function of its own.
    """
    if k < 3:
        raise ConfigError(f"topkgating: found k {k}; call top1gating or top2gating, or give 3 or more")
    if drop_policy != "probs":
        raise ConfigError(f'topkgating: found drop_policy {drop_policy!r}; give "probs"')
    gate = _gate(logits, k, capacity_factor=capacity_factor, min_capacity=min_capacity, drop_tokens=drop_tokens)
    return _masks(gate, logits, ep_group)


def masks_of(routing: Routing, num_places: int) -> tuple[Tensor, Tensor]:
    """Combine weights [T, E, C] and places [T, E, C], bool. All first choices take their places before second ones.

    Args:
        routing: with at most `num_places` choices kept by any expert.
        num_places: C.
    """
    num_tokens, k = routing.experts.shape
    num_experts = len(routing.counts)
    chosen_N = torch.where(routing.kept, routing.experts, num_experts).T.reshape(-1)  # N = K * T
    by_expert_N = chosen_N.argsort(stable=True)
    counts = torch.bincount(chosen_N, minlength=num_experts + 1)
    starts = counts.cumsum(0) - counts
    place_N = torch.empty_like(chosen_N)
    place_N[by_expert_N] = torch.arange(len(chosen_N), device=chosen_N.device) - starts[chosen_N[by_expert_N]]
    place_TK = place_N.view(k, num_tokens).T
    token, choice = routing.kept.nonzero(as_tuple=True)
    at = token, routing.experts[token, choice], place_TK[token, choice]
    combine = routing.weights.new_zeros(num_tokens, num_experts, num_places)
    combine = combine.index_put(at, routing.weights[token, choice])
    return combine, combine.detach() != 0


def _gate(logits: Tensor, k: int, **arguments: object) -> TopKGate:
    if logits.dim() != 2:
        raise ConfigError(f"gating: found logits of the shape {tuple(logits.shape)}; give [tokens, experts]")
    with torch.device("meta"):  # its own weights are not used
        return TopKGate(1, logits.shape[1], k, **arguments)  # type: ignore[arg-type]


def _masks(gate: TopKGate, logits: Tensor, ep_group: ProcessGroup | None, used_token: Tensor | None = None) -> Masks:
    used = None if used_token is None else used_token.reshape(-1) != 0
    routing = gate.route(logits.float(), used)
    num_places = routing.capacity
    if num_places is None:
        num_places = int(routing.counts.max())
        if ep_group is not None:
            num_places = max(all_gather_values(num_places, backend=group_backend(ep_group)))
    return routing.loss, *masks_of(routing, num_places), routing.counts
