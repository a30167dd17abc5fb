"""`DeepSpeedEngine`: the module with its parts. Each method is a few lines; the work is in the parts.

forward   -> precision.cast_inputs, the module, sharding.gradients.window.watch
backward  -> precision.scale, autograd (hooks fill buckets: zero/gradient_reduction.py)
step      -> at a boundary of the schedule: sharding.gradients.reduce and the step (training.py)
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from deepspeed._absent import absent_members
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.layout import location
from deepspeed.comm.give_up import begin_use, note_engine_gone
from deepspeed.compatibility import FEATURES
from deepspeed.config.constants import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.data import DeepSpeedDataLoader
from deepspeed.data.loader import check_data
from deepspeed.engine import export
from deepspeed.engine.accessors import with_accessors
from deepspeed.engine.export import refuse_unknown_division, whole_weights
from deepspeed.engine.observers import Observers
from deepspeed.engine.saving import EXIT_CODE, Saving
from deepspeed.engine.training import Accumulation, Training
from deepspeed.engine.training_state import load_module, module_state_dict
from deepspeed.engine.wrapper import GenerateOfModule, MethodOfModule, ModuleWrapper, ZeroGradOfModule, ending_together
from deepspeed.errors import CheckpointError, ConfigError, StateError, counted, whole_number
from deepspeed.log import announce, warn_once
from deepspeed.ops.optimizer import check_options
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.running import RunningModel, running
from deepspeed.precision.policy import add_dtype_hint
from deepspeed.zero.module_hooks import add_released_hint
from deepspeed.zero.offload.moved_states import offload_states
from deepspeed.zero.optimizer import not_copied

if TYPE_CHECKING:
    from deepspeed.data.sampler import Curriculum
    from deepspeed.engine.documented import Accessors  # a stub alone
    from deepspeed.engine.step_schedules import StepSchedules
else:
    Accessors = torch.nn.Module


@absent_members("runtime.engine:DeepSpeedEngine")
@with_accessors
class DeepSpeedEngine(ModuleWrapper, Accessors):
    """`DeepSpeedEngine` is what `deepspeed.initialize` returns: call it, `backward(loss)`, `step()`.

    `engine/build.py` builds it and reads the configuration; the engine only holds values and calls its parts.
    Attributes that the engine lacks are looked up in the wrapped module.

    Args:
        training: backward and step, with the precision, the sharding and the optimizer.
        schedule: the schedule of `training`.
        observers: timers, printed lines, monitors.
        saving: checkpoints.
        micro_batch_size: samples per micro-batch and rank.
        config: the configuration as the user wrote it.
        answers: return values of the getters that read the configuration, by name.
        arguments: arguments of `initialize`, by name.
        sparse_tensor_module_names: weights of embeddings, whose gradients may be sparse.
        step_schedules: gives arguments to each forward that trains, and compresses by step; None: no such schedule.
        curriculum: creates the loader of the training data; None: samples are shuffled.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        device: torch.device,
        mesh: Mesh,
        training: Training,
        schedule: Accumulation,
        observers: Observers,
        saving: Saving,
        micro_batch_size: int,
        config: dict[str, Any],
        answers: Mapping[str, Any],
        arguments: Mapping[str, Any],
        sparse_tensor_module_names: set[str],
        step_schedules: "StepSchedules | None" = None,
        curriculum: "Curriculum | None" = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.device = device
        #: the axes along which ranks are laid out, and this rank's process groups
        self.mesh = mesh
        self.precision = training.precision
        self.sharding = training.sharding
        self.schedule = schedule
        self.monitor = observers.monitor
        self.timers = observers.breakdown.timers
        self.tput_timer = observers.tput_timer
        self.checkpointer = saving.checkpointer
        self.config = config
        self.sparse_tensor_module_names = sparse_tensor_module_names
        self.collate_fn = arguments.get("collate_fn")
        self._training = training
        self._observers = observers
        self._saving = saving
        self._micro_batch_size = micro_batch_size
        self._answers = answers
        self._arguments = dict(arguments)
        #: returns the client_state of the checkpoint that `checkpoint.on_sigterm` saves; None: no client_state
        self.sigterm_client_state: Callable[[], Mapping[str, Any]] | None = None
        self._step_schedules = step_schedules
        self._curriculum = curriculum
        self._is_destroyed = False
        self._note_gone = weakref.finalize(self, note_engine_gone)  # once
        self._note_gone.atexit = False
        self._running = RunningModel(partial(mesh.group, "tp"))
        self._leading: MethodOfModule | None = None
        #: the first forward creates the group of these ranks, so a rank that fails before it has no group to leave
        self._divides_sequences = mesh.size("sp") > 1
        is_divided = any(mesh.size(axis) > 1 for axis in mesh.layout.axes if axis != "dp")
        if (is_divided or self.sharding.units.divided()) and callable(getattr(module, "generate", None)):
            self._leading = GenerateOfModule.lead(module, self._generate_of_module)
        self._zero_grad = ZeroGradOfModule.lead(module, self._zero_grad_of_module)
        data = arguments.get("training_data")
        self.training_dataloader = self._training_loader(data) if data is not None else None

    # ---- the step ---------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward in the engine's precision.

        If a forward with gradients fails, the gradients of the step are dropped, as after a failed backward: the step
        begins again with the next micro-batch.
        """
        self.sharding.states.require("forward", weights_only=True)
        begin_use()
        self.sharding.gradients.window.begin_forward()
        inputs, kwargs = self.precision.cast_inputs(inputs, kwargs)
        module: Any = self._modules["module"]  # `self.module` comes by `__getattr__`, after a failed lookup
        if self._step_schedules is not None:
            kwargs = {**kwargs, **self._step_schedules.arguments(trains=module.training)}
        order = self._training.order if module.training or torch.is_grad_enabled() else None
        stream = nullcontext() if order is None else order.of_forward(self.global_steps)
        with self._observers.forward(), self.precision.forward_context(), stream, running(self._running):
            try:
                outputs = module(*inputs, **kwargs)
            except BaseException as error:
                self.sharding.gradients.forward_failed(error, all_make_it=self._divides_sequences)
                if isinstance(error, RuntimeError | ValueError):
                    self.sharding.states.refuse_converted()
                    add_dtype_hint(error, self.precision.model_dtype, self.module, inputs, kwargs)
                    add_released_hint(error, self.module.parameters())
                raise
        if torch.is_grad_enabled():
            self.sharding.gradients.window.watch(outputs)
        return outputs

    def _generate_of_module(self, own: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own `generate`. If it fails, peers that may wait for this rank are notified."""
        begin_use()
        try:
            with ending_together(self.module, self.sharding.backend):
                return own(*inputs, **kwargs)
        except BaseException as error:
            with torch.no_grad():
                self.sharding.gradients.forward_failed(error, all_make_it=self._divides_sequences)
            raise

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        gradient: Tensor | Sequence[Tensor | None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the gradients of `loss`, scaled for fp16 and divided by the accumulation steps.

        Args:
            loss: a scalar that requires a gradient, or any tensor if `gradient` is given; or a list of these.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: False if the loss was divided by the accumulation steps already.
            gradient: gradient of the final loss with respect to `loss`, in the shape of `loss`, if `loss` is an output
                whose backward began elsewhere; for a list of tensors a list, with None for a scalar.
            **kwargs: passed to `torch.autograd.backward`.

        Returns:
            `loss`, divided by the accumulation steps.

        Raises:
            ValueError: for a tensor of several elements without its gradient, or one that requires no gradient.
        """
        self.sharding.states.require("backward")  # before the backward: a failed one drops all gradients of the step
        begin_use()
        return self._training.backward(
            loss, gradient, is_divided=not scale_wrt_gas, retain_graph=retain_graph, **kwargs
        )

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss scaled for a plain backward: `engine.scale(loss).backward()`. Only fp16 needs it.

        Scale every loss of a step, or none. It is an error if a plain backward reaches the weights without passing a
        scaled loss, or if a step has changed the scale since the loss was scaled.
        """
        return self._training.scale(loss)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Make one optimizer step at a gradient accumulation boundary; else only count the micro-batch.

        Args:
            lr_kwargs: passed to the learning rate schedule's step.

        Raises:
            CheckpointError: the asynchronous save in flight has failed on this rank. The step was made.
        """
        self._refuse_destroyed("step")
        if not self.schedule.syncs:
            raise StateError("step: found inside no_sync() or coalesce_grad_reduction(); leave it before the step")
        begin_use()
        progress = self._training.progress
        steps_before = progress.global_steps
        self._training.step(lr_kwargs)
        if self.checkpointer.copies_later:
            self.checkpointer.raise_failure()  # after the step, which the peers make too
        if progress.global_steps > steps_before:
            self._end_if_told()

    def _end_if_told(self) -> None:
        """Save and exit if `checkpoint.on_sigterm` asks for it. Every rank calls it after each optimizer step.

        Raises:
            SystemExit: with code 143: the job was told to end.
        """
        sigterm, folder = self._saving.sigterm, self._saving.last_dir
        if sigterm is None or not sigterm.is_due(self.global_steps):
            return
        if folder is None:
            warn_once("SIGTERM: nothing is saved: neither save_checkpoint nor load_checkpoint has named a directory")
        else:
            state = None if self.sigterm_client_state is None else self.sigterm_client_state()
            self.save_checkpoint(folder, client_state=state)
            self.wait_for_checkpoint()
            announce(f"SIGTERM: saved in {folder} after step {self.global_steps}", is_asked_for=True)
        raise SystemExit(EXIT_CODE)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied(
            self,
            "call engine.save_checkpoint(folder) to train on later, engine.save_16bit_model(folder) for the weights "
            "alone, or copy engine.module, at stage 3 inside "
            "deepspeed.zero.GatheredParameters(engine.module.parameters())",
        )

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
            ConfigError: the stage or `deterministic` reduces gradients after every backward.
        """
        stage = self.sharding.options.stage
        if stage.reduces_every_backward:
            why = (
                "deterministic.enabled is true, which sums over the ranks after every backward; leave it out"
                if stage.fixes_order
                else f"zero_optimization.stage is {stage.number}, which shards gradients after every backward; use "
                "stage 0 or 1"
            )
            raise ConfigError(f"no_sync: {why}")
        return self.schedule.no_sync()

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backwards inside the context only accumulate on this rank; their sum is reduced once, when it ends.

        Use it for several losses of one step, at any stage. Inside the context a rank keeps whole gradients, also at
        stages 2 and 3. All ranks enter and leave it together; `step` comes after it.

        Raises:
            StateError: inside `no_sync` or another `coalesce_grad_reduction`.
        """
        self._refuse_destroyed("coalesce_grad_reduction")
        if not self.schedule.syncs:
            raise StateError(
                "coalesce_grad_reduction: found inside no_sync() or another coalesce_grad_reduction(); leave that first"
            )
        try:
            with self.schedule.no_sync():
                yield
        except BaseException:
            self.sharding.gradients.abandon()
            raise
        self._training.reduce_postponed()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next backward completes a step, instead of letting the engine count; None: count again."""
        if is_boundary not in (True, False, None):
            raise ConfigError(
                f"set_gradient_accumulation_boundary: asked for {is_boundary!r}, allowed is True, False or None"
            )
        self.schedule.set_boundary(is_boundary)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size through the number of accumulation steps.

        If the current step has had a backward, the new number takes effect in the next step; until then the getters
        return the former one.

        Raises:
            ConfigError: if it is not a multiple of the micro-batch over the data-parallel ranks.
        """
        train_batch_size = whole_number("train_batch_size", train_batch_size)
        dp_size = self.mesh.size("dp")
        per_pass = self._micro_batch_size * dp_size
        if train_batch_size % per_pass != 0:
            raise ConfigError(
                f"train_batch_size: asked for {train_batch_size}, which is not a multiple of {per_pass} (micro-batch "
                f"{self._micro_batch_size} x {counted(dp_size, 'data-parallel rank')})"
            )
        self._set_batch(train_batch_size, train_batch_size // per_pass)

    def _set_batch(self, train_batch_size: int, num_steps: int) -> None:
        self._training.set_batch(train_batch_size, num_steps)
        if self._curriculum is not None:
            self._curriculum.set_batch(self._micro_batch_size, num_steps)
        if self.random_ltd_scheduler is not None:
            self.random_ltd_scheduler.global_batch_size = train_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch and with it the global batch; accumulation steps stay."""
        self._micro_batch_size = whole_number("train_micro_batch_size_per_gpu", micro_batch_size)
        num_steps = self._training.next_num_steps
        self._set_batch(self._micro_batch_size * self.mesh.size("dp") * num_steps, num_steps)

    def set_gradient_accumulation_steps(self, num_steps: int) -> None:
        """Change the number of micro-batches per step; the micro-batch stays."""
        num_steps = whole_number("gradient_accumulation_steps", num_steps)
        self.set_train_batch_size(num_steps * self._micro_batch_size * self.mesh.size("dp"))

    # ---- learning rate ----------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """Learning rate of every parameter group."""
        return self._training.group_values("lr")

    def set_lr(self, lr: float) -> None:
        """Give every parameter group this learning rate.

        Raises:
            ConfigError: it is no number of at least 0.
        """
        try:
            check_options(lr=lr)
        except ConfigError as error:
            raise ConfigError(f"set_lr: {error}") from None
        for group in self._training.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Momentum (or betas) of every parameter group."""
        return self._training.momentum()

    # ---- the module -------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated so far. A batch size that was set meanwhile takes effect now."""
        self._training.zero_grad()

    def _zero_grad_of_module(self, own: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the module's own `zero_grad`, and warn if it leaves gradients to which the next backward adds."""
        own(*inputs, **kwargs)
        if self.sharding.gradients.keeps_hidden:
            warn_once(
                "module.zero_grad(): found gradients that the engine keeps outside of param.grad, so that they stay, "
                "and the next backward adds to them; call engine.zero_grad() to drop them"
            )

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
        self.sharding.before_compile()
        if self._training.order is not None:
            self._training.order.stop_watching()
        self.module.compile(backend=backend or get_accelerator().get_compile_backend(), **(compile_kwargs or {}))
        if self._training.order is not None:
            self._training.order.watch_compiled(self.module)
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        return self.__dict__.get("_is_compiled", False)

    def _training_loader(self, data: Dataset[Any]) -> DeepSpeedDataLoader:
        """Return the data loader that `initialize(training_data=...)` asks for."""
        return self.deepspeed_io(data)

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
        """Create a loader that gives this rank its share of `dataset` in micro-batches.

        Args:
            batch_size: samples per micro-batch; default: `train_micro_batch_size_per_gpu`, which a curriculum needs.
            route: "train" shuffles; the first dataset of that route follows the curriculum of `data_efficiency`, if
                there is one. "eval" and "predict" keep the order.

        Raises:
            ConfigError: `dataset` is no dataset, or `batch_size` is not the one that the curriculum draws.
        """
        collate_fn = collate_fn or self.collate_fn
        check_data("deepspeed_io: dataset", dataset, collate_fn, is_sampled=data_sampler is not None)
        can_pin = self.device.type != "cpu"
        pin_memory = pin_memory and can_pin
        if self._curriculum is not None and route == "train" and data_sampler is None:
            if self._curriculum.draws(dataset):
                return self._curriculum.loader(
                    dataset,
                    batch_size,
                    can_pin=can_pin,
                    pin_memory=pin_memory,
                    collate_fn=collate_fn,
                    num_workers=num_local_io_workers,
                )
            warn_once(
                "deepspeed_io: found another data set than the first one, whose samples the curriculum draws; this one "
                'is shuffled without it. Give route="eval" for its own order'
            )
        batch_size = batch_size or self._micro_batch_size
        deals = route == "train" and self.sharding.options.stage.fixes_order
        return DeepSpeedDataLoader(
            dataset,
            batch_size,
            num_replicas=self.mesh.size("dp"),
            rank=self.mesh.rank("dp"),
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            data_sampler=data_sampler,
            shuffle=route == "train",
            drop_last=self.dataloader_drop_last(),
            deals=batch_size * self.schedule.num_steps * self.mesh.size("dp") if deals else None,
        )

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Set the schedules of metrics whose `schedule_type` is "custom", by metric name. A schedule is a function from
        the number of a step, counted from 1, to its difficulty.

        Raises:
            ConfigError: there is no curriculum, or none of that metric.
        """
        if self._curriculum is None:
            raise ConfigError(
                "set_custom_curriculum_learning_schedule: found no curriculum; switch on data_efficiency, its "
                "data_sampling and curriculum_learning there"
            )
        self._curriculum.set_schedules(schedule_func_dict)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """Call a function on each batch of the training data that a curriculum chose: it gets the batch and the state
        of the sampler, with `current_difficulties`, and returns the batch. Without a curriculum it is not called.
        """
        if self._curriculum is None or self.training_dataloader is None:
            warn_once("set_data_post_process_func: found no curriculum over training data, so that nothing calls it")
        else:
            self.training_dataloader.post_process_func = post_process_func

    def random_ltd_initialize(self) -> None:
        """Let the layers that `convert_to_random_ltd`, which calls this, has wrapped drop tokens, as configured."""
        self.sharding.units.named_parameters = list(self.module.named_parameters())  # wrapping has renamed them
        if self.random_ltd_scheduler is not None:
            from deepspeed.data.random_ltd import initialize_layers  # late: few runs ask for it

            initialize_layers(self.module, self.random_ltd_scheduler)

    def is_map_style_dataset(self, obj: Any) -> bool:
        """Whether `obj` has `__getitem__` and `__len__`, as `torch.utils.data.Dataset` may."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    def is_iterable_style_dataset(self, obj: Any) -> bool:
        """Whether `obj` is a `torch.utils.data.IterableDataset`."""
        return isinstance(obj, IterableDataset)

    # ---- checkpoints and weights ------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save weights, optimizer, schedule and counters under `<save_dir>/<tag>`; every rank calls it.

        Args:
            tag: default `global_step<N>`.
            client_state: the user's own values, returned by `load_checkpoint`.
            save_latest: let the file `latest` name this checkpoint.
            exclude_frozen_parameters: omit parameters without gradient.

        With `"checkpoint": {"async_save": true}` it returns when every rank has copied its weights. Master weights
        and states are copied until the next update, which waits for the copy. Meanwhile a process per rank writes, and
        `latest` names the checkpoint once it is complete. A save that is still running is waited for first.

        Returns:
            True. Failures raise CheckpointError on every rank, and the former checkpoint stays. A failure of an
            asynchronous save is raised at the end of a later `step()`, or by the next `save_checkpoint`,
            `load_checkpoint`, `wait_for_checkpoint` or `destroy`.
        """
        self._refuse_destroyed("save_checkpoint")
        self.sharding.states.require("save_checkpoint")
        self.sharding.options.stage.warn_if_apart("save_checkpoint")
        with self._saving.one_at_a_time("save_checkpoint"):
            if self._curriculum is not None:
                self._curriculum.agree()
            self._saving.save(
                save_dir,
                tag,
                client_state=client_state,
                save_latest=save_latest,
                exclude_frozen=exclude_frozen_parameters,
            )
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the asynchronous save in flight is on disk and can be loaded; every rank calls it.

        Returns at once if there is none.

        Raises:
            CheckpointError: on every rank: the save has failed.
        """
        self._refuse_destroyed("wait_for_checkpoint")
        with self._saving.one_at_a_time("wait_for_checkpoint"):
            self._saving.wait()

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved, or a checkpoint of torch.distributed.checkpoint; every rank calls it.

        Args:
            load_dir: the directory of all tags, or the folder in which torch.distributed.checkpoint saved.
            tag: default: the one that `latest` names.
            load_module_strict: the module's names must match exactly; shapes under common names must in any case.
            load_optimizer_states: False leaves the optimizer's state as it is; fp32 master weights start from the
                loaded weights.
            load_lr_scheduler_states: False leaves the schedule.
            load_module_only: weights only; counters stay too.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` instead of `load_state_dict`. What
                it puts into a weight stays, and the fp32 master weight follows. At stage 3 it gets no values of
                sharded parameters, and cannot change them.

        Returns:
            The model file's path and the client state; (None, None), with a warning, if `tag` is None and there is no
            file `latest`.

        Raises:
            CheckpointError: on every rank, for a checkpoint that is missing or does not fit; nothing was changed.
            Exception: whatever the module, the scheduler or `custom_load_fn` raises while it loads; on the other
                ranks a CheckpointError with that reason. The model may then be loaded in part.
        """
        self._refuse_destroyed("load_checkpoint")
        self.sharding.states.require_unmoved("load_checkpoint")
        # states that are made within torch.inference_mode could not be updated after it
        with torch.inference_mode(False), self._saving.one_at_a_time("load_checkpoint"):
            return self._saving.load(
                load_dir,
                tag,
                strict=load_module_strict,
                with_optimizer=load_optimizer_states,
                with_scheduler=load_lr_scheduler_states,
                module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )

    def offload_states(
        self,
        include: Collection[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory until `reload_states()`, so that the device's memory is free for something else.

        All ranks call it, in stages 1 to 3, after a backward or a step. Until `reload_states()`, a forward without
        gradients works if the weights were not moved; anything else that needs the states is an error. Nothing moves on
        an accelerator that computes in host memory, nor do states that are offloaded anyway.

        Args:
            include: kinds of states; default: all. `optim_states`: the optimizer's; `hp_params`: the weights that it
                updates (the model's own weights in fp32 without offload); `lp_params`: the weights that modules
                compute with; `lp_grads`: gradients (stages 2 and 3 keep none between steps);
                `contiguous_grad_buffer`: buffers of the reduction, which are dropped.
            device: "cpu".
            pin_memory: page-lock the host memory, for faster copies.
            non_blocking: return before everything is copied; needs `pin_memory`.

        Raises:
            ConfigError: in stage 0, or for another device.
            StateError: inside a backward, or while states are moved already.
        """
        self._refuse_destroyed("offload_states")
        offload_states(self.sharding, include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back everything that `offload_states` has moved, if anything.

        Args:
            non_blocking: return before everything is copied; later work on the device runs after the copies.
        """
        self.sharding.states.reload(non_blocking=non_blocking)

    def _refuse_destroyed(self, asked: str) -> None:
        if self._is_destroyed:
            raise StateError(f"{asked}: the engine was destroyed; call it before destroy()")

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's state dict, on request without frozen parameters."""
        return module_state_dict(self.module, destination, prefix, keep_vars, exclude_frozen=exclude_frozen_parameters)

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None
    ) -> None:
        """Load weights from `checkpoint["module"]` and start the fp32 master weights from them.

        Raises:
            CheckpointError: for weights of another model, or a `checkpoint` without "module"; nothing was changed.
        """
        if "module" not in checkpoint:
            raise CheckpointError(
                f"load_module_state_dict: found the keys {', '.join(map(repr, list(checkpoint)[:3])) or 'none'} in "
                'checkpoint, and none named "module", which has the weights; pass {"module": state_dict}'
            )
        load_module(self.module, checkpoint["module"], strict=strict, custom_load_fn=custom_load_fn)
        self.sharding.masters_from_weights()

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights alone, in the model's dtype, to `<save_dir>/<save_filename>`; every rank calls it.

        Returns:
            True: whole weights were saved. False in stage 3 without `stage3_gather_16bit_weights_on_model_save`:
            nothing was saved.

        Raises:
            ConfigError: the caller divided the model over ranks, and parameters do not say which part a rank has.
        """
        self.sharding.states.require("save_16bit_model", weights_only=True)
        self.sharding.options.stage.warn_if_apart("save_16bit_model")
        refuse_unknown_division("save_16bit_model", self.module, self.mesh)
        if self.sharding.stage == 3 and not self.zero_gather_16bit_weights_on_model_save():
            warn_once(
                "save_16bit_model: nothing is saved, because the weights are sharded; set "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save, or use save_checkpoint()"
            )
            return False
        path = location(save_dir) / save_filename
        weights = self._whole_weights(everywhere=False, exclude_frozen=exclude_frozen_parameters)
        export.save_weights(weights if self.checkpointer.commits else None, path, self.checkpointer)
        return True

    save_fp16_model = save_16bit_model  # the documented older name

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        refuse_unknown_division("_consolidated_16bit_state_dict", self.module, self.mesh)
        weights = self._whole_weights(everywhere=True, exclude_frozen=exclude_frozen_parameters)
        assert weights is not None
        return export.owned(weights, self.module)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the whole weights of a sharded model on the first rank, None on others. Libraries call it at stage 3.
        A collective."""
        if self.sharding.stage == 3:
            refuse_unknown_division("_zero3_consolidated_16bit_state_dict", self.module, self.mesh)
            weights = self._whole_weights(everywhere=False, exclude_frozen=exclude_frozen_parameters)
            return export.owned(weights, self.module) if weights is not None and self.checkpointer.commits else None
        raise ConfigError(
            f"_zero3_consolidated_16bit_state_dict: zero_optimization.stage is {self.sharding.stage}, nothing is "
            "partitioned; use module.state_dict()"
        )

    def _whole_weights(self, *, everywhere: bool, exclude_frozen: bool) -> dict[str, Any] | None:
        if self.mesh.model_size == 1 and not self.sharding.units.ranks.divides_experts:
            keeps = everywhere or self.checkpointer.commits
            return export.gathered(self.module, keeps=keeps, exclude_frozen=exclude_frozen)
        return whole_weights(
            self.module, self.mesh, everywhere=everywhere, exclude_frozen=exclude_frozen, device=self.device
        )

    def destroy(self) -> None:
        """Remove the hooks, drop gradients, optimizer states and communication buffers, and end the monitors.

        The module keeps its weights, and can be used without an engine or given to `initialize` again. So can an
        optimizer that was given to `initialize`: it refers to the model's parameters again. It keeps the states of
        parameters that it held all the time (stage 0 without fp32 master weights), and no others. An asynchronous save
        that is still running is waited for.

        Raises:
            CheckpointError: the save in flight has failed; the engine is destroyed all the same.
            OSError: offloaded weights cannot be read, so the module is left without them; all else is done.
        """
        if not self._is_destroyed:
            self.sharding.options.stage.warn_if_apart("destroy")
        try:
            self.checkpointer.close()
        finally:
            self._release()

    def _release(self) -> None:
        self._is_destroyed = True
        self._note_gone()
        with ExitStack() as parts:  # each part is released, last to first, even if another one raises
            parts.callback(self._forget_states)
            if self._leading is not None:
                parts.callback(self._leading.put_back)
            parts.callback(self._zero_grad.put_back)
            for ranks in reversed(self.sharding.backends):
                parts.callback(ranks.release)
            parts.callback(self.sharding.destroy)
            if self._training.order is not None:
                parts.callback(self._training.order.close)
            if self._saving.sigterm is not None:
                parts.callback(self._saving.sigterm.close)
            parts.callback(self._observers.close)

    def _forget_states(self) -> None:
        self.optimizer = self.basic_optimizer = self.lr_scheduler = None
        self._arguments.clear()  # a given optimizer holds states
