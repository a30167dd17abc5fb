"""`PipelineEngine`, which `initialize` returns for a `PipelineModule`. One call is a batch; `pipe/stage.py` runs it.

train_batch -> take_batch (all ranks agree), Stage.run: forward, backward -> training.py, messages; step
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset

from deepspeed._absent import absent_members
from deepspeed.activation import checkpointing
from deepspeed.comm.give_up import begin_use
from deepspeed.comm.point_to_point import PointToPoint
from deepspeed.comm.torch_group import group_backend
from deepspeed.comm.values import HeardFailure, all_gather_values
from deepspeed.config.parallel import PipelineConfig
from deepspeed.data import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.observers import Observers
from deepspeed.engine.training import Training
from deepspeed.errors import ConfigError, PipelineError, StateError, counted
from deepspeed.parallel import groups
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.running import RunningModel, running
from deepspeed.pipe.batch import Batch, DataFailed, take_batch
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.schedule import (
    DataParallelSchedule,
    InferenceSchedule,
    InterleavedInferenceSchedule,
    InterleavedSchedule,
    PipeSchedule,
    TrainSchedule,
    ZeroBubbleSchedule,
)
from deepspeed.pipe.stage import Stage
from deepspeed.pipe.timeline import in_message_order
from deepspeed.pipe.topology import PipelineParallelGrid, layout_of
from deepspeed.precision.policy import add_dtype_hint

__all__ = ["PipelineEngine", "PipelineError"]

# what to do where a call has no iterator
_OF_TRAINING = "pass an iterator, or training_data to initialize, or call set_dataloader(loader)"
_OF_EVALUATION = "pass an iterator of the samples to evaluate; the iterator of training stays where it is"


@absent_members("runtime.pipe.engine:PipelineEngine")
class PipelineEngine(DeepSpeedEngine):
    """Trains the stages of a `PipelineModule`; one call trains on `gradient_accumulation_steps` micro-batches.

    The first and the last stage take micro-batches `(inputs, labels)` from their iterators; the others need none. All
    ranks call each method together.

    Args:
        pipeline: section `pipeline` of the configuration.
        **parts: as for `DeepSpeedEngine`.
    """

    pipeline_parallelism = True

    def __init__(self, module: PipelineModule, *, pipeline: PipelineConfig, **parts: Any) -> None:
        super().__init__(module, **parts)
        mesh = self.mesh
        self.grid = PipelineParallelGrid(mesh=mesh)
        module.use_grid(self.grid)
        self.num_stages, self.stage_id = mesh.size("pp"), mesh.rank("pp")
        self._schedule_type = _schedule_type(pipeline.schedule, module, self.sharding.stage)
        self._batch_fn: Callable[[Any], Any] | None = None
        self._iterator: Iterator[Any] | None = None
        #: mean loss of the last batch, over micro-batches and data-parallel ranks
        self.agg_train_loss: Tensor | None = None
        self._losses = group_backend(mesh.norm_group)  # for losses, and for values that ranks agree on
        self._losses.connect()
        peers = PointToPoint(mesh.group("pp"))
        if self.num_stages > 1:
            peers.connect()
        self._orders_messages = self.num_stages > 1 and not peers.completes_on_host
        self._schedules: dict[tuple[bool, int], PipeSchedule] = {}
        self._compute = _Compute(self._training, self._observers, module, self._running, self._step)
        self._stage = Stage(
            self._compute,
            peers,
            stage_id=self.stage_id,
            num_stages=self.num_stages,
            num_chunks=module.interleave,
            device=self.device,
        )
        if self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)

    # ---- a batch ------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one batch: forward and backward of all its micro-batches, and a step.

        Args:
            data_iter: yields micro-batches on the first and last stage; default: the iterator of `set_dataiterator`,
                `set_dataloader` or `initialize(training_data=...)`.

        Returns:
            0-D, fp32, on every rank: the mean loss over micro-batches and data-parallel ranks.

        Raises:
            StateError: on every rank: an iterator ended early.
            ConfigError: on every rank: the first and the last stage were given different shapes.
            Exception: what the data iterator or `set_batch_fn`'s function raised on this rank.
            CommError: the iterator or function of another rank raised; the message names that rank.
        """
        if not torch.is_grad_enabled():
            raise PipelineError("train_batch: found gradients disabled; call it outside of torch.no_grad()")
        self.sharding.states.require("train_batch")
        begin_use()
        if self._step_schedules is not None:
            self._step_schedules.arguments()  # layers take none; the loading of the batch reads the length
        num_micros = self.schedule.num_steps
        batch = self._take("train_batch", self._iterator if data_iter is None else data_iter, num_micros, _OF_TRAINING)
        self.module.train()
        self._observers.tput_timer.start()
        schedule = self._schedule_of(num_micros, trains=True)
        self._run(schedule, lambda: self._stage.run(schedule, batch))
        assert self.agg_train_loss is not None
        self._end_if_told()
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run one batch forward, in the module's `eval()` mode and without gradients.

        Args:
            data_iter: yields micro-batches on the first and last stage; there it is needed, since the iterator of
                training keeps its place.
            return_logits: return the outputs of the micro-batches too, a list on the last stage, None on others.
            compute_loss: False: return outputs in place of losses, on the last stage.
            reduce_output: "avg": the mean over micro-batches and data-parallel ranks; None: a list of this rank's own.
            bcast_loss: return losses on every rank; False: only the last stage returns them, and others None.
            num_micro_batches: default: `gradient_accumulation_steps`.

        Returns:
            the loss; with `return_logits` a pair (loss, outputs).

        Raises:
            ConfigError: on every rank: the first or the last stage was given no `data_iter`.
        """
        if reduce_output not in ("avg", None):
            raise ConfigError(f'eval_batch: found reduce_output {reduce_output!r}; use "avg" or None')
        num_micros = self.schedule.num_steps if num_micro_batches is None else num_micro_batches
        if num_micros < 1:
            raise ConfigError(f"eval_batch: found num_micro_batches {num_micros}; give 1 or more")
        options = {"compute_loss": compute_loss, "reduce_output": reduce_output, "bcast_loss": bcast_loss}
        begin_use()
        if self._step_schedules is not None:
            self._step_schedules.arguments(trains=False)
        batch = self._take("eval_batch", data_iter, num_micros, _OF_EVALUATION, options)
        schedule = self._schedule_of(num_micros, trains=False)
        keeps_outputs = return_logits or not compute_loss

        def run() -> tuple[Any, Any]:
            results = self._stage.run(schedule, batch, keeps_outputs=keeps_outputs, keeps_loss=compute_loss)
            if compute_loss:
                return self._losses_of(results.losses, num_micros, reduce_output, is_shared=bcast_loss), results.outputs
            return self._reduced(results.outputs, reduce_output) if self.is_last_stage() else None, results.outputs

        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                value, outputs = self._run(schedule, run)
        finally:
            self.module.train(was_training)
        return (value, outputs if self.is_last_stage() else None) if return_logits else value

    def _training_loader(self, data: Dataset[Any]) -> DeepSpeedDataLoader:
        """Return a loader that keeps the order of the dataset, as DeepSpeed's does, or follows the curriculum."""
        return self.deepspeed_io(data, route="eval" if self._curriculum is None else "train")

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take micro-batches from a loader, which starts again at its end."""
        if not isinstance(loader, Iterable):
            raise ConfigError(f"set_dataloader: found a {type(loader).__name__}; give an iterable of micro-batches")
        self.training_dataloader = loader  # type: ignore[assignment]
        self._iterator = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Take micro-batches from an iterator. None: take them from the argument of `train_batch`."""
        if iterator is not None and not isinstance(iterator, Iterator):
            advice = "iter() of it, or set_dataloader" if isinstance(iterator, Iterable) else "an iterator"
            raise ConfigError(f"set_dataiterator: found a {type(iterator).__name__}, no iterator; give {advice}")
        self.training_dataloader = None
        self._iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Call `fn` on each value of an iterator; it returns (inputs, labels). None: the iterator yields these."""
        if fn is not None and not callable(fn):
            raise ConfigError(f"set_batch_fn: found a {type(fn).__name__}; give a function of what an iterator gives")
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Does nothing: the shapes between stages are sent with every batch."""

    # ---- where this rank is -------------------------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        """Whether this rank's stage takes inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank's stage computes the loss."""
        return self.stage_id == self.num_stages - 1

    def is_pipe_parallel(self) -> bool:
        """Whether there are several stages."""
        return self.num_stages > 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches per batch."""
        return self.schedule.num_steps

    # ---- refused ------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a rank has one stage."""
        self._refuse("forward")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a rank has one stage."""
        self._refuse("backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: `train_batch` makes the step."""
        self._refuse("step")

    def coalesce_grad_reduction(self) -> NoReturn:
        """Not for pipelines."""
        self._refuse("coalesce_grad_reduction")

    def no_sync(self) -> NoReturn:
        """Refused: gradients are reduced once per batch."""
        self._refuse("no_sync")

    def _refuse(self, asked: str) -> NoReturn:
        raise PipelineError(
            f"{asked}: this rank has stage {self.stage_id} of {self.num_stages}, and a micro-batch passes all of them "
            "in one call; use train_batch(data_iter) or eval_batch(data_iter) on every rank"
        )

    # ---- inside -------------------------------------------------------------------------------------------------

    def _take(
        self,
        call: str,
        iterator: Iterator[Any] | None,
        num_micros: int,
        remedy: str,
        options: Mapping[str, Any] | None = None,
    ) -> Batch:
        loads = self.is_first_stage() or self.is_last_stage()
        try:
            return take_batch(
                iterator if loads else None,
                num_micros,
                loads=loads,
                call=call,
                options=options or {},
                backend=self._losses,
                pipeline=self.mesh.rank("dp", "sp") * self.mesh.size("tp") + self.mesh.rank("tp"),
                stage=self.stage_id,
                batch_fn=self._batch_fn,
                shapes_vary=self.module.dynamic_shape,  # type: ignore[arg-type]
                remedy=remedy,
            )
        except DataFailed as failed:
            error = failed.error
        except (ConfigError, StateError, HeardFailure):  # raised on all ranks
            raise
        except BaseException:
            self.sharding.gradients.abandon()
            raise
        raise error  # with its own context

    def _schedule_of(self, num_micros: int, *, trains: bool) -> PipeSchedule:
        """Return this stage's schedule for `num_micros` micro-batches, created at the first call."""
        if (trains, num_micros) not in self._schedules:
            make = self._schedule_type if trains else self._inference_type()
            create = partial(in_message_order, make) if self._orders_messages else make
            self._schedules[trains, num_micros] = create(num_micros, self.num_stages, self.stage_id)
        return self._schedules[trains, num_micros]

    def _inference_type(self) -> Callable[[int, int, int], PipeSchedule]:
        num_chunks: int = self.module.interleave  # type: ignore[assignment]
        if num_chunks == 1:
            return InferenceSchedule
        return partial(InterleavedInferenceSchedule, num_chunks=num_chunks)

    def _run(self, schedule: PipeSchedule, run: Callable[[], Any]) -> Any:
        self._compute.begin(schedule.num_micro_batches)
        try:
            return run()
        except BaseException:
            self.sharding.gradients.abandon()
            raise
        finally:
            self._compute.end()

    def _step(self, losses: Sequence[Tensor]) -> None:
        """End a batch: compute its loss on all ranks, and update the weights."""
        loss = self._losses_of(losses, self.schedule.num_steps, "avg", is_shared=True)
        self.agg_train_loss = loss
        self._observers.saw_loss(loss)
        self.schedule.count_batch()
        self._training.step()
        self.checkpointer.raise_failure()

    def _losses_of(self, losses: Sequence[Tensor], num_micros: int, how: str | None, *, is_shared: bool) -> Any:
        """Return the losses of the last stage's micro-batches, on all ranks if they are shared."""
        mesh = self.mesh
        if how is None:
            if not is_shared:
                return list(losses) or None
            values = torch.zeros(num_micros, dtype=torch.float32, device=self.device)
            if losses:
                values.copy_(torch.stack([loss.float() for loss in losses]))
            group_backend(mesh.group("pp")).all_reduce(values).wait()
            return list(values)
        mean = torch.zeros(1, dtype=torch.float32, device=self.device)
        if losses:
            mean += torch.stack([loss.float() for loss in losses]).mean() / mesh.size("dp", "sp", "tp")
        self._losses.all_reduce(mean).wait()
        return mean[0] if is_shared or self.is_last_stage() else None

    def _reduced(self, outputs: Sequence[Any], how: str | None) -> Any:
        """Return the outputs of the last stage: a list, or their mean."""
        if how is None:
            return list(outputs)
        if not all(isinstance(each, Tensor) and each.shape == outputs[0].shape for each in outputs):
            raise ConfigError(
                "eval_batch: compute_loss=False found outputs that are no tensors of one shape, of which there is no "
                "mean; pass reduce_output=None"
            )
        mean = torch.stack([each.float() for each in outputs]).mean(0)
        group_backend(self.mesh.gradient_group()).all_reduce(mean.view(-1)).wait()
        return mean / self.mesh.size("dp", "sp")


class _Compute:
    """`_Compute` runs the instructions of a stage with this engine's parts; see `pipe.stage.Compute`."""

    def __init__(
        self,
        training: Training,
        observers: Observers,
        module: PipelineModule,
        model: RunningModel,
        step: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self._training, self._observers, self._module, self._running = training, observers, module, model
        self._step = step
        self._losses: list[Tensor] = []
        self._num_micros = 1

    def begin(self, num_micros: int) -> None:
        """Start a batch."""
        self._num_micros = num_micros
        self._losses = []

    def end(self) -> None:
        """Reset after a batch that is over, or has failed."""
        self._training.schedule.set_boundary(None)
        self._losses = []

    def forward(self, inputs: Any, chunk: int) -> Any:
        training = self._training
        training.sharding.states.require("forward", weights_only=True)
        training.sharding.gradients.window.begin_forward()
        (inputs,), _ = training.precision.cast_inputs((inputs,), {})
        with self._observers.phase("forward"), training.precision.forward_context(), running(self._running):
            try:
                return self._module(inputs, chunk)
            except (RuntimeError, ValueError) as error:
                add_dtype_hint(error, training.precision.model_dtype, self._module, (inputs,), {})
                raise

    def loss(self, outputs: Any, labels: Any) -> Tensor:
        if self._module.loss_fn is None:
            _check_scalar(outputs, "loss_fn is missing, and the last layer", "pass loss_fn=, or return a scalar")
            loss = outputs
        else:
            with self._training.precision.forward_context():
                loss = self._module.loss_fn(outputs, labels)
            _check_scalar(loss, "loss_fn", "return the mean over the micro-batch")
        if torch.is_grad_enabled() and not loss.requires_grad:
            func = self._module.activation_checkpoint_func
            reentrant = (
                f"; or activation_checkpoint_func ({getattr(func, '__name__', type(func).__name__)}) is reentrant, and "
                "drops the gradients of layers whose inputs have none: pass "
                "functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)"
                if self._module.activation_checkpoint_interval and func is not checkpointing.checkpoint
                else ""
            )
            raise ConfigError(
                "PipelineModule: the loss of a micro-batch has no gradient; return one that depends on the outputs, "
                f"without detach() or no_grad(){reentrant}"
            )
        self._losses.append(loss.detach())
        return loss

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor] | None, *, ends: bool) -> None:
        training = self._training
        training.schedule.set_boundary(ends)
        if gradients is None:
            tensors = [training.precision.scale(loss / self._num_micros) for loss in tensors]
        training.backward_part(tensors, gradients, ends=ends)

    def backward_weights(self, roots: Sequence[Tensor], *, ends: bool) -> None:
        self._training.schedule.set_boundary(ends)
        self._training.backward_part(roots, None, ends=ends)

    def reduce(self) -> None:
        self._training.end_backward()

    def step(self) -> None:
        self._step(self._losses)


def _check_scalar(loss: Any, source: str, remedy: str) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss)
        raise ConfigError(f"PipelineModule: {source} returned {found}, which is no loss; {remedy}")


def refuse_inner_pipeline(model: torch.nn.Module) -> None:
    """Raise ConfigError if a part of the model is a `PipelineModule` of several stages, which only an engine runs."""
    for name, part in model.named_modules():
        if name and isinstance(part, PipelineModule) and part.num_stages > 1:
            raise ConfigError(
                f"initialize: {name!r} of the model ({type(model).__name__}) is a PipelineModule of "
                f"{part.num_stages} stages, of which each rank has one; a pipeline is a whole model, so pass it alone, "
                "with all else as layers of its list"
            )


def mesh_of_pipeline(
    module: PipelineModule,
    mpu: Any,
    mesh_param: object,
    asked: Mapping[str, tuple[int, str]],
    *,
    has_optimizer: bool = True,
) -> Mesh:
    """Create the mesh of an engine from the arguments of `initialize` or the configuration, else from the module's
    topology. A collective.

    Args:
        module: built for some number of stages.
        mpu, mesh_param, asked: as `groups.create_mesh` takes them.
        has_optimizer: then each stage must have something to train.

    Raises:
        ConfigError: on every rank: the mesh places ranks in other stages than the module, ranks cut layers at different
            places, or a stage has nothing to train.
    """
    if mpu is None and mesh_param is None and not asked:
        mesh = Mesh(layout_of(module.topology()))
    else:
        mesh = groups.create_mesh(mpu, mesh_param, {"pp": (module.num_stages, "PipelineModule.num_stages"), **asked})
        _check_stages(module, mesh)
    _check_cuts(module, mesh)
    if has_optimizer:
        _check_trains(module, mesh)
    return mesh


def _check_stages(module: PipelineModule, mesh: Mesh) -> None:
    own = {"built": [module.stage_id, module.num_stages], "asked": [mesh.rank("pp"), mesh.size("pp")]}
    for rank, theirs in enumerate(all_gather_values(own)):
        if theirs["built"] != theirs["asked"]:
            raise ConfigError(
                f"initialize: the mesh has rank {rank} in stage {theirs['asked'][0]} of {theirs['asked'][1]}, and "
                f"PipelineModule has built stage {theirs['built'][0]} of {theirs['built'][1]} there; give both the "
                "same number of stages"
            )


def _check_cuts(module: PipelineModule, mesh: Mesh) -> None:
    found = all_gather_values(list(module.parts), mesh.norm_group)
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            raise ConfigError(
                f"PipelineModule: rank 0 cuts its {counted(found[0][-1], 'layer')} at {found[0]}, and rank {rank} its "
                f"{counted(theirs[-1], 'layer')} at {theirs}; give every rank the same layers and partition_method"
            )


def _check_trains(module: PipelineModule, mesh: Mesh) -> None:
    trains = any(param.requires_grad for param in module.parameters())
    idle = {stage for stage, has in all_gather_values([mesh.rank("pp"), trains], mesh.norm_group) if not has}
    if len(idle) == module.num_stages:
        raise ConfigError(
            "PipelineModule: found an optimizer, and no parameters that train on any stage; to evaluate only, leave "
            "the optimizer out"
        )
    if idle:
        raise ConfigError(
            f"PipelineModule: found no parameters that train on stage {', '.join(map(str, sorted(idle)))}; its cuts "
            f"are {module.parts}, so use fewer stages, or another partition_method"
        )


def _schedule_type(name: str, module: PipelineModule, zero_stage: int) -> Callable[[int, int, int], PipeSchedule]:
    key = f'pipeline.schedule: found "{name}"'
    if (name == "interleaved") != (module.interleave > 1) and module.num_stages > 1:
        raise ConfigError(
            f'{key}, and PipelineModule was built with interleave={module.interleave}; "interleaved" needs 2 or more '
            "parts per stage, and the other schedules 1"
        )
    if module.num_stages == 1:
        return DataParallelSchedule
    if name == "interleaved":
        return partial(InterleavedSchedule, num_chunks=module.interleave)
    if name == "zero_bubble":
        if zero_stage == 3:
            raise ConfigError(
                f"{key} with zero_optimization.stage 3, which releases weights before their gradients are computed; "
                'use "1f1b", or stage 2'
            )
        return ZeroBubbleSchedule
    return TrainSchedule
