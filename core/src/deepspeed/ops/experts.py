"""Expert modules of the transformers library: how to recognize them, and their forward as two products of sorted rows.

The experts of a layer are one module. Its parameters `gate_up_proj` (or `up_proj`) and `down_proj` hold all experts,
[E, out, in] or [E, in, out]; there may be biases. Its forward takes the tokens, and the index and weight of the experts
chosen by the router. Class attributes declare the variant: biases, transposed weights, no gate, own gate (GPT-OSS).

`moe.experts` shards such modules across ranks; `inference.quantized` and `ops.quantizer.layers` pack their weights.

Shape legend: T tokens, K experts of a token, N rows, E experts, H width, F inner width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

DOWN = "down_proj"

#: (rows sorted by expert, name of the weight, number of rows per expert) -> the product
Product = Callable[[Tensor, str, Sequence[int]], Tensor]


def is_experts(module: nn.Module) -> bool:
    """Return whether a module computes down(inner(up(x))) per expert, as most models of transformers do."""
    if not has_params_of_experts(module):
        return False
    if getattr(module, "has_post_expert_norm", False) or inner_of(module) is None:
        return False
    up_shape, down_shape = (_whole_shape(module.get_parameter(name)) for name in names_of_weights(module))
    if len(up_shape) != 3 or len(down_shape) != 3:
        return False
    out_dim, in_dim = (2, 1) if is_transposed(module) else (1, 2)
    widening = 2 if up_name(module) == "gate_up_proj" else 1
    fits = up_shape[in_dim] == down_shape[out_dim] and up_shape[out_dim] == widening * down_shape[in_dim]
    return bool(up_shape[0] == down_shape[0] and fits)


def has_params_of_experts(module: nn.Module) -> bool:
    """Return whether a module has the two weights, the biases that its class declares, and no other parameters."""
    params, weights = dict(module.named_parameters(recurse=False)), names_of_weights(module)
    biases = {f"{name}_bias" for name in weights} if getattr(module, "has_bias", False) else set()
    return set(params) == {*weights, *biases} and list(module.parameters()) == list(params.values())


def _whole_shape(param: Tensor) -> Sequence[int]:
    """Return the full shape of a parameter, even if ZeRO-3 has sharded it."""
    shape: Sequence[int] = getattr(param, "ds_shape", param.shape)
    return shape


def names_of_weights(module: nn.Module) -> tuple[str, str]:
    """Return the names of the weights of the first and the second product."""
    return up_name(module), DOWN


def up_name(module: nn.Module) -> str:
    """Return the name of the weight of the first product."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weights are [E, in, out]."""
    return bool(getattr(module, "is_transposed", False))


def inner_of(module: nn.Module) -> Any:
    """Return the function between the two products: [n, 2 F] -> [n, F], or [n, F] -> [n, F] without a gate.

    Returns None if the module does not define it.
    """
    act = getattr(module, "act_fn", None)
    if not getattr(module, "has_gate", True):
        return act
    own = getattr(module, "_apply_gate", None)  # transformers sets it on classes that declare their variant
    if own is not None:
        return own
    return partial(_gated, act) if callable(act) else None


def _gated(act: Callable[[Tensor], Tensor], gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return act(gate) * up


def run_experts(
    module: nn.Module, product: Product, num_experts: int, x: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Run the forward of an expert module with another product. The forward's own arguments follow `num_experts`."""
    return by_expert(x, index_TK, weights_TK, num_experts, partial(run_sorted, module, product))


def run_sorted(module: nn.Module, product: Product, rows_NH: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply the experts to rows that are sorted by expert: the first `counts[0]` rows belong to expert 0, and so on."""
    inner: Callable[[Tensor], Tensor] = inner_of(module)
    return product(inner(product(rows_NH, up_name(module), counts)), DOWN, counts)


def by_expert(
    x: Tensor, index_TK: Tensor, weights_TK: Tensor, num_experts: int, run: Callable[[Tensor, Sequence[int]], Tensor]
) -> Tensor:
    """Return the weighted sum of the expert outputs of each token, [..., H] -> [..., H].

    Args:
        index_TK: the experts of each token. Indices >= E mean no expert; transformers marks dropped tokens this way.
        run: (rows sorted by expert, number of rows per expert) -> expert outputs.
    """
    rows_TH = x.reshape(-1, x.shape[-1])
    experts = index_TK.reshape(-1)
    counts = experts.bincount(minlength=num_experts)[:num_experts].tolist()
    order = experts.argsort(stable=True)[: sum(counts)]
    tokens = order // index_TK.shape[-1]
    rows_NH = run(rows_TH[tokens], counts) * weights_TK.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(rows_TH).index_add_(0, tokens, rows_NH.to(x.dtype)).view_as(x)


class ConvertedExperts(nn.Module):
    """An expert module whose `__class__` was replaced by one from `converted_class`. The original is a base class."""

    #: the original class of the transformers library
    original: type[nn.Module]
    #: the prefix of the names of converted classes
    prefix: str

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, type(self).__bases__, self.__getstate__()


_CONVERTED: dict[tuple[type[ConvertedExperts], type[nn.Module]], type[ConvertedExperts]] = {}


def converted_class(base: type[ConvertedExperts], original: type[nn.Module]) -> type[ConvertedExperts]:
    """Return the class that derives from `base` and `original`; there is one per pair."""
    if (base, original) not in _CONVERTED:
        _CONVERTED[base, original] = type(f"{base.prefix}{original.__name__}", (base, original), {"original": original})
    return _CONVERTED[base, original]


def _empty(base: type[ConvertedExperts], original: type[nn.Module]) -> ConvertedExperts:
    """Create an empty module for copy and pickle, which set its attributes afterwards."""
    cls = converted_class(base, original)
    return cls.__new__(cls)
