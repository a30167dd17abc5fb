"""bf16 and fp16 on processors without instructions for them, where torch multiplies matrices element by element, or as
oneDNN emulates them.

The engine says what it computes in (`CPU_Accelerator.prepare_dtype`). Where torch would be slow at that, its products
of such matrices, and the backward of its attention, are replaced by ones that multiply in fp32 and round each result
once (`csrc/half_matmul/`). That counts for the whole process, from then on; `DS_OPS_DISABLE=half_matmul` leaves torch
as it is.
"""

import torch
from deepspeed.config.precision import dtype_name
from deepspeed.log import warn_once
from deepspeed.ops import registry

OP = "half_matmul"
# torch's question for whether oneDNN has instructions of this processor for a dtype
_QUESTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def is_fast(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of `dtype` by instructions of this processor. True where that is not known:
    this torch is built without oneDNN.

    oneDNN takes bf16 on every processor with AVX-512, and emulates it on those without AVX512_BF16 and AMX.
    """
    if dtype not in _QUESTIONS or not torch.backends.mkldnn.is_available():
        return True
    if dtype == torch.bfloat16 and torch.cpu._is_avx512_supported():
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(getattr(torch.ops.mkldnn, _QUESTIONS[dtype])())


def prepare(dtype: torch.dtype) -> None:
    """Make torch's products of `dtype` quick in this process; the first time on a machine, the kernel is compiled.

    Where it cannot be, a warning says so once.
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
