"""`CompressedLayer`: the base class of compressible layers. Its forward is the ordinary layer's forward with

    weight = Q(weight) * masks        input = A(input)        bias = bias * mask of rows or channels

Each technique is prepared once with its options (`enable_...`), and acts while its flag (`..._enabled`) is set;
`scheduler.py` sets the flags by step. Masks of method l1 are buffers, computed once from the current weights. Scores of
method topk are parameters, trained by the gradient of the mask. Both are in the state dict.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import prune

from deepspeed.compression.quantizers import QuantAct, TopKBinarizer, WeightQuantizer, num_kept, quantize_inputs
from deepspeed.errors import ConfigError

#: kind of pruning -> the dims of the weight along which its scores differ; heads have a shape of their own
_ALONG = {"row": 0, "channel": 0}


class CompressedLayer(nn.Module):
    """The base class of compressible layers: quantization of weight and inputs, and pruning of elements."""

    weight: Tensor
    #: as they are before anything is enabled
    weight_quantization_enabled = False
    activation_quantization_enabled = False
    weight_quantizer: WeightQuantizer | None = None
    weight_quantization_enabled_in_forward = True
    weight_quantize_num_groups = 1
    activation_quantizer: QuantAct  # where the range is static
    activation_quantization_bits = 8
    activation_quantization_method = ""
    has_static_range = False
    sparse_pruning_enabled = False
    sparse_pruning_method = ""
    sparse_pruning_ratio = 1.0
    sparse_pruning_mask: Tensor
    sparse_snip_scores: Tensor  # of method snip_momentum
    effects: Tensor | None = None  # of the elements since the last step, with method snip_momentum
    #: kinds of pruning that were enabled, as `get_mask` takes them, with method and ratio
    prunings: Mapping[str, tuple[str, float]] = MappingProxyType({})

    def enable_weight_quantization(
        self,
        start_bits: int,
        target_bits: int,
        quantization_period: int,
        weight_quantization_enabled_in_forward: bool,
        quantization_type: str,
        num_groups: int,
        *,
        stochastic: bool = False,
        mixed_ratio: float | None = None,
    ) -> None:
        """Prepare the layer to quantize its weight.

        Args:
            start_bits, target_bits, quantization_period: from how many bits to how many; steps per bit.
            weight_quantization_enabled_in_forward: has no effect; `weight_quantization_enabled` switches it.
            quantization_type: "symmetric" or "asymmetric".
            num_groups: scales of the weight; divides its elements.
            stochastic, mixed_ratio: see `WeightQuantizer`.

        Raises:
            ConfigError: the values do not fit the weight or one another.
        """
        if num_groups < 1 or self.weight.numel() % num_groups:
            raise ConfigError(
                f"quantize_groups: found {num_groups} for a weight of shape {tuple(self.weight.shape)}; give a number "
                f"that divides its {self.weight.numel()} elements"
            )
        self.weight_quantizer = WeightQuantizer(
            start_bits,
            target_bits,
            quantization_period,
            symmetric=quantization_type == "symmetric",
            num_groups=num_groups,
            stochastic=stochastic,
            mixed_ratio=mixed_ratio,
        )
        self.weight_quantize_num_groups = num_groups

    def enable_activation_quantization(self, bits: int, quantization_type: str, range_calibration: str) -> None:
        """Prepare the layer to quantize its inputs.

        Args:
            bits: 4 to 16.
            quantization_type: "symmetric" or "asymmetric".
            range_calibration: "static": a range that training follows; "dynamic": one of each token, or each image.
        """
        self.activation_quantization_bits = bits
        self.activation_quantization_method = quantization_type
        self.has_static_range = range_calibration == "static"
        if self.has_static_range:
            self.activation_quantizer = QuantAct(quant_mode=quantization_type).to(self.weight.device)
            self.activation_quantizer.train(self.training)

    def fix_weight_quantization(self) -> None:
        """Round the weight permanently to the target bits."""
        assert self.weight_quantizer is not None
        self.weight_quantizer.finish()
        with torch.no_grad():
            self.weight.copy_(self.weight_quantizer(self.weight, trains=False))
        self.weight_quantizer, self.weight_quantization_enabled = None, False

    def enable_sparse_pruning(self, ratio: float, method: str) -> None:
        """Prepare the layer to keep the share `ratio` of its weight's elements.

        Args:
            ratio: above 0, to 1.
            method: "l1", "topk" or "snip_momentum".
        """
        if method != "snip_momentum":
            self._enable("sparse", ratio, method, self.weight)
            return
        self.register_buffer("sparse_pruning_mask", torch.ones_like(self.weight, dtype=torch.bool))
        self.register_buffer("sparse_snip_scores", torch.zeros_like(self.weight, dtype=torch.float32))
        self.prunings = {**self.prunings, "sparse": (method, ratio)}
        self.sparse_pruning_method, self.sparse_pruning_ratio = method, ratio

    def fix_sparse_pruning_helper(self) -> None:
        """Set pruned elements of the weight permanently to 0."""
        mask = self.get_mask("sparse")
        with torch.no_grad():
            self.weight.mul_(mask)
        self._disable("sparse")

    def get_mask(self, pruning_type: str = "sparse") -> Tensor:
        """Return the mask of a kind of pruning that was enabled, in a shape that multiplies the weight.

        Args:
            pruning_type: "sparse", and of a linear layer "row" or "head", of a convolution "channel".

        Raises:
            ConfigError: the layer has no such mask.
        """
        if pruning_type not in self.prunings:
            raise ConfigError(
                f"get_mask: asked for {pruning_type!r}, but enabled are "
                f"{sorted(self.prunings) or 'none'}; enable it first"
            )
        method, ratio = self.prunings[pruning_type]
        if method != "topk":
            mask: Tensor = getattr(self, f"{pruning_type}_pruning_mask")
            return mask.to(self.weight.dtype)
        scores = getattr(self, _scores_of(pruning_type))
        learned: Tensor = TopKBinarizer.apply(scores, ratio, False)
        return learned

    def effective_weight(self) -> Tensor:
        """Return the weight that the forward computes with."""
        weight = self.weight
        if self.weight_quantization_enabled and self.weight_quantizer is not None:
            weight = self.weight_quantizer(weight, trains=self.training)
        for kind in self.prunings:
            is_by_blocks = kind == "sparse" and self.sparse_pruning_method == "snip_momentum"
            # of blocks nothing is gone before the first step
            if is_by_blocks or getattr(self, f"{kind}_pruning_enabled"):
                weight = self._masked(weight, kind, self.get_mask(kind))
        if self.sparse_pruning_method == "snip_momentum" and self.training and weight.requires_grad:
            weight = self._watched(weight)
        return weight

    def _watched(self, weight: Tensor) -> Tensor:
        """Return the weight with a hook that accumulates weight * gradient per element in `effects`."""
        weight, values = weight.view_as(weight), weight.detach()

        def saw(grad: Tensor) -> None:
            effects = values.float() * grad.detach().float()
            self.effects = effects if self.effects is None else self.effects + effects

        weight.register_hook(saw)
        return weight

    def effective_bias(self) -> Tensor | None:
        """Return the bias for the forward, with 0 for pruned rows or channels."""
        bias: Tensor | None = getattr(self, "bias", None)
        if bias is None:
            return None
        for kind in _ALONG:
            if kind in self.prunings and getattr(self, f"{kind}_pruning_enabled"):
                bias = bias * self.get_mask(kind).flatten()
        return bias

    def _masked(self, weight: Tensor, kind: str, mask: Tensor) -> Tensor:
        return weight * mask

    def _inputs(self, x: Tensor) -> Tensor:
        if not self.activation_quantization_enabled or x.numel() == 0:
            return x
        bits = self.activation_quantization_bits
        if self.has_static_range:
            rounded: Tensor = self.activation_quantizer(x, bits)
            return rounded
        return quantize_inputs(x, bits, self.activation_quantization_method == "symmetric", self._num_ranges(x))

    def _num_ranges(self, x: Tensor) -> int:
        """Ranges of a dynamic quantization: one a token."""
        return x.numel() // x.shape[-1]

    def _enable(self, kind: str, ratio: float, method: str, scores: Tensor) -> None:
        """Enable a pruning whose first choice is that of the largest `scores`, which have a shape for the weight."""
        if method not in ("l1", "topk"):
            raise ConfigError(f"method: found {method!r}; choose 'l1' or 'topk'")
        scores = scores.detach().abs().clone()
        if method == "l1":
            self.register_buffer(f"{kind}_pruning_mask", self._l1_mask(kind, ratio).bool())
        else:
            learned = Parameter(scores)
            learned.use_muon = False  # type: ignore[attr-defined]  # no matrix, whatever its shape
            setattr(self, _scores_of(kind), learned)
        self.prunings = {**self.prunings, kind: (method, ratio)}
        for what, value in (("enabled", False), ("method", method), ("ratio", ratio)):
            setattr(self, f"{kind}_pruning_{what}", value)

    def _l1_mask(self, kind: str, ratio: float) -> Tensor:
        weight = self.weight.detach()
        total = weight.numel() if kind == "sparse" else weight.shape[_ALONG[kind]]
        amount = total - num_kept(total, ratio)
        if kind == "sparse":
            return prune.L1Unstructured(amount).compute_mask(weight, torch.ones_like(weight))
        ones = torch.ones_like(weight)
        mask: Tensor = prune.LnStructured(amount, n=1, dim=_ALONG[kind]).compute_mask(weight, ones)
        return mask.flatten(1)[:, :1].reshape(-1, *[1] * (weight.dim() - 1))

    def _disable(self, kind: str) -> None:
        method, _ = self.prunings[kind]
        self.prunings = {name: value for name, value in self.prunings.items() if name != kind}
        delattr(self, _scores_of(kind) if method == "topk" else f"{kind}_pruning_mask")
        if method == "snip_momentum":
            del self.sparse_snip_scores
            self.sparse_pruning_method, self.effects = "", None
        setattr(self, f"{kind}_pruning_enabled", False)

    def _keep_outputs(self, kept: Tensor) -> None:
        """Keep some rows of the weight, and of the bias, by index."""
        for name in ("weight", "bias"):
            values: Tensor | None = getattr(self, name, None)
            if values is not None:
                setattr(self, name, part_of(values, kept, 0))

    def extra_repr(self) -> str:
        """Return the layer's own words, and what is enabled."""
        words = [super().extra_repr()]
        if self.weight_quantizer is not None:
            words.append(f"weight_bits={self.weight_quantizer.start_bits} to {self.weight_quantizer.target_bits}")
        words += [f"{kind}_pruning={method} {ratio}" for kind, (method, ratio) in self.prunings.items()]
        return ", ".join(words)


def _scores_of(kind: str) -> str:
    return "head_pruning_scores" if kind == "head" else f"{kind}_mask_scores"


def part_of(values: Tensor, kept: Tensor, dim: int) -> Parameter:
    """Return the slices of a parameter at the indices `kept`, as a parameter."""
    part = values.detach().index_select(dim, kept.to(values.device)).clone()
    return Parameter(part, requires_grad=values.requires_grad)


def kept_of(mask: Tensor) -> Tensor:
    """Return the indices that a mask keeps."""
    return mask.detach().flatten().nonzero().flatten()
