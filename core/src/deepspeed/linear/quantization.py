"""`QuantizedLinear` and `QuantizedParameter`: a linear layer, frozen, whose weight is stored in 8 or 6 bits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepspeed._absent import complete
from deepspeed._absent_members import absent_members
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError
from deepspeed.linear.config import QuantizationConfig, stored_as
from deepspeed.ops.quantizer import layers
from deepspeed.ops.quantizer.layers import StoredLayer
from deepspeed.ops.quantizer.packed import packed_linear
from deepspeed.ops.quantizer.stored_form import StoredForm


@absent_members("linear.quantization:QuantizedParameter")
class QuantizedParameter(nn.Parameter):
    """A weight in 8 or 6 bits: one int8 tensor, as `ops/quantizer/layers.py` has it; `dequantized` gives the numbers.

    It moves as it is; ZeRO shards and gathers it as any other parameter. It has no gradient.

    Args:
        data: the weight, [out, in].
        requires_grad: False.
        quantization_config: default: 8 bits.
        quantizer: None, since the format is that of `quantization_config`.

    Raises:
        ConfigError: it cannot be stored so.

    >>> weight = QuantizedParameter(torch.tensor([[448.0, -1.1, 0.0, 17.0]]))
    >>> weight.dequantized()
    tensor([[448.0000,  -1.1250,   0.0000,  16.0000]])
    """

    form: StoredForm
    numbers_dtype: torch.dtype

    def __new__(
        cls,
        data: Tensor,
        requires_grad: bool = False,
        quantization_config: QuantizationConfig | None = None,
        quantizer: None = None,
    ) -> "QuantizedParameter":
        if requires_grad or quantizer is not None:
            found = "requires_grad" if requires_grad else "a quantizer"
            raise ConfigError(
                f"QuantizedParameter: found {found}; a stored weight is frozen, in the form of its config"
            )
        if data.dim() != 2:
            raise ConfigError(f"QuantizedParameter: found shape {tuple(data.shape)}, but a weight is [out, in]")
        config = stored_as(quantization_config or QuantizationConfig(), data.shape[1])
        form = StoredForm.of(data.shape, config, "QuantizationConfig", "a weight")
        return cls.of(form.pack(data), form, data.dtype)

    @classmethod
    def of(cls, stored_B: Tensor, form: StoredForm, dtype: torch.dtype) -> "QuantizedParameter":
        """The parameter of bytes that are stored already."""
        made = torch.Tensor._make_subclass(cls, stored_B.detach(), False)  # type: ignore[attr-defined]
        assert isinstance(made, cls)
        made.form, made.numbers_dtype = form, dtype
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedParameter":
        made = memo.setdefault(id(self), self.of(self.data.clone(), self.form, self.numbers_dtype))
        assert isinstance(made, QuantizedParameter)
        return made

    def dequantized(self) -> Tensor:
        """The numbers, [out, in], of the type that the weight had."""
        return self.form.unpack(self.data, self.numbers_dtype)

    def to(self, *args: Any, **kwargs: Any) -> "QuantizedParameter":  # type: ignore[override]
        """The same weight elsewhere; a floating type is that of `dequantized` from then on."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        moved = self.data if device is None else self.data.to(device, non_blocking=non_blocking)
        return self.of(moved, self.form, dtype or self.numbers_dtype)

    def offload(self, revert: bool = False) -> None:
        """Keep the bytes in host memory; `revert`: on the accelerator again."""
        self.data = self.data.to(get_accelerator().current_device_name() if revert else "cpu")


class WidensInBackward(StoredLayer):
    """A stored layer whose product keeps no wide weight for the backward pass: it is widened once more there."""

    def _stored(self, name: str, value: Tensor) -> nn.Parameter:
        stored = super()._stored(name, value)
        if stored.dtype is not torch.int8 or isinstance(stored, QuantizedParameter):
            return stored
        made = QuantizedParameter.of(stored, self.form, self.dtype)
        vars(made).update(vars(stored))
        return made

    def product(self, x: Tensor) -> Tensor:
        """x W^T + bias, of x's dtype."""
        bias = self._parameters.get("bias")
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            out: Tensor = _Product.apply(x, self)
            return out if bias is None else out + bias.to(out.dtype)
        return packed_linear(x, self._packed(), bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: WidensInBackward) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.dequantized(grad.dtype), None


class QuantizedLinear(WidensInBackward, layers.QuantizedLinear):
    """A linear layer whose weight is a `QuantizedParameter`. It takes plain weights from state dicts, and stores them.

    Args:
        input_dim, output_dim: features.
        bias: whether it has one, which trains.
        quantization_config: default: 8 bits.
        dtype: of the weight before it is stored, and of the bias.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: QuantizationConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        config = stored_as(quantization_config or QuantizationConfig(), input_dim)
        super().__init__(config, nn.Linear(input_dim, output_dim, bias, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], of the input's dtype."""
        return self.product(input)


complete(__name__)
