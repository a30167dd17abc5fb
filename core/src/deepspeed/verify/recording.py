"""`RecordedEngine` trains with the script's configuration, and writes a `Record` for the comparison with a second run.

    run.json                     the arithmetic of the run
    setting.json                 the accelerator, the configuration without secrets, hooks and optimizer of the script
    step0/rank0.safetensors      the initial weights
    step3/rank0.json             for one rank and step: loss scale, norm, learning rates, and each forward
    step3/rank0.safetensors      gradients before clipping, weights after the update, random states

Rank 0 writes what all ranks share. Each other rank writes the weights and gradients of experts whose first holder it
is. The record uses only the engine's public interface, so it holds what a user could see.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.autotuning.trial import write_json
from deepspeed.checkpoint.layout import LATEST_FILE, is_dcp_folder
from deepspeed.comm.values import dtype_name
from deepspeed.engine import export
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.observers import StepStats
from deepspeed.errors import ConfigError, counted
from deepspeed.log import warn_once
from deepspeed.parallel.model_part import expert_group_of, expert_sizes, parts_held
from deepspeed.zero.fragments import safe_get_full_fp32_param, safe_get_full_grad
from deepspeed.zero.param_unit import shape_of
from deepspeed.zero.stages import LocalSteps

#: packages whose hooks do not belong to the script
_LIBRARIES = ("torch", "deepspeed", "transformers", "accelerate", "lightning", "peft", "trl")
GRADIENT, WEIGHT, RANDOM, DEVICE_RANDOM = "gradient/", "weight/", "random/", "device_random/"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`Arithmetic` says how a run computes, for the bounds of `verdict.py`. Dtypes have torch's names."""

    num_ranks: int
    num_micros: int  # micro-batches per step and rank
    model: str  # dtype of the weights in the forward
    sums: str  # the narrowest dtype in which gradients are added or sent
    masters: str  # dtype of the weights that the optimizer updates
    clip: float  # 0: gradients are not clipped
    other_kernels: bool  # whether the forward uses other kernels than plain torch, such as compiled ones
    shows_gradients: bool = False  # whether scripts find the averages in `param.grad` before the step
    computes: str = ""  # dtype of the forward's products; "": the dtype of the weights
    num_samples: int = 0  # per step, over all ranks
    scales_loss: bool = False
    checks_overflow: bool = False  # whether a step with gradients that are not finite is skipped


class Record:
    """A folder with the record of one engine's run. A rank writes its own files, and reads those of all ranks.

    Args:
        folder: folder on storage that all ranks can access.
        rank: rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._files: dict[tuple[int, int], tuple[Any, frozenset[str]]] = {}  # (step, rank), only for one step

    def write(self, step: int, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Write this rank's data of a step. A reader finds either all of it or nothing."""
        folder = self.folder / f"step{step}"
        folder.mkdir(parents=True, exist_ok=True)
        if tensors:
            own = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
            path = folder / f"rank{self.rank}.safetensors"
            try:
                save_file(own, path.with_suffix(".tmp"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"ds_verify: cannot write {path}: {error}; take fewer --steps, or --keep a folder with more room"
                ) from error
            os.replace(path.with_suffix(".tmp"), path)
        write_json(folder / f"rank{self.rank}.json", facts)

    def facts(self, step: int) -> dict[str, Any] | None:
        """Return this rank's facts about a step; None if the run does not have this step."""
        path = self.folder / f"step{step}" / f"rank{self.rank}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def tensor(self, step: int, name: str, rank: int) -> Tensor | None:
        """Return a tensor that a rank recorded for a step, in host memory; None if no tensor has this name."""
        if (step, rank) not in self._files:
            path = self.folder / f"step{step}" / f"rank{rank}.safetensors"
            file = safe_open(path, framework="pt") if path.exists() else None
            self._files = {key: value for key, value in self._files.items() if key[0] == step}
            self._files[step, rank] = file, frozenset(() if file is None else file.keys())
        file, names = self._files[step, rank]
        return file.get_tensor(name) if name in names else None

    @property
    def arithmetic(self) -> Arithmetic:
        """The arithmetic of the recorded run.

        Raises:
            ConfigError: the recorded run does not have this engine.
        """
        path = self.folder / "run.json"
        if not path.exists():
            raise ConfigError(
                f"ds_verify: {self.folder.name} was not there when the script was recorded; let the script build the "
                "same engines each time, also where one of them fails"
            )
        return Arithmetic(**json.loads(path.read_text()))

    def begin(self, arithmetic: Arithmetic) -> None:
        """Write the arithmetic of the run. Called on rank 0."""
        write_json(self.folder / "run.json", asdict(arithmetic))


def digest(value: Any) -> list[Any]:
    """Describe a value in a few numbers. A floating tensor gives its shape, a sum with weights that rise from 1 to 2 by
    position, and the sum of squares, in fp64. An integer or boolean tensor gives shape, hash, sum and sum of squares; a
    complex tensor gives shape and hash; any other value gives a hash or a class name."""
    if not isinstance(value, Tensor):
        return ["", hashlib.sha256(repr(value).encode()).hexdigest()[:16] if _is_plain(value) else type(value).__name__]
    if not value.is_floating_point():
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        hashed = [list(value.shape), hashlib.sha256(data).hexdigest()[:16]]
        if value.is_complex():
            return hashed
        wide = value.detach().to(torch.float64)
        return [*hashed, float(wide.sum()), float(wide.square().sum())]
    wide = value.detach().to(torch.float64).reshape(-1)
    weights = torch.linspace(1.0, 2.0, wide.numel(), dtype=torch.float64, device=wide.device)
    return [list(value.shape), float(wide @ weights), float(wide @ wide)]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


class WatchedForwards:
    """Describes each forward of a module: its inputs, and the weights that its modules used.

    A hook on each module reads the module's own parameters after all earlier hooks, so that the parameters of a sharded
    model are gathered. A parameter that is still empty is skipped.
    """

    def __init__(self, module: Module) -> None:
        self.facts: list[dict[str, Any]] = []
        self._names = {id(param): name for name, param in module.named_parameters()}
        self._is_on = False
        for each in module.modules():
            if next(each.parameters(recurse=False), None) is not None:
                each.register_forward_pre_hook(self._before)

    @contextmanager
    def watched(self, inputs: Any, kwargs: Any) -> Iterator[None]:
        """Describe the block as one forward."""
        self.facts.append({"inputs": [digest(leaf) for leaf in tree_leaves((inputs, kwargs))], "weights": {}})
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _before(self, module: Module, _: Any) -> None:
        if not self._is_on:
            return
        weights = self.facts[-1]["weights"]
        for param in module.parameters(recurse=False):
            name = self._names.get(id(param))
            if name is not None and name not in weights and param.numel():
                weights[name] = digest(param)


def hooks_of(module: Module) -> list[str]:
    """Return the names of parameters and modules (with "forward of" or "backward of") on which the script registered
    hooks, in model order. Hooks of torch, of the engine and of the libraries in `_LIBRARIES` do not count."""
    found = []
    for name, param in module.named_parameters():
        if any(map(_is_of_script, (param._backward_hooks, param._post_accumulate_grad_hooks))):  # type: ignore[attr-defined]
            found.append(name)
    for name, each in module.named_modules():
        of = name or "the model"
        if _is_of_script(each._forward_pre_hooks) or _is_of_script(each._forward_hooks):
            found.append(f"forward of {of}")
        if _is_of_script(each._backward_pre_hooks) or _is_of_script(each._backward_hooks):
            found.append(f"backward of {of}")
    return found


def _is_of_script(hooks: Mapping[int, Callable[..., Any]] | None) -> bool:
    return any(_origin(hook) not in _LIBRARIES for hook in (hooks or {}).values())


def _origin(hook: Callable[..., Any]) -> str:
    """Return the package that defines a hook."""
    while isinstance(hook, partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").split(".")[0]


class Finished(SystemExit):
    """All requested steps are done: the process exits with code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class VerifiedEngine(DeepSpeedEngine):
    """`VerifiedEngine` is the base of the engines in both runs of `ds_verify`. It ends early, and saves nothing.

    Args:
        runs: provides a record for each engine that trains.
    """

    def __init__(self, module: Module, *, runs: "Runs", **parts: Any) -> None:
        super().__init__(module, **parts)
        self._runs = runs
        self._steps = 0
        self.is_watched = self.basic_optimizer is not None
        if self.is_watched:
            self.record = runs.next_record()
            trained = {id(param) for param in self.sharding.units.params}
            named = dict(self.module.named_parameters())
            self.trained = {name: param for name, param in named.items() if id(param) in trained}
            #: name of a parameter -> the rank that records it: its first holder
            self.holders = {name: self._first_holder(param) for name, param in named.items()}

    def _first_holder(self, param: Parameter) -> int:
        if expert_group_of(param) is None:
            return 0
        return torch.distributed.get_process_group_ranks(self.group_of(param))[0]

    def holds(self, name: str) -> bool:
        """Return whether this rank records and compares a parameter or buffer."""
        return self.holders.get(name, 0) == comm.get_rank()

    def recorded(self, kind: str, name: str, *, step: int | None = None) -> Tensor | None:
        """Return a recorded tensor of a step (default: the current one); None if there is none."""
        step = self._steps + 1 if step is None else step
        value = self.record.tensor(step, kind + name, self.holders.get(name, 0))
        return None if value is None else value.to(self.device)

    def set_random_states(self, number: int) -> None:
        """Set the random states that a forward of the step had at its start in the recorded run."""
        rank, step = self.record.rank, self._steps + 1
        if (state := self.record.tensor(step, f"{RANDOM}{number}", rank)) is not None:
            torch.set_rng_state(state)
        if (state := self.record.tensor(step, f"{DEVICE_RANDOM}{number}", rank)) is not None:
            get_accelerator().set_rng_state(state)

    def group_of(self, param: Parameter) -> ProcessGroup:
        """Return the process group over which a parameter's gradient is averaged."""
        group = expert_group_of(param)
        return self.mesh.gradient_group(1 if group is None else expert_sizes(self.module)[group])

    def buffer_digests(self) -> dict[str, list[Any]]:
        """Describe the module's buffers, such as the statistics of a batch norm, by name."""
        return {name: digest(buffer) for name, buffer in self.module.named_buffers()}

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps >= self._runs.num_steps:
            comm.barrier()  # no rank exits while its peers still wait for it
            self._runs.are_over = True
            raise Finished

    def _leave_if_over(self) -> None:
        """Raise `Finished` again if the script has caught it."""
        if self._runs.are_over:
            raise Finished

    def save_checkpoint(self, save_dir: str, *arguments: Any, **named: Any) -> bool:
        """Save nothing: otherwise a run of a few steps would become the user's latest checkpoint."""
        warn_once(f"ds_verify: save_checkpoint saves nothing in {save_dir}")
        return True

    def save_16bit_model(self, save_dir: str, *arguments: Any, **named: Any) -> bool:
        """Save nothing."""
        warn_once(f"ds_verify: save_16bit_model saves nothing in {save_dir}")
        return True

    save_fp16_model = save_16bit_model

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, *arguments: Any, **named: Any
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Return (None, None) if there is no checkpoint: scripts may try to resume from their last one.

        Raises:
            ConfigError: there is a checkpoint; the other run would need the same states.
        """
        if tag is None and "://" not in str(load_dir) and not _may_load(Path(load_dir)):
            warn_once(f"ds_verify: load_checkpoint finds no checkpoint in {load_dir}")
            return None, None
        raise ConfigError(
            f"ds_verify: the script loads a checkpoint ({load_dir}), and a run that goes on from one cannot be "
            "compared yet; let it begin from its own weights"
        )


def _may_load(folder: Path) -> bool:
    return (folder / LATEST_FILE).exists() or is_dcp_folder(folder)


class Runs:
    """The records of one run of a script, which may have several engines.

    Args:
        folder: folder of the records.
        num_steps: the script ends after an engine has made this number of steps.
    """

    def __init__(self, folder: str | Path, num_steps: int) -> None:
        self.folder, self.num_steps = Path(folder), num_steps
        self.are_over = False  # one engine has made its steps
        self._count = self._calls = 0

    def next_record(self) -> Record:
        """Return the record of the next engine that trains."""
        self._count += 1
        return Record(self.folder / f"engine{self._count - 1}", comm.get_rank())

    def noting_failures(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `start` to record its failures for the other run, in which the same call might succeed."""

        def noted(**arguments: Any) -> Any:
            self._calls, count = self._calls + 1, self._count
            try:
                return start(**arguments)
            except ConfigError as error:
                self._count = count  # reuse the record's number, because there is no engine for it
                write_json(self._failure, str(error))
                raise

        return noted

    def failing_as_noted(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `start` to fail in each call that failed in the other run."""

        def failing(**arguments: Any) -> Any:
            self._calls += 1
            if self._failure.exists():
                raise ConfigError(json.loads(self._failure.read_text()))
            return start(**arguments)

        return failing

    @property
    def _failure(self) -> Path:
        rank = comm.get_rank() if comm.is_initialized() else int(os.environ.get("RANK", "0"))
        return self.folder / f"failed{self._calls}-rank{rank}.json"

    def check_room(self, num_bytes: int) -> None:
        """Raise ConfigError if the disk has no room for the record.

        Args:
            num_bytes: bytes of all weights in fp32. The start needs this number, and each step twice this number.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        needed, free = num_bytes * (2 * self.num_steps + 1), shutil.disk_usage(self.folder).free
        if needed > free:
            raise ConfigError(
                f"ds_verify: {counted(self.num_steps, 'step')} of this model need {needed / 2**30:.1f} GiB in "
                f"{self.folder}, which has {free / 2**30:.1f} GiB free; take fewer --steps, or --keep it elsewhere"
            )


class RecordedEngine(VerifiedEngine):
    """`RecordedEngine` trains with the script's configuration, and records each step."""

    def __init__(self, module: Module, *, runs: Runs, **parts: Any) -> None:
        super().__init__(module, runs=runs, **parts)
        if not self.is_watched:
            return
        self._refuse()
        self._losses: list[float] = []
        self._loss = 0.0  # loss of the step, accumulated like its gradient
        self._facts: dict[str, Any] = {}  # facts of the step
        self._num_micros = -1  # number of the last micro-batch in the previous step
        self._random: dict[str, Tensor] = {}
        self._forwards = WatchedForwards(self.module)
        self._setting: dict[str, Any] = {"hooks": []}
        if (order := self._training.order) is not None:
            order.of_forward = partial(self._in_order, order.of_forward)  # type: ignore[method-assign]
        self._begin()
        self._training.before_update.append(self._before_update)
        self._observers.after_step.append(self._after_step)

    def note_setting(self, setting: dict[str, Any]) -> None:
        """Record the engine's setting, and the script's parts in both runs. Later steps add to its "hooks".

        Only rank 0 writes it.
        """
        if comm.get_rank() == 0:
            self._setting = setting
            write_json(self.record.folder / "setting.json", setting)

    def _note_new_hooks(self) -> None:
        """Record hooks that the script registered after `initialize`."""
        noted = self._setting["hooks"]
        if new := [name for name in hooks_of(self.module) if name not in noted]:
            self.note_setting({**self._setting, "hooks": [*noted, *new]})

    def _begin(self) -> None:
        """Record the initial weights. A collective."""
        weights = self._weights()
        self._runs.check_room(4 * sum(shape_of(param).numel() for param in self.trained.values()))
        if comm.get_rank() == 0:
            self.record.begin(self._arithmetic(weight.dtype for weight in weights.values()))
        self.record.write(0, {}, {**self._untrained(), **weights})

    def _refuse(self) -> None:
        """Raise ConfigError for settings that do not allow a comparison with a second run."""
        divided = [axis for axis in self.mesh.layout.axes if axis not in ("dp", "dp_shard", "dp_replicate")]
        found = [f"{self.mesh.size(axis)} ranks along {axis}" for axis in divided if self.mesh.size(axis) > 1]
        parts = [name for name, part in parts_held(self.module).items() if not part.is_whole]
        if parts:
            found.append(f"parts of {parts[0]} on several ranks")
        lossy = ("zero_quantized_weights", "zero_quantized_gradients")
        found += [f"zero_optimization.{name}" for name in lossy if getattr(self, name)()]
        if self._step_schedules is not None and self._step_schedules.compression is not None:
            found.append("compression_training")
        if self._training.moq is not None:
            found.append("quantize_training")
        if "OneBit" in (name := type(self.basic_optimizer).__name__) or "ZeroOne" in name:
            found.append(f"the optimizer {name}, which sends rounded sums")
        if isinstance(self.sharding.options.stage, LocalSteps):
            found.append("local_sgd, by which each rank trains a copy of its own")
        if found:
            raise ConfigError(
                f"ds_verify: found {' and '.join(found)}, which has no equal in another run; verify the script without"
            )

    def _arithmetic(self, masters: Iterable[torch.dtype]) -> Arithmetic:
        model, sums = self.get_data_types()
        narrow = max((sums, self.communication_data_type), key=lambda dtype: torch.finfo(dtype).eps)
        return Arithmetic(
            num_ranks=comm.get_world_size(),
            num_micros=self.gradient_accumulation_steps(),
            model=dtype_name(model),
            sums=dtype_name(narrow),
            masters=dtype_name(max(masters, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)),
            clip=self.gradient_clipping(),
            other_kernels=self.torch_autocast_enabled(),
            shows_gradients=self.sharding.options.stage.shows_gradients,
            computes=dtype_name(getattr(self.precision, "dtype", model)),
            num_samples=self.train_batch_size(),
            scales_loss=self.loss_scale() != 1.0 or self.precision.loss_scaler.is_dynamic,
            checks_overflow=self.precision.checks_overflow,
        )

    def _weights(self) -> dict[str, Tensor]:
        """Return this rank's part of the weights that the optimizer updates. A collective."""
        found: dict[str, Tensor] = {}
        for name, param in self.trained.items():
            weight = safe_get_full_fp32_param(param)
            if self.holds(name) and weight is not None:
                found[WEIGHT + name] = weight.cpu()
        return found

    def _untrained(self) -> dict[str, Tensor]:
        """Return this rank's part of the frozen parameters and buffers. A collective."""
        state = export.owned(export.gathered(self.module, keeps=True, exclude_frozen=False) or {}, self.module)
        names = {*dict(self.module.named_parameters()), *dict(self.module.named_buffers())} - set(self.trained)
        return {WEIGHT + name: state[name] for name in names if name in state and self.holds(name)}

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self.is_watched:
            return super().forward(*inputs, **kwargs)
        with self._forwards.watched(inputs, kwargs), self._drawing():
            return super().forward(*inputs, **kwargs)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Record the random states of the current forward, and whether it draws random numbers."""
        if torch.is_grad_enabled():
            self._see_random_states(len(self._forwards.facts) - 1)
        before, facts = torch.get_rng_state(), self._forwards.facts[-1]
        yield
        facts["draws"] = facts.get("draws", False) or not torch.equal(before, torch.get_rng_state())

    @contextmanager
    def _in_order(self, of_forward: Callable[[int], AbstractContextManager[None]], step: int) -> Iterator[None]:
        """Wrap a forward with its own random states (`deterministic`), so that these states are recorded."""
        with of_forward(step), self._drawing():
            yield

    def _see_random_states(self, number: int) -> None:
        """Record the random states at the start of a forward of the step."""
        self._random[f"{RANDOM}{number}"] = torch.get_rng_state()
        if not get_accelerator().is_synchronized_device():
            self._random[f"{DEVICE_RANDOM}{number}"] = get_accelerator().get_rng_state()

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        **named: Any,
    ) -> Any:
        if self.is_watched:
            losses = losses_of(loss)
            self._losses += losses
            self._loss += sum(losses) / (self.schedule.num_steps if scale_wrt_gas else 1)
        return super().backward(loss, retain_graph, scale_wrt_gas, **named)

    def _before_update(self, step: int) -> None:
        """Take the reduced gradients before they are clipped. A collective."""
        self._leave_if_over()
        self._facts = {"loss_scale": self.loss_scale(), "lr": [float(lr) for lr in self.get_lr()]}
        self._facts |= {"loss": self._loss, "micros": self.schedule.micro_steps - self._num_micros}
        self._tensors = dict(self._random)
        for name, param in self.trained.items():
            gradient = safe_get_full_grad(param)
            if gradient is not None and self.holds(name):
                self._tensors[GRADIENT + name] = gradient.cpu()

    def _after_step(self, stats: StepStats) -> None:
        """Record the step, with the weights after it. A collective.

        Raises:
            Finished: the step was the last one.
        """
        said = {"losses": self._losses, "forwards": self._forwards.facts, "buffers": self.buffer_digests()}
        said |= {"applied": stats.applied, "norm": self.get_global_grad_norm()}
        self._leave_step({**self._facts, **said})
        self._losses, self._random, self._tensors, self._loss = [], {}, {}, 0.0
        self._num_micros = self.schedule.micro_steps
        self._forwards.facts.clear()
        self._note_new_hooks()
        self._count_step()

    def _leave_step(self, facts: dict[str, Any]) -> None:
        """Write the facts and tensors of a step, and the weights after it. A collective."""
        self.record.write(self._steps + 1, facts, {**self._tensors, **self._weights()})


def losses_of(loss: Any) -> list[float]:
    """Return the values of the single-element tensors at which a backward starts."""
    tensors = [loss] if isinstance(loss, Tensor) else list(loss)
    return [float(tensor.detach()) for tensor in tensors if isinstance(tensor, Tensor) and tensor.numel() == 1]
