"""`Quantizer` rounds weights after each step of an optimizer, with fewer bits over time: Mixture of Quantization.

For loops of one's own, whose optimizer updates other tensors than the model's (masters of fp16). The engine rounds in
the forward instead (`quantizers.WeightQuantizer`). Here the bits fall by one when the steps reach a parameter's
`q_period`, which doubles then, as DeepSpeed's tutorial "Mixture of Quantization" says.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed import log
from deepspeed._absent import complete
from deepspeed._absent_members import absent_members
from deepspeed.compression.quantizers import BinaryQuantizer, TernaryQuantizer
from deepspeed.errors import ConfigError
from deepspeed.ops.quantizer.groups import fake_quantize

__all__ = ["Quantizer"]

#: by how much the largest eigenvalue stretches a period, above 1
_STRETCH = 4


@absent_members("runtime.quantize:Quantizer")
class Quantizer:
    """Rounds parameters that have `start_bits`, `target_bits` and `q_period`, in place.

    Args:
        q_groups: scales per parameter.
        q_mixed_fp16: mix the rounded value with the parameter's own, whose share falls by `q_change_ratio` a step.
        q_change_ratio: by how much the share of the own value falls each step, with `q_mixed_fp16`.
        q_type: "symmetric" or 0; "asymmetric" or 1.
        q_rounding: "nearest" or 0; "stochastic" or 1.
        q_verbose: log when bits change.
        q_eigenvalue: whether periods follow eigenvalues; for the caller.
        use_quantizer_kernel: has no effect; the accelerator's kernel is used if it has one.
        layer_num: layers that eigenvalues are of; for the caller.
    """

    def __init__(
        self,
        q_groups: int = 1,
        q_mixed_fp16: bool = False,
        q_change_ratio: float = 0.01,
        q_type: int | str = 0,
        q_rounding: int | str = 0,
        q_verbose: bool = False,
        q_eigenvalue: bool = False,
        use_quantizer_kernel: bool = False,
        layer_num: int = 0,
    ) -> None:
        for name, value, known in (
            ("q_type", q_type, (0, 1, "symmetric", "asymmetric")),
            ("q_rounding", q_rounding, (0, 1, "nearest", "stochastic")),
        ):
            if value not in known:
                raise ConfigError(f"{name}: found {value!r}; give one of {', '.join(map(repr, known))}")
        self.q_groups = q_groups
        self.q_mixed_fp16 = q_mixed_fp16
        self.q_change_ratio = q_change_ratio
        self.q_type = q_type
        self.q_rounding = q_rounding
        self.q_verbose = q_verbose
        self.q_eigenvalue = q_eigenvalue
        self.use_quantizer_kernel = use_quantizer_kernel
        self.layer_num = layer_num
        #: steps so far
        self.qsteps = 0
        #: share of the parameter's own value
        self.quantize_real_ratio = 1.0
        self._switches = True

    def any_precision_switch(self) -> bool:
        """Whether bits may still fall, so that eigenvalues are of use: True until `quantize` saw no such parameter."""
        return self._switches

    def step(self) -> None:
        """Count a step."""
        self.qsteps += 1

    def quantize(
        self,
        parameter_group: Iterable[Iterable[Tensor]],
        overflow: bool,
        eigenvalue_enabled: bool,
        block_eigenvalue: Mapping[int, tuple[float, int]] | None = None,
    ) -> None:
        """Count a step and round each parameter of 2-D and more, in place. One that was skipped rounds nothing.

        Args:
            parameter_group: groups of parameters, of the model's own type.
            overflow: whether the step was skipped.
            eigenvalue_enabled: whether periods follow `block_eigenvalue`.
            block_eigenvalue: as `Eigenvalue.compute_eigenvalue` returns it.
        """
        if overflow and not eigenvalue_enabled:
            return
        self.step()
        self.update_fp16_ratio()
        self._switches = False
        for group in parameter_group:
            param: Any  # with the attributes of its schedule
            for param in group:
                if param.dim() > 1 and getattr(param, "start_bits", None):
                    value, layer = (block_eigenvalue or {}).get(id(param), (None, 0))
                    factor = 1 if value is None else 1 + math.floor(value * _STRETCH)
                    with torch.no_grad():
                        param.copy_(self.compute_quantization(param, layer, factor))
                    self._switches |= param.start_bits != param.target_bits

    def compute_quantization(self, input: Tensor, index: int = 0, factor: int = 1) -> Tensor:
        """Return a parameter rounded, after its bits fell if its period is over.

        Args:
            input: the parameter; its `start_bits` and `q_period` change.
            index: number of its layer.
            factor: by which the period grows, beside doubling, when the bits fall.
        """
        param: Any = input
        if param.start_bits != param.target_bits and self.qsteps >= param.q_period:
            self.quantize_real_ratio = 1.0
            param.q_period = param.q_period * 2 * factor
            param.start_bits -= 1
            if self.q_verbose:
                log.report(
                    f"quantization of layer {index}: {param.start_bits} bits after {self.qsteps} steps, the next after "
                    f"{param.q_period}"
                )
        if param.start_bits < param.target_bits:
            raise ConfigError(
                f"start_bits: found {param.start_bits} below target_bits {param.target_bits}; bits only get fewer"
            )
        if param.start_bits >= 3:
            rounded = self.quantize_highbit(input, param.start_bits)
        elif param.start_bits == 2:
            rounded = self.quantize_tenary(input)
        else:
            rounded = self.quantize_binary(input)
        return self.mixed_fp16_quantize(input, rounded, index)

    def quantize_highbit(self, inputs: Tensor, num_bits: int) -> Tensor:
        """Return the tensor rounded to 3 bits or more."""
        return fake_quantize(
            inputs,
            self.q_groups,
            num_bits,
            symmetric=self.q_type in (0, "symmetric"),
            stochastic=self.q_rounding in (1, "stochastic"),
        )

    def quantize_tenary(self, inputs: Tensor) -> Tensor:
        """Return the tensor with three values a group."""
        rounded: Tensor = TernaryQuantizer.apply(inputs.detach(), 2, None, None, self.q_groups)
        return rounded

    def quantize_binary(self, inputs: Tensor) -> Tensor:
        """Return the tensor with two values a group."""
        rounded: Tensor = BinaryQuantizer.apply(inputs.detach(), 1, None, None, self.q_groups)
        return rounded

    def mixed_fp16_quantize(self, input: Tensor, input_q: Tensor, index: int) -> Tensor:
        """Return the mixture of a parameter and its rounded value; that one where nothing is mixed."""
        return torch.lerp(input_q, input.detach(), self.quantize_real_ratio) if self.q_mixed_fp16 else input_q

    def update_fp16_ratio(self) -> None:
        """Lower the share of parameters' own values by one step."""
        if self.q_mixed_fp16:
            self.quantize_real_ratio = max(0.0, self.quantize_real_ratio - self.q_change_ratio)


complete(__name__)
