"""`DeepSpeedEngine`: the module with its parts. Each method is a few lines; the work is in the parts.

forward   -> precision.cast_inputs, the module, sharding.window.watch
backward  -> precision.scale, autograd (hooks fill buckets: zero/strategy.py)
step      -> step.take_step at a boundary
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from deepspeed.accelerator import get_accelerator
from deepspeed.compatibility import ENGINE_METHODS, FEATURES
from deepspeed.config import DeepSpeedConfig
from deepspeed.data import DeepSpeedDataLoader
from deepspeed.engine.accessors import EngineAccessors
from deepspeed.engine.accumulation import Accumulation
from deepspeed.engine.observers import Observers
from deepspeed.engine.saving import Saving, create_checkpointer
from deepspeed.engine.step import StepStats, take_step
from deepspeed.errors import ConfigError, StateError
from deepspeed.log import warn_once
from deepspeed.precision import Precision
from deepspeed.precision.dtype_hint import add_dtype_hint
from deepspeed.zero.strategy import BackwardPlan, Sharding


class DeepSpeedEngine(EngineAccessors, Saving, torch.nn.Module):
    """What `deepspeed.initialize` returns: call it, `backward(loss)`, `step()`.

    Built by `engine/build.py`, which reads the configuration; the engine itself only asks its parts.
    Attributes that it does not have are looked up in the wrapped module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        config: DeepSpeedConfig,
        precision: Precision,
        sharding: Sharding,
        schedule: Accumulation,
        observers: Observers,
        basic_optimizer: Optimizer | None,
        device: torch.device,
        training_data: Dataset[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.device = device
        self.precision = precision
        self.sharding = sharding
        self.schedule = schedule
        self.basic_optimizer = basic_optimizer
        self.optimizer: Optimizer | None = None  # the face of it, set by build.py
        self.lr_scheduler: Any = None
        self.config: dict[str, Any] = config.raw
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self.collate_fn = collate_fn
        self._config = config
        self._train_batch_size = int(config.train_batch_size)
        self._micro_batch_size = int(config.train_micro_batch_size_per_gpu)
        self._stats: StepStats | None = None
        self._loss_is_scaled = False
        self._had_backward = False  # since the last step
        self._arguments = dict(arguments or {})  # what initialize was given, for the accessors
        #: weights of embeddings, whose gradients may be sparse; none without the key `sparse_gradients`
        self.sparse_tensor_module_names = _embedding_weights(module) if config.sparse_gradients else set()
        self._observers = observers
        self.monitor = observers.monitor
        self.timers = observers.breakdown.timers
        self.tput_timer = observers.tput_timer
        self.checkpointer = create_checkpointer(self)
        self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None

    # ---- the step ---------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, in the engine's precision."""
        self.sharding.window.begin_forward()
        inputs, kwargs = self.precision.cast_inputs(inputs, kwargs)
        with self._observers.forward(), self.precision.forward_context():
            try:
                outputs = self.module(*inputs, **kwargs)
            except (RuntimeError, ValueError) as error:
                add_dtype_hint(error, self.precision.model_dtype, self.module.parameters(), inputs, kwargs)
                raise
        if torch.is_grad_enabled():
            self.sharding.window.watch(outputs)
        return outputs

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any) -> Tensor:
        """Gradients of `loss`, scaled for fp16 and divided by the accumulation steps.

        Args:
            loss: a scalar that requires a gradient.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: False if the loss was divided by the accumulation steps already.
            **kwargs: passed to `Tensor.backward`.

        Returns:
            The loss, divided by the accumulation steps.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                "backward: asked for the gradients of one loss, found "
                + (f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
                   if isinstance(loss, Tensor) else f"{type(loss).__name__}")
                + "; pass a scalar loss that was computed from the engine's output"
            )  # fmt: skip
        if scale_wrt_gas and self.schedule.num_steps > 1:
            loss = loss / self.schedule.num_steps
        window = self.sharding.window
        phase = self._observers.phase
        with phase("backward"):
            with window.opened(), phase("backward_inner"):
                self.precision.scale(loss).backward(retain_graph=retain_graph, **kwargs)
            with phase("backward_allreduce"):
                window.close()
        self._observers.saw_loss(loss)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as a plain `.backward()` needs it: `engine.scale(loss).backward()`. Needed for fp16 only."""
        self._loss_is_scaled = True
        return self.precision.scale(loss)

    def plan_backward(self, by_user: bool) -> BackwardPlan:
        """Asked by the sharding when a backward begins. An unscaled loss in fp16 is refused at its first gradient."""
        self._had_backward = True
        plan = self.schedule.plan(by_user)
        if by_user and self.precision.loss_scaler.loss_scale != 1.0 and not self._loss_is_scaled:
            refusal = StateError(
                f"backward: the loss scale is {self.loss_scale():g} and loss.backward() got an unscaled loss; call "
                "engine.backward(loss) or engine.scale(loss).backward()"
            )
            plan = dataclasses.replace(plan, refusal=refusal)
        self._loss_is_scaled = False
        return plan

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a gradient accumulation boundary one optimizer step, else only the count of micro-batches.

        Args:
            lr_kwargs: passed to the learning rate schedule's step.
        """
        if not self.schedule.syncs:
            raise StateError("step: found inside no_sync(); leave it before the step")
        self.sharding.window.abort_if_left()
        if self.schedule.is_boundary():
            self._step(lr_kwargs)
        else:
            self._observers.micro_batch_ended()
        self.schedule.advance()

    def _step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        if self.basic_optimizer is None:
            raise StateError(
                'step: the engine has no optimizer; give one to initialize() or name one in the config ("optimizer"), '
                "with a model that has parameters to train"
            )
        if not self._had_backward:
            warn_once(
                "step: found no backward since the last step; no weight gets a new gradient, and the step is counted "
                "and moves the learning rate schedule all the same. Call engine.backward(loss) before engine.step()"
            )
        self._had_backward = False
        self._stats = take_step(
            self.sharding,
            self.precision,
            lambda: self._advance_schedule(lr_kwargs),
            self.global_steps,
            self._observers.phase,
        )
        self.global_steps += 1
        self.global_samples += self._train_batch_size
        self.skipped_steps += not self._stats.applied
        self._observers.step_ended(self, self._stats)

    def _advance_schedule(self, lr_kwargs: dict[str, Any] | None) -> None:
        if self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def print_forward_breakdown(self, fwd_time: float) -> None:
        """Print a table of one forward and its parts, as far as `wall_clock_breakdown` measures them.

        Args:
            fwd_time: milliseconds of the forward.
        """
        self._observers.print_forward_breakdown(fwd_time)

    # ---- gradient accumulation --------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside the context only accumulate on this rank.

        Raises:
            ConfigError: with sharded gradients, which cannot wait on one rank.
        """
        if self.sharding.reduces_always:
            raise ConfigError(
                f"no_sync: zero_optimization.stage is {self.sharding.stage}, which shards gradients after every "
                "backward; use stage 0 or 1"
            )
        return self.schedule.no_sync()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next backward completes a step, instead of letting the engine count."""
        self.schedule.set_boundary(is_boundary)

    @property
    def micro_steps(self) -> int:
        return self.schedule.micro_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size through the number of accumulation steps.

        Raises:
            ConfigError: if it is not a multiple of the micro-batch over all ranks.
        """
        per_pass = self._micro_batch_size * self.sharding.world_size
        if train_batch_size <= 0 or train_batch_size % per_pass != 0:
            raise ConfigError(
                f"train_batch_size: asked for {train_batch_size}, which is not a multiple of {per_pass} (micro-batch "
                f"{self._micro_batch_size} x {self.sharding.world_size} ranks)"
            )
        self.schedule.num_steps = train_batch_size // per_pass
        self._train_batch_size = train_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch and with it the global batch; accumulation steps stay."""
        if micro_batch_size <= 0:
            raise ConfigError(f"train_micro_batch_size_per_gpu: asked for {micro_batch_size}, allowed is 1 or more")
        self._micro_batch_size = micro_batch_size
        self._train_batch_size = micro_batch_size * self.sharding.world_size * self.schedule.num_steps

    def set_gradient_accumulation_steps(self, num_steps: int) -> None:
        """Change the number of micro-batches per step; the micro-batch stays."""
        if num_steps <= 0:
            raise ConfigError(f"gradient_accumulation_steps: asked for {num_steps}, allowed is 1 or more")
        self.set_train_batch_size(num_steps * self._micro_batch_size * self.sharding.world_size)

    # ---- learning rate ----------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """Learning rate of every parameter group."""
        return self._group_values("lr")

    def set_lr(self, lr: float) -> None:
        for group in self.basic_optimizer.param_groups if self.basic_optimizer is not None else []:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Momentum (or betas) of every parameter group."""
        return self._group_values("betas") or self._group_values("momentum")

    def _group_values(self, name: str) -> list[Any]:
        groups = self.basic_optimizer.param_groups if self.basic_optimizer is not None else []
        return [group[name] for group in groups if name in group]

    # ---- the module -------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            try:
                return getattr(module, name)
            except AttributeError:
                if name in ENGINE_METHODS:
                    raise AttributeError(ENGINE_METHODS[name].explain()) from None
                raise AttributeError(
                    f"neither {type(self).__name__} nor the wrapped {type(module).__name__} has {name!r}"
                ) from None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated so far."""
        self.sharding.zero_grad()

    def compile(  # type: ignore[override]
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module in place with `torch.compile`.

        Raises:
            ConfigError: for a DeepCompile `schedule` or compiled autograd, which are not in this version.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ConfigError(FEATURES["DeepCompile"].explain("compile: schedule and compiled_autograd_enabled"))
        self.module.compile(backend=backend or get_accelerator().get_compile_backend(), **(compile_kwargs or {}))
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        return self.__dict__.get("_is_compiled", False)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> DeepSpeedDataLoader:
        """A loader that gives this rank its share of `dataset` in micro-batches.

        Args:
            route: "train" shuffles; "eval" and "predict" keep the order.
        """
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self._micro_batch_size,
            num_replicas=self.sharding.world_size,
            rank=self.sharding.rank,
            pin_memory=pin_memory and self.device.type != "cpu",
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers,
            data_sampler=data_sampler,
            shuffle=route == "train",
            drop_last=self._config.dataloader_drop_last,
        )

    def is_map_style_dataset(self, obj: Any) -> bool:
        """Whether `obj` has `__getitem__` and `__len__`, as `torch.utils.data.Dataset` may."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    def is_iterable_style_dataset(self, obj: Any) -> bool:
        """Whether `obj` is a `torch.utils.data.IterableDataset`."""
        return isinstance(obj, IterableDataset)

    def destroy(self) -> None:
        """Remove the hooks, drop gradients, optimizer states and communication buffers, and end the monitors.

        The module keeps its weights, and can be used without an engine or given to `initialize` again. So can an
        optimizer that was given to `initialize`: it holds the model's parameters again, and keeps only the states of
        those that it held all the time (stage 0 without fp32 masters).
        """
        self._observers.close()
        self.sharding.destroy()
        self.sharding.backend.release()
        self.optimizer = self.basic_optimizer = self.lr_scheduler = None
        self._arguments.clear()  # a given optimizer holds states


def _embedding_weights(module: torch.nn.Module) -> set[str]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {f"{name}.weight".lstrip(".") for name, part in module.named_modules() if isinstance(part, kinds)}
