"""`InferenceEngine` wraps a model in evaluation mode on this rank's device, and is called like the model.

With graphs, forwards are captured once per kind of inputs and then replayed. The forward of a small model is bound by
the host, which launches each kernel separately; a replay launches all kernels at once. A graph reads and writes fixed
memory, so inputs are copied into it and outputs are copied from it.

`export` writes a plain transformers model into a folder for `from_pretrained`. `save_parts` writes the parts of a
divided model as each rank holds them, so that a load need not divide them again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten, tree_unflatten

from deepspeed._absent import absent_members, complete
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.checkpointer import Ranks, alone
from deepspeed.checkpoint.load import Position
from deepspeed.checkpoint.stores import compact
from deepspeed.comm.values import all_gather_values, dtype_name
from deepspeed.config.inference import GRAPHS, DeepSpeedInferenceConfig
from deepspeed.engine.export import tensor_parallel_whole
from deepspeed.engine.wrapper import ModuleWrapper
from deepspeed.errors import ConfigError, StateError, first_line
from deepspeed.inference.checkpoint import JSON_NAME
from deepspeed.inference.generate import StaticGeneration
from deepspeed.log import warn_once
from deepspeed.parallel.mesh import Mesh
from deepspeed.parallel.model_part import division_is_known, parts_held
from deepspeed.tensor_parallel.layers import widened
from deepspeed.tensor_parallel.ranks import same_random_numbers
from deepspeed.zero.optimizer import not_copied

#: Maximum number of graphs; each holds the memory of one forward. Further kinds of inputs run without a graph.
MAX_KINDS = 16
# Values of these types are part of the kind: a forward may branch on them.
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass
class _Captured:
    """A graph with its input tensors and its outputs."""

    graph: Any
    inputs: list[Tensor]
    outputs: list[Any]  # the tensors in it are the graph's memory
    output_spec: Any


class GraphedForward:
    """Replays a forward from graphs. It is called like the forward, without gradients.

    The first call with a kind of inputs runs the forward, and captures it for later calls. Inputs are of one kind if
    structure, shapes, dtypes and plain values are equal. A forward with inputs or outputs other than tensors and plain
    values is never captured: the host also modifies a key-value cache.

    Args:
        forward: must not read a tensor's value on the host.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._kinds: dict[Any, _Captured | None] = {}  # None: not captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the forward's outputs; the caller owns the tensors.

        Raises:
            ConfigError: the forward cannot be captured.
        """
        leaves, spec = tree_flatten((args, kwargs))
        kind = _kind_of(leaves, spec)
        if kind is None or (kind not in self._kinds and len(self._kinds) >= MAX_KINDS):
            return self._forward(*args, **kwargs)
        if kind not in self._kinds:
            outputs = self._forward(*args, **kwargs)
            self._kinds[kind] = self._capture(leaves, spec) if _is_plain(outputs) else None
            return outputs
        captured = self._kinds[kind]
        if captured is None:
            return self._forward(*args, **kwargs)
        given = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        for at, value in zip(captured.inputs, given, strict=True):
            at.copy_(value)
        get_accelerator().replay_graph(captured.graph)
        outputs = [each.clone() if isinstance(each, Tensor) else each for each in captured.outputs]
        return tree_unflatten(outputs, captured.output_spec)

    def _capture(self, leaves: list[Any], spec: Any) -> _Captured:
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(own, spec)
        accelerator = get_accelerator()
        graph = accelerator.create_graph()
        accelerator.synchronize()
        try:
            with accelerator.capture_to_graph(graph):
                outputs, output_spec = tree_flatten(self._forward(*args, **kwargs))
        except RuntimeError as error:
            raise ConfigError(
                f"{GRAPHS}: the forward cannot be captured: {first_line(error)}; it may read a tensor's value "
                f"on the host. Leave {GRAPHS} at false"
            ) from error
        return _Captured(graph, [each for each in own if isinstance(each, Tensor)], outputs, output_spec)


def graphed(forward: Callable[..., Any]) -> GraphedForward | None:
    """Return a `GraphedForward`; warn and return None if the accelerator does not support graphs."""
    accelerator = get_accelerator()
    if accelerator.is_graph_supported():
        return GraphedForward(forward)
    warn_once(
        f"{GRAPHS}: found true, but the accelerator {accelerator.device_name()!r} records no graphs; forwards "
        "run without, with the same results"
    )
    return None


def _kind_of(leaves: list[Any], spec: Any) -> Any:
    """Return the kind of the inputs; None if a leaf is another object, or a tensor that is not on the device."""
    found: list[Any] = [str(spec)]
    on_accelerator = get_accelerator().on_accelerator
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not on_accelerator(leaf):
                return None
            found.append((leaf.shape, leaf.dtype, leaf.device))
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf), leaf))
        else:
            return None
    return tuple(found)


def _is_plain(outputs: Any) -> bool:
    return all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in tree_flatten(outputs)[0])


@absent_members("inference.engine:InferenceEngine")
class InferenceEngine(ModuleWrapper):
    """The engine that `deepspeed.init_inference` returns. Missing attributes are looked up in the module, so that
    pipelines of transformers accept the engine as a model.

    Args:
        module: the model, on its device.
        config: the configuration of `init_inference`.
        group: process group of the ranks that share the module; None: the module is not divided.
        dtype: dtype of the weights.
    """

    def __init__(
        self, module: nn.Module, config: DeepSpeedInferenceConfig, *, group: ProcessGroup | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.module = module
        self._graphs = graphed(module) if config.wants_graphs else None
        self.mp_world_size = 1 if group is None else torch.distributed.get_world_size(group)
        self.mp_group = group
        self._config = config
        self._dtype = dtype
        self._times: _ForwardTimes | None = None
        self.eval()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.mp_group is not None:
            raise not_copied(self, "call engine.export(folder), which writes the whole weights")
        return super().__reduce_ex__(protocol)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, before packing."""
        return self._dtype

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module without gradients. Ranks that share a model pass the same inputs, and get the same
        outputs. With graphs the forward is replayed; see `GraphedForward`, also for its
        errors."""
        if self._graphs is None:
            return self.module(*inputs, **kwargs)
        with nullcontext() if self._times is None else self._times.measured():
            return self._graphs(*inputs, **kwargs)

    @torch.no_grad()
    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module's `generate` without gradients. Ranks that share a model pass the same inputs, and sample the
        same tokens.

        Raises:
            ConfigError: the module has no `generate`.
        """
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise ConfigError(
                f"generate: {type(self.module).__name__} has none; give init_inference a model of transformers that "
                "generates, or call the engine itself"
            )
        with same_random_numbers(self.mp_group):
            return generate(*inputs, **kwargs)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write a plain transformers model into a folder: whole weights in this engine's dtype, and the configuration.
        `from_pretrained(path)` and serving libraries can read it. A collective of all ranks.

        Packed weights are written as numbers, in the model's dtype. Meanwhile every rank holds the numbers of its
        part.

        Raises:
            ConfigError: see the function `export`; also if the output layer is packed, and the model's configuration
                ties its weight to the embedding, which is not packed.
            CheckpointError: another rank failed; the message names the rank and its reason.
        """
        get_head: Any = getattr(self.module, "get_output_embeddings", None)
        config: Any = getattr(self.module, "config", None)
        head = None if get_head is None else get_head()
        if getattr(head, "packed", None) is not None and getattr(config, "tie_word_embeddings", False):
            raise ConfigError(
                "export: found an output layer in few bits, whose weight the model shares with its embedding; a file "
                "has one of them: leave quant.weight.output_num_bits out"
            )
        with widened(self.module, self._dtype):
            export(self.module, self.mp_group, Path(path))

    def profile_model_time(self, *_: Any, **__: Any) -> None:
        """Start to measure each forward, also those of `generate`; see `model_times`. DeepSpeed's argument for the
        clock is accepted and ignored: the host's clock is read after the device has finished. With
        graphs, only the engine's own forwards are measured, not those inside `generate`."""
        if self._times is not None:
            return
        self._times = _ForwardTimes()
        if self._graphs is not None:  # a hook would synchronize during a capture
            return
        self.module.register_forward_pre_hook(self._times.begin)
        self.module.register_forward_hook(self._times.end)
        if isinstance(own := vars(self.module).get("generate"), StaticGeneration):
            own.around_token = self._times.measured

    def model_times(self) -> list[float]:
        """Return the milliseconds of each forward since the last `model_times`, or since `profile_model_time`.

        Raises:
            StateError: `profile_model_time` was not called.
        """
        if self._times is None:
            raise StateError("model_times: nothing is measured; call profile_model_time() first")
        return self._times.take()


class _ForwardTimes:
    """Measures the milliseconds of each forward. `block.num_hooks` ignores its methods when they are used as hooks."""

    def __init__(self) -> None:
        self._times_ms: list[float] = []
        self._start_s = 0.0

    def begin(self, *_: Any) -> None:
        get_accelerator().synchronize()
        self._start_s = time.perf_counter()

    def end(self, *_: Any) -> None:
        get_accelerator().synchronize()
        self._times_ms.append(1e3 * (time.perf_counter() - self._start_s))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the block like a forward."""
        self.begin()
        yield
        self.end()

    def take(self) -> list[float]:
        """Return the milliseconds of each forward since the last call."""
        times, self._times_ms = self._times_ms, []
        return times


complete(__name__)


def all_ranks() -> Ranks:
    """Return the ranks that read or write together: all ranks of the job, or this process. The first one commits."""
    has_peers = torch_dist.is_initialized()
    rank, world_size = (torch_dist.get_rank(), torch_dist.get_world_size()) if has_peers else (0, 1)
    gather = all_gather_values if has_peers else alone
    return Ranks(Position(rank, world_size, mp_rank=0, mp_world_size=1), commits=rank == 0, gather=gather)


def export(module: nn.Module, group: ProcessGroup | None, path: Path) -> None:
    """Write the whole weights and the model's configuration into a folder. A collective of all ranks.

    The first rank writes, in the weights' dtypes, and creates the folder if needed. The module does not change.
    Called by `InferenceEngine.export`.

    Args:
        module: a model of transformers.
        group: process group of the ranks that share the model; None: the model is not divided.

    Raises:
        ConfigError: the module is no transformers model, its division is not known, or `path` is a file.
        CheckpointError: another rank failed; the message names it and its reason. That rank raises its own error.
    """
    save: Any = getattr(module, "save_pretrained", None)
    if save is None:
        raise ConfigError(
            f"export: {type(module).__name__} has no save_pretrained, so it is no model of transformers; save its "
            "state_dict() with torch.save"
        )
    if group is not None and not division_is_known(module):
        raise ConfigError(
            f"export: {type(module).__name__} is divided, and its parameters do not say which part a rank has; mark "
            "them with deepspeed.parallel.model_part.mark_part, or save the module's own state_dict() on every rank"
        )
    ranks = all_ranks()
    device = torch.device("cpu") if group is None else torch.device(get_accelerator().current_device_name())
    weights = tensor_parallel_whole(module, group, keeps=ranks.commits, device=device)

    def write() -> None:
        if weights is None:
            return
        if path.is_file():
            raise ConfigError(f"export: found the file {path}; give a folder")
        save(path, state_dict=weights)

    ranks.together(write, f"export the model to {path}")


def save_parts(module: nn.Module, mesh: Mesh | None, dtype: torch.dtype, path: Path) -> None:
    """Write the weights as each rank holds them, and the JSON for `checkpoint` of `init_inference`.

    A collective of all ranks; the ranks of the first model replica write. An old JSON is removed first and the new one
    is written last, so a folder with a JSON is complete. `init_inference` calls it for `save_mp_checkpoint_path`.

    Raises:
        CheckpointError: another rank failed; the message names it and its reason. That rank raises its own error.
    """
    ranks = all_ranks()
    tp_rank, tp_size = (mesh.rank("tp"), mesh.size("tp")) if mesh is not None else (0, 1)
    is_first = mesh.ranks("tp")[0] == 0 if mesh is not None else ranks.commits
    divided = {name for name, part in parts_held(module).items() if not part.is_whole}
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    file, rest = f"tp_{tp_rank:02d}_00.pt", "non-tp.pt"

    def begin() -> None:
        if ranks.commits:
            path.mkdir(parents=True, exist_ok=True)
            (path / JSON_NAME).unlink(missing_ok=True)

    def write() -> None:
        if is_first and divided:
            _save({name: value for name, value in state.items() if name in divided}, path / file)
        if ranks.commits:
            _save({name: value for name, value in state.items() if name not in divided}, path / rest)

    def describe() -> None:
        if not ranks.commits:
            return
        files = {"non_tp": [rest], "tp": [f"tp_{rank:02d}_00.pt" for rank in range(tp_size)] if divided else []}
        content: dict[str, Any] = {"type": "ds_model", "checkpoints": files, "version": 1.0, "parallelization": "tp"}
        content |= {"tp_size": tp_size, "dtype": dtype_name(dtype), "division": divisions}
        text = json.dumps(content)
        (path / f".{JSON_NAME}").write_text(text)
        (path / f".{JSON_NAME}").replace(path / JSON_NAME)

    what = f"save the parts of the model to {path}"
    ranks.together(begin, what)
    divisions = division_of(module, mesh)
    ranks.together(write, what)
    ranks.together(describe, what)


def division_of(module: nn.Module, mesh: Mesh | None) -> list[str]:
    """Return a digest of the parts that each tensor-parallel rank holds; [] if undivided. A collective of the ranks."""
    if mesh is None:
        return []
    parts = {name: part.to_plain() for name, part in sorted(parts_held(module).items())}
    return all_gather_values(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16], mesh.group("tp"))


def _save(state: dict[str, Tensor], path: Path) -> None:
    """Save through a temporary file, so that an existing file stays intact or is replaced."""
    beside = path.with_name(f".{path.name}")
    torch.save(compact(state), beside)
    beside.replace(path)
