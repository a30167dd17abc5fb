"""`inject` replaces the forwards of a model's transformer layers with fused blocks, and returns an `Injected`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.errors import ConfigError, StateError
from deepspeed.inference.generate import StaticGeneration, can_generate
from deepspeed.inference.injection.block import FusedBlock
from deepspeed.inference.injection.decoder import Decoder
from deepspeed.inference.injection.policies import POLICIES, InjectionPolicy
from deepspeed.inference.injection.weights import OutputLayer
from deepspeed.precision.policy import cast_buffers, cast_floating

Policies = Mapping[type[nn.Module] | str, InjectionPolicy | tuple[InjectionPolicy, ...]]


@dataclass
class Injected:
    """`Injected` says which layers `inject` replaced in a model, and can restore them.

    model: the given model; its class, parameter names and values are unchanged.
    replaced: names of the layers that use fused blocks.
    left: name -> reason, for layers of known classes that were not replaced.
    """

    model: nn.Module
    replaced: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    _blocks: list[FusedBlock | OutputLayer] = field(default_factory=list, repr=False)
    _generation: StaticGeneration | None = field(default=None, repr=False)

    def restore(self) -> nn.Module:
        """Undo the injection: restore the forwards, and give every parameter its own memory with the same bits."""
        for block in self._blocks:
            block.release()
        if self._generation is not None:
            self._generation.release()
        self._blocks, self._generation, self.replaced = [], None, ()
        return self.model


def inject(
    model: nn.Module,
    *,
    policies: Policies | None = None,
    dtype: torch.dtype | None = None,
    max_out_tokens: int = 1024,
) -> Injected:
    """Replace the forwards of the layers of `model` with fused blocks, and give `model.generate` a preallocated cache.

    Divide a model over tensor-parallel ranks (`tensor_parallel`) before the injection, because the number of this
    rank's heads is read from the weights. Layers without a policy do not change. If no layer has a policy, the model
    does not change, and `replaced` is empty.

    The fused blocks handle calls without gradients (`torch.no_grad`, or no parameter requires a gradient) in evaluation
    mode. Other calls run the layers' own forwards.

    Args:
        policies: layer class, or its qualified name -> policy; they take precedence over the table.
        dtype: floating-point parameters are cast to it; None: no cast.
        max_out_tokens: capacity of the cache of `generate`, for prompt and new tokens.

    Raises:
        ConfigError: max_out_tokens is not positive, or a policy of the caller does not match its layer.
        StateError: the model is injected already.
    """
    if max_out_tokens < 1:
        raise ConfigError(f"inject: max_out_tokens is {max_out_tokens}; give the tokens of the longest sequence")
    layers = list(_known_layers(model, policies or {}))
    if is_injected(model):
        raise StateError("inject: the model is injected already; call restore() of what inject returned first")
    if dtype is not None:
        cast_floating(model.parameters(), dtype)
        cast_buffers(model, None, (), dtype)
    done = Injected(model)
    names = []
    for name, layer, candidates, is_asked in layers:
        try:
            block = FusedBlock(layer, _chosen(layer, candidates))
        except ConfigError as error:
            if is_asked:
                raise ConfigError(f"inject: {name} ({type(layer).__name__}): {error}") from error
            done.left[name] = str(error)
            continue
        layer.forward = block  # type: ignore[method-assign]
        done._blocks.append(block)
        names.append(name)
    done.replaced = tuple(names)
    if names and (output := _output_of(model)) is not None:
        fused = OutputLayer(output)
        output.forward = fused  # type: ignore[method-assign, assignment]
        done._blocks.append(fused)
    if names and can_generate(model):
        done._generation = StaticGeneration(model, max_out_tokens, _decoder_of(model))
    return done


def is_injected(model: nn.Module) -> bool:
    """Return whether a layer of the model uses a fused block."""
    return any(isinstance(vars(module).get("forward"), FusedBlock) for module in model.modules())


def _decoder_of(model: nn.Module) -> Decoder | None:
    """Return the model's `Decoder`; None: the model's own forward computes each token."""
    try:
        return Decoder(model)
    except ConfigError:  # generation is only slower without it
        return None


def _output_of(model: nn.Module) -> nn.Linear | None:
    """Return the linear that computes the logits, if it is a plain one without hooks."""
    asks = getattr(model, "get_output_embeddings", None)
    found = asks() if callable(asks) else None
    is_plain = type(found) is nn.Linear and not (found._forward_hooks or found._forward_pre_hooks)
    return found if is_plain else None


def _known_layers(
    model: nn.Module, policies: Policies
) -> Iterator[tuple[str, nn.Module, tuple[InjectionPolicy, ...], bool]]:
    """Yield (name, layer, policies of its class, whether the caller gave them)."""
    asked = {key if isinstance(key, str) else _qualified(key): value for key, value in policies.items()}
    for name, layer in model.named_modules():
        key = _qualified(type(layer))
        found = asked.get(key, POLICIES.get(key))
        if found is not None:
            yield name, layer, found if isinstance(found, tuple) else (found,), key in asked


def _chosen(layer: nn.Module, candidates: tuple[InjectionPolicy, ...]) -> InjectionPolicy:
    for policy in candidates:
        if all(_value(layer, path) == value for path, value in policy.when):
            return policy
    conditions = "; ".join(", ".join(f"{path} {value}" for path, value in policy.when) for policy in candidates)
    raise ConfigError(f"its configuration fits no policy, which are for: {conditions}")


def _value(layer: Any, path: str) -> Any:
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
