"""Speed up bf16 and fp16 matrix products on processors without instructions for these dtypes. There, torch multiplies
element by element, or uses oneDNN's emulation.

The engine passes its compute dtype to `CPU_Accelerator.prepare_dtype`. If torch would be slow with this dtype, torch's
matrix products and the backward of its attention are replaced by kernels that multiply in fp32 and round each result
once (`csrc/half_matmul/`). The replacement affects the whole process from then on. `DS_OPS_DISABLE=half_matmul`
prevents it.
"""

import torch
from deepspeed.comm.values import dtype_name
from deepspeed.log import warn_once
from deepspeed.ops import registry

OP = "half_matmul"
# torch's functions that return whether oneDNN supports a dtype on this processor
_QUESTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def is_fast(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of `dtype` with instructions of this processor. True if that is unknown,
    because this torch is built without oneDNN.

    oneDNN accepts bf16 on every processor with AVX-512, and emulates bf16 on processors without AVX512_BF16 and AMX.
    """
    if dtype not in _QUESTIONS or not torch.backends.mkldnn.is_available():
        return True
    if dtype == torch.bfloat16 and torch.cpu._is_avx512_supported():
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(getattr(torch.ops.mkldnn, _QUESTIONS[dtype])())


def prepare(dtype: torch.dtype) -> None:
    """Make torch's matrix products of `dtype` fast in this process. The first call on a machine compiles the kernel.

    If the kernel is not available, a warning says so once.
    """
    if is_fast(dtype):
        return
    op = registry.kernel(OP)
    if op is not None:
        op.enable_half_matmul(dtype, True)
    else:
        warn_once(
            f"this processor has no instructions for {dtype_name(dtype)}: torch's products of matrices take 4 to 90 "
            f"times as long as in fp32, and op {OP!r}, which computes them in fp32, is not used "
            f"({registry.resolve(OP).why()}). Train in fp32, or let that op be compiled"
        )
