"""`Init` creates linear layers with frozen, quantized weights; `init_lora` adds adapters to them."""

import contextlib
import dataclasses
import functools
from types import TracebackType
from typing import Any

from torch import nn

from deepspeed._absent import absent_members, complete
from deepspeed.errors import ConfigError, StateError
from deepspeed.linear.config import LoRAConfig, QuantizationConfig
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear, freeze


@absent_members("linear.context_manager:Init")
class Init(contextlib.AbstractContextManager["Init"]):
    """A context in which each new `torch.nn.Linear` is a `LoRAOptimizedLinear` without an adapter.

    Weights that `from_pretrained` or `load_state_dict` loads are stored according to `quant_config`. After the load,
    call `init_lora(model)`. Classes derived from `torch.nn.Linear` are not changed.

    Args:
        lora_config: default: `LoRAConfig()`.
        quant_config: None: weights keep their dtype.

    Raises:
        StateError: this object is entered a second time.

    >>> import torch
    >>> with Init(LoRAConfig(lora_r=2, target_mods=["0"]), QuantizationConfig(group_size=16)):
    ...     model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    >>> init_lora(model)
    >>> [name for name, param in model.named_parameters() if param.requires_grad]
    ['0.lora_weight_1.weight', '0.lora_weight_2.weight']
    """

    def __init__(self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None) -> None:
        self._lora = dataclasses.replace(lora_config or LoRAConfig(), delay_lora_init=True)
        self._quantization = quant_config
        self._init: Any = None

    def __enter__(self) -> "Init":
        if self._init is not None:
            raise StateError(
                "deepspeed.linear.Init: found this object entered already; make one for each with statement"
            )
        self._init = init = nn.Linear.__init__

        @functools.wraps(init)
        def construct(layer: nn.Linear, *args: Any, **kwargs: Any) -> None:
            init(layer, *args, **kwargs)
            if type(layer) is nn.Linear:
                freeze(layer, self._lora, self._quantization)

        nn.Linear.__init__ = construct  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        nn.Linear.__init__ = self._init  # type: ignore[method-assign]
        self._init = None


def init_lora(model: nn.Module) -> None:
    """Create the adapters of the layers that `target_mods` names. Call this after the weights are loaded.

    Raises:
        ConfigError: `target_mods` matches none of the model's `LoRAOptimizedLinear`s, so that nothing would train.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, LoRAOptimizedLinear)}
    if layers and not any(_is_target(name, layer) for name, layer in layers.items()):
        ends, names = (
            next(iter(layers.values())).lora_config.target_mods,
            sorted({each.rpartition(".")[2] for each in layers}),
        )
        raise ConfigError(
            f"LoRAConfig.target_mods: found {ends}, but no layer's name ends so; the ends are {', '.join(names[:20])}"
        )
    for name, module in layers.items():
        for param in module.parameters(recurse=False):  # a load may have replaced parameters
            param.requires_grad_(False)
        if _is_target(name, module):
            module.init_lora()
        else:
            module.disable()


def _is_target(name: str, layer: LoRAOptimizedLinear) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in layer.lora_config.target_mods)


complete(__name__)
