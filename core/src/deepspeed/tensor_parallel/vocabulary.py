"""Divide the token embedding, the output layer and the cross entropy by vocabulary (arXiv 1909.08053, section 3).

Layers are divided only if the model returns them (`get_input_embeddings`, `get_output_embeddings`) and they are plain:
a layer with a custom forward stays whole, and so does a layer that shares its weight. The loss all-gathers two numbers
per token instead of all logits. Legend: N tokens, v entries of the vocabulary on this rank, W ranks, I features.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepspeed.errors import ConfigError
from deepspeed.parallel.model_part import part_held, whole_shape
from deepspeed.tensor_parallel.layers import ColumnParallelLinear
from deepspeed.tensor_parallel.ranges import Cut, hold_part, spread
from deepspeed.tensor_parallel.ranks import TensorRanks, sum_over


class VocabParallelEmbedding(nn.Module):
    """Rows [start, start + n) of an embedding. Tokens of other ranks contribute zeros to the sum over the ranks.

    Args:
        weight: [n, I].
        start: the first token that this rank holds.
        vocabulary: number of tokens on all ranks.
        padding_idx: the token for which the row gets no gradient.
    """

    def __init__(
        self, weight: nn.Parameter, ranks: TensorRanks, *, start: int, vocabulary: int, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.ranks, self.start, self.vocabulary, self.padding_idx = ranks, start, vocabulary, padding_idx
        self.num_embeddings, self.embedding_dim = whole_shape(weight)

    def forward(self, input: Tensor) -> Tensor:
        """Tokens [...], integers -> [..., I], equal on all ranks.

        Raises:
            IndexError: on the host, for a token outside the vocabulary; a device raises its own error.
        """
        check_tokens(input, self.vocabulary, "embedding: found token")
        own = input - self.start
        # Tokens outside the vocabulary stay out of range, so a device raises its own error.
        is_elsewhere = ((own < 0) | (own >= self.num_embeddings)) & (input >= 0) & (input < self.vocabulary)
        padding = None if self.padding_idx is None else self.padding_idx - self.start
        if padding is not None and not 0 <= padding < self.num_embeddings:
            padding = None
        rows = F.embedding(own.masked_fill(is_elsewhere, 0), self.weight, padding)
        return sum_over(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0), self.ranks)

    def extra_repr(self) -> str:
        return f"tokens [{self.start}, {self.start + self.num_embeddings}), {self.embedding_dim} features"


def vocab_parallel_cross_entropy(
    logits_Nv: Tensor,
    targets_N: Tensor,
    ranks: TensorRanks,
    *,
    start: int,
    vocabulary: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return losses [N] in nats, fp32, equal on all ranks; 0 for ignored targets. A collective.

    The loss is log(sum over the vocabulary of exp(logit)) - logit of the target.

    Args:
        logits_Nv: this rank's part, floating point.
        targets_N: tokens of the whole vocabulary, integers, equal on all ranks.
        start: the token of this rank's first logit.
        vocabulary: number of tokens on all ranks; None: computed with one more collective.
        ignore_index: the target without a loss.

    Raises:
        IndexError: on the host, for a target outside the vocabulary; a device raises its own error.
    """
    if vocabulary is None:
        vocabulary = int(ranks.gather(targets_N.new_tensor([logits_Nv.shape[1]])).sum())
    check_tokens(targets_N[targets_N != ignore_index], vocabulary, "cross entropy: found target")
    losses: Tensor = _CrossEntropy.apply(logits_Nv, targets_N, ranks, start, vocabulary, ignore_index)
    return losses


def check_tokens(tokens: Tensor, vocabulary: int, found: str) -> None:
    """Raise `IndexError` for tokens outside the vocabulary. Skipped on a device, to avoid a synchronization."""
    if tokens.device.type == "cpu" and tokens.numel():
        for token in map(int, tokens.aminmax()):
            if not 0 <= token < vocabulary:
                raise IndexError(f"{found} {token}, and the vocabulary has the tokens 0 to {vocabulary - 1}")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        targets_N: Tensor,
        ranks: TensorRanks,
        start: int,
        vocabulary: int,
        ignore_index: int,
    ) -> Tensor:
        ctx.dtype = logits_Nv.dtype
        logits_Nv = logits_Nv.float()
        own_N = targets_N - start
        is_own_N = (own_N >= 0) & (own_N < logits_Nv.shape[1])
        is_ignored_N = targets_N == ignore_index
        # Targets outside the vocabulary stay out of range, so a device raises its own error.
        is_known_N = is_ignored_N | ((targets_N >= 0) & (targets_N < vocabulary))
        own_N = own_N.masked_fill(~is_own_N & is_known_N, 0)
        of_target_N = logits_Nv.gather(1, own_N.unsqueeze(1)).squeeze(1).masked_fill(~is_own_N, 0)
        both_W2N = ranks.gather(torch.stack([logits_Nv.logsumexp(1), of_target_N]))
        log_sum_N = both_W2N[:, 0].logsumexp(0)
        ctx.save_for_backward(logits_Nv, log_sum_N, own_N, is_own_N, is_ignored_N)
        return (log_sum_N - both_W2N[:, 1].sum(0)).masked_fill_(is_ignored_N, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """Return softmax - one-hot of the target, for this rank's part."""
        logits_Nv, log_sum_N, own_N, is_own_N, is_ignored_N = ctx.saved_tensors
        grad_Nv = (logits_Nv - log_sum_N.unsqueeze(1)).exp_()
        grad_Nv.scatter_add_(1, own_N.unsqueeze(1), -is_own_N.to(grad_Nv.dtype).unsqueeze(1))
        grad_Nv.mul_(grads[0].masked_fill(is_ignored_N, 0).unsqueeze(1))
        return grad_Nv.to(ctx.dtype), None, None, None, None, None


_KEY = "tensor_parallel.vocab_parallel_lm_head"


def divide_vocabulary(model: nn.Module, ranks: TensorRanks, *, keeps_logits_divided: bool) -> None:
    """Divide embedding and output layer over `ranks`, in place.

    Args:
        keeps_logits_divided: see `divide.divide_model`.

    Raises:
        ConfigError: if the logits are to stay divided, but the model has no plain linear output layer.
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
        """Return the sum of the losses divided by the number of tokens, or by `num_items_in_batch`.

        Args:
            logits: [B, T, v].
            labels: [B, T]; position t predicts label t + 1.
            vocab_size: the whole model's; not used.
            num_items_in_batch: the number of tokens in all micro-batches.
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
    except NotImplementedError:  # transformers' models raise it if they have none
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
