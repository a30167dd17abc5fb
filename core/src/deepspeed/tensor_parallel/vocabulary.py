"""The embedding of tokens and the output layer, divided by vocabulary.

Only where the model says which they are (`get_input_embeddings`, `get_output_embeddings`) and they are plain layers:
one with a forward of its own stays whole, and so does the layer that it shares its weight with.
"""

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.errors import ConfigError
from deepspeed.parallel.model_part import part_held
from deepspeed.parallel.sharded_params import whole_shape
from deepspeed.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from deepspeed.tensor_parallel.cuts import Cut, hold_part
from deepspeed.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from deepspeed.tensor_parallel.ranks import TensorRanks
from deepspeed.tensor_parallel.shares import spread

_KEY = "tensor_parallel.vocab_parallel_lm_head"


def divide_vocabulary(model: nn.Module, ranks: TensorRanks, *, keeps_logits_divided: bool) -> None:
    """Divide embedding and output layer over `ranks`, in place.

    Args:
        keeps_logits_divided: see `divide.divide_model`.

    Raises:
        ConfigError: if the logits are to stay divided, and the model has no output layer or loss that can.
    """
    embedding, head = _ask(model, "get_input_embeddings"), _ask(model, "get_output_embeddings")
    weights = [end.weight for end in (embedding, head) if isinstance(getattr(end, "weight", None), nn.Parameter)]
    for weight in weights[:1] if len(weights) == 2 and weights[0] is weights[1] else weights:
        _divide(model, weight, ranks, gathers=not keeps_logits_divided)
    if keeps_logits_divided:
        head = _ask(model, "get_output_embeddings")
        if not isinstance(head, ColumnParallelLinear):
            raise ConfigError(
                f"{_KEY}: {type(model).__name__} has no plain linear output layer to divide; set it false"
            )
        own = part_held(head.weight)
        assert own is not None
        loss: Any = _CausalLoss(ranks, own.ranges[0][0], own.shape[0])
        model.loss_function = loss


def check_loss(model: nn.Module) -> None:
    """Raise `ConfigError` unless the model takes its loss from `loss_function`, as transformers' causal models do."""
    forward = inspect.unwrap(type(model).forward)
    if (
        getattr(model, "loss_type", None) not in ("ForCausalLM", None)
        or "loss_function" not in forward.__code__.co_names
    ):
        raise ConfigError(
            f"{_KEY}: {type(model).__name__} does not take its loss from loss_function of a causal language model, so "
            "that it would read divided logits; set it false, which gathers them"
        )


class _CausalLoss:
    """The next-token loss of transformers' causal models, from this rank's part of the logits."""

    def __init__(self, ranks: TensorRanks, start: int, vocabulary: int) -> None:
        self.ranks, self.start, self.vocabulary = ranks, start, vocabulary

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CausalLoss":
        return self

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The sum over tokens divided by their number, or by `num_items_in_batch`.

        Args:
            logits: [B, T, v].
            labels: [B, T]; position t predicts label t + 1.
            vocab_size: of the whole model; not used.
            num_items_in_batch: of all micro-batches together.
            ignore_index: the label without a loss.
            shift_labels: [B, T]; position t predicts label t.
        """
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets_N = shift_labels.reshape(-1).to(logits.device)
        losses_N = vocab_parallel_cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            targets_N,
            self.ranks,
            start=self.start,
            vocabulary=self.vocabulary,
            ignore_index=ignore_index,
        )
        if num_items_in_batch is None:
            num_items_in_batch = (targets_N != ignore_index).sum()
        return losses_N.sum() / num_items_in_batch


def _ask(model: nn.Module, method: str) -> Any:
    ask = getattr(model, method, None)
    if not callable(ask):
        return None
    try:
        return ask()
    except NotImplementedError:  # how transformers' models say that they have none
        return None


def _divide(model: nn.Module, weight: nn.Parameter, ranks: TensorRanks, *, gathers: bool) -> None:
    users = [
        (path, module)
        for path, module in model.named_modules()
        if any(param is weight for param in module.parameters(recurse=False))
    ]
    num_tokens = whole_shape(weight)[0]
    if num_tokens < ranks.world_size or not all(_is_plain(module) for _, module in users):
        return
    cuts = [Cut(num_tokens, (own,)) for own in spread(num_tokens, ranks.world_size)]
    own = cuts[ranks.rank]
    new: dict[int, nn.Module] = {}  # a module may be in several places
    for path, module in users:
        if id(module) not in new:
            hold_part(weight, 0, own, path, ranks.data_group)
            new[id(module)] = _divided(module, own, cuts, ranks, path, gathers=gathers).train(module.training)
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in new:
            model.set_submodule(path, new[id(module)])


def _is_plain(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return type(module) is nn.Linear


def _divided(
    module: nn.Module, own: Cut, cuts: list[Cut], ranks: TensorRanks, path: str, *, gathers: bool
) -> nn.Module:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    if isinstance(module, nn.Embedding):
        return VocabParallelEmbedding(
            weight, ranks, start=own.ranges[0][0], vocabulary=own.total, padding_idx=module.padding_idx
        )
    bias = module.bias if isinstance(module.bias, nn.Parameter) else None
    if bias is not None:
        hold_part(bias, 0, own, path, ranks.data_group)
    sizes = tuple(cut.size for cut in cuts) if gathers else ()
    return ColumnParallelLinear(weight, bias, ranks, gathered_sizes=sizes)
