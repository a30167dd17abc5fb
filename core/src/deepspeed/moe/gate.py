"""`TopKGate` chooses the experts of each token and their weights, and computes the gate's losses.

A gate computes the probabilities `p_TE = softmax(x_TH @ wg_EH.T)` in fp32 and chooses k experts per token. An expert
takes at most `capacity` choices of a rank's tokens. Excess choices are dropped and add nothing to the token's output:

    k = 1   GShard and Switch: the likeliest expert, weight p. `use_rts` selects at random which excess tokens drop.
    k = 2   GShard: weights p1 / (p1 + p2) among the kept choices. All first choices come before second choices.
    k > 2   weights as for 2. An expert keeps its likeliest choices.

Losses: load balance, E * sum over e of mean(p_e) * f_e, where f_e is the share of tokens whose first choice is e
(k > 2: the share of all choices); Shazeer's z loss, mean(logsumexp(logits)**2).

Sources: GShard, arXiv 2006.16668, section 2.2 and algorithm 1; Switch Transformer, arXiv 2101.03961, section 2.2;
random token selection, arXiv 2109.10465, section 3; z loss, ST-MoE, arXiv 2202.08906, section 3.3.

`top1gating`, `top2gating` and `topkgating` return GShard's capacity masks, for layers that dispatch by einsum.

    loss, combine_TEC, dispatch_TEC, counts = top2gating(logits_TE, capacity_factor=1.0, min_capacity=4)
    rows_ECH = torch.einsum("tec,th->ech", dispatch_TEC.to(x_TH.dtype), x_TH)
    y_TH = torch.einsum("tec,ech->th", combine_TEC, experts(rows_ECH))

`deepspeed.moe.sharded_moe` has these functions for Megatron's layers. They use the choices, weights and losses of the
gate in training mode. `MoE` itself needs no masks; masks grow with the square of the number of tokens.

Shape legend: T tokens, E experts, K choices of a token, C capacity, H hidden size.
"""

import math
import operator
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed._absent import absent_members
from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.values import all_gather_values
from deepspeed.errors import ConfigError, counted
from deepspeed.log import warn_once

NOISE_POLICIES = (None, "Jitter", "RSample")
#: "Jitter" multiplies the gate's inputs by uniform numbers from 1 - JITTER to 1 + JITTER (Switch, section 2.2)
JITTER = 1e-2


@dataclass(frozen=True)
class Routing:
    """`Routing` holds the experts and weights of a rank's tokens, and the gate's loss.

    Args:
        experts: [T, K], int64; a token's experts, the first choice first.
        weights: [T, K], fp32, differentiable; 0 where `kept` is False.
        kept: [T, K], bool; False for a choice over capacity, or of an unused token.
        counts: [E], int64; number of choices of each expert before dropping.
        loss: scalar, fp32, differentiable: the load balance loss plus the z loss times its coefficient.
        capacity: the maximum number of choices per expert; None: unlimited.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor
    counts: Tensor
    loss: Tensor
    capacity: int | None


@absent_members("moe.sharded_moe:TopKGate")
class TopKGate(nn.Module):
    """The gate of a layer of experts. Its weights are `wg.weight`, [E, H].

    Args:
        model_dim: H.
        num_experts: E.
        k: experts per token.
        capacity_factor: capacity in training, in units of k * T / E; see `capacity_of`.
        eval_capacity_factor: the same factor in evaluation.
        min_capacity: the minimum capacity.
        noisy_gate_policy: in training: "Jitter" multiplies the gate's inputs by `1 +- JITTER`; "RSample" (k = 1) adds
            Gumbel noise to the logits for the choice.
        drop_tokens: False: the capacity is unlimited.
        use_rts: for k = 1 in training, an expert over capacity keeps random tokens; otherwise the first tokens.
        ep_group: has no effect; ranks need not agree on a capacity.
        top2_2nd_expert_sampling: for k = 2 in training, sample the second expert: the likeliest after Gumbel noise.
        z_loss_coefficient: the coefficient of the z loss; 0: no z loss.

    Raises:
        ConfigError: for invalid arguments.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: ProcessGroup | None = None,
        top2_2nd_expert_sampling: bool = True,
        z_loss_coefficient: float = 0.0,
    ) -> None:
        super().__init__()
        if not isinstance(k, SupportsIndex) or not 1 <= k <= num_experts:
            raise ConfigError(f"MoE: found k {k!r} with num_experts {num_experts}; give a k from 1 to {num_experts}")
        if noisy_gate_policy not in NOISE_POLICIES:
            raise ConfigError(
                f"MoE: found noisy_gate_policy {noisy_gate_policy!r}; give one of "
                f"{', '.join(map(repr, NOISE_POLICIES))}"
            )
        if noisy_gate_policy == "RSample" and k > 1:
            warn_once(
                f"MoE: noisy_gate_policy 'RSample' adds noise where a token gets one expert, and found k={k}: training "
                "goes on without it; take 'Jitter', or k=1"
            )
        factors = capacity_factor, eval_capacity_factor
        if not all(isinstance(each, SupportsFloat) and 0 < each < math.inf for each in factors):
            raise ConfigError(
                f"MoE: found capacity_factor {capacity_factor!r} and eval_capacity_factor {eval_capacity_factor!r}; "
                "give positive numbers, or drop_tokens=False for no limit"
            )
        if not isinstance(min_capacity, SupportsIndex) or operator.index(min_capacity) < 0:
            raise ConfigError(f"MoE: found min_capacity {min_capacity!r}; give a whole number, 0 or more")
        if not isinstance(z_loss_coefficient, SupportsFloat) or not 0 <= z_loss_coefficient < math.inf:
            raise ConfigError(f"MoE: found z_loss_coefficient {z_loss_coefficient!r}; give a number, 0 or more")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.num_experts = num_experts
        self.k = k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        self.z_loss_coefficient = z_loss_coefficient

    def forward(self, x_TH: Tensor, used_token: Tensor | None = None) -> Routing:
        """Route tokens.

        Args:
            x_TH: any float dtype; the gate computes in fp32.
            used_token: [T], 0 for tokens (padding) that go to no expert; None: use all tokens.

        Raises:
            ConfigError: `used_token` has another number of elements.
        """
        if used_token is not None and used_token.numel() != len(x_TH):
            raise ConfigError(
                f"MoE: found used_token with {counted(used_token.numel(), 'element')} for {len(x_TH)} tokens; give one "
                "for each token, 0 for those that go to no expert"
            )
        with torch.autocast(x_TH.device.type, enabled=False):
            x_TH = x_TH.float()
            if self.training and self.noisy_gate_policy == "Jitter":
                x_TH = x_TH * torch.empty_like(x_TH).uniform_(1 - JITTER, 1 + JITTER)
            logits_TE = F.linear(x_TH, self.wg.weight.float())
            return self.route(logits_TE, None if used_token is None else used_token.reshape(-1) != 0)

    def route(self, logits_TE: Tensor, used_T: Tensor | None = None) -> Routing:
        """Route tokens by their fp32 logits; `used_T` is bool."""
        num_tokens, num_experts = logits_TE.shape
        gates_TE = F.softmax(logits_TE, dim=-1)
        experts_TK = self._choose(logits_TE.detach())
        used_TK = torch.ones_like(experts_TK, dtype=torch.bool)
        if used_T is not None:
            used_TK = used_T[:, None].expand_as(experts_TK)
        chosen_TK = torch.where(used_TK, experts_TK, num_experts)  # the index E stands for no expert
        capacity, kept_TK = None, used_TK
        if self.drop_tokens:
            factor = self.capacity_factor if self.training else self.eval_capacity_factor
            capacity = capacity_of(num_tokens, num_experts, self.k, factor, self.min_capacity)
            kept_TK = used_TK & self._within(capacity, chosen_TK, gates_TE.detach())
        weights_TK = gates_TE.gather(1, experts_TK) * kept_TK
        if self.k > 1:
            least = torch.finfo(torch.float32).eps
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True).clamp(min=least)
        loss = _balance_loss(gates_TE, chosen_TK if self.k > 2 else chosen_TK[:, :1])
        if self.z_loss_coefficient:
            loss = loss + self.z_loss_coefficient * logits_TE.logsumexp(-1).square().mean()
        return Routing(experts_TK, weights_TK, kept_TK, _counts(chosen_TK, num_experts), loss, capacity)

    def _choose(self, logits_TE: Tensor) -> Tensor:
        if self.k > 2:
            return logits_TE.topk(self.k, dim=1).indices
        if self.k == 1 and self.training and self.noisy_gate_policy == "RSample":
            logits_TE = logits_TE + _gumbel(logits_TE)
        # argmax: ties go to the first expert, as in DeepSpeed; with `topk`, ties differ between devices
        first_T1 = logits_TE.argmax(1, keepdim=True)
        if self.k == 1:
            return first_T1
        if self.training and self.top2_2nd_expert_sampling:
            logits_TE = logits_TE + _gumbel(logits_TE)
        second_T1 = logits_TE.scatter(1, first_T1, -math.inf).argmax(1, keepdim=True)
        return torch.cat([first_T1, second_T1], 1)

    def _within(self, capacity: int, chosen_TK: Tensor, gates_TE: Tensor) -> Tensor:
        """Whether each choice fits in its expert's capacity: an expert takes its first `capacity` choices in order."""
        num_tokens, k = chosen_TK.shape
        chosen_N = chosen_TK.T.reshape(-1)  # N = K * T: all first choices, then all second choices
        if k == 1 and self.training and self.use_rts:
            order_N = torch.randperm(num_tokens, device=chosen_TK.device)
        elif k > 2:
            likely_TK = gates_TE.gather(1, chosen_TK.clamp(max=self.num_experts - 1))
            order_N = likely_TK.T.reshape(-1).argsort(descending=True, stable=True)
        else:
            order_N = torch.arange(len(chosen_N), device=chosen_TK.device)
        by_expert_N = order_N[chosen_N[order_N].argsort(stable=True)]
        counts = _counts(chosen_TK, self.num_experts + 1)
        starts_E = counts.cumsum(0) - counts
        place_N = torch.empty_like(chosen_N)
        place_N[by_expert_N] = torch.arange(len(chosen_N), device=chosen_N.device) - starts_E[chosen_N[by_expert_N]]
        return (place_N < capacity).view(k, num_tokens).T


def capacity_of(num_tokens: int, num_experts: int, k: int, factor: float, least: int) -> int:
    """Return the maximum number of choices per expert: ceil(k * T / E * factor), but at least `least`."""
    exact = k * num_tokens / num_experts * factor
    return max(math.ceil(exact * (1 - 1e-7)), least)  # 1.1 * 10 must give 11, not 12


def _balance_loss(gates_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    num_experts = gates_TE.shape[1]
    share_E = _counts(chosen_TK, num_experts).to(gates_TE.dtype) / max(chosen_TK.numel(), 1)
    return num_experts * torch.dot(gates_TE.sum(0) / max(len(gates_TE), 1), share_E)


def _counts(chosen_TK: Tensor, num_experts: int) -> Tensor:
    """Count the choices of each expert; choices of experts from `num_experts` on are ignored."""
    return torch.bincount(chosen_TK.reshape(-1), minlength=num_experts)[:num_experts]


def _gumbel(like: Tensor) -> Tensor:
    """Sample the standard Gumbel distribution: -log(Exp(1))."""
    return -torch.empty_like(like).exponential_().log()


#: loss, scalar; combine weights [T, E, C], fp32, differentiable; dispatch mask [T, E, C], bool; choices per expert
#: before dropping, [E], int64
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
    """Choose the likeliest expert of each token. Returns `Masks`.

    Args:
        logits: [T, E].
        capacity_factor: C is this factor times T / E.
        min_capacity: the minimum C.
        used_token: [T], 0 for tokens that go to no expert.
        noisy_gate_policy: None or "RSample".
        drop_tokens: False: C is the largest number of choices of any expert.
        use_rts: an expert over capacity keeps random tokens; else the first tokens.
        ep_group: without dropping, C is the maximum over these ranks; then this is a collective of them.
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
    """Choose two experts for each token; C is `capacity_factor` times 2 T / E. Returns `Masks`.

    Args:
        top2_2nd_expert_sampling: sample the second expert; for the other arguments see `top1gating`.
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
    """Choose the k >= 3 likeliest experts of each token; C is `capacity_factor` times k T / E. Returns `Masks`.

    Args:
        drop_policy: "probs": an expert keeps its likeliest choices; for the other arguments see `top1gating`.

    Raises:
        ConfigError: for another policy, or k below 3.
    """
    if k < 3:
        raise ConfigError(f"topkgating: found k {k}; call top1gating or top2gating, or give 3 or more")
    if drop_policy != "probs":
        raise ConfigError(f'topkgating: found drop_policy {drop_policy!r}; give "probs"')
    gate = _gate(logits, k, capacity_factor=capacity_factor, min_capacity=min_capacity, drop_tokens=drop_tokens)
    return _masks(gate, logits, ep_group)


def masks_of(routing: Routing, num_places: int) -> tuple[Tensor, Tensor]:
    """Return combine weights [T, E, C] and dispatch mask [T, E, C], bool. First choices get their places first.

    Args:
        routing: a routing in which each expert keeps at most `num_places` choices.
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
    with torch.device("meta"):  # the gate's weights are not used
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
