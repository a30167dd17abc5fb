"""Quantizers and masks for training: the forward rounds values, and the backward passes gradients through unchanged.

This is the straight-through estimator (Bengio, Leonard, Courville, arXiv 1308.3432, section 5): the gradient of the
rounded value is used as the original value's gradient. `ops/quantizer/groups.py` does the rounding, or with a given
range `torch.fake_quantize_per_tensor_affine`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed._absent import absent_members
from deepspeed.errors import ConfigError
from deepspeed.ops.quantizer.groups import fake_quantize

_TERNARY_THRESHOLD = 0.7


class _Straight(torch.autograd.Function):
    """A function that passes its gradient unchanged to its first argument."""

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # type: ignore[override]
        return (grad_output, None, None, None, None, None)[: len(ctx.needs_input_grad)]


def _refuse_range(min_value: Any, max_value: Any) -> None:
    if min_value is not None or max_value is not None:
        raise ConfigError(
            f"min_value, max_value: found {min_value!r} and {max_value!r}; ranges are those of the groups here, so "
            "leave them out; QuantAct keeps a range of its own"
        )


class SymQuantizer(_Straight):
    """Rounds each group to 2^b - 1 levels around 0."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        num_bits: int,
        min_value: None = None,
        max_value: None = None,
        num_groups: int = 1,
        stochastic: bool = False,
    ) -> Tensor:
        """Call `fake_quantize`."""
        _refuse_range(min_value, max_value)
        return fake_quantize(input, num_groups, num_bits, stochastic=stochastic)


class AsymQuantizer(_Straight):
    """Rounds each group to 2^b levels from its minimum to its maximum."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        num_bits: int,
        min_value: None = None,
        max_value: None = None,
        num_groups: int = 1,
        stochastic: bool = False,
    ) -> Tensor:
        """Call `fake_quantize(symmetric=False)`."""
        _refuse_range(min_value, max_value)
        return fake_quantize(input, num_groups, num_bits, symmetric=False, stochastic=stochastic)


class TernaryQuantizer(_Straight):
    """Rounds each group to three values: -a, 0 and a.

    Source: Li, Zhang, Liu, "Ternary Weight Networks" (arXiv 1605.04711), section 2.3: with t = 0.7 mean|w|, elements
    with |w| > t become a with their sign, and a is the mean |w| of these elements.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, num_bits: int = 2, min_value: None = None, max_value: None = None, num_groups: int = 1
    ) -> Tensor:
        """Return the three values, in `input`'s shape and dtype."""
        _refuse_range(min_value, max_value)
        groups = input.detach().reshape(num_groups, -1).float()
        sizes = groups.abs()
        kept = (sizes > _TERNARY_THRESHOLD * sizes.mean(1, keepdim=True)).float()
        scale = (sizes * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp_min(1)
        return (groups.sign() * kept * scale).reshape(input.shape).to(input.dtype)


class BinaryQuantizer(_Straight):
    """Rounds each group to two values: -a and a, with a = mean|w| (0 stays 0).

    Source: Rastegari et al., "XNOR-Net" (arXiv 1603.05279), section 3.1, equation 6.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, num_bits: int = 1, min_value: None = None, max_value: None = None, num_groups: int = 1
    ) -> Tensor:
        """Return the two values, in `input`'s shape and dtype."""
        _refuse_range(min_value, max_value)
        groups = input.detach().reshape(num_groups, -1).float()
        return (groups.sign() * groups.abs().mean(1, keepdim=True)).reshape(input.shape).to(input.dtype)


class TopKBinarizer(torch.autograd.Function):
    """Computes a mask from scores: 1 for the highest, 0 for the others. The scores get the gradient of the mask.

    Source: Sanh, Wolf, Rush, "Movement Pruning" (arXiv 2005.07683), section 4, with its Appendix A.1.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, threshold: float, sigmoid: bool) -> Tensor:
        """Return the mask.

        Args:
            inputs: the scores.
            threshold: the share of ones; with `sigmoid`, the threshold of the sigmoid.
            sigmoid: compare the sigmoid of each score.
        """
        if sigmoid:
            return (torch.sigmoid(inputs) > threshold).to(inputs.dtype)
        mask = torch.zeros_like(inputs)
        highest = inputs.flatten().topk(num_kept(inputs.numel(), threshold)).indices
        mask.view(-1)[highest] = 1
        return mask

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Pass the gradient on."""
        return grad_outputs[0], None, None


def num_kept(total: int, ratio: float) -> int:
    """Return the number of `total` to keep, like torch.nn.utils.prune with amount 1 - ratio, but at least one."""
    return max(1, total - round((1 - ratio) * total))


class WeightQuantizer:
    """Rounds a weight to a number of bits that decreases with the steps.

    Args:
        start_bits: initial number of bits.
        target_bits: final number of bits.
        period: number of steps per bit; 0 if the bits never change.
        symmetric: True uses a range around 0; False uses the minimum to the maximum of a group.
        num_groups: number of scales per weight.
        stochastic: round stochastically (unbiased).
        mixed_ratio: increase per step of the share of the rounded value; None: the share is 1 from the first step on.

    Raises:
        ConfigError: 1 or 2 bits are requested with an asymmetric range or stochastic rounding.
    """

    def __init__(
        self,
        start_bits: int,
        target_bits: int,
        period: int,
        *,
        symmetric: bool = True,
        num_groups: int = 1,
        stochastic: bool = False,
        mixed_ratio: float | None = None,
    ) -> None:
        if target_bits < 3 and (stochastic or not symmetric):
            kind = "stochastic rounding" if stochastic else "an asymmetric range"
            raise ConfigError(
                f"target_bits: found {target_bits} with {kind}; 1 and 2 bits are symmetric, and rounded to nearest"
            )
        self.start_bits, self.target_bits, self.period = start_bits, target_bits, period
        self.symmetric, self.num_groups, self.stochastic = symmetric, num_groups, stochastic
        self.mixed_ratio = mixed_ratio
        self.num_bits = start_bits
        self.share = 1.0 if mixed_ratio is None else 0.0

    def move_to(self, num_steps: int) -> None:
        """Set the bits for a step, counted from the first step that quantizes."""
        if self.period:
            self.num_bits = max(self.target_bits, self.start_bits - num_steps // self.period)
        if self.mixed_ratio is not None:
            self.share = min(1.0, self.mixed_ratio * num_steps)

    def finish(self) -> None:
        """Set the final bits and share."""
        self.num_bits, self.share = self.target_bits, 1.0

    def __call__(self, weight: Tensor, *, trains: bool = True) -> Tensor:
        """Return the rounded weight, with a straight-through gradient. Stochastic rounding is used only in training."""
        rounded = self._round(weight, stochastic=self.stochastic and trains)
        return rounded if self.share == 1.0 else torch.lerp(weight, rounded, self.share)

    def _round(self, weight: Tensor, *, stochastic: bool) -> Tensor:
        result: Tensor
        if self.num_bits < 3:
            kind = BinaryQuantizer if self.num_bits == 1 else TernaryQuantizer
            result = kind.apply(weight, self.num_bits, None, None, self.num_groups)
        else:
            many = SymQuantizer if self.symmetric else AsymQuantizer
            result = many.apply(weight, self.num_bits, None, None, self.num_groups, stochastic)
        return result


class QuantAct(nn.Module):
    """Rounds inputs within a running range: range <- m range + (1 - m) (minimum, maximum), updated in training.

    The range is the buffer `x_min_max`, so checkpoints include it. Evaluation, and inputs with inf or nan, do not
    change it. Inputs outside the range are clipped and get no gradient. Without a range, inputs are not rounded.
    Source: Jacob et al., arXiv 1712.05877, section 3.1.

    Args:
        act_range_momentum: m.
        quant_mode: "symmetric" or "asymmetric".
    """

    x_min_max: Tensor

    def __init__(self, act_range_momentum: float = 0.95, quant_mode: str = "symmetric") -> None:
        super().__init__()
        self.act_range_momentum = act_range_momentum
        self.quant_mode = quant_mode
        self.register_buffer("x_min_max", torch.zeros(2))

    def forward(self, x: Tensor, num_bits: int, *args: Any) -> Tensor:
        """Return `x` rounded to `num_bits`. In training, update the range first."""
        if self.training:
            with torch.no_grad():
                seen = torch.stack(x.detach().aminmax()).to(self.x_min_max.dtype)
                moved = self.act_range_momentum * self.x_min_max + (1 - self.act_range_momentum) * seen
                # the first inputs set the range; an overflow must not enter the range, because it would never leave
                moved = torch.where(self.x_min_max.any(), moved, seen)
                self.x_min_max.copy_(torch.where(seen.isfinite().all(), moved, self.x_min_max))
        if not self.x_min_max.any():  # no range yet: an empty range would round all inputs to 0
            return x
        low, high = self.x_min_max.float()
        if self.quant_mode == "symmetric":
            top = 2 ** (num_bits - 1) - 1
            scale, zero, bottom = torch.maximum(-low, high) / top, torch.zeros_like(low), -top
        else:
            bottom, top = 0, 2**num_bits - 1
            low, high = low.clamp_max(0), high.clamp_min(0)  # the range must include 0, as torch requires
            scale = (high - low) / top
            zero = (-low / scale.clamp_min(torch.finfo(torch.float32).tiny)).round()
        scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
        rounded = torch.fake_quantize_per_tensor_affine(x.float(), scale, zero.to(torch.int32), bottom, top)
        return rounded.to(x.dtype)


def quantize_inputs(x: Tensor, num_bits: int, symmetric: bool, num_groups: int) -> Tensor:
    """Round inputs, each group within its own range."""
    kind = SymQuantizer if symmetric else AsymQuantizer
    result: Tensor = kind.apply(x, num_bits, None, None, num_groups)
    return result


absent_members("compression.basic_layer:QuantAct")(QuantAct)
