"""The generation step of a causal model with fused layers: newest tokens -> logits.

The step computes the same as the model's forward, with less Python: masks and tables are created once per generation,
and the blocks are called directly. See `generate.py` for the loop, `policies.py` for the differences between families.

Shape legend: B sequences, S tokens with those of the cache, C features, R numbers of a head that turn.

`WholeLayers` computes each layer by one kernel call, if the accelerator has the kernel. A divided layer takes one call
per half, each followed by a sum over the ranks; the first rank adds the residual. It is created for one generation from
the fused blocks, and uses their weights and the cache's buffers. It holds no weights but fp32 copies of norms and
biases."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.errors import ConfigError
from deepspeed.inference.generate import check_fits
from deepspeed.inference.injection.block import FusedBlock, FusedNorm, found, norm_of, num_hooks, part_of
from deepspeed.inference.injection.policies import DECODERS
from deepspeed.inference.injection.weights import OutputLayer, packed_step
from deepspeed.inference.quantized import PackedLinear
from deepspeed.ops.quantizer import PackedWeight
from deepspeed.ops.transformer import DecoderLayer, Norm
from deepspeed.ops.transformer.decoder_layer import decoder_layer_operator
from deepspeed.ops.transformer.linear import linear_kernel
from deepspeed.tensor_parallel.layers import ColumnParallelLinear
from deepspeed.tensor_parallel.ranks import TensorRanks, gather_last_dim

# Kinds of rotary embedding whose angles depend only on the position, not on the length of the sequence.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")


class Decoder:
    """The parts of an injected causal model; `start` returns the step of one generation.

    Args:
        model: a model with fused layers, of a class in `DECODERS`.

    Raises:
        ConfigError: a layer is not fused, or a part does not match the policy; the message begins with the difference.
    """

    def __init__(self, model: nn.Module) -> None:
        policy = DECODERS.get(f"{type(model).__module__}.{type(model).__qualname__}")
        if policy is None:
            raise ConfigError(f"{type(model).__name__} is in no table of decoders")
        if any(found(model, path) != value for path, value in policy.when):
            raise ConfigError("its configuration is not that of the table of decoders")
        self.model, self.policy = model, policy
        self.base: nn.Module = found(model, policy.layers.rpartition(".")[0])
        self.layers: list[nn.Module] = list(found(model, policy.layers))
        self.embedding = found(model, policy.embedding)
        self.positions = found(model, policy.positions) if policy.positions else None
        self.blocks = self._found_blocks()
        own_tables = bool(self.blocks[0].policy.rotary_table)
        self.rotary = found(model, policy.rotary) if policy.rotary and not own_tables else None
        self.project_in, self.project_out = (
            found(model, path) if path else None for path in (policy.project_in, policy.project_out)
        )
        own_norm = found(model, policy.norm)
        self.norm = None if own_norm is None else norm_of(own_norm)
        self.softcap: float | None = found(model, policy.softcap) if policy.softcap else None
        parts = ((policy.norm, own_norm), (policy.rotary, self.rotary))
        self._parts = [part_of(model, path) for path, module in parts if module is not None]
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}
        self._in_pairs = self.blocks[0].policy.rotary == "pairs"
        if self.rotary is not None and self._in_pairs:
            found(self.rotary, "embed_positions")
        elif self.rotary is not None and getattr(self.rotary, "rope_type", "") not in _FIXED_ROTARY:
            raise ConfigError("its rotary embedding depends on the length of the sequence")

    def _found_blocks(self) -> list[FusedBlock]:
        blocks = [vars(layer).get("forward") for layer in self.layers]
        fused = [block for block in blocks if isinstance(block, FusedBlock)]
        if not fused or len(fused) < len(blocks):
            raise ConfigError("one of its layers is not fused")
        if any(block.policy.alibi for block in fused) and getattr(self.model.config, "alibi", True):
            raise ConfigError("it has ALiBi")
        return fused

    def serves(self) -> bool:
        """Return whether the step is equivalent to the model: no part was replaced, got a hook or is in training mode.

        The step runs hooks of the embeddings and of the output layer. It does not run hooks of the model, its layers
        and their parts; with such hooks the model's own forward runs.
        """
        around = (self.model, self.base, *self._between(), *self.layers)
        if any(num_hooks(module) for module in around) or any(
            "forward" in vars(each) for each in around[: -len(self.layers)]
        ):
            return False
        layers = list(found(self.model, self.policy.layers))
        if len(layers) != len(self.layers) or any(
            layer is not known or vars(layer).get("forward") is not block
            for layer, known, block in zip(layers, self.layers, self.blocks, strict=True)
        ):
            return False
        return all(part.is_as_it_was() for part in self._parts) and all(block.is_whole() for block in self.blocks)

    def _between(self) -> list[nn.Module]:
        """Return the modules between the model and its base; OPT has one."""
        names = self.policy.layers.split(".")[:-2]
        return [found(self.model, ".".join(names[: depth + 1])) for depth in range(len(names))]

    def start(self, cache: Any, mask: Tensor | None, positions: Tensor, max_tokens: int) -> "DecodeStep":
        """Return the step of a generation whose prompt is in `cache`.

        Args:
            cache: a cache of transformers; new tokens are written into it.
            mask: (B, S), 0 for hidden tokens; None: all tokens are visible.
            positions: (B,), positions of the last tokens in the cache.
            max_tokens: capacity of the cache.
        """
        return DecodeStep(self, cache, mask, positions, max_tokens)

    def table(self, num_positions: int) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of the first positions, (positions, R), from the model's rotary module.

        For rotary embeddings in pairs, return sin and cos, (positions, R / 2).
        """
        if self.rotary is None:
            return None
        like = self.embedding.weight
        if self._in_pairs:
            sin, cos = self.rotary.embed_positions.to(like.dtype).chunk(2, -1)
            return sin, cos
        key = (num_positions, like.device, like.dtype)
        if key not in self._tables:
            every = torch.arange(num_positions, device=like.device).unsqueeze(0)
            self._tables = {key: tuple(each[0] for each in self.rotary(like[:1].unsqueeze(0), every))}  # type: ignore[dict-item]
        return self._tables[key]


def _gathered(output: ColumnParallelLinear, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function for a divided output layer and inputs like `rows`: this rank's product, then a gather."""
    weight, bias, packed = output.weight, output.bias, output.packed
    if packed is not None:
        product = packed_step(rows, packed, bias)
    elif (kernel := linear_kernel(rows, weight, bias)) is not None:
        product = partial(kernel, weight=weight, bias=bias)
    else:
        return output
    if not output.gathered_sizes:
        return product
    return lambda hidden: gather_last_dim(product(hidden), output.gathered_sizes, output.ranks)


class DecodeStep:
    """Computes logits from the newest token of each sequence; see `Decoder.start`."""

    def __init__(self, decoder: Decoder, cache: Any, mask: Tensor | None, positions: Tensor, max_tokens: int) -> None:
        self._decoder, self._cache, self._max_tokens = decoder, cache, max_tokens
        self._num_seen = int(cache.get_seq_length())
        self._positions = positions.view(-1, 1).clone()
        # a caller's own position_ids may be ahead of the tokens in the cache
        ahead = max(0, int(positions.max()) + 1 - self._num_seen)
        self._table = decoder.table(max_tokens + ahead)
        self._visible: Tensor | None = None
        if mask is not None:
            self._visible = torch.ones(mask.shape[0], max_tokens, dtype=torch.bool, device=mask.device)
            self._visible[:, : mask.shape[1]] = mask.bool()
        self._whole = WholeLayers.of(decoder.blocks, cache, mask, self._table)
        self._output = self._output_step()

    def _output_step(self) -> Callable[[Tensor], Tensor]:
        """Return a fast function for the output layer, or the module itself if it has hooks or an unknown kind."""
        output: Any = self._decoder.model.get_output_embeddings()  # type: ignore[operator]
        own = vars(output).get("forward")
        like = self._decoder.embedding.weight
        if num_hooks(output) or self._decoder.project_out is not None:
            return output
        if isinstance(own, OutputLayer):
            rows = like.new_empty(len(self._positions), 1, own.fused.linears[0].in_features)
            return own.fused.step(rows)
        if own is None and type(output) is PackedLinear:
            rows = like.new_empty(len(self._positions), 1, output.in_features)
            return packed_step(rows, output.packed_weights["weight"], output.bias)
        if own is None and type(output) is ColumnParallelLinear and not output.transposed:
            rows = like.new_empty(len(self._positions), 1, output.in_features)
            return _gathered(output, rows)
        return output

    def __call__(self, tokens: Tensor) -> Tensor:
        """Map tokens, (B,), to logits, (B, vocabulary).

        Raises:
            ConfigError: the cache is full.
        """
        decoder = self._decoder
        check_fits(self._num_seen + 1, self._max_tokens)
        self._num_seen += 1
        self._positions += 1
        hidden = decoder.embedding(tokens.unsqueeze(1))
        if decoder.project_in is not None:
            hidden = decoder.project_in(hidden)
        if decoder.positions is not None:
            rows = self._positions + decoder.policy.first_position
            hidden = hidden + torch.nn.functional.embedding(rows, decoder.positions.weight)
        if self._whole is not None:
            hidden = self._whole(hidden.squeeze(1), self._num_seen - 1, self._positions.squeeze(1)).unsqueeze(1)
        else:
            hidden = self._through_layers(hidden)
        if decoder.norm is not None:
            hidden = decoder.norm(hidden)
        if decoder.project_out is not None:
            hidden = decoder.project_out(hidden)
        logits: Tensor = self._output(hidden)[:, -1]
        cap = decoder.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _through_layers(self, hidden: Tensor) -> Tensor:
        given: dict[str, Any] = {
            "past_key_values": self._cache,
            "position_ids": self._positions,
            "position_embeddings": None
            if self._table is None
            else tuple(each[self._positions] for each in self._table),
        }
        masks: dict[int | None, Tensor | None] = {}
        for block in self._decoder.blocks:
            # the block applies its policy's window; the window of the model's masks is applied here
            window = block.sliding_window if block.window is None else None
            if window not in masks:
                masks[window] = self._mask(window)
            given["attention_mask"] = masks[window]
            hidden = block.compute(hidden, given)
        return hidden

    def _mask(self, window: int | None) -> Tensor | None:
        """Return the mask (B or 1, 1, 1, S), True for visible tokens; None if all are visible."""
        num_seen = self._num_seen
        seen = None if self._visible is None else self._visible[:, None, None, :num_seen]
        if window is None or num_seen <= window:
            return seen
        recent = torch.arange(num_seen, device=self._positions.device) >= num_seen - window
        return recent.view(1, 1, 1, -1) if seen is None else seen & recent


class WholeLayers:
    """Computes all layers with one call of `decoder_layer` per layer or half, on the buffers of the cache."""

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
        """Create the object; None if there is no kernel, a layer is unsupported, or a token inside a prompt is hidden.

        Args:
            cache: the cache, which holds the prompt.
            mask: (B, tokens of the prompt), 0 for hidden tokens.
            table: result of `Decoder.table`; None: no rotary embedding, or the layers have their own tables.
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
        """Map (B, C) to (B, C) for the tokens with index `length` in the cache."""
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
    """Split a layer at the sums over the ranks; only rank 0 adds the residual."""
    if ranks is None:
        return [layer]
    is_first = ranks.rank == 0
    if layer.parallel:
        return [replace(layer, adds_input=is_first)]
    return [replace(layer, part="attention", adds_input=is_first), replace(layer, part="mlp", adds_input=is_first)]


def _fits(weight: Tensor | PackedWeight, dtype: torch.dtype) -> bool:
    return isinstance(weight, PackedWeight) or weight.dtype == dtype


def _half_table(table: tuple[Tensor, Tensor] | None, *, in_pairs: bool) -> tuple[Tensor, Tensor] | None:
    """Return cos and sin, fp32 (positions, R / 2), without the repeated half."""
    if table is None:
        return None
    if in_pairs:
        return table[1].float().contiguous(), table[0].float().contiguous()
    width = table[0].shape[-1] // 2
    return table[0][:, :width].float().contiguous(), table[1][:, :width].float().contiguous()


def _table_of_layer(block: FusedBlock, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin like `_half_table`, from a layer's own table of sines and cosines."""
    sin, cos = found(block.layer, block.policy.rotary_table).to(dtype).chunk(2, -1)
    return cos.float().contiguous(), sin.float().contiguous()


# function, or class name -> name for the kernel
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
    """Return the whole layer for `decoder_layer`, with the current weights; None if the layer is unsupported."""
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
