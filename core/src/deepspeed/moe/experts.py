"""The experts that a rank holds: copies of a user's module, each run on a contiguous slice of the rows."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from deepspeed.errors import ConfigError
from deepspeed.moe.stacked import ExpertMLP, StackedExperts
from deepspeed.parallel.expert_params import ModuleOfExperts
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import ModelPart, mark_names, mark_part, part_held
from deepspeed.parallel.sharded_params import whole_shape

#: a module, of which every expert is a copy; or a function that makes one, called once for each expert of the layer
ExpertSource = nn.Module | Callable[[], nn.Module]


class Experts(ModuleOfExperts):
    """Experts `first`, `first + 1`, ... of a layer, as `deepspeed_experts.0`, `deepspeed_experts.1`, ...

    Every expert runs in every forward, also on no rows, so that ranks which hold copies of it agree on what was used.

    Args:
        experts: modules from [n, H] to [n, H']; of a tuple, as Megatron's layers return it, the first counts.
        ep_size: ranks over which the experts of the layer are divided; parameters are marked with it.
    """

    def __init__(self, experts: Iterable[nn.Module], ep_size: int = 1) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(experts)
        self.num_local_experts = len(self.deepspeed_experts)
        self.mark_as_experts(ep_size)

    def forward(self, rows_NH: Tensor, counts: Sequence[int]) -> Tensor:
        """Run expert e on its `counts[e]` rows; `rows_NH` is sorted by expert."""
        parts = rows_NH.split(list(counts))
        outputs = [_first(expert(part)) for expert, part in zip(self.deepspeed_experts, parts, strict=True)]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def divide(self, mesh: Mesh, divide: Callable[[nn.Module, Mesh], None] | None) -> None:
        """Divide each expert over the tensor-parallel ranks of `mesh`, which get the same rows. A collective of them.

        Args:
            divide: an expert, in place; None: none can.

        Raises:
            ConfigError: if experts cannot be divided.
        """
        if any(getattr(param, "tensor_model_parallel", False) for param in self.parameters()):
            return
        if divide is None:
            raise ConfigError(
                "MoE: found enable_expert_tensor_parallelism without an engine; pass the model to "
                "deepspeed.initialize, which divides the experts, or experts that are divided already"
            )
        if any(hasattr(param, "ds_id") for param in self.parameters()):
            raise ConfigError(
                "MoE: found enable_expert_tensor_parallelism with experts that were sharded by zero.Init; build the "
                "layer without it: an expert is divided first, and stage 3 shards what each rank holds"
            )
        for expert in self.deepspeed_experts:
            divide(expert, mesh)

    def mark(self, path: str, part: int, num_parts: int) -> None:
        """Say that these are part `part` of the experts of the layer, whose name is `path`."""
        for number, expert in enumerate(self.deepspeed_experts, part * self.num_local_experts):
            for name, param in expert.named_parameters():
                whole_name = f"{path}.deepspeed_experts.{number}.{name}"
                known = part_held(param)  # over tensor-parallel ranks
                if known is not None:
                    mark_part(param, replace(known, name=whole_name))
                    continue
                mark_part(param, ModelPart.all_of(whole_shape(param), whole_name), over="ep")
        experts, first = "deepspeed_experts", part * self.num_local_experts
        mark_names(
            self,
            {
                f"{experts}.{number}.{name}": f"{path}.{experts}.{first + number}.{name}"
                for number, expert in enumerate(self.deepspeed_experts)
                for named in (expert.named_parameters, expert.named_buffers)
                for name, _ in named(remove_duplicate=False)
            },
        )


def make_experts(source: ExpertSource, num_experts: int, held: range) -> list[nn.Module]:
    """The experts `held` of `num_experts`.

    Copies of a module are equal. A function is called for all experts, in their order, so that the random numbers of a
    seed give the same experts and the same layers after them, however many ranks divide them.

    Raises:
        ConfigError: for a module that `zero.Init` has sharded, of which no rank has a whole copy.
    """
    if isinstance(source, nn.Module):
        if any(hasattr(param, "ds_id") for param in source.parameters()):
            raise ConfigError(
                f"MoE: the expert ({type(source).__name__}) was sharded by zero.Init and cannot be copied; pass a "
                "function that makes it, such as lambda: Expert(...)"
            )
        return [copy.deepcopy(source) for _ in held]
    if not callable(source):
        raise ConfigError(
            f"MoE: expert is {type(source).__name__}; give a module, of which copies are made, or a function "
            "that makes one, such as lambda: Expert(...)"
        )
    made: list[nn.Module] = []
    for index in range(num_experts):
        expert = source()
        if not isinstance(expert, nn.Module):
            raise ConfigError(f"MoE: expert gave {type(expert).__name__}; give a module, or a function that makes one")
        if index in held:
            made.append(expert)
    return made


def hold_experts(experts: list[nn.Module], ep_size: int, *, one_by_one: bool = False) -> Experts | StackedExperts:
    """This rank's experts: stacked where they are `ExpertMLP`s, else one by one."""
    stackable = [] if one_by_one else [expert for expert in experts if type(expert) is ExpertMLP]
    return StackedExperts(stackable, ep_size) if len(stackable) == len(experts) else Experts(experts, ep_size)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
