"""`compression_scheduler` switches each technique on at its step, and lowers the bits of weights by step."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from deepspeed import log
from deepspeed._absent import complete
from deepspeed._absent_members import absent_members
from deepspeed.compression.compress import check_prepared, inner_of, planned
from deepspeed.compression.compressed_layer import CompressedLayer
from deepspeed.config.compression import CompressionConfig
from deepspeed.config.intake import parse_section

__all__ = ["compression_scheduler"]


@absent_members("compression.scheduler:compression_scheduler")
class compression_scheduler:  # DeepSpeed's name
    """Keeps the layers of a model at the techniques of a step. All follows from the number of steps.

    The engine has one (`engine.compression_scheduler`), and moves it before each forward to the steps that it counts,
    so that a run which goes on from a checkpoint goes on with them. A loop of one's own makes one and calls `step()`
    after each step of the optimizer.

    Args:
        model: one that `init_compression` prepared.
        compression_config: the section `compression_training`, as `get_compression_config` returns it.
        num_steps: returns the steps so far; None: `step` counts them.
        rounds_weights: False: somebody rounds them after each step (`moq.py`), and the forward does not.

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
        self._verbose = section.weight_quantization.shared_parameters.quantize_verbose
        self._counts = num_steps
        self._counted = 0
        self._reached = -1
        self.check_all_modules()

    @property
    def training_steps(self) -> int:
        """Steps so far."""
        return self._counted if self._counts is None else self._counts()

    def step(self, step_zero_check: bool = False) -> None:
        """Count a step, unless the engine does, and move to it.

        Args:
            step_zero_check: only move.
        """
        if not step_zero_check:
            self._counted += 1
        self.check_all_modules()

    def check_all_modules(self) -> None:
        """Move all layers to the step: what begins at it is switched on, what begins later is off."""
        num_steps = self.training_steps
        if num_steps == self._reached:
            return
        self._reached = num_steps
        for item, layer in self._plan:
            if not isinstance(layer, CompressedLayer):  # `redundancy_clean` has made an ordinary one of it
                continue
            is_on = num_steps >= item.shared.schedule_offset
            flag = f"{item.technique}_enabled"
            if is_on != getattr(layer, flag):  # only then: code that torch.compile made depends on it
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


def _layer(model: nn.Module, name: str) -> CompressedLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, CompressedLayer)
    return layer


complete(__name__)
