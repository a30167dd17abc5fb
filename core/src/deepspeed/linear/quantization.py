"""`QuantizedLinear` and `QuantizedParameter`: a frozen linear layer with a weight in 8 or 6 bits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepspeed._absent import absent_members, complete
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ConfigError
from deepspeed.linear.config import QuantizationConfig, stored_as
from deepspeed.ops.quantizer import layers
from deepspeed.ops.quantizer.layers import StoredLayer
from deepspeed.ops.quantizer.packed import packed_linear
from deepspeed.ops.quantizer.stored_form import StoredForm


@absent_members("linear.quantization:QuantizedParameter")
class QuantizedParameter(nn.Parameter):
    """A weight in 8 or 6 bits, as one int8 tensor (`ops/quantizer/layers.py`). `dequantized` returns the numbers.

    Moves keep the stored bytes, and ZeRO shards and gathers it like any other parameter. It has no gradient.

    Args:
        data: the weight, [out, in].
        requires_grad: must be False.
        quantization_config: default: 8 bits.
        quantizer: must be None, because `quantization_config` sets the format.

    Raises:
        ConfigError: an argument is not supported, or the weight does not fit the format.

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
        """Create the parameter from stored bytes."""
        made = torch.Tensor._make_subclass(cls, stored_B.detach(), False)  # type: ignore[attr-defined]
        assert isinstance(made, cls)
        made.form, made.numbers_dtype = form, dtype
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedParameter":
        made = memo.setdefault(id(self), self.of(self.data.clone(), self.form, self.numbers_dtype))
        assert isinstance(made, QuantizedParameter)
        return made

    def dequantized(self) -> Tensor:
        """Return the numbers, [out, in], in the dtype of the original weight."""
        return self.form.unpack(self.data, self.numbers_dtype)

    def to(self, *args: Any, **kwargs: Any) -> "QuantizedParameter":  # type: ignore[override]
        """Return the weight on another device. A dtype does not change the bytes, but sets that of `dequantized`."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        moved = self.data if device is None else self.data.to(device, non_blocking=non_blocking)
        return self.of(moved, self.form, dtype or self.numbers_dtype)

    def offload(self, revert: bool = False) -> None:
        """Move the bytes to host memory, or, with `revert`, back to the accelerator."""
        self.data = self.data.to(get_accelerator().current_device_name() if revert else "cpu")


class WidensInBackward(StoredLayer):
    """A stored layer that dequantizes its weight again in the backward, instead of saving it in the forward."""

    def _stored(self, name: str, value: Tensor) -> nn.Parameter:
        stored = super()._stored(name, value)
        if stored.dtype is not torch.int8 or isinstance(stored, QuantizedParameter):
            return stored
        made = QuantizedParameter.of(stored, self.form, self.dtype)
        vars(made).update(vars(stored))
        return made

    def product(self, x: Tensor) -> Tensor:
        """Return x W^T + bias, in the dtype of x."""
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
    """A linear layer with a `QuantizedParameter` as weight. It quantizes plain weights from state dicts.

    Args:
        input_dim, output_dim: numbers of features.
        bias: whether the layer has a bias, which trains.
        quantization_config: default: 8 bits.
        dtype: dtype of the original weight and of the bias.
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
