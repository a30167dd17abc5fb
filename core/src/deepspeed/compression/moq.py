"""`Quantizer` rounds weights after each optimizer step, with fewer bits over time: Mixture of Quantization.

Only the model's weights are rounded. The optimizer updates separate master weights, which stay unrounded. When the
number of steps reaches a parameter's `q_period`, its bits fall by one and the period doubles (DeepSpeed's tutorial
"Mixture of Quantization"). The engine uses `MixtureOfQuantization`; a custom loop calls `Quantizer.quantize`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import log
from deepspeed._absent import absent_members, complete
from deepspeed.comm.values import all_gather_values
from deepspeed.compression.compress import is_in, planned
from deepspeed.compression.eigenvalue import Eigenvalue
from deepspeed.compression.quantizers import BinaryQuantizer, TernaryQuantizer
from deepspeed.config.compression import (
    BitsParams,
    CompressionConfig,
    EigenvalueConfig,
    QuantizeTrainingConfig,
    eigenvalue_of,
    rounds_after_steps,
)
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.ops.quantizer.groups import fake_quantize
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import is_moe_param, is_tensor_parallel

__all__ = ["Quantizer"]

_OLDER, _OF_LAYERS = "quantize_training", "compression_training.weight_quantization"
#: the largest eigenvalue multiplies a period by 1 + this factor
_STRETCH = 4


@absent_members("runtime.quantize:Quantizer")
class Quantizer:
    """Rounds parameters in place. Each parameter has the attributes `start_bits`, `target_bits` and `q_period`.

    Args:
        q_groups: number of groups per parameter; each group has its own scale.
        q_mixed_fp16: mix the rounded value with the unrounded value.
        q_change_ratio: with `q_mixed_fp16`, the share of the unrounded value falls by this number each step.
        q_type: "symmetric" or 0; "asymmetric" or 1.
        q_rounding: "nearest" or 0; "stochastic" or 1.
        q_verbose: log when bits change.
        q_eigenvalue: whether periods depend on eigenvalues; used by the caller.
        use_quantizer_kernel: ignored; the accelerator's kernel is used if there is one.
        layer_num: number of layers with eigenvalues; used by the caller.
    """

    def __init__(
        self,
        q_groups: int = 1,
        q_mixed_fp16: bool = False,
        q_change_ratio: float = 0.01,
        q_type: int | str = 0,
        q_rounding: int | str = 0,
        q_verbose: bool = False,
        q_eigenvalue: bool = False,
        use_quantizer_kernel: bool = False,
        layer_num: int = 0,
    ) -> None:
        for name, value, known in (
            ("q_type", q_type, (0, 1, "symmetric", "asymmetric")),
            ("q_rounding", q_rounding, (0, 1, "nearest", "stochastic")),
        ):
            if value not in known:
                raise ConfigError(f"{name}: found {value!r}; give one of {', '.join(map(repr, known))}")
        self.q_groups = q_groups
        self.q_mixed_fp16 = q_mixed_fp16
        self.q_change_ratio = q_change_ratio
        self.q_type = q_type
        self.q_rounding = q_rounding
        self.q_verbose = q_verbose
        self.q_eigenvalue = q_eigenvalue
        self.use_quantizer_kernel = use_quantizer_kernel
        self.layer_num = layer_num
        #: number of steps so far
        self.qsteps = 0
        #: share of the parameter's unrounded value
        self.quantize_real_ratio = 1.0
        self._switches = True

    def any_precision_switch(self) -> bool:
        """Return whether bits may still fall. True until `quantize` finds all parameters at their `target_bits`."""
        return self._switches

    def step(self) -> None:
        """Count a step."""
        self.qsteps += 1

    def quantize(
        self,
        parameter_group: Iterable[Iterable[Tensor]],
        overflow: bool,
        eigenvalue_enabled: bool,
        block_eigenvalue: Mapping[int, tuple[float, int]] | None = None,
    ) -> None:
        """Count a step and round each parameter that has `start_bits` and at least 2 dimensions, in place.

        Args:
            parameter_group: groups of the model's parameters.
            overflow: whether the step was skipped; if so, nothing is done unless `eigenvalue_enabled`.
            eigenvalue_enabled: whether eigenvalues are estimated.
            block_eigenvalue: the result of `Eigenvalue.compute_eigenvalue`; None: periods only double.
        """
        if overflow and not eigenvalue_enabled:
            return
        self.step()
        self.update_fp16_ratio()
        self._switches = False
        for group in parameter_group:
            param: Any  # has the attributes of its schedule
            for param in group:
                if param.dim() > 1 and getattr(param, "start_bits", None):
                    value, layer = (block_eigenvalue or {}).get(id(param), (None, 0))
                    factor = 1 if value is None else 1 + math.floor(value * _STRETCH)
                    with torch.no_grad():
                        param.copy_(self.compute_quantization(param, layer, factor))
                    self._switches |= param.start_bits != param.target_bits

    def compute_quantization(self, input: Tensor, index: int = 0, factor: int = 1) -> Tensor:
        """Return the rounded parameter. If its period is over, its bits fall by one first.

        Args:
            input: the parameter; `start_bits` and `q_period` may change, and `quantize_real_ratio` is set.
            index: number of the parameter's layer, for the log.
            factor: when the bits fall, the period is multiplied by 2 * `factor`.
        """
        param: Any = input
        if param.start_bits != param.target_bits and self.qsteps >= param.q_period:
            self.quantize_real_ratio = 1.0
            param.q_period = param.q_period * 2 * factor
            param.start_bits -= 1
            if self.q_verbose:
                log.report(
                    f"quantization of layer {index}: {param.start_bits} bits after {self.qsteps} steps, the next after "
                    f"{param.q_period}"
                )
        if param.start_bits < param.target_bits:
            raise ConfigError(
                f"start_bits: found {param.start_bits} below target_bits {param.target_bits}; bits only get fewer"
            )
        if param.start_bits >= 3:
            rounded = self.quantize_highbit(input, param.start_bits)
        elif param.start_bits == 2:
            rounded = self.quantize_tenary(input)
        else:
            rounded = self.quantize_binary(input)
        param.quantize_real_ratio = self.quantize_real_ratio  # per parameter: the bits of the next may fall
        return self.mixed_fp16_quantize(input, rounded, index)

    def quantize_highbit(self, inputs: Tensor, num_bits: int) -> Tensor:
        """Return the tensor rounded to 3 bits or more."""
        return fake_quantize(
            inputs,
            self.q_groups,
            num_bits,
            symmetric=self.q_type in (0, "symmetric"),
            stochastic=self.q_rounding in (1, "stochastic"),
        )

    def quantize_tenary(self, inputs: Tensor) -> Tensor:
        """Return the tensor rounded to three values per group."""
        rounded: Tensor = TernaryQuantizer.apply(inputs.detach(), 2, None, None, self.q_groups)
        return rounded

    def quantize_binary(self, inputs: Tensor) -> Tensor:
        """Return the tensor rounded to two values per group."""
        rounded: Tensor = BinaryQuantizer.apply(inputs.detach(), 1, None, None, self.q_groups)
        return rounded

    def mixed_fp16_quantize(self, input: Tensor, input_q: Tensor, index: int) -> Tensor:
        """Return the mixture of a parameter and its rounded value; without `q_mixed_fp16`, the rounded value."""
        return torch.lerp(input_q, input.detach(), self.quantize_real_ratio) if self.q_mixed_fp16 else input_q

    def update_fp16_ratio(self) -> None:
        """Lower the share of the unrounded values by `q_change_ratio`."""
        if self.q_mixed_fp16:
            self.quantize_real_ratio = max(0.0, self.quantize_real_ratio - self.q_change_ratio)


@dataclass(frozen=True)
class Rounding:
    """Describes the weights to round and the schedule. `asked_by` and `asked_of_layers` create it from a configuration.

    Args:
        where: the section of the configuration, for error messages.
        offset: weights are first rounded after the step with this number.
        bits: name of a weight -> its schedule.
        quantizer: arguments of `Quantizer`.
    """

    where: str
    offset: int
    bits: Mapping[str, BitsParams]
    quantizer: Mapping[str, Any]


def create_moq(
    config: Any,
    module: nn.Module,
    mesh: Mesh,
    *,
    stage: int,
    is_pipeline: bool,
    trained: Collection[int],
    masters: Collection[int],
    accept: Callable[[], None],
) -> "MixtureOfQuantization":
    """Create the engine's `MixtureOfQuantization` from the configuration. Called by `build.py`.

    Args:
        config: the whole `DeepSpeedConfig`.
        module: the model.
        mesh: the engine's mesh; eigenvalues are averaged over its gradient group.
        stage: the ZeRO stage.
        is_pipeline: whether the model is one stage of a pipeline.
        trained: ids of the parameters that the optimizer updates.
        masters, accept: see `MixtureOfQuantization`.

    Raises:
        ConfigError: a key does not fit the model, the stage or another key.
    """
    of_layers = rounds_after_steps(config)
    where = _OF_LAYERS if of_layers else _OLDER
    remedy = "set quantize_weight_in_forward to true, or " if of_layers else ""
    if stage == 3:
        raise ConfigError(
            f"{where}: found it at stage 3, whose weights are divided when they would be rounded, after the step; "
            f"{remedy}use stage 2 or below"
        )
    if is_pipeline:
        raise ConfigError(
            f"{where}: found it with a PipelineModule, whose stages would round by schedules of their own; "
            f"{remedy}leave it out"
        )
    if of_layers:
        rounding = asked_of_layers(config.compression_training, module)
    else:
        names = [name for name, param in module.named_parameters() if param.dim() > 1 and id(param) in trained]
        rounding = asked_by(config.quantize_training, names)

    def average(values: list[float]) -> list[float]:
        is_alone = mesh.size("dp") * mesh.size("sp") == 1
        by_rank = [values] if is_alone else all_gather_values(values, mesh.gradient_group())
        return [sum(each) / len(each) for each in zip(*by_rank, strict=True)]

    return MixtureOfQuantization(rounding, module, masters, accept, eigenvalue_of(config), average)


def asked_by(section: QuantizeTrainingConfig, names: Collection[str]) -> Rounding:
    """Return the `Rounding` of the section `quantize_training` for a model with these weight names.

    Raises:
        ConfigError: keys contradict each other, or no weight name contains an entry of `modules`.
    """
    where = _OLDER
    start, target = section.quantize_bits.start_bits, section.quantize_bits.target_bits
    if target > start:
        raise ConfigError(
            f"{where}.quantize_bits.target_bits: found {target}, above start_bits {start}; bits only get fewer"
        )
    written = section.quantize_algo.model_fields_set
    kind = section.quantize_type or section.quantize_algo.q_type
    if "q_type" in written and kind != section.quantize_algo.q_type:
        raise ConfigError(f"{where}.quantize_type: found {kind!r}, and quantize-algo.q_type says the other; keep one")
    for pattern in section.modules:
        if not any(is_in(pattern, name) for name in names):
            raise ConfigError(
                f"{where}.modules: found {pattern!r}, which is in the name of no weight of 2 dimensions or more that "
                "is trained; see model.named_parameters() for names"
            )
    bits = BitsParams(
        start_bits=start, target_bits=target, quantization_period=section.quantize_schedule.quantize_period
    )
    chosen = [name for name in names if any(is_in(pattern, name) for pattern in section.modules)]
    mixed = section.fp16_mixed_quantize
    return Rounding(
        where,
        section.quantize_schedule.schedule_offset,
        dict.fromkeys(chosen, bits),
        {
            "q_groups": section.quantize_groups,
            "q_type": kind,
            "q_rounding": section.quantize_algo.rounding,
            "q_mixed_fp16": mixed.enabled,
            "q_change_ratio": mixed.quantize_change_ratio,
            "q_verbose": section.quantize_verbose,
        },
    )


def asked_of_layers(section: CompressionConfig, module: nn.Module) -> Rounding:
    """Return the `Rounding` of `compression_training.weight_quantization` for the layers that its groups name."""
    shared = section.weight_quantization.shared_parameters
    items = [item for item in planned(module, section) if item.technique == "weight_quantization"]
    mixed = shared.fp16_mixed_quantize
    return Rounding(
        _OF_LAYERS,
        shared.schedule_offset,
        {f"{item.name}.weight".lstrip("."): item.params for item in items},
        {
            "q_groups": shared.quantize_groups,
            "q_type": shared.quantization_type,
            "q_rounding": shared.rounding,
            "q_mixed_fp16": mixed.enabled,
            "q_change_ratio": mixed.quantize_change_ratio,
            "q_verbose": shared.quantize_verbose,
        },
    )


class MixtureOfQuantization:
    """Rounds the model's weights after each step of the engine. The engine saves its state in checkpoints.

    Args:
        rounding: the weights to round and the schedule.
        module: the model.
        masters: ids of the parameters that have separate master weights.
        accept: called after each rounding, so that rounded weights do not count as changes by the user.
        eigenvalue: the section `eigenvalue`; None: periods only double.
        average: returns the means of the numbers over the ranks. A collective.

    Raises:
        ConfigError: a weight cannot be rounded, or `eigenvalue` names no layers of the model.
    """

    def __init__(
        self,
        rounding: Rounding,
        module: nn.Module,
        masters: Collection[int],
        accept: Callable[[], None],
        eigenvalue: EigenvalueConfig | None,
        average: Callable[[list[float]], list[float]],
    ) -> None:
        self.quantizer = Quantizer(**rounding.quantizer, q_eigenvalue=eigenvalue is not None)
        self._offset, self._accept, self._average = rounding.offset, accept, average
        named = dict(module.named_parameters(remove_duplicate=False))
        self._params: dict[str, Any] = {name: named[name] for name in rounding.bits}
        for name, param in self._params.items():
            _refuse_unroundable(rounding, name, param, masters)
            bits = rounding.bits[name]
            param.start_bits, param.target_bits = bits.start_bits, bits.target_bits
            param.q_period, param.quantize_real_ratio = bits.quantization_period, 1.0
        self._eigenvalue: Eigenvalue | None = None
        self._layers: list[nn.Module] = []
        if eigenvalue is not None:
            self._eigenvalue = Eigenvalue(**eigenvalue.model_dump(exclude={"enabled"}))
            self._layers = self._eigenvalue.get_layers(module)
        self.block_eigenvalue: dict[int, tuple[float, int]] = {}

    @property
    def refuses_plain_backward(self) -> bool:
        """Whether the user must call `engine.backward`, because eigenvalues are estimated there."""
        return self._eigenvalue is not None

    def saw_loss(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], *, step: int, scale: float
    ) -> None:
        """Estimate the eigenvalues of a loss if they are due; a collective in that case.

        Args:
            tensors, gradients: the arguments of the backward of the step's last micro-batch.
            step: the number of the step, from 1.
            scale: the loss scale.
        """
        estimate = self._eigenvalue
        if estimate is None or step % estimate.gas_boundary_resolution or step < self._offset:
            return
        if all(param.start_bits == param.target_bits for param in self._params.values()):
            return
        params = [param for layer in self._layers for param in layer.parameters() if param.requires_grad]
        found = torch.autograd.grad(tensors, params, gradients, create_graph=True, allow_unused=True)
        grads: dict[Tensor, Tensor] = {
            param: grad for param, grad in zip(params, found, strict=True) if grad is not None
        }
        values = self._average(estimate.estimates(self._layers, grads, scale=scale))
        self.block_eigenvalue = estimate.by_weight(self._layers, values)

    def after_update(self, step: int, *, applied: bool = True, scale: float = 1.0) -> None:
        """Round the weights after `step`, counted from 1. A skipped step (not `applied`) rounds nothing."""
        if not applied or step < self._offset:
            return
        with self._same_chance(self.quantizer.qsteps + 1):
            is_by_eigenvalue = self._eigenvalue is not None
            self.quantizer.quantize([self._params.values()], False, is_by_eigenvalue, self.block_eigenvalue)
        self._accept()

    def round_again(self) -> None:
        """Round weights that were just loaded to the current bits, without counting a step."""
        if self.quantizer.qsteps == 0:
            return
        now = self.quantizer.quantize_real_ratio
        with torch.no_grad(), self._same_chance(self.quantizer.qsteps):
            for param in self._params.values():
                self.quantizer.quantize_real_ratio = param.quantize_real_ratio
                param.copy_(self.quantizer.compute_quantization(param))
        self.quantizer.quantize_real_ratio = now
        self._accept()

    @contextmanager
    def _same_chance(self, seed: int) -> Iterator[None]:
        """Make stochastic rounding equal on all ranks, and restore the random generators afterwards."""
        if self.quantizer.q_rounding != "stochastic":
            yield
            return
        device = next(iter(self._params.values())).device
        with torch.random.fork_rng([] if device.type == "cpu" else [device.index], device_type=device.type):
            torch.manual_seed(seed)
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "qsteps": self.quantizer.qsteps,
            "quantize_real_ratio": self.quantizer.quantize_real_ratio,
            "bits": {
                name: (param.start_bits, param.q_period, param.quantize_real_ratio)
                for name, param in self._params.items()
            },
            "eigenvalues": {
                name: self.block_eigenvalue[id(param)]
                for name, param in self._params.items()
                if id(param) in self.block_eigenvalue
            },
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a CheckpointError if the state is malformed, or has no bits of a weight that this run rounds."""
        kinds: dict[str, Any] = {"qsteps": int, "quantize_real_ratio": (int, float)}
        kinds |= {"bits": Mapping, "eigenvalues": Mapping}
        for key, kind in kinds.items():
            if not isinstance(state.get(key), kind):
                raise CheckpointError(
                    f"moq.{key}: found a {type(state.get(key)).__name__} in the checkpoint; load another one, or the "
                    "weights alone with load_module_only=True"
                )
        for name, value in state["bits"].items():
            is_sound = (
                isinstance(value, tuple) and len(value) == 3 and all(isinstance(one, int | float) for one in value)
            )
            if not is_sound or value[0] not in range(1, 17):
                raise CheckpointError(
                    f"moq.bits: found {value!r} for {name!r} in the checkpoint, not (bits of 1 to 16, period, share); "
                    "load another one, or the weights alone with load_module_only=True"
                )
        missing = self._params.keys() - state["bits"].keys()
        if missing:
            raise CheckpointError(
                f"moq: found no bits of {min(missing)} in the checkpoint, which this run rounds; round the weights "
                "that the saved run did, or load the weights alone with load_module_only=True"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Call `round_again` after the weights are loaded."""
        self.quantizer.qsteps = int(state["qsteps"])
        self.quantizer.quantize_real_ratio = float(state["quantize_real_ratio"])
        for name, param in self._params.items():
            param.start_bits, param.q_period, param.quantize_real_ratio = state["bits"][name]
        self.block_eigenvalue = {
            id(self._params[name]): tuple(value) for name, value in state["eigenvalues"].items() if name in self._params
        }


def _refuse_unroundable(rounding: Rounding, name: str, param: nn.Parameter, masters: Collection[int]) -> None:
    found = f"{rounding.where}: found {name!r}"
    if is_moe_param(param):
        raise ConfigError(
            f"{found}, a weight of an expert, of which ranks hold different ones; leave it out of modules"
        )
    if is_tensor_parallel(param):
        raise ConfigError(f"{found}, of which this rank has a part; leave it out of modules, or leave it whole")
    if id(param) not in masters:
        raise ConfigError(
            f"{found}, which is rounded after each step, but no master weight keeps its updates, as it is not trained "
            "or is trained in fp32; leave it out of modules, or set bf16.enabled or fp16.enabled to true"
        )
    groups = rounding.quantizer["q_groups"]
    if param.numel() % groups:
        raise ConfigError(
            f"{found} of {param.numel()} elements, which {groups} groups do not divide; set another number of groups"
        )


complete(__name__)
