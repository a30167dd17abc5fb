"""`PipelineModule` is a model given as a list of layers; each rank builds only the layers of its stage.

    layers = [LayerSpec(torch.nn.Linear, 16, 64), torch.relu, LayerSpec(torch.nn.Linear, 64, 4)]
    model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.cross_entropy)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    loss = engine.train_batch(data_iter)

A layer takes one argument, a tensor or a tuple of tensors, and returns the argument of the next layer. The name of a
parameter has the number of its layer in the whole list ("2.weight"), or the key of its shared module
("tied_modules.embed.weight"). So a name refers to the same parameter for any number of stages.

[Note: parts] With `interleave` v the list is cut into v parts per stage. Of S stages, stage s holds the parts s, s + S,
s + 2 S, ...
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, Parameter

import deepspeed.comm as dist
from deepspeed._absent import absent_members
from deepspeed.activation import checkpointing
from deepspeed.comm.give_up import together
from deepspeed.errors import ConfigError, PipelineError, counted, either
from deepspeed.parallel.model_part import mark_tied
from deepspeed.pipe.layers import (
    LayerSpec,
    TiedLayerSpec,
    check_method,
    count_parameters,
    partition_balanced,
    partition_uniform,
    times_of_layers,
    type_weights,
)
from deepspeed.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology, check_world

__all__ = ["LayerSpec", "PipelineError", "PipelineModule", "TiedLayerSpec"]

Layer = LayerSpec | Module | Callable[[Any], Any]


@absent_members("runtime.pipe.module:PipelineModule")
class PipelineModule(Module):
    """`PipelineModule` is a model given as a list of layers; each rank builds only the layers of its stage.

    `torch.distributed` must be initialized. All ranks build their stages together.

    Args:
        layers: specs, modules or functions, in order; also a `torch.nn.Sequential`.
        num_stages: default: the number of stages of `topology`.
        topology: places all ranks; default: `num_stages` stages, and data parallelism over the remaining ranks.
        loss_fn: called as `loss_fn(outputs, labels)` on the last stage; without it the last layer returns the loss. If
            it is a module, its parameters belong to the last stage.
        seed_layers: seed the random generators with `base_seed` plus the layer's number before building each layer, so
            initial weights do not depend on the number of stages.
        seed_fn: called with that seed, instead of `torch.manual_seed`.
        base_seed: the seed of layer 0.
        partition_method: "parameters" balances the trainable parameters; "uniform" the layers; "type:REGEX" the layers
            with a matching class name; "profile" the times, measured with `sample_inputs`.
        activation_checkpoint_interval: recompute the activations of this many layers at a time in the backward; 0: off.
        activation_checkpoint_func: called as `func(run, *inputs)`; default `deepspeed.checkpointing.checkpoint`.
        checkpointable_layers: class names; only groups of such layers are recomputed. Default: groups with parameters.
        dynamic_shape: shapes between stages vary between micro-batches although the shapes of the inputs do not.
        interleave: parts per stage; see [Note: parts]. `"pipeline": {"schedule": "interleaved"}` needs 2 or more.
        sample_inputs: the inputs of the first layer, for "profile".

    Raises:
        ConfigError: the stages do not fit the layers or the ranks, or another argument is invalid.
        HeardFailure: another rank failed to build its stage.
    """

    #: a name refers to the same parameter for any number of stages; checkpoints read this attribute
    names_are_global = True

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        interleave: int = 1,
        sample_inputs: Any = None,
    ) -> None:
        super().__init__()
        # a rank may fail to build its layers
        with nullcontext() if num_stages == 1 else together(f"PipelineModule(num_stages={num_stages})"):
            if not isinstance(layers, Iterable):
                raise ConfigError(
                    f"PipelineModule: layers is {type(layers).__name__}, which cannot be cut into stages; give a list "
                    "of layers (modules, functions, LayerSpecs) or a torch.nn.Sequential, which run one after another"
                )
            _check_functions(loss_fn=loss_fn, seed_fn=seed_fn, activation_checkpoint_func=activation_checkpoint_func)
            self._specs = list(layers)
            self._topology = _topology(num_stages, topology)
            self.num_stages = max(1, self._topology.get_dim("pipe"))
            self.interleave = interleave if self.num_stages > 1 else 1
            coord = self._topology.get_coord(dist.get_rank())
            self.stage_id = int(getattr(coord, "pipe", 0))
            self._set_loss(loss_fn)
            self.seed_layers, self.base_seed = seed_layers, base_seed
            self.seed_fn = seed_fn or torch.manual_seed
            self.activation_checkpoint_func = activation_checkpoint_func
            self.checkpointable_layers = checkpointable_layers
            self.set_checkpoint_interval(activation_checkpoint_interval)
            self.dynamic_shape = dynamic_shape
            self._grid: PipelineParallelGrid | None = None
            self._check()
            #: cuts between the parts, in layers
            self.parts = self._partition(check_method(partition_method), sample_inputs)
            self._check_shared()
            self.tied_modules = ModuleDict()
            #: this rank's layers by chunk, as functions of one argument, each with its module if it has one
            self._chunks = [self._build(part) for part in range(self.stage_id, self.num_parts, self.num_stages)]
            self._mark_tied()
            order = [key for key in self.tied_stages() if key in self.tied_modules]  # equal on all stages
            self.tied_modules = ModuleDict({key: self.tied_modules[key] for key in order})

    # ---- what is where ------------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """Number of stages times parts per stage."""
        return self.num_stages * self.interleave

    def topology(self) -> ProcessTopology:
        """The places of all ranks."""
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """Return the grid of this pipeline. The first call is a collective of all ranks, unless an engine set it."""
        if self._grid is None:
            self._grid = PipelineParallelGrid(self._topology)
        return self._grid

    def use_grid(self, grid: PipelineParallelGrid) -> None:
        """Let `mpu()` return `grid` from now on; called when an engine is built."""
        self._grid = grid

    def num_pipeline_stages(self) -> int:
        """Number of stages."""
        return self.num_stages

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that holds a layer.

        Raises:
            ValueError: there is no such layer.
        """
        if not 0 <= layer_idx < len(self._specs):
            raise ValueError(f"stage_owner: found layer {layer_idx}; there are layers 0 to {len(self._specs) - 1}")
        part = next(index for index, stop in enumerate(self.parts[1:]) if layer_idx < stop)
        return part % self.num_stages

    def tied_stages(self) -> dict[str, tuple[int, ...]]:
        """Return the stages that hold a shared module, in order, by the module's key."""
        stages: dict[str, set[int]] = {}
        for index, spec in enumerate(self._specs):
            if isinstance(spec, TiedLayerSpec):
                stages.setdefault(spec.key, set()).add(self.stage_owner(index))
        return {key: tuple(sorted(found)) for key, found in stages.items()}

    def saved_layers(self) -> dict[int, str]:
        """Return the prefix of weight names by layer number, for this rank's layers that have a file in a checkpoint.

        A shared module is in the files of the layers that call it without a `forward_fn`. If there are none, it is in
        the file of its first layer.
        """
        prefixes = self.layer_prefixes()
        uses: dict[str, list[tuple[int, bool]]] = {}
        for index, spec in enumerate(self._specs):
            if isinstance(spec, TiedLayerSpec):
                uses.setdefault(spec.key, []).append((index, spec.forward_fn is None))
        saved = {key: [index for index, calls in its if calls] or [its[0][0]] for key, its in uses.items()}
        found = {}
        for part in range(self.stage_id, self.num_parts, self.num_stages):
            for index in range(self.parts[part], self.parts[part + 1]):
                spec = self._specs[index]
                is_saved = index in saved[spec.key] if isinstance(spec, TiedLayerSpec) else str(index) in self._modules
                if is_saved:
                    found[index] = prefixes[index]
        return found

    def layer_prefixes(self) -> dict[int, str]:
        """Return the prefix of weight names by layer number, for the layers of all stages; functions have none."""
        return {
            index: f"tied_modules.{spec.key}." if isinstance(spec, TiedLayerSpec) else f"{index}."
            for index, spec in enumerate(self._specs)
            if isinstance(spec, LayerSpec | Module)
        }

    # ---- running ------------------------------------------------------------------------------------------------

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute the activations of `interval` layers at a time in the backward; 0: keep activations.

        Raises:
            ConfigError: `interval` is not an int >= 0, or no layer is in `checkpointable_layers`.
        """
        if not isinstance(interval, int) or interval < 0:
            raise ConfigError(
                f"PipelineModule: found activation_checkpoint_interval {interval!r}; give a number of layers, or 0"
            )
        self._check_checkpointable(interval)
        self.activation_checkpoint_interval = interval

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        """Run one part of this stage.

        Args:
            inputs: the inputs of its first layer, a tensor or a tuple of tensors.
            chunk: the number of the part within this stage.
        """
        layers, interval = self._chunks[chunk], self.activation_checkpoint_interval
        if interval <= 0 or not torch.is_grad_enabled():
            return _run(layers, inputs)
        for start in range(0, len(layers), interval):
            group = layers[start : start + interval]
            if self._is_checkpointable(group):
                given = inputs if isinstance(inputs, tuple) else (inputs,)
                inputs = self.activation_checkpoint_func(_as_function(group), *given)
            else:
                inputs = _run(group, inputs)
        return inputs

    def _is_checkpointable(self, layers: Sequence["_Layer"]) -> bool:
        if self.checkpointable_layers is not None:
            return all(layer.name in self.checkpointable_layers for layer in layers)
        return any(layer.module is not None and any(True for _ in layer.module.parameters()) for layer in layers)

    # ---- building -----------------------------------------------------------------------------------------------

    def _check_checkpointable(self, interval: int) -> None:
        names = self.checkpointable_layers
        if names is None:
            return
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"PipelineModule: found checkpointable_layers {names!r}; give a list of names of classes")
        found = [_name(spec) for spec in self._specs]
        if interval > 0 and not set(names) & set(found):
            raise ConfigError(
                f"PipelineModule: found checkpointable_layers {list(names)}, and no layer is one of them; the layers "
                f"are {', '.join(found)}"
            )

    def _check(self) -> None:
        if self.num_stages > 1 and hasattr(_OneParameter().weight, "ds_id"):
            raise ConfigError(
                "PipelineModule: found zero.Init around it, which shards each parameter over all ranks, and stages "
                "build different layers; build it outside of zero.Init: a rank builds only its own layers"
            )
        if self.interleave < 1:
            raise ConfigError(f"PipelineModule: found interleave {self.interleave}; give 1 or more parts per stage")
        if self.num_parts > len(self._specs):
            parts = f" x {self.interleave} parts" if self.interleave > 1 else ""
            raise ConfigError(
                f"PipelineModule: found {counted(self.num_stages, 'stage')}{parts} for "
                f"{counted(len(self._specs), 'layer')}; each needs a layer, so use at most "
                f"{counted(max(1, len(self._specs) // self.interleave), 'stage')}"
            )
        for index, spec in enumerate(self._specs):
            if not callable(spec) and not isinstance(spec, LayerSpec):
                raise ConfigError(
                    f"PipelineModule: layer {index} is {type(spec).__name__}; give a LayerSpec, a module or a function"
                )

    def _set_loss(self, loss_fn: Callable[[Any, Any], Tensor] | None) -> None:
        if isinstance(loss_fn, Module) and self.stage_id < self.num_stages - 1:
            vars(self)["loss_fn"] = loss_fn  # not registered: this copy of its parameters would never train
        else:
            self.loss_fn = loss_fn

    def _check_shared(self) -> None:
        """Raise ConfigError if a trainable parameter is in layers of several stages that are not tied: the stages would
        train separate copies. Checks layers that are modules, modules in the arguments of specs, and `loss_fn`, which
        is on the last stage."""
        users: list[tuple[str, int, str | None, list[Parameter]]] = [
            (f"layer {index} ({_name(spec)}, ", self.stage_owner(index), _key(spec), _given_parameters(spec))
            for index, spec in enumerate(self._specs)
        ]
        if isinstance(self.loss_fn, Module):
            loss = self.loss_fn
            users.append((f"loss_fn ({_name(loss)}, ", self.num_stages - 1, None, _given_parameters(loss)))
        first: dict[int, tuple[str, int, str | None]] = {}  # the user, by id of the parameter
        for name, stage, key, params in users:
            for param in params:
                other, other_stage, other_key = first.setdefault(id(param), (name, stage, key))
                if stage != other_stage and (key is None or key != other_key):
                    raise ConfigError(
                        f"PipelineModule: found a parameter of shape {list(param.shape)} in {other}stage "
                        f"{other_stage}) and in {name}stage {stage}), of which each stage would train a copy of "
                        "its own; give both layers as TiedLayerSpec of one key, whose copies stay equal, or use a "
                        "partition_method that has them in one stage"
                    )

    def _partition(self, method: str, sample_inputs: Any) -> list[int]:
        if method == "uniform":
            return partition_uniform(len(self._specs), self.num_parts)
        if method == "parameters":
            weights: Sequence[float] = [_num_parameters(spec) for spec in self._specs]
        elif method == "profile":
            weights = self._measure(sample_inputs)
        else:
            weights = type_weights(method, [_name(spec) for spec in self._specs])
            if sum(weights) < self.num_parts:
                raise ConfigError(
                    f"partition_method: {method!r} matches {sum(weights)} of the layers "
                    f"{', '.join(map(_name, self._specs))}, and there are {self.num_parts} parts, each of which needs "
                    "one; use another expression"
                )
        return partition_balanced(weights, self.num_parts)

    def _measure(self, inputs: Any) -> list[float]:
        if inputs is None:
            raise ConfigError('partition_method: "profile" runs the layers; pass sample_inputs=, those of the first')
        built = [spec.build() if isinstance(spec, LayerSpec) else spec for spec in self._specs]
        return times_of_layers([_Layer(spec, each) for spec, each in zip(self._specs, built, strict=True)], inputs)

    def _build(self, part: int) -> list["_Layer"]:
        return [self._build_layer(index) for index in range(self.parts[part], self.parts[part + 1])]

    def _build_layer(self, index: int) -> "_Layer":
        spec = self._specs[index]
        if self.seed_layers:
            self.seed_fn(self.base_seed + self._seeded_as(index))
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in self.tied_modules:
                self.tied_modules[spec.key] = spec.build()
                spec.check(self.tied_modules[spec.key])
            return _Layer(spec, self.tied_modules[spec.key])
        built = spec.build() if isinstance(spec, LayerSpec) else spec
        if isinstance(built, Module):
            self.add_module(str(index), built)
        return _Layer(spec, built)

    def _seeded_as(self, index: int) -> int:
        """Return the layer number that seeds layer `index`: for a shared module, its first layer on any stage."""
        spec = self._specs[index]
        if not isinstance(spec, TiedLayerSpec) or spec.key in self.tied_modules:
            return index
        return next(
            number
            for number, other in enumerate(self._specs)
            if isinstance(other, TiedLayerSpec) and other.key == spec.key
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "PipelineModule":
        """Move or convert parameters, then mark tied parameters again, since some are new objects."""
        super()._apply(fn, recurse)
        self._mark_tied()
        return self

    def _mark_tied(self) -> None:
        for key, stages in self.tied_stages().items():
            if len(stages) > 1 and key in self.tied_modules:
                for param in self.tied_modules[key].parameters():
                    mark_tied(param, stages)


class _Layer:
    """One layer as a function of one argument."""

    def __init__(self, spec: Layer, built: Module | Callable[[Any], Any]) -> None:
        self.name = _name(spec)
        self.module = built if isinstance(built, Module) else None
        self._forward = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
        self._function = built

    def __call__(self, inputs: Any) -> Any:
        if self._forward is not None:
            return self._forward(self.module, inputs)  # type: ignore[arg-type]
        return self._function(inputs)


def _check_functions(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ConfigError(f"PipelineModule: {name} is {type(value).__name__}; give a function")


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    world_size = dist.get_world_group().size()
    if topology is not None and not isinstance(topology, ProcessTopology):
        raise ConfigError(
            f"PipelineModule: topology is {type(topology).__name__}; give a ProcessTopology, such as "
            "PipeDataParallelTopology(num_pp=2, num_dp=1), or num_stages alone"
        )
    if topology is not None:
        check_world(topology, world_size)
        if num_stages not in (None, topology.get_dim("pipe")):
            raise ConfigError(
                f"PipelineModule: found num_stages {num_stages}, and a topology with {topology.get_dim('pipe')}; give "
                "one of them"
            )
        return topology
    if num_stages is None:
        raise ConfigError("PipelineModule: found neither num_stages nor topology; give one of them")
    if not isinstance(num_stages, int):
        raise ConfigError(f"PipelineModule: found num_stages {num_stages!r}; give a number of stages")
    if num_stages < 1 or world_size % num_stages:
        allowed = either(size for size in range(1, world_size + 1) if world_size % size == 0)
        if world_size == 1:
            raise ConfigError(
                f"PipelineModule: found {num_stages} stages and 1 rank; start the script on more of them, such as "
                f"`deepspeed --num_accelerators {max(num_stages, 1)} script.py`, or use num_stages=1"
            )
        raise ConfigError(
            f"PipelineModule: found {counted(num_stages, 'stage')} for {counted(world_size, 'rank')}, which must "
            f"divide evenly among them; use {allowed}"
        )
    return PipeDataParallelTopology(num_stages, world_size // num_stages)


def _run(layers: Sequence[_Layer], inputs: Any) -> Any:
    for layer in layers:
        inputs = layer(inputs)
    return inputs


def _as_function(layers: Sequence[_Layer]) -> Callable[..., Any]:
    """Return a function that runs the layers; a checkpoint function calls it with the inputs as its arguments."""

    def run(*inputs: Any) -> Any:
        return _run(layers, inputs if len(inputs) > 1 else inputs[0])

    return run


def _name(spec: Layer) -> str:
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return type(spec).__name__ if isinstance(spec, Module) else getattr(spec, "__name__", type(spec).__name__)


class _OneParameter(Module):
    """A module with one parameter, which is sharded if the module is built inside `zero.Init`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(1))


def _given_parameters(spec: Layer) -> list[Parameter]:
    """Return the trainable parameters in a module layer, or in the modules and parameters among a spec's arguments."""
    given = [*spec.module_args, *spec.module_kwargs.values()] if isinstance(spec, LayerSpec) else [spec]
    found = [list(each.parameters()) if isinstance(each, Module) else [each] for each in given]
    return [param for params in found for param in params if isinstance(param, Parameter) and param.requires_grad]


def _key(spec: Layer) -> str | None:
    return spec.key if isinstance(spec, TiedLayerSpec) else None


def _num_parameters(spec: Layer) -> int:
    if isinstance(spec, LayerSpec):
        return spec.num_parameters()
    return count_parameters(spec) if isinstance(spec, Module) else 0
