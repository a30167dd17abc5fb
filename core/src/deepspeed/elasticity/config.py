"""The section `elasticity` as an object with DeepSpeed's names, and the errors of elastic training."""

import json
from collections.abc import Mapping
from typing import Any

from deepspeed.errors import MAX_NAME_LENGTH, ConfigError, by_words, is_strict, nearest_name, shown
from deepspeed.log import warn_once

# DeepSpeed's constants for the names of the keys, and for their defaults.
ELASTICITY = "elasticity"
LATEST_ELASTICITY_VERSION = 0.2
MINIMUM_DEEPSPEED_VERSION = "0.3.8"
DEEPSPEED_ELASTICITY_CONFIG = "DEEPSPEED_ELASTICITY_CONFIG"
"""Variable in which a scheduler leaves the section as it knows it; see `ensure_immutable_elastic_config`."""

ENABLED, ENABLED_DEFAULT = "enabled", False
MAX_ACCEPTABLE_BATCH_SIZE, MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT = "max_train_batch_size", 2000
MICRO_BATCHES, MICRO_BATCHES_DEFAULT = "micro_batch_sizes", [2, 4, 6]
MIN_GPUS, MIN_GPUS_DEFAULT = "min_gpus", 1
MAX_GPUS, MAX_GPUS_DEFAULT = "max_gpus", 10000
NUM_GPUS_PER_NODE, NUM_GPUS_PER_NODE_DEFAULT = "num_gpus_per_node", 1
MODEL_PARALLEL_SIZE, MODEL_PARALLEL_SIZE_DEFAULT = "model_parallel_size", 1
MIN_TIME, MIN_TIME_DEFAULT = "min_time", 0
PREFER_LARGER_BATCH, PREFER_LARGER_BATCH_DEFAULT = "prefer_larger_batch", True
IGNORE_NON_ELASTIC_BATCH_INFO, IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT = "ignore_non_elastic_batch_info", False
VERSION, VERSION_DEFAULT = "version", LATEST_ELASTICITY_VERSION
_KEYS = (
    *(ENABLED, IGNORE_NON_ELASTIC_BATCH_INFO, MAX_GPUS, MAX_ACCEPTABLE_BATCH_SIZE, MICRO_BATCHES, MIN_GPUS, MIN_TIME),
    *(MODEL_PARALLEL_SIZE, NUM_GPUS_PER_NODE, PREFER_LARGER_BATCH, VERSION),
)

FORMAT = """
"elasticity": {
  "enabled": true,
  "max_train_batch_size": 2000,
  "micro_batch_sizes": [2, 4, 6]
}
"""


class ElasticityError(ConfigError):
    """Base class of the errors of elastic training."""


class ElasticityConfigError(ElasticityError):
    """The section `elasticity` is invalid, or other settings contradict it."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch size does not allow this number of ranks."""


class ElasticityConfig:
    """The checked section `elasticity`.

    Args:
        param_dict: the section as a dict. If it is enabled, it must have `max_train_batch_size` and
            `micro_batch_sizes`.

    Raises:
        ElasticityConfigError: the section is no dict, a key is missing or has an invalid value, or an unknown key
            resembles a known one. Other unknown keys are ignored, with a warning.
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        if not isinstance(param_dict, Mapping):
            raise ElasticityConfigError(
                f"{ELASTICITY}: found {shown(str(param_dict))}; give a section with {ENABLED}, "
                f"{MAX_ACCEPTABLE_BATCH_SIZE} and {MICRO_BATCHES}"
            )
        self._given = dict(param_dict)
        for name in self._given:
            if name not in _KEYS:
                _unknown_key(str(name))
        self.enabled = bool(self._given.get(ENABLED, ENABLED_DEFAULT))
        if self.enabled:
            for name in (MAX_ACCEPTABLE_BATCH_SIZE, MICRO_BATCHES):
                if name not in self._given:
                    raise ElasticityConfigError(
                        f"elasticity.{name}: is missing; elasticity needs it once it is enabled"
                    )
        self.max_acceptable_batch_size = self._whole(MAX_ACCEPTABLE_BATCH_SIZE, MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT)
        self.micro_batches = self._micro_batches()
        self.min_gpus = self._whole(MIN_GPUS, MIN_GPUS_DEFAULT)
        self.max_gpus = self._whole(MAX_GPUS, MAX_GPUS_DEFAULT)
        if self.max_gpus < self.min_gpus:
            raise ElasticityConfigError(
                f"elasticity.{MAX_GPUS}: found {self.max_gpus}, less than {MIN_GPUS} ({self.min_gpus}); make it as "
                "large or larger"
            )
        self.model_parallel_size = self._whole(MODEL_PARALLEL_SIZE, MODEL_PARALLEL_SIZE_DEFAULT)
        self.num_gpus_per_node = self._whole(NUM_GPUS_PER_NODE, NUM_GPUS_PER_NODE_DEFAULT)
        self.min_time = self._whole(MIN_TIME, MIN_TIME_DEFAULT, least=0)
        self.version = self._version()
        self.prefer_larger_batch_size = bool(self._given.get(PREFER_LARGER_BATCH, PREFER_LARGER_BATCH_DEFAULT))
        self.ignore_non_elastic_batch_info = bool(
            self._given.get(IGNORE_NON_ELASTIC_BATCH_INFO, IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT)
        )
        self._check_model_parallel()

    def repr(self) -> dict[str, Any]:
        """Return a copy of the given section."""
        return dict(self._given)

    def __repr__(self) -> str:
        return json.dumps(self._given, sort_keys=True, indent=4, default=str)

    def _whole(self, name: str, default: int, least: int = 1) -> int:
        value = self._given.get(name, default)
        if not _is_whole(value) or value < least:
            raise ElasticityConfigError(
                f"elasticity.{name}: found {shown(str(value))}; allowed: a whole number of {least} or more"
            )
        return int(value)

    def _micro_batches(self) -> list[int]:
        found = self._given.get(MICRO_BATCHES, MICRO_BATCHES_DEFAULT)
        if not isinstance(found, list | tuple) or not found or not all(_is_whole(each) and each > 0 for each in found):
            raise ElasticityConfigError(
                f"elasticity.{MICRO_BATCHES}: found {shown(str(found))}; allowed: a list of whole numbers of 1 or more"
            )
        if max(found) > self.max_acceptable_batch_size:
            raise ElasticityConfigError(
                f"elasticity.{MICRO_BATCHES}: found {max(found)}, more than {MAX_ACCEPTABLE_BATCH_SIZE} "
                f"({self.max_acceptable_batch_size}); a micro-batch is at most a whole batch"
            )
        return [int(each) for each in found]

    def _version(self) -> float:
        found = self._given.get(VERSION, VERSION_DEFAULT)
        try:
            version = float(found)
        except (TypeError, ValueError):
            version = 0.0
        if version not in (0.1, LATEST_ELASTICITY_VERSION):
            raise ElasticityConfigError(
                f"elasticity.{VERSION}: found {shown(str(found))}; allowed: 0.1 or {LATEST_ELASTICITY_VERSION}"
            )
        return version

    def _check_model_parallel(self) -> None:
        if self.model_parallel_size == 1:
            return
        found = f"elasticity.{MODEL_PARALLEL_SIZE}: found {self.model_parallel_size}"
        if self.version < LATEST_ELASTICITY_VERSION:
            raise ElasticityConfigError(
                f"{found} with {VERSION} {self.version}, which knows data parallelism only; set {VERSION} to "
                f"{LATEST_ELASTICITY_VERSION}"
            )
        if self.num_gpus_per_node % self.model_parallel_size:
            raise ElasticityConfigError(
                f"{found}, which does not divide {NUM_GPUS_PER_NODE} ({self.num_gpus_per_node}); a model-parallel "
                "group has to lie within a node, change one of them"
            )


def _unknown_key(written: str) -> None:
    """Raise ElasticityConfigError for a key that resembles one of the section's, or warn once, as all sections do."""
    near = nearest_name(written, _KEYS, 2) or by_words(written, _KEYS)
    where = f"{ELASTICITY}.{written if written.isprintable() and len(written) <= MAX_NAME_LENGTH else shown(written)}"
    if near is None and written.isprintable() and len(written) <= MAX_NAME_LENGTH and not is_strict():
        warn_once(f"{where}: unknown config key, ignored")
        return
    hint = f"allowed: {', '.join(_KEYS)}" if near is None else f"did you mean '{near}'?"
    raise ElasticityConfigError(f"{where}: found an unknown key; {hint}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
