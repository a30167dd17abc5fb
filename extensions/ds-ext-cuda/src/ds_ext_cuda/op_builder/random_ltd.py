"""Builder of the token operators for random layerwise token dropping."""

import torch
from torch import Tensor

from ds_ext_cuda.op_builder.cuda_op_builder import CUDAOpBuilder, cuda_kernel_path


class RandomLTDBuilder(CUDAOpBuilder):
    """`torch.ops.ds_cuda.{token_sort_, token_gather, token_scatter_}`, with DeepSpeed's arguments.

    In-place operators return nothing, but in DeepSpeed they return their argument: torch does not compile an operator
    that returns an input.

    - `token_sort_(indices, num_tokens)` sorts int32 indices [..., kept] within each row, in place.
    - `token_gather(activations, indices, batch_first)` selects the tokens in indices [batch, kept] from [batch, tokens,
      hidden] (or [tokens, batch, hidden]) into [batch, kept, hidden] (or [kept, batch, hidden]).
    - `token_scatter_(all_activations, layer_activations, indices, batch_first)` writes tokens back, in place.
    """

    BUILD_VAR = "DS_BUILD_RANDOM_LTD"
    NAME = "random_ltd"

    def sources(self) -> list[str]:
        return [cuda_kernel_path("random_ltd/random_ltd.cu")]

    def register_fakes(self) -> None:
        torch.library.register_fake("ds_cuda::token_sort_", _sort)
        torch.library.register_fake("ds_cuda::token_gather", _gather)
        torch.library.register_fake("ds_cuda::token_scatter_", _scatter)


def _sort(indices: Tensor, num_tokens: int) -> None:
    return None


def _gather(activations: Tensor, indices: Tensor, batch_first: bool) -> Tensor:
    batch, kept = indices.shape
    hidden = activations.shape[2]
    return activations.new_empty((batch, kept, hidden) if batch_first else (kept, batch, hidden))


def _scatter(all_activations: Tensor, layer_activations: Tensor, indices: Tensor, batch_first: bool) -> None:
    return None
