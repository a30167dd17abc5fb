"""DtypeMixin: what the device computes in, and the tensor constructors of old scripts."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.accelerator.device import TorchModule

TensorMaker = Callable[..., torch.Tensor]


class DtypeMixin(TorchModule):
    """Number formats."""

    def supported_dtypes(self) -> list[torch.dtype]:
        """The floating point types that a model can be trained in. Asked when the engine is built, to refuse others."""
        dtypes = [torch.float32]
        if self.is_fp16_supported():
            dtypes.append(torch.float16)
        if self.is_bf16_supported():
            dtypes.append(torch.bfloat16)
        return dtypes

    def prepare_dtype(self, dtype: torch.dtype) -> None:
        """Get ready to compute in `dtype`, which is one of `supported_dtypes`.

        `deepspeed.initialize` and `init_inference` call it for what the configuration asks for, before they build
        anything; again for each engine. A device on which torch computes slowly in it may load kernels of its own.
        Default: nothing.
        """

    def is_bf16_supported(self) -> bool:
        """True when bfloat16 arithmetic works. Default: what torch says of the device, else True."""
        return bool(self._ask("is_bf16_supported")) if self._has("is_bf16_supported") else True

    def is_fp16_supported(self) -> bool:
        """True when float16 arithmetic works. Default: what torch says of the device, else True."""
        return bool(self._ask("is_fp16_supported")) if self._has("is_fp16_supported") else True

    def is_fp64_supported(self) -> bool:
        """True when torch computes in float64 on this device."""
        return True

    def is_grouped_mm_supported(self) -> bool:
        """True when torch's product of groups of rows, each with its matrix, runs on this device. Layers of experts
        ask; without it they take one product per expert. Default: torch has it for every device, which it had not
        before 2.8.
        """
        return _torch_has_grouped_mm()

    def prefer_triton_grouped_mm(self) -> bool:
        """True when grouped matrix products are faster by Triton than by torch. Default False."""
        return False

    def is_triton_supported(self) -> bool:
        """True when Triton compiles for this device. Default False: a vendor who has a Triton back end says so."""
        return False

    def amp(self) -> Any:
        """Return torch's autocast module for the device (`torch.xyz.amp`), or None. `torch.autocast` needs none."""
        return getattr(self._module(), "amp", None)

    # ----- constructors of old scripts: get_accelerator().FloatTensor([1.0, 2.0]) ------------------------------------

    @property
    def BFloat16Tensor(self) -> TensorMaker:
        """Makes a `torch.bfloat16` tensor of the given values on the current device."""
        return self._maker(torch.bfloat16)

    @property
    def ByteTensor(self) -> TensorMaker:
        """Makes a `torch.uint8` tensor of the given values on the current device."""
        return self._maker(torch.uint8)

    @property
    def DoubleTensor(self) -> TensorMaker:
        """Makes a `torch.float64` tensor of the given values on the current device."""
        return self._maker(torch.float64)

    @property
    def FloatTensor(self) -> TensorMaker:
        """Makes a `torch.float32` tensor of the given values on the current device."""
        return self._maker(torch.float32)

    @property
    def HalfTensor(self) -> TensorMaker:
        """Makes a `torch.float16` tensor of the given values on the current device."""
        return self._maker(torch.float16)

    @property
    def IntTensor(self) -> TensorMaker:
        """Makes a `torch.int32` tensor of the given values on the current device."""
        return self._maker(torch.int32)

    @property
    def LongTensor(self) -> TensorMaker:
        """Makes a `torch.int64` tensor of the given values on the current device."""
        return self._maker(torch.int64)

    def _maker(self, dtype: torch.dtype) -> TensorMaker:
        # `torch.device(name)` without an index is the current device, and asking for it initializes nothing.
        return functools.partial(torch.tensor, dtype=dtype, device=self._name)


@functools.cache  # asked for each product of each layer
def _torch_has_grouped_mm() -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return hasattr(torch, "_grouped_mm") and bool(has("aten::_grouped_mm", "CompositeExplicitAutograd"))
