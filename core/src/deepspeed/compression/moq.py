"""`Quantizer` rounds weights after each step of an optimizer, with fewer bits over time: Mixture of Quantization.

The optimizer updates other tensors than the model's, the master weights of fp16 and bf16, which stay unrounded. The
bits fall by one when the steps reach a parameter's `q_period`, which doubles then, as DeepSpeed's tutorial "Mixture of
Quantization" says. `MixtureOfQuantization` does it for the engine; a loop of one's own calls `Quantizer.quantize`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import log
from deepspeed._absent import complete
from deepspeed._absent_members import absent_members
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
#: by how much the largest eigenvalue stretches a period, above 1
_STRETCH = 4


@absent_members("runtime.quantize:Quantizer")
class Quantizer:
    """Rounds parameters that have `start_bits`, `target_bits` and `q_period`, in place.

    Args:
        q_groups: scales per parameter.
        q_mixed_fp16: mix the rounded value with the parameter's own, whose share falls by `q_change_ratio` a step.
        q_change_ratio: by how much the share of the own value falls each step, with `q_mixed_fp16`.
        q_type: "symmetric" or 0; "asymmetric" or 1.
        q_rounding: "nearest" or 0; "stochastic" or 1.
        q_verbose: log when bits change.
        q_eigenvalue: whether periods follow eigenvalues; for the caller.
        use_quantizer_kernel: has no effect; the accelerator's kernel is used if it has one.
        layer_num: layers that eigenvalues are of; for the caller.
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
        #: steps so far
        self.qsteps = 0
        #: share of the parameter's own value
        self.quantize_real_ratio = 1.0
        self._switches = True

    def any_precision_switch(self) -> bool:
        """Whether bits may still fall, so that eigenvalues are of use: True until `quantize` saw no such parameter."""
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
        """Count a step and round each parameter of 2-D and more, in place. One that was skipped rounds nothing.

        Args:
            parameter_group: groups of parameters, of the model's own type.
            overflow: whether the step was skipped.
            eigenvalue_enabled: whether periods follow `block_eigenvalue`.
            block_eigenvalue: as `Eigenvalue.compute_eigenvalue` returns it.
        """
        if overflow and not eigenvalue_enabled:
            return
        self.step()
        self.update_fp16_ratio()
        self._switches = False
        for group in parameter_group:
            param: Any  # with the attributes of its schedule
            for param in group:
                if param.dim() > 1 and getattr(param, "start_bits", None):
                    value, layer = (block_eigenvalue or {}).get(id(param), (None, 0))
                    factor = 1 if value is None else 1 + math.floor(value * _STRETCH)
                    with torch.no_grad():
                        param.copy_(self.compute_quantization(param, layer, factor))
                    self._switches |= param.start_bits != param.target_bits

    def compute_quantization(self, input: Tensor, index: int = 0, factor: int = 1) -> Tensor:
        """Return a parameter rounded, after its bits fell if its period is over.

        Args:
            input: the parameter; its `start_bits` and `q_period` change, and `quantize_real_ratio` is set.
            index: number of its layer.
            factor: by which the period grows, beside doubling, when the bits fall.
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
        param.quantize_real_ratio = self.quantize_real_ratio  # of this parameter: the bits of the next one may fall
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
        """Return the tensor with three values a group."""
        rounded: Tensor = TernaryQuantizer.apply(inputs.detach(), 2, None, None, self.q_groups)
        return rounded

    def quantize_binary(self, inputs: Tensor) -> Tensor:
        """Return the tensor with two values a group."""
        rounded: Tensor = BinaryQuantizer.apply(inputs.detach(), 1, None, None, self.q_groups)
        return rounded

    def mixed_fp16_quantize(self, input: Tensor, input_q: Tensor, index: int) -> Tensor:
        """Return the mixture of a parameter and its rounded value; that one where nothing is mixed."""
        return torch.lerp(input_q, input.detach(), self.quantize_real_ratio) if self.q_mixed_fp16 else input_q

    def update_fp16_ratio(self) -> None:
        """Lower the share of parameters' own values by one step."""
        if self.q_mixed_fp16:
            self.quantize_real_ratio = max(0.0, self.quantize_real_ratio - self.q_change_ratio)


@dataclass(frozen=True)
class Rounding:
    """`Rounding` says what the engine rounds, and when; `asked_by` and `asked_of_layers` read it off a configuration.

    Args:
        where: the section that asks for it.
        offset: the number of the step after which weights are rounded first.
        bits: by name of a weight.
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
    """Return what the engine rounds weights by, for a configuration that asks for it.

    Args:
        config: the whole `DeepSpeedConfig`.
        module: the model.
        mesh: of the engine; the ranks that average gradients average eigenvalues, too.
        stage: of ZeRO.
        is_pipeline: whether the model is one stage of a pipeline.
        trained: ids of the parameters that the optimizer has.
        masters, accept: as for `MixtureOfQuantization`.

    Raises:
        ConfigError: names the key that does not fit, and what to do.
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
    """Return what the section `quantize_training` asks for, of the weights of these names.

    Raises:
        ConfigError: its keys contradict each other, or an entry of `modules` is in no name.
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
    """Return what `compression_training.weight_quantization` asks for, of the layers that its groups name."""
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
    """Rounds the model's weights after each step that the engine makes. A part of its state, in checkpoints too.

    Args:
        rounding: which weights, and how.
        module: the model.
        masters: ids of the parameters that the optimizer updates copies of.
        accept: called after weights were rounded, so that nobody takes it for a change of the user's.
        eigenvalue: None: periods only double.
        average: the mean over the ranks, of numbers that each has. A collective.

    Raises:
        ConfigError: a weight that is to be rounded cannot be, or `eigenvalue` names no layers of the model.
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
        """Whether a loss has to come through `engine.backward`, since its eigenvalues are estimated there."""
        return self._eigenvalue is not None

    def saw_loss(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], *, step: int, scale: float
    ) -> None:
        """Estimate the eigenvalues of a loss, if they are due. A collective then.

        Args:
            tensors, gradients: of the last micro-batch of a step, as its backward gets them.
            step: the number of that step, from 1.
            scale: what the loss was multiplied by.
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
        """Round the weights that a step, counted from 1, has made. One that was skipped leaves them as they are."""
        if not applied or step < self._offset:
            return
        with self._same_chance(self.quantizer.qsteps + 1):
            is_by_eigenvalue = self._eigenvalue is not None
            self.quantizer.quantize([self._params.values()], False, is_by_eigenvalue, self.block_eigenvalue)
        self._accept()

    def round_again(self) -> None:
        """Round weights that were loaded, to the bits of now."""
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
        """Let stochastic rounding be the same on all ranks, and leave the generators as they are."""
        if self.quantizer.q_rounding != "stochastic":
            yield
            return
        device = next(iter(self._params.values())).device
        with torch.random.fork_rng([] if device.type == "cpu" else [device.index], device_type=device.type):
            torch.manual_seed(seed)
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
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
        """Raise CheckpointError for a state of other weights, or one that no run has written."""
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
        """Go on from `state_dict`. `round_again` is to follow, when the weights are there."""
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
