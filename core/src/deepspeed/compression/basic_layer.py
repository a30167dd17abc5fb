"""Compressible layers for training: Linear, Embedding, Conv2d, and BatchNorm2d after a convolution.

`compressed` converts an ordinary layer in place, so its parameters, hooks and references stay valid. `restored` reverts
it. `compressed_layer.py` has the common base class. This file has the forwards, and the removal of rows, columns,
heads and channels.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from deepspeed._absent import absent_members, complete
from deepspeed.compression.compressed_layer import CompressedLayer, kept_of, part_of
from deepspeed.compression.quantizers import QuantAct
from deepspeed.errors import ConfigError

__all__ = ["BNLayer_Compress", "Conv2dLayer_Compress", "Embedding_Compress", "LinearLayer_Compress", "QuantAct"]


@absent_members("compression.basic_layer:LinearLayer_Compress")
class LinearLayer_Compress(CompressedLayer, nn.Linear):
    """A `torch.nn.Linear` with pruning of elements, rows (outputs), or the columns of heads."""

    #: where the method is topk
    sparse_mask_scores: Parameter
    row_mask_scores: Parameter
    head_pruning_scores: Parameter
    num_heads = 0
    row_pruning_enabled = False
    row_pruning_method = ""
    row_pruning_ratio = 1.0
    head_pruning_enabled = False
    head_pruning_method = ""
    head_pruning_ratio = 1.0

    def get_mask(self, pruning_type: str = "row") -> Tensor:
        """Return the mask of "row", "sparse" or "head" pruning, as `CompressedLayer.get_mask` does."""
        return super().get_mask(pruning_type)

    def enable_row_pruning(self, ratio: float, method: str) -> None:
        """Prepare the layer to keep the share `ratio` of its rows: of least mean size first, or by learned scores."""
        self._enable("row", ratio, method, self.weight.detach().abs().mean(1, keepdim=True))

    def enable_head_pruning(self, ratio: float, method: str, num_heads: int) -> None:
        """Prepare the layer, an attention's output projection, to keep the share `ratio` of the heads.

        Raises:
            ConfigError: the heads do not divide the inputs, or the method is another than "topk".
        """
        if method != "topk":
            raise ConfigError(f"head_pruning method: found {method!r}; heads are chosen by 'topk'")
        if self.in_features % num_heads:
            raise ConfigError(
                f"num_heads: found {num_heads} for {self.in_features} inputs; give the heads, which divide them evenly"
            )
        self.num_heads = num_heads
        sizes = self.weight.detach().abs().mean(0).view(num_heads, -1).mean(1)
        self._enable("head", ratio, method, sizes.view(1, num_heads))

    def head_pruning_reshape(self, w: Tensor, mask: Tensor) -> Tensor:
        """Multiply the columns of each head by its element of `mask`."""
        return w * mask.flatten().repeat_interleave(w.shape[1] // mask.numel())

    def _masked(self, weight: Tensor, kind: str, mask: Tensor) -> Tensor:
        return self.head_pruning_reshape(weight, mask) if kind == "head" else weight * mask

    def fix_row_col_pruning_helper(self, mask: Tensor | None = None, dim_reduction: bool = False) -> Tensor:
        """Prune permanently: the rows of this layer, or the columns that match the pruned rows of another layer.

        Args:
            mask: the row mask of the other layer; None: prune the rows of this layer.
            dim_reduction: remove them; else they become zeros.

        Returns:
            The mask that was used.
        """
        if mask is not None:
            if mask.numel() != self.in_features:
                raise _unrelated(f"a layer of {self.in_features} inputs", f"a layer of {mask.numel()} outputs")
            self._prune_columns(mask, dim_reduction)
            return mask
        mask = self.get_mask("row").detach()
        if dim_reduction:
            self._keep_outputs(kept_of(mask))
            self.out_features = self.weight.shape[0]
        else:
            with torch.no_grad():
                self.weight.mul_(mask)
                if self.bias is not None:
                    self.bias.mul_(mask.flatten())
        self._disable("row")
        return mask

    def _prune_columns(self, mask: Tensor, dim_reduction: bool) -> None:
        """Prune columns by the mask of the previous layer's outputs. A channel of a convolution has several columns."""
        if self.in_features % mask.numel():
            raise _unrelated(f"a layer of {self.in_features} inputs", f"a layer of {mask.numel()} outputs")
        columns = mask.detach().flatten().repeat_interleave(self.in_features // mask.numel())
        if dim_reduction:
            self.weight = part_of(self.weight, kept_of(columns), 1)
            self.in_features = self.weight.shape[1]
        else:
            with torch.no_grad():
                self.weight.mul_(columns)

    def fix_channel_pruning_helper(self, mask: Tensor, dim_reduction: bool = True) -> None:
        """Prune the columns of the pruned channels of a previous convolution."""
        self._prune_columns(mask, dim_reduction)

    def fix_head_pruning_helper(
        self, mask: Tensor | None = None, num_heads: int | None = None, dim_reduction: bool = False
    ) -> Tensor:
        """Prune heads permanently: the columns of this output projection, or the rows of a query, key or value layer.

        Args:
            mask: the head mask of the output projection; None: this is the output projection.
            num_heads: the number of heads of `mask`.
            dim_reduction: remove them; else they become zeros.

        Returns:
            The mask that was used.
        """
        if mask is None:
            mask = self.get_mask("head").detach()
            self._prune_columns(mask, dim_reduction)
            self._disable("head")
            return mask
        if self.out_features % mask.numel():
            raise _unrelated(f"a projection of {self.out_features} outputs", f"{mask.numel()} heads")
        rows = mask.detach().flatten().repeat_interleave(self.out_features // mask.numel())
        if dim_reduction:
            self._keep_outputs(kept_of(rows))
            self.out_features = self.weight.shape[0]
        else:
            with torch.no_grad():
                self.weight.mul_(rows.unsqueeze(1))
                if self.bias is not None:
                    self.bias.mul_(rows)
        return mask

    def forward(self, input: Tensor, skip_bias_add: bool = False) -> Any:
        """Return the outputs; with `skip_bias_add` the outputs without the bias, and the bias."""
        weight, bias = self.effective_weight(), self.effective_bias()
        if skip_bias_add:
            return F.linear(self._inputs(input), weight), bias
        return F.linear(self._inputs(input), weight, bias)


@absent_members("compression.basic_layer:Embedding_Compress")
class Embedding_Compress(CompressedLayer, nn.Embedding):
    """A `torch.nn.Embedding` with a quantized weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows, rounded."""
        return F.embedding(
            input,
            self.effective_weight(),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


@absent_members("compression.basic_layer:Conv2dLayer_Compress")
class Conv2dLayer_Compress(CompressedLayer, nn.Conv2d):
    """A `torch.nn.Conv2d` with pruning of elements or output channels."""

    #: where the method is topk
    sparse_mask_scores: Parameter
    channel_mask_scores: Parameter
    channel_pruning_enabled = False
    channel_pruning_method = ""
    channel_pruning_ratio = 1.0
    #: a batch norm masks its outputs too; it takes the mask of each forward from here
    tells_mask = False
    mask_of_forward: Tensor | None = None

    def enable_channel_pruning(self, ratio: float, method: str) -> None:
        """Prepare the layer to keep the share `ratio` of its output channels: of least size first, or by scores."""
        if self.groups != 1:
            raise ConfigError(
                f"channel_pruning: found a convolution of {self.groups} groups, whose channels belong together; "
                "leave it out of modules"
            )
        self._enable("channel", ratio, method, self.weight.detach().abs().mean((1, 2, 3), keepdim=True))

    def fix_channel_pruning_helper(self, mask: Tensor | None = None, dim_reduction: bool = False) -> Tensor:
        """Prune permanently: the output channels of this layer, or the input channels that another layer has pruned.

        Args:
            mask: the channel mask of the other layer; None: prune the channels of this layer.
            dim_reduction: remove them; else they become zeros.

        Returns:
            The mask that was used.
        """
        if mask is not None:
            self._prune_inputs(mask, dim_reduction)
            return mask
        mask = self.get_mask("channel").detach()
        if dim_reduction:
            self._keep_outputs(kept_of(mask))
            self.out_channels = self.weight.shape[0]
        else:
            with torch.no_grad():
                self.weight.mul_(mask)
                if self.bias is not None:
                    self.bias.mul_(mask.flatten())
        self._disable("channel")
        return mask

    def _prune_inputs(self, mask: Tensor, dim_reduction: bool) -> None:
        if self.groups != 1 or mask.numel() != self.in_channels:
            raise ConfigError(
                f"related_modules: found a convolution of {self.in_channels} channels in {self.groups} groups after "
                f"one of {mask.numel()} channels; name the layer that takes them, of one group"
            )
        if dim_reduction:
            self.weight = part_of(self.weight, kept_of(mask), 1)
            self.in_channels = self.weight.shape[1]
        else:
            with torch.no_grad():
                self.weight.mul_(mask.view(1, -1, 1, 1))

    def _num_ranges(self, x: Tensor) -> int:
        return x.shape[0] if x.dim() == 4 else 1

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs."""
        if self.tells_mask:
            self.mask_of_forward = self.get_mask("channel") if self.channel_pruning_enabled else None
        return self._conv_forward(self._inputs(input), self.effective_weight(), self.effective_bias())


@absent_members("compression.basic_layer:BNLayer_Compress")
class BNLayer_Compress(nn.BatchNorm2d):
    """A `torch.nn.BatchNorm2d` that loses the pruned channels of the previous convolution.

    While the convolution is pruned, the norm sets these channels to 0 too, so that the smaller model is equivalent.
    """

    #: the convolution, in a tuple: it is no part of this layer
    pruned_before: tuple[Conv2dLayer_Compress, ...] = ()

    def fix_channel_pruning_helper(self, mask: Tensor, dim_reduction: bool = True) -> None:
        """Take out the channels that the convolution has lost; without `dim_reduction` they become zeros."""
        if mask.numel() != self.num_features:
            raise ConfigError(
                f"related_modules: found a batch norm of {self.num_features} channels after a convolution of "
                f"{mask.numel()}; name the one that takes them"
            )
        kept = kept_of(mask)
        if not dim_reduction:
            with torch.no_grad():
                for values in (self.weight, self.bias):
                    if values is not None:
                        values.mul_(mask.flatten())
            return
        for name in ("weight", "bias"):
            if getattr(self, name) is not None:
                setattr(self, name, part_of(getattr(self, name), kept, 0))
        for name in ("running_mean", "running_var"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[kept].clone())
        self.num_features = len(kept)

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs; zeros where the convolution's channels are pruned."""
        result = super().forward(input)
        for convolution in self.pruned_before:
            mask, convolution.mask_of_forward = convolution.mask_of_forward, None
            if mask is not None:
                result = result * mask.view(1, -1, 1, 1)
        return result


def check_related(layer: nn.Module, other: nn.Module, technique: str) -> None:
    """Check that the sizes of `other` match `layer`, so that `other` can lose the same rows, heads or channels.

    Raises:
        ConfigError: the sizes do not fit.
    """
    if technique == "head_pruning" and isinstance(layer, nn.Linear) and isinstance(other, nn.Linear):
        if other.out_features != layer.in_features:  # fewer heads of keys and values, or all three in one
            raise _unrelated(f"a projection of {other.out_features} outputs", f"heads of {layer.in_features} in all")
    elif isinstance(layer, nn.Linear) and isinstance(other, nn.Linear):
        if other.in_features != layer.out_features:
            raise _unrelated(f"a layer of {other.in_features} inputs", f"a layer of {layer.out_features} outputs")
    elif isinstance(layer, nn.Conv2d) and isinstance(other, nn.Conv2d):
        if other.groups != 1 or other.in_channels != layer.out_channels:
            found = f"a convolution of {other.in_channels} channels in {other.groups} groups"
            raise _unrelated(found, f"a convolution of {layer.out_channels} channels, for one of one group")
    elif isinstance(layer, nn.Conv2d) and isinstance(other, nn.BatchNorm2d):
        if other.num_features != layer.out_channels:
            found = f"a batch norm of {other.num_features} channels"
            raise _unrelated(found, f"a convolution of {layer.out_channels}")
    elif isinstance(layer, nn.Conv2d) and isinstance(other, nn.Linear) and other.in_features % layer.out_channels:
        raise _unrelated(f"a layer of {other.in_features} inputs", f"a convolution of {layer.out_channels} channels")


def _unrelated(found: str, after: str) -> ConfigError:
    return ConfigError(f"related_modules: found {found} for {after}; name the layers that take or make just these")


#: ordinary class -> compressible class
COMPRESSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LinearLayer_Compress,
    nn.Embedding: Embedding_Compress,
    nn.Conv2d: Conv2dLayer_Compress,
    nn.BatchNorm2d: BNLayer_Compress,
}
_ORDINARY = {made: plain for plain, made in COMPRESSED.items()}


def is_compressible(layer: nn.Module, kinds: Sequence[type[nn.Module]] = tuple(COMPRESSED)) -> bool:
    """Return whether a layer's class is one of `kinds` or its compressible class. Subclasses do not count."""
    return type(layer) in kinds or _ORDINARY.get(type(layer)) in kinds


def compressed(layer: nn.Module) -> nn.Module:
    """Convert a layer to its compressible class in place, unless it already has this class."""
    layer.__class__ = COMPRESSED.get(type(layer), type(layer))
    return layer


def restored(layer: nn.Module) -> nn.Module:
    """Convert a layer back to its ordinary class in place, unless its forward still quantizes."""
    if isinstance(layer, CompressedLayer) and (layer.activation_quantization_method or layer.weight_quantizer):
        return layer
    for name in set(vars(layer)) & _OWN:
        del vars(layer)[name]
    layer.__class__ = _ORDINARY.get(type(layer), type(layer))
    return layer


_KINDS = ("sparse", "row", "head", "channel")
_OWN = {
    *CompressedLayer.__annotations__,
    *(f"{kind}_pruning_{what}" for kind in _KINDS for what in ("enabled", "method", "ratio")),
    *("tells_mask", "mask_of_forward", "pruned_before", "num_heads"),
    *("weight_quantization_enabled", "activation_quantization_enabled", "activation_quantization_bits"),
    *("weight_quantize_num_groups", "activation_quantization_method", "has_static_range"),
}

complete(__name__)
