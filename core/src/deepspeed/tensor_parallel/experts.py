"""Experts of transformers, whose weights are one tensor each, divided along their inner features.

Every rank has a part of every expert: `gate_up_proj` [E, 2 F, H] is cut within each half, `down_proj` [E, H, F] alike,
and what the experts give is summed over the ranks. Routing is that of the whole model, on every rank.
"""

from typing import Any

from torch import Tensor, nn

from deepspeed.errors import ConfigError
from deepspeed.parallel.sharded_params import whole_shape
from deepspeed.tensor_parallel.cuts import Cut, hold_part
from deepspeed.tensor_parallel.ranks import TensorRanks, sum_gradient, sum_over

#: inner features are cut at multiples of this: grouped products ask for rows of whole 16 bytes
EXPERTS_GRAIN = 8
_RANKS = "ds_tensor_ranks_of_experts"


def ranks_of_experts(experts: nn.Module) -> TensorRanks | None:
    """The ranks over which these experts are divided; None: they are whole."""
    return getattr(experts, _RANKS, None)


def inner_features(experts: Any, path: str) -> int:
    """F.

    Raises:
        ConfigError: the module has not the two weights.
    """
    found = {name: tuple(whole_shape(param)) for name, param in experts.named_parameters(recurse=False)}
    up, down = found.get("gate_up_proj", ()), found.get("down_proj", ())
    if len(found) != 2 or len(up) != 3 or down != (up[0], up[2], up[1] // 2):
        raise ConfigError(
            f"{path}: found experts with {found}, but those that are divided have gate_up_proj, [experts, 2 F, H], and "
            "down_proj, [experts, H, F]; keep them whole by tensor_parallel.partition_config"
        )
    return down[2]


def divide_experts(experts: Any, cuts: list[Cut], path: str, ranks: TensorRanks) -> None:
    """Keep this rank's part of the weights, and sum the output over the ranks. Cuts: of F, by rank."""
    own = cuts[ranks.rank]
    both = [(start + half * own.total, stop + half * own.total) for half in (0, 1) for start, stop in own.ranges]
    hold_part(experts.gate_up_proj, 1, Cut(2 * own.total, tuple(both)), path, ranks.data_group)
    hold_part(experts.down_proj, 2, own, path, ranks.data_group)

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        return sum_gradient(hidden, ranks), index, sum_gradient(weights, ranks)

    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(lambda _, __, output: sum_over(output, ranks))
    object.__setattr__(experts, _RANKS, ranks)
