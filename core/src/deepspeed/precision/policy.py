"""`Precision`: what the engine asks about number formats. The base class *is* fp32; others override what differs.

Call order in one step:

    1. cast_inputs(args, kwargs), forward_context()      around the module's forward
    2. scale(loss)                                       before its backward
    3. verdict(norm)                                     after the gradients are reduced
    4. after_step(verdict)                               the loss scale learns from it

`cast_buffers` leaves the dtype of buffers as the model came, unless `data_types.buffer_dtype` says otherwise: rotary
frequencies, score corrections and counters lose digits that matter in 16 bits. `engine/build.py` calls it when the
weights have their dtype. `add_dtype_hint` completes torch's error about inputs of another dtype than the model's.

Loss scales are a constant one, and one that follows overflows. Small fp16 gradients vanish below 6e-8, so the loss is
multiplied by a scale before the backward and the gradients are divided by it before the step (Mixed Precision Training,
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

from deepspeed._absent_members import absent_members
from deepspeed.config.base import AUTO
from deepspeed.config.precision import TorchAutocastConfig, dtype_name
from deepspeed.errors import CheckpointError, ConfigError, StateError, counted
from deepspeed.log import report, warn_once


@absent_members("runtime.fp16.loss_scaler:LossScaler")
class LossScaler:
    """A constant loss scale."""

    __module__ = "deepspeed.runtime.fp16.loss_scaler"  # its old address, by which DeepSpeed's checkpoints name it
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
        """Called once per step, after it was judged."""
        self.overflow = overflow
        if overflow:
            scale = "" if self.loss_scale == 1.0 else f", at the constant loss scale {self.loss_scale:g}"
            report(f"gradient overflow: step skipped{scale}")

    def state_dict(self) -> dict[str, Any]:
        return {"cur_scale": self.loss_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A constant scale is the configuration's, whatever a checkpoint had."""

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError for what `load_state_dict` cannot take; changes nothing."""


@absent_members("runtime.fp16.loss_scaler:DynamicLossScaler")
class DynamicLossScaler(LossScaler):
    """Halves the scale on overflow, doubles it after `window` steps without one.

    An overflow is forgiven `hysteresis - 1` times before the scale is lowered. The credit is restored when the scale
    is raised, or with `consecutive_hysteresis` after every good step.

    Args:
        initial_scale: first scale, usually 2**16.
        window: steps between raises.
        hysteresis: overflows until the scale is lowered.
        min_scale: the scale is not lowered further; an overflow at it raises StateError, since nothing would ever
            be learned again.
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
        """Go on where another dynamic scale was; the state of a constant one leaves this one as it is."""
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
    """Whether the step is made, and by what its gradients are multiplied first."""

    applies: bool
    grad_scale: float | Tensor  # unscales and clips in one factor; a 0-D tensor if it clips by a norm that is one
    norm: float | Tensor  # global L2 norm of the unscaled gradients, before clipping


class Precision:
    """fp32: the parameters stay as they are.

    Args:
        clip_norm: gradients are clipped to this global L2 norm; 0 means never.
        checks_overflow: skip a step whose gradients are not finite.
    """

    name = "fp32"
    #: dtype that the parameters get, or None to leave them
    model_dtype: torch.dtype | None = None

    def __init__(self, *, clip_norm: float = 0.0, checks_overflow: bool = False) -> None:
        self.clip_norm = clip_norm
        self.checks_overflow = checks_overflow
        self.loss_scaler = LossScaler(1.0)

    def cast_params(self, module: torch.nn.Module) -> None:
        """Cast floating parameters that are not yet in the model's dtype: frozen ones."""
        if self.model_dtype is not None:
            cast_floating(module.parameters(), self.model_dtype)

    def refuse_complex(self, module: torch.nn.Module) -> None:
        """A complex parameter has no low precision, and its master weight is itself; an update has masters of one kind.

        Raises:
            ConfigError: names such a parameter that trains, where weights are cast.
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
        """The inputs of the module's forward; as given, but for fp16 with `auto_cast`."""
        return args, kwargs

    def forward_context(self) -> AbstractContextManager[Any]:
        """A context for the module's forward."""
        return contextlib.nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as its backward needs it."""
        return self.loss_scaler.scale(loss)

    def verdict(self, scaled_norm: float | Tensor) -> Verdict:
        """Judge the reduced gradients by their norm: g <- g / loss_scale * min(1, clip_norm / (norm + 1e-6)).

        The clip coefficient is that of `torch.nn.utils.clip_grad_norm_`, also where the step is made with a norm that
        is not finite: nan makes every gradient nan; inf makes the finite ones 0 and the infinite ones nan.

        Args:
            scaled_norm: of the gradients as they are; as a 0-D tensor it is read only if it decides whether the step
                is made.
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
        """The step is made; its factor stays on the device."""
        norm = scaled_norm / self.loss_scaler.loss_scale
        factor: float | Tensor = 1.0 / self.loss_scaler.loss_scale
        if self.clip_norm > 0:
            factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0) * factor
        return Verdict(True, factor, norm)

    def after_step(self, verdict: Verdict) -> None:
        """Let the loss scale adapt."""
        self.loss_scaler.update(overflow=not verdict.applies)


def cast_floating(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Give every floating tensor this dtype; each stays the same object."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)


def warn_unless_finite(norm: float) -> None:
    """Warn once of a step that is made with gradients of this norm."""
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
        auto_cast: cast floating inputs of the forward to float16.
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
    """The forward runs under `torch.autocast`.

    Args:
        device_type: of the accelerator, as `torch.autocast` takes it.
        dtype: torch.bfloat16 or torch.float16; the latter wants a dynamic `loss_scaler`.
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
    """The context that the engine's forward has: `torch.autocast` with `torch_autocast.enabled`, else nothing.

    For a part of the computation outside of the engine, such as a loss.
    """
    return engine.precision.forward_context()


def get_default_autocast_lower_precision_modules() -> list[str]:
    """The default of `torch_autocast.lower_precision_safe_modules`."""
    return list(TorchAutocastConfig().lower_precision_safe_modules)


def add_dtype_hint(error: Exception, configured: torch.dtype | None, module: Module, args: Any, kwargs: Any) -> None:
    """Append a hint to the message of `error` if a forward failed over the dtype of its floating inputs or buffers.

    Called by the engine with what the module's forward raised; the error keeps its type and traceback.

    Args:
        configured: the dtype that the configuration gave the parameters; None: their own.
        module: whose forward it is.
        args, kwargs: what the forward was called with.
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
    """The dtype of all floating `params`; None if they differ or there are none."""
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
    """Cast the floating buffers of a model.

    Args:
        dtype: that they get; None: they stay.
        kept: "auto", or regular expressions for whole parts of the names of buffers that stay.
        model_dtype: of the weights, to find what "auto" means; None: their own.
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
    """Return the name patterns that models of transformers, anywhere in `module`, declare as kept in fp32. Some of them
    count only if the model computes in fp16."""
    names = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * (model_dtype == torch.float16)
    return sorted({pattern for part in module.modules() for name in names for pattern in _declared(part, name)})


def _declared(part: Module, name: str) -> Iterator[str]:
    yield from getattr(part, name, None) or ()


def _computed_with(part: Module) -> Iterator[tuple[Tensor, Iterable[Tensor]]]:
    """Weights, each with the buffers that torch's own code computes with it, and only where both have one dtype."""
    if isinstance(part, _NormBase) and part.weight is not None:
        yield part.weight, part.buffers(recurse=False)
    if isinstance(part, ParametrizationList):
        for each in part:
            if isinstance(each, _SpectralNorm | _Orthogonal):
                yield next(part.parameters()), each.buffers()
    for hook in part._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            yield getattr(part, f"{hook.name}_orig"), [getattr(part, f"{hook.name}_{which}") for which in "uv"]
