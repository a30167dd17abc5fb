"""`Precision`: the engine's policy for dtypes and loss scaling. The base class is fp32; subclasses override it.

Call order in one step:

    1. cast_inputs(args, kwargs), forward_context()      around the module's forward
    2. scale(loss)                                       before the backward
    3. verdict(norm)                                     after the gradients are reduced
    4. after_step(verdict)                               updates the loss scale

`cast_buffers` does not change the dtype of buffers unless `data_types.buffer_dtype` is set: rotary frequencies, score
corrections and counters need more than 16 bits. `engine/build.py` calls it after the weights have their dtype.
`add_dtype_hint` adds a hint to torch's error about inputs with another dtype than the model's.

The loss scale is constant, or adapts to overflows. fp16 gradients below 6e-8 vanish. So the loss is multiplied by a
scale before the backward, and the gradients are divided by the scale before the step (Mixed Precision Training,
arXiv 1710.03740, section 3.2).
"""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _Orthogonal, _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed._absent import absent_members
from deepspeed.comm.values import dtype_name
from deepspeed.config.base import AUTO
from deepspeed.config.precision import TorchAutocastConfig
from deepspeed.errors import CheckpointError, ConfigError, StateError, counted
from deepspeed.log import report, warn_once


@absent_members("runtime.fp16.loss_scaler:LossScaler")
class LossScaler:
    """A constant loss scale."""

    __module__ = "deepspeed.runtime.fp16.loss_scaler"  # DeepSpeed's module, which its checkpoints refer to
    is_dynamic = False

    def __init__(self, loss_scale: float) -> None:
        self.loss_scale = float(loss_scale)
        self.overflow = False  # whether the last step was skipped

    @property
    def cur_scale(self) -> float:
        return self.loss_scale

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scale == 1.0 else loss.float() * self.loss_scale

    def update(self, *, overflow: bool) -> None:
        """Record whether the step was skipped because of an overflow. Called once per step, after `verdict`."""
        self.overflow = overflow
        if overflow:
            scale = "" if self.loss_scale == 1.0 else f", at the constant loss scale {self.loss_scale:g}"
            report(f"gradient overflow: step skipped{scale}")

    def state_dict(self) -> dict[str, Any]:
        return {"cur_scale": self.loss_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: a constant scale comes from the configuration, not from a checkpoint."""

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise a CheckpointError if `load_state_dict` cannot load `state`. Changes nothing."""


@absent_members("runtime.fp16.loss_scaler:DynamicLossScaler")
class DynamicLossScaler(LossScaler):
    """Halves the scale on overflow, and doubles it after `window` steps without overflow.

    The scale is lowered only at the `hysteresis`-th overflow. The count of overflows is reset when the scale is raised,
    or with `consecutive_hysteresis` after every good step.

    Args:
        initial_scale: first scale, usually 2**16.
        window: number of steps between raises.
        hysteresis: number of overflows until the scale is lowered.
        min_scale: the lower bound. An overflow at this scale raises StateError, because every later step would be
            skipped too.
    """

    is_dynamic = True
    factor = 2.0

    def __init__(
        self,
        initial_scale: float,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        consecutive_hysteresis: bool = False,
    ) -> None:
        super().__init__(initial_scale)
        self.window, self.hysteresis, self.min_scale = window, hysteresis, float(min_scale)
        self.consecutive_hysteresis = consecutive_hysteresis
        self._credit = hysteresis
        self._num_steps = 0
        self._last_overflow = -1

    def update(self, *, overflow: bool) -> None:
        self.overflow = overflow
        if overflow:
            self._lower()
            self._last_overflow = self._num_steps
        else:
            if self.consecutive_hysteresis:
                self._credit = self.hysteresis
            if (self._num_steps - self._last_overflow) % self.window == 0:
                self._credit = self.hysteresis
                self.loss_scale *= self.factor
        self._num_steps += 1

    def _lower(self) -> None:
        if self._credit > 1:
            self._credit -= 1
            report(f"gradient overflow: step skipped, loss scale {self.loss_scale:g} kept (hysteresis)")
            return
        if self.loss_scale <= self.min_scale:
            raise StateError(
                f"gradient overflow at the smallest loss scale ({self.loss_scale:g}, fp16.min_loss_scale): training "
                "has diverged; lower the learning rate or use bf16"
            )
        lowered = max(self.loss_scale / self.factor, self.min_scale)
        report(f"gradient overflow: step skipped, loss scale {self.loss_scale:g} -> {lowered:g}")
        self.loss_scale = lowered

    def state_dict(self) -> dict[str, Any]:
        return {
            "cur_scale": self.loss_scale,
            "cur_hysteresis": self._credit,
            "cur_iter": self._num_steps,
            "last_overflow_iter": self._last_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of a dynamic scale. The state of a constant scale changes nothing."""
        self.check_state_dict(state)
        if "cur_hysteresis" not in state:
            return
        self.loss_scale = float(state["cur_scale"])
        self._credit = int(state["cur_hysteresis"])
        self._num_steps = int(state["cur_iter"])
        self._last_overflow = int(state["last_overflow_iter"])

    def check_state_dict(self, state: dict[str, Any]) -> None:
        if "cur_hysteresis" not in state:
            return
        for name, own in self.state_dict().items():
            value: Any = state.get(name)
            fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if fits:
                fits = value > 0 if name == "cur_scale" else value == int(value)
            if not fits:
                raise CheckpointError(
                    f"loss scale: the saved {name} is {value!r:.60}, and a number as {own} is expected; load another "
                    "tag, or with load_optimizer_states=False"
                )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the step is applied, and the factor for its gradients."""

    applies: bool
    grad_scale: float | Tensor  # unscales and clips in one factor; a 0-D tensor if the norm is a tensor and clips
    norm: float | Tensor  # global L2 norm of the unscaled gradients, before clipping


class Precision:
    """The fp32 policy, which does not change the dtype of parameters, and the base class of the others.

    Args:
        clip_norm: gradients are clipped to this global L2 norm; 0 disables clipping.
        checks_overflow: skip a step if its gradients are not finite.
    """

    name = "fp32"
    #: dtype to cast the parameters to, or None to keep theirs
    model_dtype: torch.dtype | None = None

    def __init__(self, *, clip_norm: float = 0.0, checks_overflow: bool = False) -> None:
        self.clip_norm = clip_norm
        self.checks_overflow = checks_overflow
        self.loss_scaler = LossScaler(1.0)

    def cast_params(self, module: torch.nn.Module) -> None:
        """Cast floating-point parameters that are not yet in the model's dtype, such as frozen parameters."""
        if self.model_dtype is not None:
            cast_floating(module.parameters(), self.model_dtype)

    def refuse_complex(self, module: torch.nn.Module) -> None:
        """Refuse complex trainable parameters in low precision: they cannot be cast to 16 bits.

        Raises:
            ConfigError: this policy casts weights, and a trainable parameter is complex; the message names it.
        """
        if self.model_dtype is None:
            return
        for name, param in module.named_parameters():
            if param.is_complex() and param.requires_grad:
                dtype = str(param.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"{self.name}: the parameter {name!r} is {dtype}, which has no form in 16 bits; train it in "
                    "fp32, or keep the parameter as real numbers (torch.view_as_real) and make it complex in the "
                    "forward (torch.view_as_complex)"
                )

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of the module's forward, unchanged except for fp16 with `auto_cast`."""
        return args, kwargs

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context for the module's forward."""
        return contextlib.nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, for the backward."""
        return self.loss_scaler.scale(loss)

    def verdict(self, scaled_norm: float | Tensor) -> Verdict:
        """Decide by the norm whether to step, and compute g <- g / loss_scale * min(1, clip_norm / (norm + 1e-6)).

        The clip coefficient is equal to `torch.nn.utils.clip_grad_norm_`, even if a step is made with a norm that is
        not finite: nan makes every gradient nan; inf makes finite gradients 0 and infinite gradients nan.

        Args:
            scaled_norm: the norm of the gradients before unscaling. A 0-D tensor is only read (which synchronizes the
                host with the device) if it decides whether to step.
        """
        if isinstance(scaled_norm, Tensor):
            if not self.checks_overflow:
                return self._verdict_on_device(scaled_norm)
            scaled_norm = scaled_norm.item()
        loss_scale = self.loss_scaler.loss_scale
        norm = scaled_norm / loss_scale
        applies = not self.checks_overflow or math.isfinite(scaled_norm)
        if applies:
            warn_unless_finite(norm)
        factor = 1.0 / loss_scale
        if applies and self.clip_norm > 0:
            coefficient = self.clip_norm / (norm + 1e-6)
            factor *= coefficient if math.isnan(coefficient) else min(1.0, coefficient)
        return Verdict(applies, factor, norm)

    def _verdict_on_device(self, scaled_norm: Tensor) -> Verdict:
        """Return a verdict that applies the step; its factor stays on the device."""
        norm = scaled_norm / self.loss_scaler.loss_scale
        factor: float | Tensor = 1.0 / self.loss_scaler.loss_scale
        if self.clip_norm > 0:
            factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0) * factor
        return Verdict(True, factor, norm)

    def after_step(self, verdict: Verdict) -> None:
        """Update the loss scale."""
        self.loss_scaler.update(overflow=not verdict.applies)


def cast_floating(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Cast every floating-point tensor to `dtype` in place: the tensor objects stay the same."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)


def warn_unless_finite(norm: float) -> None:
    """Warn once if a step is made although the norm is not finite."""
    if not math.isfinite(norm):
        warn_once(
            f"step: the norm of the gradients is {norm}, and the step is made all the same: the weights are lost. Look "
            'for the cause; in bf16 "bf16": {"check_grad_overflow": true}, the default, skips such steps'
        )


class BF16(Precision):
    """Parameters and computation in bfloat16; `zero/` keeps the fp32 master weights that the optimizer updates."""

    name = "bf16"
    model_dtype = torch.bfloat16


class FP16(Precision):
    """Parameters and computation in float16; a step with inf or nan gradients is skipped.

    Args:
        loss_scaler: static or dynamic.
        auto_cast: cast floating-point inputs of the forward to float16.
    """

    name = "fp16"
    model_dtype = torch.float16

    def __init__(self, loss_scaler: LossScaler, *, clip_norm: float = 0.0, auto_cast: bool = False) -> None:
        super().__init__(clip_norm=clip_norm, checks_overflow=True)
        self.loss_scaler = loss_scaler
        self._auto_cast = auto_cast

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map(_to_half, (args, kwargs)) if self._auto_cast else (args, kwargs)


def _to_half(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value


class Autocast(Precision):
    """Runs the forward under `torch.autocast`.

    Args:
        device_type: the accelerator's device type for `torch.autocast`.
        dtype: torch.bfloat16 or torch.float16; float16 needs a dynamic `loss_scaler`.
    """

    name = "autocast"

    def __init__(
        self, device_type: str, dtype: torch.dtype, *, clip_norm: float = 0.0, loss_scaler: LossScaler | None = None
    ) -> None:
        super().__init__(clip_norm=clip_norm, checks_overflow=loss_scaler is not None)
        self.device_type, self.dtype = device_type, dtype
        if loss_scaler is not None:
            self.loss_scaler = loss_scaler

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype)


class _HasPrecision(Protocol):
    precision: Precision


def autocast_if_enabled(engine: _HasPrecision) -> AbstractContextManager[Any]:
    """Return the context of the engine's forward: `torch.autocast` with `torch_autocast.enabled`, else a null context.

    Use it for computation outside of the engine, such as a loss.
    """
    return engine.precision.forward_context()


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the default of `torch_autocast.lower_precision_safe_modules`."""
    return list(TorchAutocastConfig().lower_precision_safe_modules)


def add_dtype_hint(error: Exception, configured: torch.dtype | None, module: Module, args: Any, kwargs: Any) -> None:
    """Append a hint to the message of `error` if a forward failed because of the dtype of its inputs or buffers.

    The engine calls this with the exception of the module's forward. The error keeps its type and traceback.

    Args:
        configured: the dtype of the parameters in the configuration; None: their own dtype.
        module: the module of the forward.
        args, kwargs: the arguments of the forward.
    """
    dtype = configured or _dtype_of(module.parameters())
    if dtype is None or "type" not in str(error):
        return
    floating = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if others := sorted({dtype_name(leaf.dtype) for leaf in floating if leaf.dtype != dtype}):
        hint = (
            f"{_origin(configured, dtype)}, and this forward got inputs of {', '.join(others)}; "
            f"cast them before the call (x.to({dtype}))"
        )
        hint += ', or set "fp16": {"auto_cast": true}' if configured is torch.float16 else ""
    elif configured is not None and "dtype" in str(error):
        hint = _hint_of_buffers(module, configured)
    else:
        hint = ""
    if hint:
        error.args = (f"{error}; {hint}", *error.args[1:])


def _hint_of_buffers(module: Module, dtype: torch.dtype) -> str:
    others = [name for name, each in module.named_buffers() if each.is_floating_point() and each.dtype != dtype]
    if not others:
        return ""
    return (
        f"{_origin(dtype, dtype)}, and found {counted(len(others), 'buffer')} of another type, such as {others[0]!r}: "
        "buffers stay as the model came. If the error is about one, cast it where it is used, or all of them with "
        f'"data_types": {{"buffer_dtype": "{dtype_name(dtype)}"}}'
    )


def _dtype_of(params: Iterable[Tensor]) -> torch.dtype | None:
    """Return the dtype of all floating-point `params`; None if dtypes differ or there are none."""
    dtypes = {param.dtype for param in params if param.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _origin(configured: torch.dtype | None, dtype: torch.dtype) -> str:
    if configured is None:
        return f"the model's parameters are {dtype_name(dtype)}"
    key = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "dtype")
    return f"the config's {key} made the model's parameters {dtype_name(dtype)}"


def cast_buffers(
    module: Module, dtype: torch.dtype | None, kept: Iterable[str], model_dtype: torch.dtype | None
) -> None:
    """Cast the floating-point buffers of a model. Buffers that torch computes together with a weight get its dtype.

    Args:
        dtype: the new dtype; None: no change.
        kept: buffers to keep: "auto", or regular expressions that match complete components of buffer names.
        model_dtype: the configured dtype of the weights, which "auto" depends on; None: their own dtype.
    """
    if dtype is not None:
        patterns = _patterns_of(module, model_dtype) if kept == AUTO else list(kept)
        stays = re.compile("|".join(rf"(^|\.)({pattern})($|\.)" for pattern in patterns)) if patterns else None
        named = module.named_buffers()
        cast_floating((buffer for name, buffer in named if stays is None or not stays.search(name)), dtype)
    for part in module.modules():
        for weight, buffers in _computed_with(part):
            cast_floating(buffers, weight.dtype)


def _patterns_of(module: Module, model_dtype: torch.dtype | None) -> list[str]:
    """Return the name patterns of fp32 buffers that transformers models anywhere in `module` declare. Some apply only
    if the model computes in fp16."""
    names = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * (model_dtype == torch.float16)
    return sorted({pattern for part in module.modules() for name in names for pattern in _declared(part, name)})


def _declared(part: Module, name: str) -> Iterator[str]:
    yield from getattr(part, name, None) or ()


def _computed_with(part: Module) -> Iterator[tuple[Tensor, Iterable[Tensor]]]:
    """Yield (weight, buffers) for buffers that torch's own code combines with the weight, which needs one dtype."""
    if isinstance(part, _NormBase) and part.weight is not None:
        yield part.weight, part.buffers(recurse=False)
    if isinstance(part, ParametrizationList):
        for each in part:
            if isinstance(each, _SpectralNorm | _Orthogonal):
                yield next(part.parameters()), each.buffers()
    for hook in part._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            yield getattr(part, f"{hook.name}_orig"), [getattr(part, f"{hook.name}_{which}") for which in "uv"]
