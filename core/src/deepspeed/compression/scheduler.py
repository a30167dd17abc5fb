"""`compression_scheduler` enables each technique at its step, and reduces the bits of weights over the steps."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import log
from deepspeed._absent import absent_members, complete
from deepspeed.compression.compress import check_prepared, inner_of, planned
from deepspeed.compression.compressed_layer import CompressedLayer
from deepspeed.config.compression import CompressionConfig, SparsePruningShared
from deepspeed.config.intake import parse_section
from deepspeed.errors import ConfigError

__all__ = ["compression_scheduler"]


@absent_members("compression.scheduler:compression_scheduler")
class compression_scheduler:  # DeepSpeed's name
    """Enables and configures the techniques of all layers. The settings depend only on the number of steps.

    The engine has one (`engine.compression_scheduler`), and before each forward moves it to the engine's step count, so
    a run resumed from a checkpoint continues the schedule. A custom training loop creates one and calls `step()`
    after each optimizer step.

    Args:
        model: a model from `init_compression`.
        compression_config: the section `compression_training`, as from `get_compression_config`.
        num_steps: returns the number of steps so far; None: `step` counts them.
        rounds_weights: False if `moq.py` rounds the weights after each step, and the forward must not.

    Raises:
        ConfigError: the model was not prepared with this configuration.
    """

    def __init__(
        self,
        model: nn.Module,
        compression_config: Mapping[str, Any] | CompressionConfig,
        num_steps: Callable[[], int] | None = None,
        *,
        rounds_weights: bool = True,
    ) -> None:
        self.model = model
        section = (
            compression_config
            if isinstance(compression_config, CompressionConfig)
            else parse_section(CompressionConfig, compression_config, "compression_training")
        )
        inner = inner_of(model)
        plan = planned(inner, section)
        check_prepared(inner, plan)
        self._plan = [
            (item, _layer(inner, item.name))
            for item in plan
            if rounds_weights or item.technique != "weight_quantization"
        ]
        blocks = {
            item.name: layer
            for item, layer in self._plan
            if item.technique == "sparse_pruning" and item.shared.method == "snip_momentum"
        }
        #: prunes blocks after each step; None: no layer has the method "snip_momentum"
        self.blocks = BlockPruning(section.sparse_pruning.shared_parameters, blocks) if blocks else None
        self._verbose = section.weight_quantization.shared_parameters.quantize_verbose
        self._counts = num_steps
        self._counted = 0
        self._reached = -1
        self.check_all_modules()

    @property
    def training_steps(self) -> int:
        """The number of steps so far."""
        return self._counted if self._counts is None else self._counts()

    def step(self, step_zero_check: bool = False) -> None:
        """Count a step, unless the engine counts, and update all layers.

        Args:
            step_zero_check: update without counting.
        """
        if not step_zero_check:
            self._counted += 1
            if self.blocks is not None and self._counts is None:
                self.blocks.step_ended(self._counted, applied=True)
        self.check_all_modules()

    def check_all_modules(self) -> None:
        """Update all layers: enable techniques that have begun, and disable techniques that begin later."""
        num_steps = self.training_steps
        if num_steps == self._reached:
            return
        self._reached = num_steps
        for item, layer in self._plan:
            if not isinstance(layer, CompressedLayer):  # `redundancy_clean` has converted it to an ordinary layer
                continue
            is_on = num_steps >= item.shared.schedule_offset
            flag = f"{item.technique}_enabled"
            if is_on != getattr(layer, flag):  # write only changes: code from torch.compile depends on the flag
                setattr(layer, flag, is_on)
                log.logger.debug(f"{item.technique} of {item.name}: {'on' if is_on else 'off'} after step {num_steps}")
            if item.technique == "weight_quantization" and is_on:
                self._set_bits(item.name, layer, num_steps - item.shared.schedule_offset)

    def _set_bits(self, name: str, layer: CompressedLayer, num_steps: int) -> None:
        quantizer = layer.weight_quantizer
        if quantizer is None:  # cleaned
            return
        before = quantizer.num_bits
        quantizer.move_to(num_steps)
        if self._verbose and (quantizer.num_bits != before or num_steps == 0):
            log.report(f"weight quantization of {name}: {quantizer.num_bits} bits")


#: decay factor of the scores per step
_MOMENTUM = 0.9


class BlockPruning:
    """Prunes the blocks of weights, over all layers together, that the loss depends on least.

    The score of an element is |w dL/dw| of the reduced gradient, as in SNIP (Lee et al., arXiv 1810.02340, section
    4.1), with a momentum: s <- 0.9 s + |w dL/dw| at each step. The score of a block is the mean of its elements. The
    pruned share grows as in Zhu, Gupta, "To prune, or not to prune" (arXiv 1710.01878), section 3: final share times
    1 - (1 - t)^3, t from 0 at `schedule_offset` to 1 at `schedule_offset_end`, in strides of `schedule_offset_stride`.

    Args:
        shared: the section's `shared_parameters`.
        layers: name -> layer, for layers with the method "snip_momentum".

    Raises:
        ConfigError: blocks do not divide a weight.
    """

    def __init__(self, shared: SparsePruningShared, layers: Mapping[str, CompressedLayer]) -> None:
        self._shared, self._layers = shared, layers
        self._rows, self._columns = map(int, shared.block_pattern.split("x"))
        #: averages a tensor over ranks in place, if each rank has local gradients
        self.average: Callable[[Tensor], None] | None = None
        for name, layer in layers.items():
            rows, columns = layer.sparse_pruning_mask.flatten(1).shape
            if rows % self._rows or columns % self._columns:
                raise ConfigError(
                    "compression_training.sparse_pruning.shared_parameters.block_pattern: found "
                    f"{shared.block_pattern!r}, which does not divide the {rows} x {columns} weight of {name!r}; "
                    "choose another, or name the layer in excluded_modules"
                )

    def share_gone(self, step: int) -> float:
        """Return the pruned share after `step` steps."""
        first, last = self._shared.schedule_offset, self._shared.schedule_offset_end
        done = 1.0 if step >= last else max(0.0, (step - first) / (last - first))
        return (1.0 - self._shared.dense_ratio) * (1.0 - (1.0 - done) ** 3)

    def step_ended(self, step: int, *, applied: bool, scale: float = 1.0) -> None:
        """Update the scores with the gradients of a step, and select blocks if due. A collective if ranks share scores.

        Args:
            step: the number of the step, from 1.
            applied: False if the step was skipped; its gradients are then ignored.
            scale: the loss scale.
        """
        if applied:
            self._score(scale)
        for layer in self._layers.values():
            layer.effects = None
        first, last = self._shared.schedule_offset, self._shared.schedule_offset_end
        is_time = (step - first) % self._shared.schedule_offset_stride == 0 or step == last
        if first <= step <= last and is_time:
            self._choose(self.share_gone(step))

    def _score(self, scale: float) -> None:
        for layer in self._layers.values():
            scores = layer.sparse_snip_scores
            effects = torch.zeros_like(scores) if layer.effects is None else layer.effects.to(scores.dtype) / scale
            if self.average is not None:
                effects = effects.contiguous()
                self.average(effects.view(-1))
            scores.mul_(_MOMENTUM).add_(effects.abs())

    def _choose(self, share: float) -> None:
        by_layer = [self._by_block(layer.sparse_snip_scores).mean((1, 3)) for layer in self._layers.values()]
        scores = torch.cat([each.flatten() for each in by_layer])
        kept = torch.ones_like(scores, dtype=torch.bool)
        kept[scores.argsort(stable=True)[: int(share * scores.numel())]] = False
        parts = kept.split([each.numel() for each in by_layer])
        for layer, blocks, part in zip(self._layers.values(), by_layer, parts, strict=True):
            mask = self._by_block(layer.sparse_pruning_mask)
            mask.copy_(part.view(blocks.shape)[:, None, :, None].expand_as(mask))

    def _by_block(self, values: Tensor) -> Tensor:
        """View a weight as (row blocks, rows per block, column blocks, columns per block)."""
        rows, columns = values.flatten(1).shape
        return values.view(rows // self._rows, self._rows, columns // self._columns, self._columns)


def _layer(model: nn.Module, name: str) -> CompressedLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, CompressedLayer)
    return layer


complete(__name__)
