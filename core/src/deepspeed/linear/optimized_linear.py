"""`OptimizedLinear`: a linear layer that is plain, quantized, frozen with an adapter, or quantized with an adapter.

LoRA (arXiv 2106.09685): y = x W^T + b + (lora_alpha / lora_r) (x A^T) B^T, where only A and B train.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed._absent import absent_members, complete
from deepspeed.errors import ConfigError
from deepspeed.linear.config import LoRAConfig, QuantizationConfig, stored_as
from deepspeed.linear.quantization import QuantizedLinear, WidensInBackward
from deepspeed.ops.quantizer.stored_form import StoredForm


class OptimizedLinear(nn.Module):
    """A factory: the arguments decide the class of the returned layer: `LoRAOptimizedLinear` with a `lora_config`,
    `QuantizedLinear` with only a `quantization_config`, else `linear_cls`.

    Args:
        input_dim, output_dim: numbers of features.
        bias: whether the layer has a bias.
        lora_config: the options of the adapter.
        quantization_config: the format of the stored weight.
        device: the device of the weights.
        dtype: the dtype of the weights.
        linear_cls: the class of a plain layer.
    """

    def __new__(  # type: ignore[misc]
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[nn.Module] = nn.Linear,
    ) -> nn.Module:
        if lora_config is not None:
            return LoRAOptimizedLinear(input_dim, output_dim, bias, lora_config, quantization_config, device, dtype)
        if quantization_config is None:
            return linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype)
        layer = QuantizedLinear(input_dim, output_dim, bias, quantization_config, dtype)
        return layer if device is None else layer.to(device)


class _Adapter(nn.Linear):
    """A linear layer of an adapter. It is a separate class, so that `deepspeed.linear.Init` does not convert it."""


@absent_members("linear.optimized_linear:LoRAOptimizedLinear")
class LoRAOptimizedLinear(nn.Linear):
    """A frozen linear layer with an adapter; its weight may be quantized.

    The arguments are those of `OptimizedLinear`; `linear_cls` must be `torch.nn.Linear`.
    """

    # attributes that `freeze` sets
    lora_config: LoRAConfig
    lora_scaling_factor: float
    disabled: bool
    lora_weight_1: nn.Linear | None
    lora_weight_2: nn.Linear | None

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[nn.Module] = nn.Linear,
    ) -> None:
        if linear_cls is not nn.Linear:
            raise ConfigError(
                f"LoRAOptimizedLinear: found linear_cls {linear_cls.__name__}; adapters are beside a torch.nn.Linear"
            )
        super().__init__(input_dim, output_dim, bias, device=device, dtype=dtype)
        freeze(self, lora_config or LoRAConfig(), quantization_config)

    def init_lora(self) -> None:
        """Create the adapter, which adds zero at first, with the weight's device and dtype. Later calls do nothing.

        A is initialized like the weight of `torch.nn.Linear`, and B with 0.
        """
        if self.disabled or self.lora_weight_1 is not None:
            return
        rank, like = self.lora_config.lora_r, {"device": self.weight.device, "dtype": self._adapter_dtype()}
        self.lora_weight_1 = _Adapter(self.in_features, rank, bias=False, **like)
        self.lora_weight_2 = _Adapter(rank, self.out_features, bias=False, **like)
        nn.init.kaiming_uniform_(self.lora_weight_1.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_weight_2.weight)

    def disable(self) -> None:
        """Remove the adapter, so that the layer computes only with its frozen weight."""
        self.disabled = True
        self.lora_weight_1 = self.lora_weight_2 = None

    def full_weight(self) -> Tensor:
        """Return the frozen weight as numbers, [out, in]."""
        return self.weight.detach()

    def linear_without_F_linear(self, input: Tensor, weight: Tensor) -> Tensor:
        """Return input W^T."""
        return input @ weight.t()

    def forward(self, input_tensor: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        base = self.product(input_tensor)
        if self.lora_weight_1 is None or self.lora_weight_2 is None:
            return base
        return base + self.lora_scaling_factor * self.lora_weight_2(self.lora_weight_1(input_tensor))

    def product(self, x: Tensor) -> Tensor:
        """Return the output of the frozen weight, without the adapter: x W^T + bias."""
        return F.linear(x, self.weight, self.bias)

    def _adapter_dtype(self) -> torch.dtype:
        return self.weight.dtype


class QuantizedLoRALinear(WidensInBackward, LoRAOptimizedLinear):
    """A `LoRAOptimizedLinear` with a quantized weight; `freeze` converts layers to it."""

    def full_weight(self) -> Tensor:
        """Return the frozen weight as numbers, [out, in]."""
        return self.dequantized()

    def _adapter_dtype(self) -> torch.dtype:
        return self.dtype


def freeze(layer: nn.Linear, lora: LoRAConfig, quantization: QuantizationConfig | None) -> None:
    """Convert a plain layer, in place, to one with a frozen weight and an adapter (with `delay_lora_init`, no adapter
    yet). On the meta device, the weight is quantized when it is loaded."""
    layer.__class__ = LoRAOptimizedLinear
    assert isinstance(layer, LoRAOptimizedLinear)
    layer.requires_grad_(False)
    layer.lora_config, layer.lora_scaling_factor = lora, lora.lora_alpha / lora.lora_r
    layer.disabled, layer.lora_weight_1, layer.lora_weight_2 = False, None, None
    if quantization is not None:
        weight = layer.weight
        config = stored_as(quantization, layer.in_features)
        form = StoredForm.of(weight.shape, config, "QuantizationConfig", "a Linear")
        layer.__class__ = QuantizedLoRALinear
        assert isinstance(layer, QuantizedLoRALinear)
        layer.begin_storing(weight.dtype)
        layer.forms["weight"] = form
        layer.weight = weight
    if not lora.delay_lora_init:
        layer.init_lora()


complete(__name__)
