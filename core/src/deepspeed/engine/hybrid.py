"""`DeepSpeedHybridEngine` trains, and generates with the same weights. `initialize` returns it if
`hybrid_engine.enabled` is true.

    engine.eval(); tokens = engine.generate(input_ids, max_new_tokens=32)
    engine.train(); loss = engine(tokens); engine.backward(loss); engine.step()

generate -> whole weights (stage 3: gathered), LoRA fused, the model's own generate; then both are undone

`FusedLora` adds the product of the LoRA matrices to the base weights while tokens are generated. In LoRA (arXiv
2106.09685) a layer computes x W^T + s x A^T B^T; with W + s B A in place of W one product instead of three gives the
same outputs. Afterwards the former weights are put back bit by bit: in bf16 a subtraction would leave a rounding
error in the frozen weights every time.
"""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from deepspeed._absent import absent_members
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.give_up import begin_use
from deepspeed.config.inference import HybridEngineConfig
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.wrapper import GenerateOfModule, ending_together
from deepspeed.errors import ConfigError, StateError, counted
from deepspeed.log import log_dist
from deepspeed.pipe.module import PipelineModule
from deepspeed.tensor_parallel.ranks import same_random_numbers
from deepspeed.zero.gather import GatheredParameters


class FusedLora:
    """`FusedLora` fuses all LoRA layers of `module`, and puts their base weights back.

    It knows the layers of PEFT (`merge`, `unmerge`, `get_base_layer`) and of DeepSpeed-Chat (`fuse_lora_weight`,
    `unfuse_lora_weight`, `weight`). Adapters that the user has merged or disabled stay so.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._fused: list[tuple[Module, list[tuple[Tensor, Tensor]]]] = []

    @property
    def is_fused(self) -> bool:
        return bool(self._fused)

    def refusal(self, name: str) -> StateError | None:
        """Return the error if `name` cannot be done now, else None."""
        if not self._fused:
            return None
        return StateError(f"{name}: LoRA is fused into the base weights; call train() or unfuse_lora_weight() first")

    def fuse(self) -> None:
        """Add the products to the base weights. A copy of these weights stays in memory until `unfuse`."""
        if self._fused:
            return
        for layer in self._module.modules():
            if not _is_lora(layer) or _is_fused(layer):
                continue
            params = [param for param in _base(layer).parameters(recurse=False) if not _is_of_adapter(layer, param)]
            before: list[tuple[Tensor, Tensor]] = [(param, param.detach().clone()) for param in params]
            _call(layer, "merge", "fuse_lora_weight")
            self._fused.append((layer, before))

    def unfuse(self) -> None:
        """Put the former base weights back."""
        fused, self._fused = self._fused, []
        for layer, before in fused:
            _call(layer, "unmerge", "unfuse_lora_weight")
            for param, value in before:
                param.data.copy_(value)


def _is_lora(module: Module) -> bool:
    names = ("merge", "unmerge", "get_base_layer", "merged", "disable_adapters")
    is_peft = all(hasattr(module, name) for name in names)
    return is_peft or all(hasattr(module, name) for name in ("fuse_lora_weight", "unfuse_lora_weight", "weight"))


def _is_fused(layer: Any) -> bool:
    if hasattr(layer, "merged"):
        return bool(layer.merged) or bool(layer.disable_adapters)
    return bool(getattr(layer, "fuse_lora", False))


def _base(layer: Any) -> Module:
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def _is_of_adapter(layer: Any, param: Tensor) -> bool:
    """Whether a parameter of a DeepSpeed-Chat layer, which is base and adapter in one, belongs to the adapter."""
    return any(param is getattr(layer, name, None) for name in ("lora_right_weight", "lora_left_weight"))


def _call(layer: Any, *names: str) -> None:
    next(getattr(layer, name) for name in names if hasattr(layer, name))()


@dataclass
class GenerationTimes:
    """Seconds of generation between two switches to training mode.

    switch_s: gathering weights, fusing LoRA, and undoing both.
    generate_s: in the model's own `generate`.
    num_calls: calls of `generate`.
    is_over: whether training has begun since.
    """

    switch_s: float = 0.0
    generate_s: float = 0.0
    num_calls: int = 0
    is_over: bool = False


@absent_members("runtime.hybrid_engine:DeepSpeedHybridEngine")
class DeepSpeedHybridEngine(DeepSpeedEngine):
    """A `DeepSpeedEngine` whose `generate` calls the model's `generate` with whole weights, at every ZeRO stage.

    `module.generate` calls the engine's too, until the engine is gone or destroyed (`wrapper.py`).

    Args:
        hybrid: section `hybrid_engine` of the configuration.
        **parts: as for `DeepSpeedEngine`.

    Raises:
        ConfigError: for a pipeline, whose stages do not generate, and for a model without `generate`.
    """

    def __init__(self, module: torch.nn.Module, *, hybrid: HybridEngineConfig, **parts: Any) -> None:
        super().__init__(module, **parts)
        if isinstance(module, PipelineModule) or not callable(getattr(module, "generate", None)):
            raise ConfigError(
                f"hybrid_engine.enabled: found true for a {type(module).__name__}, which has no generate(); pass a "
                "model of transformers that generates, or set it to false"
            )
        if hybrid.inference_tp_size != self.mesh.size("tp"):
            raise ConfigError(
                f"hybrid_engine.inference_tp_size: found {hybrid.inference_tp_size} with "
                f"{counted(self.mesh.size('tp'), 'tensor-parallel rank')} in training; tokens are generated over these "
                "ranks, so set both to the same number (tensor_parallel.autotp_size)"
            )
        self._gathers_all = self.sharding.stage == 3 and hybrid.pin_parameters
        self._tensor_ranks = self.mesh.group("tp") if self.mesh.size("tp") > 1 else None
        self._lora = FusedLora(module)
        if self._leading is None:
            self._leading = GenerateOfModule.lead(module, self._generate_of_module)
        self._generate = self._leading.own
        self._takes_synced = _takes_synced_gpus(self._generate, module)
        #: times of the current generation, or else of the last one
        self.generation_times = GenerationTimes()
        self._training.refuse_backward = self._lora.refusal

    @property
    def is_lora_fused(self) -> bool:
        """Whether LoRA's products are in the base weights now: within `generate`, or after `fuse_lora_weight`."""
        return self._lora.is_fused

    @torch.no_grad()
    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model's `generate` with whole weights and fused LoRA layers. All ranks call it together.

        At stage 3 `pin_parameters` gathers all weights once, and each rank generates as many tokens as it needs.
        Without it each layer is gathered for each token, so all ranks go on until the last one is done, and LoRA stays
        unfused. Tensor-parallel ranks pass the same inputs, and sample the same tokens.

        Args:
            *inputs, **kwargs: those of the model's `generate`.

        Returns:
            What the model's `generate` returns.

        Raises:
            StateError: the engine was destroyed, or `offload_states` has moved its states.
        """
        self._refuse_destroyed("generate")
        self.sharding.states.require("generate", weights_only=True)
        begin_use()
        if self._takes_synced and self.sharding.stage == 3:
            kwargs.setdefault("synced_gpus", not self._gathers_all and self.sharding.world_size > 1)
        started_s = _now_s()
        if self.generation_times.is_over:
            self.generation_times = GenerationTimes()
        times = self.generation_times
        times.num_calls += 1
        try:
            with self._whole(), same_random_numbers(self._tensor_ranks), self.precision.forward_context():
                began_s = _now_s()
                with ending_together(self.module, self.sharding.backend):
                    tokens = self._generate(*inputs, **kwargs)
                generated_s = _now_s() - began_s
        except BaseException as error:  # peers wait for this rank's part of the weights, or in the next step
            self.sharding.gradients.forward_failed(error, all_make_it=True)
            raise
        times.generate_s += generated_s
        times.switch_s += _now_s() - started_s - generated_s
        return tokens

    def _generate_of_module(self, own: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.generate(*inputs, **kwargs)

    def fuse_lora_weight(self) -> None:
        """Fuse LoRA until `unfuse_lora_weight` or `train()`, for forwards without gradients.

        Raises:
            ConfigError: at stage 3, whose weights are whole within `generate` only.
        """
        if self.sharding.stage == 3:
            raise ConfigError(
                "fuse_lora_weight: zero_optimization.stage is 3, which shards the weights; generate() fuses them while "
                "they are whole"
            )
        self._lora.fuse()

    def unfuse_lora_weight(self) -> None:
        """Put the base weights back."""
        self._lora.unfuse()

    def train(self, mode: bool = True) -> "DeepSpeedHybridEngine":
        """Set the module's mode; `train()` unfuses LoRA, and logs (INFO) how long generation took."""
        if mode and "_lora" in self.__dict__:
            self._lora.unfuse()
            self._end_times()
        super().train(mode)
        return self

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_fused("backward")
        return super().backward(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_fused("step")
        super().step(*args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        self._refuse_fused("save_checkpoint")
        return super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_fused("load_checkpoint")
        return super().load_checkpoint(*args, **kwargs)

    def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._refuse_fused("module_state_dict")
        return super().module_state_dict(*args, **kwargs)

    def load_module_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_fused("load_module_state_dict")
        super().load_module_state_dict(*args, **kwargs)

    def _whole_weights(self, **choices: Any) -> dict[str, Any] | None:
        self._refuse_fused("save_16bit_model")  # and what libraries call instead
        return super()._whole_weights(**choices)

    def destroy(self) -> None:
        self._lora.unfuse()
        super().destroy()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Gather the weights if the configuration asks for it, and fuse LoRA if all weights are whole."""
        with ExitStack() as stack:
            if self._gathers_all:
                stack.enter_context(GatheredParameters(self.module.parameters()))
            if not self._lora.is_fused and (self._gathers_all or self.sharding.stage < 3):
                stack.callback(self._lora.unfuse)
                self._lora.fuse()
            yield

    def _end_times(self) -> None:
        times = self.generation_times
        if times.num_calls and not times.is_over:
            times.is_over = True
            log_dist(
                f"hybrid engine: {times.num_calls} calls of generate took {times.generate_s:.3f} s, and switching to "
                f"generation and back {times.switch_s:.3f} s"
            )

    def _refuse_fused(self, name: str) -> None:
        if (refusal := self._lora.refusal(name)) is not None:
            raise refusal


def _takes_synced_gpus(generate: Callable[..., Any], module: torch.nn.Module) -> bool:
    """Whether `generate` takes the argument, or passes its arguments on to one that does, as PEFT's models do."""
    params = inspect.signature(generate).parameters
    if "synced_gpus" in params or not any(each.kind is each.VAR_KEYWORD for each in params.values()):
        return "synced_gpus" in params
    inner = {getattr(type(each), "generate", None) for each in module.modules()}
    return any(callable(each) and "synced_gpus" in inspect.signature(each).parameters for each in inner)


def _now_s() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()
