"""Run norms, residual sums and dropout on each rank's part of the sequence (arXiv 2205.05198, section 4.2.2).

Between divided blocks every rank has B x T/W x D of the activations instead of all B x T x D. A block gathers the
sequence before its column-parallel layers, and its row-parallel layer reduce-scatters its output over the sequence.
This sends as many bytes as the all-reduces. Parameters outside blocks see only a part of the tokens, so their gradients
are summed. In evaluation the sequence stays whole, since generation processes one token at a time.
"""

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import ConfigError, counted
from deepspeed.parallel.model_part import part_held
from deepspeed.parallel.running import tensors_in
from deepspeed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from deepspeed.tensor_parallel.plans import TensorPlan
from deepspeed.tensor_parallel.ranges import remember_sums
from deepspeed.tensor_parallel.ranks import TensorRanks, gather_for_all, gather_for_block, take_part

_KEY = "tensor_parallel.sequence_parallel"


def find_stack(model: nn.Module, plan: TensorPlan) -> nn.ModuleList:
    """Return the list of layers in which the sequence is divided.

    Raises:
        ConfigError: if the plan does not name exactly one list of the model.
    """
    stacks = [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and plan.stack and f".{path}".endswith(f".{plan.stack}")
    ]
    if len(stacks) != 1:
        raise ConfigError(
            f"{_KEY}: the plan {plan.name!r} does not say in which layers of {type(model).__name__} the sequence can "
            "be divided; set it false"
        )
    return stacks[0]


def divide_sequence(model: nn.Module, stack: nn.ModuleList, ranks: TensorRanks) -> None:
    """Divide the sequence between the blocks of `stack`. Its linear layers must be divided already."""
    blocks = {
        path.rpartition(".")[0] for path, module in stack.named_modules() if isinstance(module, ColumnParallelLinear)
    }
    for path in blocks:
        stack.get_submodule(path).register_forward_pre_hook(_GatherBefore(ranks), with_kwargs=True)
    for module in stack.modules():
        if isinstance(module, ColumnParallelLinear):
            module.reads_gathered = True
        elif isinstance(module, RowParallelLinear):
            module.scatters_sequence = True
        whole = [name for name, param in module.named_parameters(recurse=False) if part_held(param) is None]
        if whole and not hasattr(module, "ds_gradient_sums"):
            remember_sums(module, None, whole, only_where_divided=True)
            module.register_forward_hook(_WatchOutputs(ranks))
    stack[0].register_forward_pre_hook(_TakeFirstPart(ranks), with_kwargs=True)
    for layer in stack:
        layer.register_forward_pre_hook(lambda layer, _: ranks.enter_layer(training=layer.training))
        layer.register_forward_hook(lambda *_: ranks.leave_layer(), always_call=True)
    stack[-1].register_forward_hook(_GatherAfter(ranks))
    model.register_forward_pre_hook(
        lambda model, _: ranks.begin_forward(divides_sequence=model.training and torch.is_grad_enabled())
    )
    model.register_forward_hook(_WatchOutputs(ranks))


class _WatchOutputs:
    """A hook that watches a module's outputs; see [Note: whose state] in `ranks.py`."""

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks = ranks

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            self.ranks.watch(tensors_in(output))


class _TakeFirstPart:
    """A hook that gives the first layer this rank's part of the sequence."""

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks = ranks

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _change(args, kwargs, self._part) if self.ranks.sequence_is_divided else None

    def _part(self, hidden: Tensor) -> Tensor:
        if hidden.shape[1] % self.ranks.world_size:
            raise ConfigError(
                f"{_KEY}: found a sequence of {counted(hidden.shape[1], 'token')} for {self.ranks.world_size} ranks; "
                "pad it to a multiple of that number"
            )
        self.ranks.num_tokens = hidden.shape[1]
        return take_part(hidden, self.ranks)


class _GatherBefore:
    """A hook that gathers the whole sequence for a divided block."""

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks = ranks

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.ranks.sequence_is_divided:
            return None
        return _change(args, kwargs, lambda hidden: gather_for_block(hidden, self.ranks))


class _GatherAfter:
    """A hook that gathers the whole sequence after the last layer."""

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks = ranks

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        self.ranks.in_layers = False
        if not self.ranks.sequence_is_divided:
            return None
        if isinstance(output, tuple):
            return gather_for_all(output[0], self.ranks), *output[1:]
        return gather_for_all(output, self.ranks)


def _change(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `change` applied to the activations: the first argument, or `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
