"""Builder of the op `utils` (DeepSpeed's name): flatten many tensors into one, and unflatten."""

import torch
from torch import Tensor

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_path


class UtilsBuilder(CUDAOpBuilder):
    """`torch.ops.ds_cuda.{flatten, unflatten}`: `flatten(tensors)` and `unflatten(flat, tensors)`, as in DeepSpeed."""

    BUILD_VAR = "DS_BUILD_UTILS"
    NAME = "utils"

    def sources(self) -> list[str]:
        return [cuda_kernel_path("flatten/flatten.cu")]

    def register_fakes(self) -> None:
        torch.library.register_fake("ds_cuda::flatten", _flatten)


def _flatten(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((sum(tensor.numel() for tensor in tensors),))
