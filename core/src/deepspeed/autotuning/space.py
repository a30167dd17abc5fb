"""`Space` holds the open settings of a user's configuration, and creates the configuration of each trial.

A value that the user wrote is fixed. A setting is open if the configuration says "auto" or gives a list of values. The
micro-batch is also open if it is missing, and the stage if the section `zero_optimization` lacks it. With `fast` false,
buckets, overlap and the place of the optimizer states are open too. `Space.coarse` returns points of stage,
micro-batch, mesh and offload; `Space.fine` returns points of the other settings around some of them.
"""

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.autotuning.tuners import MICRO_BATCH, Point
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.base import AUTO
from deepspeed.config.training import AutotuningConfig
from deepspeed.errors import ConfigError, counted, whole_number
from deepspeed.planning import Mesh, estimate_measured, read_training
from deepspeed.planning.blocks import Param
from deepspeed.planning.training import OPTIMIZER_STATES

STAGE = "zero_optimization.stage"
TRAIN, STEPS = "train_batch_size", "gradient_accumulation_steps"
OFFLOADS = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
#: axis of the mesh -> keys that set its size
_AXES = {
    "pp": ("mesh.pp",),
    "sp": ("mesh.sp", "sequence_parallel_size"),
    "tp": ("mesh.tp", "tensor_parallel.autotp_size"),
}
_STAGE_3 = ("stage3_", "prefetch_", "param_persistence", "max_live", "max_reuse")
_SHARES = (1, 4, 16)  # a bucket holds the model divided by this


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """`ModelInfo` is information about the model, from a job or from `model_info`.

    parameters: (name, number of elements, whether it is trained) of each parameter; empty if unknown.
    num_params: total number of elements.
    activation_bytes: bytes that the forward of one sample saves for the backward; 0: unknown.
    memory_bytes: memory of a rank's device; 0: unknown.
    ranks: number of ranks of a trial.
    is_host: whether the device uses host memory, so that offload moves nothing.
    """

    parameters: tuple[tuple[str, int, bool], ...] = ()
    num_params: int = 0
    activation_bytes: int = 0
    memory_bytes: int = 0
    ranks: int = 1
    is_host: bool = False


def read_section(raw: Mapping[str, Any]) -> AutotuningConfig:
    """Return the section `autotuning` of a configuration whose other values may be lists.

    Raises:
        ConfigError: the section is invalid; the message names the key.
    """
    return DeepSpeedConfig({"autotuning": raw.get("autotuning", {})}, batch_required=False).autotuning


class Space:
    """`Space` has the points of a search, and converts a point to a configuration.

    Args:
        raw: the user's configuration.
        config: its section `autotuning`.
        info: information about the model.
        said: values in the user's command for keys of `arg_mappings`.
        ran: a point at which a job has run; points that need no more memory fit too.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        config: AutotuningConfig,
        info: ModelInfo,
        said: Mapping[str, Any] | None = None,
        ran: Point | None = None,
    ) -> None:
        self.raw = {name: value for name, value in raw.items() if name != "autotuning"}
        self.config, self.info, self.said = config, info, said or {}
        if self.raw.get("zero_optimization") in ("all", AUTO):
            self.raw["zero_optimization"] = {}
        if isinstance(self.raw.get("zero_optimization"), bool):  # the form of the first DeepSpeed
            self.raw["zero_optimization"] = {"stage": int(self.raw["zero_optimization"])}
        if self.raw.get("mesh") == AUTO:  # the other axes need support by the model
            self.raw["mesh"] = {"tp": AUTO}
        self.accumulation = self._accumulation()
        self._ran = ran
        self._micro = _given(self.raw, MICRO_BATCH)
        self._zero = self.raw.get("zero_optimization")
        #: points of `coarse` that do not fit into a rank's memory, with the minimum of bytes that they need
        self.pruned: list[tuple[Point, int]] = []

    def coarse(self) -> list[Point]:
        """Return the points of stage, mesh, offload and micro-batch that may fit, ordered by stage."""
        points, ranks = list(self._coarse()), counted(self.info.ranks, "rank")
        if not points and not list(self._meshes()):
            given = {key: _given(self.raw, key) for keys in _AXES.values() for key in keys}
            sizes = {key: size for key, size in given.items() if size is not None}
            sizes = sizes or {"autotuning.mp_size": self.config.mp_size}
            found = " and ".join(f"{key} {size}" for key, size in sizes.items())
            raise ConfigError(
                f"{next(iter(sizes))}: found {found} on {ranks}; the number of ranks must be a multiple of their "
                "product, so start more ranks or give smaller sizes"
            )
        if not points and self._micro not in (None, AUTO):
            raise ConfigError(
                f"{MICRO_BATCH}: found {self._micro}; none divides {TRAIN} {self.raw.get(TRAIN)} on {ranks}; "
                "give others"
            )
        if not points:
            bounds = {TRAIN: self.raw.get(TRAIN), "autotuning.max_train_batch_size": self.config.max_train_batch_size}
            found = " and ".join(f"{key} {value}" for key, value in bounds.items() if value is not None)
            within = f", with {found}" if found else ""
            raise ConfigError(
                f"autotuning: no micro-batch fits: from {self.config.min_train_micro_batch_size_per_gpu} to "
                f"{self.config.max_train_micro_batch_size_per_gpu} on {ranks}{within}; allow others"
            )
        needs = [self.bytes_needed(point) for point in points]
        limit = self.info.memory_bytes
        if limit and self._ran is not None:
            limit = max(limit, self.bytes_needed(self._ran))
        self.pruned = [(point, need) for point, need in zip(points, needs, strict=True) if limit and need > limit]
        fitting = [point for point, need in zip(points, needs, strict=True) if not limit or need <= limit]
        return fitting or points[:1]  # an estimate alone does not end a search

    def _coarse(self) -> Iterator[Point]:
        for stage in self._stages():
            for axes in self._meshes():
                for places in self._places(stage):
                    for micro in self._micro_batches(axes):
                        yield {STAGE: stage, **axes, **places, MICRO_BATCH: micro}

    def fine(self, measured: Sequence[tuple[Point, float]]) -> list[Point]:
        """Return points of the other settings, at the best stage and its best micro-batches.

        Args:
            measured: points of `coarse` with their scores.
        """
        ranked = sorted(measured, key=lambda each: -each[1])
        if not ranked:
            return []
        best = {name: value for name, value in ranked[0][0].items() if name != MICRO_BATCH}
        alike = [point for point, _ in ranked if {**point, **best} == point]
        found: list[Point] = []
        for point in alike[: self.config.num_tuning_micro_batch_sizes]:
            dims = self._fine_dims(point[STAGE])
            for values in itertools.product(*dims.values()):
                found.append({**point, **dict(zip(dims, values, strict=True))})
        return found if len(found) > len(alike[: self.config.num_tuning_micro_batch_sizes]) else []

    def _accumulation(self) -> Any:
        """Return the micro-batches per step: a number, or "auto" if only the script knows it."""
        given = _given(self.raw, STEPS)
        if given == AUTO or (given is None and STEPS in self.said):
            return self.said.get(STEPS, AUTO)
        if isinstance(given, list):
            raise ConfigError(f"{STEPS}: found {given}; give one number, or train_batch_size, from which it follows")
        return 1 if given is None else whole_number(STEPS, given)

    def _stages(self) -> Sequence[int]:
        if self._zero is None:
            return [0]
        given = _given(self.raw, STAGE)
        if given in (None, AUTO, "all"):
            return [0, 1, 2, 3]
        return _values(given)

    def _meshes(self) -> Iterator[dict[str, Any]]:
        """Yield sizes of the open axes, by key, whose product divides the number of ranks."""
        dims: dict[tuple[str, ...], Sequence[int]] = {}
        for keys in _AXES.values():
            given = {key: _given(self.raw, key) for key in keys}
            is_open = tuple(key for key, value in given.items() if value == AUTO or isinstance(value, list))
            lists = [value for value in given.values() if isinstance(value, list)]
            sizes = [size for size in range(1, self.info.ranks + 1) if self.info.ranks % size == 0]
            if is_open:
                dims[is_open] = lists[0] if lists else sizes
        for chosen in itertools.product(*dims.values()):
            point = {key: size for keys, size in zip(dims, chosen, strict=True) for key in keys}
            if self.info.ranks % self._model_ranks(point) == 0:
                yield point

    def _model_ranks(self, point: Point) -> int:
        """Return the number of ranks that get the same samples at this point."""
        sizes = [self._axis(point, axis) for axis in _AXES]
        product = sizes[0] * sizes[1] * sizes[2]
        return product if product > 1 else self.config.mp_size

    def _axis(self, point: Point, axis: str) -> int:
        found = [point.get(key, _given(self.raw, key)) for key in _AXES[axis]]
        return max((size for size in found if isinstance(size, int)), default=1) or 1

    def data_ranks(self, point: Point) -> int:
        """Return the number of ranks that get different samples at this point."""
        return max(self.info.ranks // self._model_ranks(point), 1)

    def _places(self, stage: int) -> Iterator[dict[str, Any]]:
        """Yield places of the optimizer states and the parameters, by key."""
        dims: dict[str, Sequence[Any]] = {}
        for key, least in zip(OFFLOADS, (1, 3), strict=True):
            section = _given(self.raw, key.rpartition(".")[0])
            given = section if section == AUTO else _given(self.raw, key)
            is_open = given == AUTO or (
                section is None and key == OFFLOADS[0] and not self.config.fast and not self.info.is_host
            )
            if is_open and self._zero is not None:
                dims[key] = ["none", "cpu"] if stage >= least else ["none"]
            elif isinstance(given, list):
                dims[key] = given if stage >= least else given[:1]
        for values in itertools.product(*dims.values()):
            yield dict(zip(dims, values, strict=True))

    def _micro_batches(self, axes: Point) -> list[int]:
        config, ranks = self.config, self.data_ranks(axes)
        train = _given(self.raw, TRAIN)
        if self._micro not in (None, AUTO):
            given = [whole_number(MICRO_BATCH, size) for size in _values(self._micro)]
            return [size for size in given if not isinstance(train, int) or train % (size * ranks) == 0]
        steps = self.accumulation if isinstance(self.accumulation, int) else 1
        least = max(config.min_train_micro_batch_size_per_gpu, int(self.said.get(MICRO_BATCH, 1)))
        most = config.max_train_micro_batch_size_per_gpu or 2**30
        if isinstance(train, int):  # the global batch stays as it is
            return [size for size in range(least, min(most, train) + 1) if train % (size * ranks) == 0]
        least = max(least, -(-config.min_train_batch_size // (steps * ranks)))
        if config.max_train_batch_size is not None:
            most = min(most, config.max_train_batch_size // (steps * ranks))
        sizes = [least * 2**power for power in range(31) if least * 2**power <= most]
        is_bound = config.max_train_batch_size is not None and sizes and sizes[-1] < most
        return [*sizes, most] if is_bound else sizes

    def _fine_dims(self, stage: int) -> dict[str, Sequence[Any]]:
        """Return open settings besides those of `coarse`: the user's lists, and with `fast` false our own values."""
        zero = self._zero if isinstance(self._zero, Mapping) else {}
        dims: dict[str, Sequence[Any]] = {}
        for name, value in zero.items():
            key = f"zero_optimization.{name}"
            if isinstance(value, list) and key != STAGE:
                dims[key] = value if stage == 3 or not name.startswith(_STAGE_3) else value[:1]
        if self.config.fast or self._zero is None:
            return dims
        own: dict[str, Sequence[Any]] = {"overlap_comm": [True, False]}
        if self.info.num_params:
            sizes = [max(self.info.num_params // share, 1) for share in _SHARES]
            own["reduce_bucket_size"] = sizes
            if stage == 3:
                own["stage3_prefetch_bucket_size"] = [0, *sizes[1:]]
        for name, values in own.items():
            if zero.get(name, AUTO) == AUTO:
                dims[f"zero_optimization.{name}"] = values
        return dims

    def settle(self, point: Point) -> dict[str, Any]:
        """Return the configuration of a point, without the section `autotuning`."""
        config = copy.deepcopy(self.raw)
        for name, value in (config.get("zero_optimization") or {}).items():
            if isinstance(value, list):  # the first value, until `fine` chooses
                config["zero_optimization"][name] = value[0]
        for key, value in point.items():
            if key != STAGE or self._zero is not None:
                _put(config, key, value)
        config[STEPS] = self.accumulation
        train = config.pop(TRAIN, None)
        if isinstance(train, int) and not isinstance(train, bool):
            config[TRAIN] = train
            config[STEPS] = train // (point[MICRO_BATCH] * self.data_ranks(point))
        tp = point.get("mesh.tp")
        if tp is not None and "tensor_parallel" not in self.raw:
            config["tensor_parallel"] = {"autotp_size": tp}
        return config

    def name(self, point: Point) -> str:
        """Return the name of a trial, from stage, micro-batch, accumulation and other open settings."""
        config = self.settle(point)
        words = [f"z{point[STAGE]}", f"tmbspg{point[MICRO_BATCH]}", f"gas{config[STEPS]}"]
        for key, value in point.items():
            if key not in (STAGE, MICRO_BATCH):
                path = key.removeprefix("zero_optimization.").removeprefix("mesh.")
                short = path if len(path) < 3 else "".join(word[0] for word in re.split(r"[._]", path))
                words.append(f"{short}{value}")
        return re.sub(r"[^\w.+-]", "-", "_".join(words))

    def bytes_needed(self, point: Point) -> int:
        """Return the planner's lower bound of a rank's device memory in bytes; 0 if it is unknown."""
        info = self.info
        if not info.parameters:
            return 0
        optimizer = str((self.raw.get("optimizer") or {}).get("type", "adamw")).lower()
        given = {"optimizer": optimizer if optimizer in OPTIMIZER_STATES else "sgd"}  # a lower bound
        config = {name: section for name, section in self.settle(point).items() if name in _PLANNED}
        training, _ = read_training(config, **given)
        divided = self._axis(point, "tp") * self._axis(point, "pp")
        params = [Param(name, -(-numel // divided)) for name, numel, trains in info.parameters if trains]
        frozen = sum(numel for _, numel, trains in info.parameters if not trains) // divided
        mesh = Mesh(dp=self.data_ranks(point), sp=self._axis(point, "sp"))
        activations = info.activation_bytes * point[MICRO_BATCH] // (divided * mesh.sp)
        shards = mesh.replicas if training.stage == 3 else 1
        memory = estimate_measured(params, activations, mesh, training)
        return memory.total + training.weight_bytes * frozen // shards


#: sections that the planner reads; others may hold values that only a script fills in
_PLANNED = ("zero_optimization", "bf16", "fp16", "data_types", "gradient_accumulation_steps", MICRO_BATCH)


def mapped_values(config: Mapping[str, Any], mappings: Mapping[str, str]) -> dict[str, Any]:
    """Return flag -> value for the flags of `arg_mappings` in a trial, if the configuration has the key.

    A key is the path of a value, or its last part within `zero_optimization`.
    """
    found = {}
    for key, flag in mappings.items():
        value = _given(config, key.strip())
        if value is None:
            value = _given(config, f"zero_optimization.{key.strip()}")
        if value is not None and value != AUTO:
            found[flag] = value
    return found


def _given(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        if not isinstance(config.get(section), dict):
            config[section] = {}
        config = config[section]
    config[name] = value


def _values(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]
