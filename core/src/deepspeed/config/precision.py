"""`fp16`, `bf16`, `torch_autocast`, `amp`, `data_types`: the dtypes for storage, computation and accumulation.

Dtypes are names here ("fp32", "fp16", "bf16"), so that a config can be read without torch. Modules that create tensors
call `torch_dtype`.
"""

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from deepspeed._absent import absent_members
from deepspeed.config.base import (
    AUTO,
    Finite,
    Flag,
    Float,
    Int,
    LaxSection,
    Says,
    Section,
    Texts,
    key,
    one_of,
    quiet,
    refused,
    warned,
)

if TYPE_CHECKING:
    import torch

_SPELLINGS = {
    "fp32": ("fp32", "float32", "float"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16", "bfp16"),
}
_TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_APEX = quiet("apex only")
_AUTOCAST_MODULES = ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"]


def canonical_dtype(name: Any) -> str:
    """Return "fp16" for "float16", "half", "torch.half" or torch.float16, and so on. Raises ValueError."""
    text = str(name).removeprefix("torch.").lower()
    for canonical, spellings in _SPELLINGS.items():
        if text in spellings:
            return canonical
    raise ValueError(f"unknown data type {name!r}; allowed: fp32, fp16, bf16")


def torch_dtype(name: str) -> "torch.dtype":
    """Return the torch.dtype of a canonical name."""
    import torch  # late: processes that read a config need not load torch

    dtype = getattr(torch, _TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _spelled(*canonical: str) -> WithJsonSchema:
    names = [spelling for name in canonical for spelling in _SPELLINGS[name]]
    return one_of(*names, *(f"torch.{name}" for name in names))


DType = Annotated[
    str,
    BeforeValidator(canonical_dtype),
    Says('"fp32" or "fp16" or "bf16" (or a longer spelling)'),
    _spelled("fp32", "fp16", "bf16"),
]


def _low(name: Any) -> str:
    canonical = canonical_dtype(name)
    if canonical == "fp32":
        raise ValueError("not a lower precision")
    return canonical


LowDType = Annotated[
    str, BeforeValidator(_low), Says('"fp16" or "bf16" (or a longer spelling)'), _spelled("fp16", "bf16")
]


@absent_members("runtime.precision_config:DeepSpeedFP16Config")
class FP16Config(LaxSection):
    """`fp16`: weights and gradients in half precision, fp32 master weights, loss scaling.

    Dynamic loss scale S (loss_scale 0): S starts at 2**initial_scale_power. After `hysteresis` steps with an overflow S
    is halved, but never below min_loss_scale. After `loss_scale_window` steps without an overflow S is doubled.
    """

    enabled: Flag = key(False, "Train in fp16. Excludes bf16, amp and torch_autocast.")
    auto_cast: Flag = key(False, "Cast floating-point inputs of the model to fp16.")
    loss_scale: Finite = key(0.0, "Fixed loss scale; 0: dynamic.", ge=0)
    initial_scale_power: Int = key(16, "The dynamic scale begins at 2 to this power.", unit="log2", ge=0, le=127)
    loss_scale_window: Int = key(1000, "Steps without overflow before the scale doubles.", unit="steps", ge=1)
    hysteresis: Int = key(2, "Overflows until the scale halves.", unit="steps", ge=1)
    consecutive_hysteresis: Flag = key(False, "Start to count again after each step without overflow.")
    min_loss_scale: Finite = key(1.0, "The dynamic scale never falls below this.", ge=0)
    fp16_master_weights_and_grads: Flag = key(
        False,
        "Keep master weights in fp16 (offloaded optimizers).",
        support=refused("master weights are fp32 in this version"),
    )


class BF16Config(LaxSection):
    """`bf16`: weights and gradients in bfloat16, fp32 master weights, no loss scaling."""

    enabled: Flag = key(False, "Train in bf16. Excludes fp16 and amp.")
    check_grad_overflow: Flag = key(True, "Skip the update when a gradient is not finite.")
    immediate_grad_update: Flag = key(
        False,
        "Add a gradient to the accumulation buffer as soon as it exists.",
        support=quiet("gradients are always added at once"),
    )
    bf16_master_weights_and_grads: Flag = key(
        False, "Keep master weights in bf16.", support=refused("master weights are fp32 in this version")
    )
    bf16_optimizer_states: Flag = key(
        False, "Keep optimizer states in bf16.", support=refused("optimizer states are fp32 in this version")
    )


class TorchAutocastConfig(Section):
    """`torch_autocast`: torch.autocast around the forward pass; weights keep their dtype."""

    enabled: Flag = key(False, "Run the forward pass under torch.autocast. Excludes fp16 and amp.")
    dtype: LowDType = key("bf16", "The lower precision: bfloat16 or float16.")
    lower_precision_safe_modules: Texts = key(
        _AUTOCAST_MODULES,
        "Module types whose gradients are reduced in the lower precision.",
        support=warned("gradients are reduced in fp32; torch chooses the operators"),
    )


class AmpConfig(Section):
    """`amp`: NVIDIA apex. All keys are arguments of apex.amp.initialize."""

    enabled: Flag = key(False, "Train with apex.", support=refused("apex is not supported; use bf16 or torch_autocast"))
    opt_level: str = key("O1", "apex optimization level.", support=_APEX)
    cast_model_type: Any = key(None, "Type of the model's weights.", support=_APEX)
    patch_torch_functions: Flag | None = key(None, "Patch torch's functions.", support=_APEX)
    keep_batchnorm_fp32: Any = key(None, "Keep batch norms in fp32.", support=_APEX)
    master_weights: Flag | None = key(None, "Keep fp32 master weights.", support=_APEX)
    loss_scale: Any = key(None, 'A number, or "dynamic".', support=_APEX)
    cast_model_outputs: Any = key(None, "Type of the model's outputs.", support=_APEX)
    num_losses: Int = key(1, "Losses with a scale of their own.", ge=1, support=_APEX)
    verbosity: Int = key(1, "0: no output of apex.", support=_APEX)
    min_loss_scale: Float | None = key(None, "Lower bound of the dynamic scale.", support=_APEX)
    max_loss_scale: Float = key(2.0**24, "Upper bound of the dynamic scale.", support=_APEX)


def _patterns(value: Any) -> Any:
    if value != AUTO and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise ValueError("not a list of patterns")
    for pattern in value if value != AUTO else []:
        try:
            re.compile(pattern)
        except re.error:
            raise ValueError("not a regular expression") from None
    return value


Patterns = Annotated[
    Any,
    BeforeValidator(_patterns),
    Says('a list of regular expressions or "auto"'),
    WithJsonSchema({"type": "array", "items": {"type": "string", "format": "regex"}}),
]


class DataTypesConfig(Section):
    """`data_types`: dtypes in addition to those of `fp16` and `bf16`."""

    grad_accum_dtype: DType | None = key(None, "Type in which gradients are accumulated; null: as the model.")
    param_dtype: DType | None = key(
        None,
        "Type of the weights; null: that of bf16 or fp16, else their own. bf16 alone trains with fp32 master weights.",
    )
    buffer_dtype: DType | None = key(
        None,
        "Type that floating-point buffers get; null: they stay as the model came. Running statistics of a batch norm, "
        "and what torch's spectral_norm and orthogonal keep, have the type of the weights, since torch takes no other.",
    )
    keep_in_fp32_modules: Patterns = key(
        AUTO,
        "Buffers that buffer_dtype leaves as they came: regular expressions for the parts of their names between dots. "
        "auto: what the model says in _keep_in_fp32_modules_strict, and in fp16 also in _keep_in_fp32_modules.",
    )
