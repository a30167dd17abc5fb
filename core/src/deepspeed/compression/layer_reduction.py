"""`student_initialization`: initializes a student model of fewer layers with layers of its teacher.

Source: Wu et al., "Extreme Compression for Pre-trained Transformers Made Simple and Efficient" (arXiv 2206.01859): skip
layers evenly, then distill. The script's loss does the distillation.
"""

import torch
from torch import Tensor, nn

from deepspeed.config.compression import LayerReductionConfig, compression_section
from deepspeed.config.read import ConfigSource, read_config
from deepspeed.errors import ConfigError


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: ConfigSource) -> None:
    """Copy weights and buffers of the teacher to a student of fewer layers, as configured by `layer_reduction`.

    The student's layer i gets the values of the teacher's layer `teacher_layer[i]`. Modules in `other_module_name` get
    the values of the teacher's module of the same name.

    Raises:
        ConfigError: a module is missing, or differs in the teacher. The student is then unchanged.
    """
    settings = compression_section(read_config(deepspeed_config)).layer_reduction
    student, teacher = inner_of(student_model), inner_of(teacher_model)
    pairs = _pairs(settings)
    copies = [
        (_module(student, mine, "student"), _module(teacher, theirs, "teacher"), mine, theirs) for mine, theirs in pairs
    ]
    where = "compression_training.layer_reduction"
    for to, source, mine, theirs in copies:
        own, given = _values(to), _values(source)
        for name in sorted(own.keys() | given.keys()):
            shapes = [tuple(values[name].shape) if name in values else None for values in (own, given)]
            if shapes[0] != shapes[1]:
                raise ConfigError(
                    f"{where}: found {name!r} of shape {shapes[0]} in the student's {mine!r} and {shapes[1]} in the "
                    f"teacher's {theirs!r}; they have to be alike"
                )
        for kind, module in (("student", to), ("teacher", source)):
            if any(param.numel() == 0 for param in module.parameters()):
                raise ConfigError(
                    f"{where}: found sharded weights in the {kind}; call student_initialization before "
                    "deepspeed.initialize, on models made outside of zero.Init"
                )
    with torch.no_grad():
        for to, source, *_ in copies:
            given = _values(source)
            for name, value in _values(to).items():
                value.copy_(given[name])


def _pairs(settings: LayerReductionConfig) -> list[tuple[str, str]]:
    """Return (name in the student, name in the teacher) of the modules to copy."""
    where = "compression_training.layer_reduction"
    kept, layers = settings.keep_number_layer, settings.teacher_layer
    if layers and not settings.module_name_prefix:
        raise ConfigError(f"{where}.module_name_prefix: found nothing beside teacher_layer; name the list of layers")
    if kept is not None and layers and kept != len(layers):
        raise ConfigError(
            f"{where}.keep_number_layer: found {kept}, but teacher_layer lists {len(layers)}; list as many"
        )
    if not layers and not settings.other_module_name:
        raise ConfigError(f"{where}: found neither teacher_layer nor other_module_name; say what is copied")
    prefix = settings.module_name_prefix
    pairs = [(f"{prefix}.{mine}", f"{prefix}.{theirs}") for mine, theirs in enumerate(layers)]
    return pairs + [(name, name) for name in settings.other_module_name]


def _module(model: nn.Module, name: str, kind: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ConfigError(
            f"compression_training.layer_reduction: found no module {name!r} in the {kind}; see "
            "model.named_modules() for names"
        ) from None


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def inner_of(model: nn.Module) -> nn.Module:
    """Return the model inside an engine or another wrapper, which has it as its only part."""
    return model.get_submodule("module") if [*model._modules] == ["module"] else model


def recursive_getattr(model: nn.Module, module_name: str) -> nn.Module:
    """Return a module by its name, with dots."""
    return model.get_submodule(module_name)


def recursive_setattr(model: nn.Module, module_name: str, module: nn.Module) -> None:
    """Put a module in the place of the one of that name, with dots."""
    model.set_submodule(module_name, module)


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Put a `torch.nn.Linear` in the place of each module of a class whose weight is its transpose.

    Args:
        convert_type: transformers' `Conv1D`, of GPT-2.

    Returns:
        the model, inside of which they were exchanged.
    """
    inner = inner_of(model)
    for name, module in list(inner.named_modules()):
        if not isinstance(module, convert_type):
            continue
        weight, bias = module.weight, getattr(module, "bias", None)
        assert isinstance(weight, Tensor)
        num_inputs, num_outputs = weight.shape
        linear = nn.Linear(num_inputs, num_outputs, bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
        if isinstance(bias, nn.Parameter):
            linear.bias = bias
        recursive_setattr(inner, name, linear.train(module.training))
    return inner
