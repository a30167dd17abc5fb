"""The section `deterministic`: losses are bitwise the same for every number of ranks, ZeRO stage, placement and number
of accumulation steps, as long as the global batch is divided into micro-batches of the same samples.

    sums of gradients     one binary tree over the micro-batches of a step         `FixedOrder`
    norm of gradients     a sum that does not depend on the order                  `ExactSquares`
    random numbers        seeded per forward, backward: (seed, step, micro-batch)  `OneOrder`
    samples               `training_data` is dealt in whole micro-batches          `DeepSpeedDataLoader`
    kernels               those that torch calls deterministic; others raise       `DeterministicKernels`

Anything that cannot be bitwise the same is refused by name: keys in `sharding.py`, all else here. `build.py` calls this
file once per engine.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from deepspeed.accelerator import get_accelerator
from deepspeed.activation.rng import get_rng_tracker, seed_from
from deepspeed.comm.values import check_same
from deepspeed.config.training import DeterministicConfig
from deepspeed.errors import ConfigError, StateError
from deepspeed.optim import is_elementwise
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import expert_sizes
from deepspeed.pipe.module import PipelineModule
from deepspeed.zero.backward_window import is_in_backward
from deepspeed.zero.placement import Placement

if TYPE_CHECKING:
    from deepspeed.engine.observers import Progress
    from deepspeed.engine.training import Accumulation


_NOWHERE = (-1, -1)

_APART = (
    "deterministic.enabled: found a backward with no forward since the one before it, after forwards that have drawn "
    "random numbers. They follow from the place of the micro-batch, which is known if its backward comes before the "
    "next forward: call backward after each forward, or model.eval() where nothing is to be drawn"
)


class OneOrder:
    """`OneOrder` knows the position of every micro-batch in the global batch. It seeds the random numbers of each
    forward and backward, so that they do not depend on the rank that runs it.

    A seed depends on the run's seed, the step, the position, and the number of the forward within its micro-batch, with
    and without gradients counted apart. Afterwards the generators are restored for the script's own random numbers.

    Args:
        seed: the same on all ranks.
        world_size: number of data-parallel ranks.
        rank: this rank among them.
        module: its forwards are seeded too if a script calls it directly instead of the engine. A submodule that a
            script calls directly may not draw random numbers.
        progress: counters of the run.
    """

    def __init__(self, seed: int, world_size: int, rank: int, module: nn.Module, progress: "Progress") -> None:
        self._seed = seed
        self._world_size, self._rank = world_size, rank
        self._progress = progress
        self._num_reduced = 0  # backwards since the last step whose gradients are summed over the ranks
        self._num_of_micro_batch = 0  # the same, of the current micro-batch
        self._last = _NOWHERE  # (step, reduced backwards before it) of the last forward
        self._num_forwards = {True: 0, False: 0}  # of that micro-batch so far, by whether they have gradients
        self._last_name = ""  # of the last forward
        self._num_backwards = 0  # since the last reduced backward
        self._num_since = 0  # forwards since the last reduced backward
        self._has_drawn = False  # whether a forward since the last step has drawn random numbers
        self._is_inside = False  # whether a forward is running
        self._kept = _kept_buffers(module)
        self._may_write = True  # whether the next forward with gradients may write a buffer: the first, or the last did
        self._watched = ExitStack()  # encloses the running forward of the module
        self._past: nn.Module | None = None  # a submodule whose forward the script called directly
        self._states: list[Tensor] = []  # of the generators before that forward
        self._end_compiled: Callable[[], None] | None = None
        self._hooks = [] if module._compiled_call_impl is not None else self._watch(module)
        self.watch_compiled(module)
        self._give_back = weakref.finalize(self, DeterministicKernels.take())
        self._give_back.atexit = False

    def _watch(self, module: nn.Module) -> list[RemovableHandle]:
        itself = weakref.ref(self)

        def enter(module: nn.Module, _: Any) -> None:
            owner = itself()
            if owner is not None and not owner._is_inside and (module.training or torch.is_grad_enabled()):
                owner._watched.enter_context(OneOrder.of_forward(owner, owner._progress.global_steps))

        def leave(*_: Any) -> None:
            if (owner := itself()) is not None:
                owner._watched.close()

        def enter_part(part: nn.Module, _: Any) -> None:
            owner = itself()
            if owner is None or owner._is_inside or owner._past is not None or not torch.is_grad_enabled():
                return
            if not is_in_backward():  # else a checkpoint inside the model recomputes, and restores the generators
                owner._past, owner._states = part, _random_states()

        def leave_part(part: nn.Module, *_: Any) -> None:
            if (owner := itself()) is not None and owner._past is part:
                owner._past = None
                if not _are_same(owner._states, _random_states()):
                    path = next((name for name, each in module.named_modules() if each is part), None)
                    if path is not None:  # else it is a part of a copy of the model
                        _refuse_part(path, part)

        hooks = [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]
        for part in module.modules():
            if part is not module and part._compiled_call_impl is None:
                hooks.append(part.register_forward_pre_hook(enter_part, prepend=True))
                hooks.append(part.register_forward_hook(leave_part, always_call=True))
        return hooks

    def watch_compiled(self, module: nn.Module) -> None:
        """Seed the forwards of a module that is compiled in place when a script calls it directly instead of the
        engine. Hooks would be compiled too."""
        compiled, itself = module._compiled_call_impl, weakref.ref(self)
        if compiled is None:
            return

        def call(*inputs: Any, **kwargs: Any) -> Any:
            owner = itself()
            if owner is None or owner._is_inside or not (module.training or torch.is_grad_enabled()):
                return compiled(*inputs, **kwargs)
            with OneOrder.of_forward(owner, owner._progress.global_steps):
                return compiled(*inputs, **kwargs)

        def end() -> None:
            if module._compiled_call_impl is call:
                module._compiled_call_impl = compiled

        module._compiled_call_impl = call
        self._end_compiled = end

    def stop_watching(self) -> None:
        """Remove the hooks: the module is about to be compiled, or the engine ends."""
        while self._hooks:
            self._hooks.pop().remove()
        if self._end_compiled is not None:
            self._end_compiled()
            self._end_compiled = None

    def close(self) -> None:
        """Remove the hooks and give back the deterministic kernels; the engine ends."""
        self.stop_watching()
        self._give_back()

    def saw_reduction(self) -> StateError | None:
        """Count a backward that ends in a sum over the ranks. Return the error if its forward has no position."""
        self._num_reduced += 1
        self._num_of_micro_batch += 1
        has_forward, self._num_since = self._num_since > 0, 0
        self._num_backwards = 0
        if has_forward or not self._has_drawn:
            return None
        return StateError(_APART) if self._num_of_micro_batch == 1 else _too_many(self._num_of_micro_batch)

    def end_micro_batch(self, schedule: "Accumulation") -> StateError | None:
        """End the micro-batch. Return the error if it had more than one reduced backward: on another number of ranks
        they would be two micro-batches. If the user sets boundaries, a micro-batch ends only with its step."""
        found, self._num_of_micro_batch = self._num_of_micro_batch, 0
        return None if found <= 1 or schedule.boundary is not None else _too_many(found)

    def restart(self) -> None:
        """Reset the counts: a step begins, or begins again."""
        self._num_reduced = self._num_of_micro_batch = self._num_since = 0
        self._has_drawn = False
        self._last = _NOWHERE

    @contextmanager
    def of_forward(self, step: int) -> Iterator[None]:
        """Seed one forward that trains, after `step` steps."""
        is_again = is_in_backward()  # a checkpoint around the engine recomputes
        name = self._same_name() if is_again else self._next_name(step)
        checks = not is_again and torch.is_grad_enabled()
        before, marks = (self._buffers(), self._marks()) if checks else ([], [])
        self._is_inside = True
        try:
            with self._drawing(name):
                yield
        finally:
            self._is_inside = False
        for path, former, part, key in before:
            _refuse_written(path, former, part, key)
        if checks:
            pairs = zip(marks, self._marks(), strict=True)
            self._may_write = any(one is not other or was != now for (one, was), (other, now) in pairs)

    def of_backward(self, step: int) -> AbstractContextManager[None]:
        """Seed one backward after `step` steps; call it before `saw_reduction`. Only hooks of the script, and
        checkpoints that do not preserve random numbers, draw in a backward."""
        micro_batch = self._num_reduced * self._world_size + self._rank
        self._num_backwards += 1
        return self._drawing(f"{self._seed} {step} {micro_batch} backward {self._num_backwards}", is_forward=False)

    def _next_name(self, step: int) -> str:
        place, has_gradients = (step, self._num_reduced), torch.is_grad_enabled()
        if self._last != place:
            self._num_forwards = {True: 0, False: 0}
        number = self._num_forwards[has_gradients]
        self._last, self._num_forwards[has_gradients] = place, number + 1
        self._num_since += 1
        micro_batch = self._num_reduced * self._world_size + self._rank
        self._last_name = f"{self._seed} {step} {micro_batch} {number}" + (
            "" if has_gradients else " without gradients"
        )
        return self._last_name

    def _same_name(self) -> str:
        if (found := sum(self._num_forwards.values())) > 1:
            raise StateError(
                f"deterministic.enabled: found a checkpoint around the engine after {found} forwards of a micro-batch, "
                "of which it does not say which one it computes again; put the checkpoint inside the model"
            )
        return self._last_name

    @contextmanager
    def _drawing(self, name: str, *, is_forward: bool = True) -> Iterator[None]:
        """Seed the random numbers inside the context by `name`."""
        accelerator, tracker = get_accelerator(), get_rng_tracker()
        on_host = accelerator.device_name() == "cpu"
        host, device = torch.get_rng_state(), None if on_host else accelerator.get_rng_state()
        try:
            with tracker.restarted(name):
                torch.manual_seed(seed_from(name))
                seeded = torch.get_rng_state(), None if on_host else accelerator.get_rng_state()
                yield
                if is_forward and not self._has_drawn:
                    self._has_drawn = bool(tracker.states_) or not torch.equal(seeded[0], torch.get_rng_state())
                    if seeded[1] is not None:
                        self._has_drawn |= not torch.equal(seeded[1], accelerator.get_rng_state())
        finally:
            torch.set_rng_state(host)
            if device is not None:
                accelerator.set_rng_state(device)

    def _buffers(self) -> list[tuple[str, Tensor, nn.Module, str]]:
        """Return copies of the buffers if the forward may write one, else an empty list."""
        listed = self._kept if self._may_write else []
        found = [(path, part._buffers.get(key), part, key) for path, part, key in listed]
        return [(path, buffer.clone(), part, key) for path, buffer, part, key in found if buffer is not None]

    def _marks(self) -> list[tuple[Tensor | None, int]]:
        """Return each buffer with torch's count of the operations that wrote it. The counts show that a forward has
        begun to write; from the next forward on, values are compared."""
        buffers = [part._buffers.get(key) for _, part, key in self._kept]
        return [(each, 0 if each is None or each.is_inference() else each._version) for each in buffers]


class DeterministicKernels:
    """Torch uses deterministic kernels while at least one engine needs them; then the former setting returns."""

    _num_users = 0
    _before = False, False  # the former setting: enabled, warn_only

    @classmethod
    def take(cls) -> Callable[[], None]:
        """Count one more engine that needs these kernels, until the returned function is called."""
        if cls._num_users == 0:
            enabled, warns = (
                torch.are_deterministic_algorithms_enabled,
                torch.is_deterministic_algorithms_warn_only_enabled,
            )
            cls._before = enabled(), warns()
        cls._num_users += 1
        torch.use_deterministic_algorithms(True)
        return cls._give_back

    @classmethod
    def _give_back(cls) -> None:
        cls._num_users -= 1
        if cls._num_users == 0:
            was_enabled, warned = cls._before
            torch.use_deterministic_algorithms(was_enabled, warn_only=warned)


def _too_many(found: int) -> StateError:
    return StateError(
        f"deterministic.enabled: found {found} backwards in one micro-batch, which have no place in one order of "
        "sums over micro-batches; call backward after each forward and step after it, add the losses up and call "
        "backward once, or enclose the backwards in engine.coalesce_grad_reduction()"
    )


def _random_states() -> list[Tensor]:
    accelerator = get_accelerator()
    on_host = accelerator.device_name() == "cpu"
    named = get_rng_tracker().states_.values()
    return [torch.get_rng_state(), *([] if on_host else [accelerator.get_rng_state()]), *named]


def _are_same(before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    return len(before) == len(now) and all(map(torch.equal, before, now))


def _refuse_part(path: str, part: nn.Module) -> NoReturn:
    refuse_undetermined(
        f"a forward of {path}, a {type(part).__name__}, that the script calls past the model's",
        "which has drawn random numbers that follow no micro-batch",
        "call it in the model's forward, and that by the engine",
    )


def _kept_buffers(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return the buffers that a checkpoint has: path, module, name there. Non-persistent buffers are caches."""
    return [
        (f"{path}.{name}".lstrip("."), part, name)
        for path, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def _refuse_written(path: str, former: Tensor, part: nn.Module, key: str) -> None:
    found = part._buffers.get(key)
    if found is None or found.shape != former.shape or not _is_same(found.detach(), former):
        refuse_undetermined(
            f"the buffer {path} of a {type(part).__name__}",
            "which a forward has written, so that it follows the micro-batches of one rank",
            "use a module whose forward changes nothing",
        )


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; nan equals nan."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def create_order(
    section: DeterministicConfig,
    module: nn.Module,
    mesh: Mesh,
    optimizer: Optimizer | None,
    progress: "Progress",
    placement: Placement,
    device: torch.device,
) -> OneOrder | None:
    """Create the order if the section asks for it, else return None. A collective.

    Raises:
        ConfigError: losses depend on the number of ranks with this model, mesh or optimizer.
    """
    if not section.enabled:
        return None
    _refuse_mesh(mesh, module)
    _refuse_parts(module, optimizer, on_host=device.type == "cpu" or placement.is_offloaded)
    threads = "torch.get_num_threads(), which changes the order of sums in kernels of the host"
    check_same({threads: str(torch.get_num_threads())}, mesh.norm_group)
    return OneOrder(section.seed, mesh.size("dp"), mesh.rank("dp"), module, progress)


def _refuse_parts(module: nn.Module, optimizer: Optimizer | None, *, on_host: bool) -> None:
    if optimizer is not None and not is_elementwise(optimizer):
        refuse_undetermined(
            f"the optimizer {type(optimizer).__name__}",
            "whose update of an element is not known to depend on that element alone, and shards differ",
            "use AdamW, SGD, Adagrad or Lion",
        )
    if optimizer is not None and on_host and any(group.get("fused") for group in optimizer.param_groups):
        refuse_undetermined(
            f"the optimizer {type(optimizer).__name__} with fused=True",
            "whose kernel of the host rounds the last elements of a tensor in another way, and shards end elsewhere",
            "give fused=False (TrainingArguments: optim='adamw_torch'), or name the optimizer in the configuration",
        )
    for name, size in expert_sizes(module).items():
        if size > 1:
            refuse_undetermined(
                f"experts divided over {size} ranks ({name})", "which take tokens of several", "use ep_size 1"
            )
    for path, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            refuse_undetermined(
                f"module {path or '(the model)'}, a {type(part).__name__}",
                "whose running statistics are those of the micro-batches of one rank",
                "use LayerNorm or GroupNorm, or track_running_stats=False",
            )


def _refuse_mesh(mesh: Mesh, module: nn.Module) -> None:
    if isinstance(module, PipelineModule) or mesh.size("pp") > 1:
        refuse_undetermined(
            "a pipeline", "which computes and sums several micro-batches at a time", "train without one"
        )
    for axis, name in (("tp", "tensor"), ("sp", "sequence")):
        if (size := mesh.size(axis)) > 1:
            refuse_undetermined(
                f"{size} {name}-parallel ranks", "whose matrix products have other shapes and sums", "use 1"
            )
    if (size := mesh.size("dp")) & (size - 1):
        refuse_undetermined(
            f"{size} data-parallel ranks", "which is no power of two, as one binary tree needs", "use 2, 4, 8 ..."
        )


def refuse_undetermined(found: str, reason: str, instead: str) -> NoReturn:
    """Raise the error for something that cannot be bitwise the same on another number of ranks."""
    raise ConfigError(
        f"deterministic.enabled: asked for losses that are bitwise the same for every number of ranks, and found "
        f"{found}, {reason}; {instead}, or set deterministic.enabled to false"
    )
