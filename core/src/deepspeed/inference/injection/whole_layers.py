"""All layers of a decoder by one call each, where the accelerator has the kernel: `WholeLayers`.

A divided layer is a call for each half, and a sum over the ranks behind it, to which the first rank adds the residual.
Made for one generation from the fused blocks, over their weights and the buffers of the cache; holds no weight itself
but fp32 copies of norms and biases. Shape legend: B sequences, C features, R numbers of a head that turn.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.inference.injection.block import FusedBlock, FusedNorm, found
from deepspeed.ops.quantizer import PackedWeight
from deepspeed.ops.transformer import DecoderLayer, Norm
from deepspeed.ops.transformer.decoder_layer import decoder_layer_operator
from deepspeed.tensor_parallel.ranks import TensorRanks


class WholeLayers:
    """All layers, one call of `decoder_layer` for each or for each half, over the buffers of the cache."""

    def __init__(
        self,
        kernel: Any,
        layers: list[list[DecoderLayer]],
        buffers: list[tuple[Tensor, Tensor]],
        tables: list[tuple[Tensor, Tensor] | None],
        starts: Tensor | None,
        ranks: TensorRanks | None,
    ) -> None:
        self._kernel, self._starts, self._ranks = kernel, starts, ranks
        self._layers = [
            (*both, [part.arguments for part in parts]) for both, parts in zip(buffers, layers, strict=True)
        ]
        self._tables = tables

    @classmethod
    def of(
        cls, blocks: list[FusedBlock], cache: Any, mask: Tensor | None, table: tuple[Tensor, Tensor] | None
    ) -> "WholeLayers | None":
        """None: the kernel, or a layer that is one call, is missing, or a token within a prompt is hidden.

        Args:
            cache: holds the prompt.
            mask: (B, tokens of the prompt), 0 for hidden ones.
            table: of `Decoder.table`; None: there are none, or the layers have their own.
        """
        buffers = [cache.layers[block.layer_index].buffers for block in blocks]
        num_rows, dtype = buffers[0][0].shape[0], buffers[0][0].dtype
        kernel = decoder_layer_operator(buffers[0][0].view(num_rows, -1))
        if kernel is None:
            return None
        starts = None
        if mask is not None:
            starts = mask.shape[1] - mask.long().sum(1)
            if bool((mask[:, 1:] < mask[:, :-1]).any()) or bool((starts == mask.shape[1]).any()):
                return None
        layers = [layer for block in blocks if (layer := _layer_of(block)) is not None]
        if len(layers) < len(blocks):
            return None
        if not all(_fits(each.weight, dtype) for layer in layers for each in layer.linears):
            return None
        shared = _half_table(table, in_pairs=blocks[0].policy.rotary == "pairs")
        tables = [_table_of_layer(block, dtype) if block.policy.rotary_table else shared for block in blocks]
        ranks = blocks[0].ranks
        return cls(kernel, [_parts_of(layer, ranks) for layer in layers], buffers, tables, starts, ranks)

    def __call__(self, x: Tensor, length: int, positions: Tensor) -> Tensor:
        """(B, C) -> (B, C), of the tokens that become number `length` in the cache."""
        known: tuple[Tensor, Tensor] | None = None
        cos: Tensor | None = None
        sin: Tensor | None = None
        for (keys, values, parts), table in zip(self._layers, self._tables, strict=True):
            if table is not known and table is not None:
                known = table
                cos, sin = (each.index_select(0, positions) for each in table)
            for arguments in parts:
                x = self._kernel(x, keys, values, length, self._starts, cos, sin, *arguments)
                if self._ranks is not None:
                    x = self._ranks.sum_in_place(x)
        return x


def _parts_of(layer: DecoderLayer, ranks: TensorRanks | None) -> list[DecoderLayer]:
    """Cut a layer into the parts that are computed between two sums over the ranks; only rank 0 adds the residual."""
    if ranks is None:
        return [layer]
    is_first = ranks.rank == 0
    if layer.parallel:
        return [replace(layer, adds_input=is_first)]
    return [replace(layer, part="attention", adds_input=is_first), replace(layer, part="mlp", adds_input=is_first)]


def _fits(weight: Tensor | PackedWeight, dtype: torch.dtype) -> bool:
    return isinstance(weight, PackedWeight) or weight.dtype == dtype


def _half_table(table: tuple[Tensor, Tensor] | None, *, in_pairs: bool) -> tuple[Tensor, Tensor] | None:
    """cos and sin, fp32 (positions, R / 2), without the repetition."""
    if table is None:
        return None
    if in_pairs:
        return table[1].float().contiguous(), table[0].float().contiguous()
    width = table[0].shape[-1] // 2
    return table[0][:, :width].float().contiguous(), table[1][:, :width].float().contiguous()


def _table_of_layer(block: FusedBlock, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same from the table of sines and cosines that a layer holds."""
    sin, cos = found(block.layer, block.policy.rotary_table).to(dtype).chunk(2, -1)
    return cos.float().contiguous(), sin.float().contiguous()


# by function, or name of the class
_ACTIVATIONS: dict[Any, str] = {
    **dict.fromkeys((F.silu, "SiLU", "SiLUActivation"), "silu"),
    **dict.fromkeys((F.gelu, "GELUActivation"), "gelu"),
    **dict.fromkeys(("NewGELUActivation", "FastGELUActivation", "PytorchGELUTanh", "GELUTanh"), "gelu_tanh"),
    **dict.fromkeys((F.relu, "ReLU"), "relu"),
}


def _activation_name(activation: Any) -> str | None:
    if not isinstance(activation, nn.Module):
        return _ACTIVATIONS.get(activation)
    if isinstance(activation, nn.GELU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    is_known = type(activation).__module__ in ("transformers.activations", "torch.nn.modules.activation")
    return _ACTIVATIONS.get(type(activation).__name__) if is_known else None


def _layer_of(block: FusedBlock) -> DecoderLayer | None:
    """The whole layer for `decoder_layer`, over the weights as they are now; None: it is not one call."""
    policy = block.policy
    linears = (block.qkv, block.out, block.up, block.down)
    norms = [norm for norm in (block.norm_attention, block.norm_mlp, block.norm_query, block.norm_key) if norm]
    activation, gated = _activation_name(block.activation), len(policy.up) == 2
    if block.softcap is not None or policy.norm_attention_out:
        return None
    if policy.placement == "post" or activation is None or (gated and activation == "relu"):
        return None
    if any(each is None or (each.packed is not None and each.packed.floating) for each in linears):
        return None
    if len({(norm.centered, norm.eps) for norm in norms}) > 1 or any(norm.weight is None for norm in norms):
        return None

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().float()  # else every call would widen it

    def of(norm: FusedNorm | None) -> Norm | None:
        if norm is None:
            return None
        weight = wide(norm.weight)
        assert weight is not None
        return Norm(weight, wide(norm.module.bias) if norm.centered else None)

    before = of(block.norm_attention)
    assert before is not None
    qkv, out, up, down = (each.as_linear(wide) for each in linears if each is not None)
    width = sum(block.qkv.sizes) // block.head_dim
    return DecoderLayer(
        *(qkv, out, up, down),
        norm_attention=before,
        norm_mlp=of(block.norm_mlp),
        norm_query=of(block.norm_query),
        norm_key=of(block.norm_key),
        heads=width - 2 * block.num_kv_heads,
        kv_heads=block.num_kv_heads,
        head_dim=block.head_dim,
        eps=block.norm_attention.eps,
        scale=block.scale,
        activation=activation,
        gated=gated,
        parallel=policy.placement == "parallel",
        centered=block.norm_attention.centered,
        interleaved=policy.rotary == "pairs",
        layout="by_part" if policy.layout in ("separate", "by_part") else "by_group",
        window=block.sliding_window,
    )
