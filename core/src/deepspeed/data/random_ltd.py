"""Random layer-wise token dropping: `convert_to_random_ltd` wraps layers, `RandomLTDScheduler` sets how many they keep.

Implements the section `data_efficiency.data_routing.random_ltd` with DeepSpeed's names. Source: Yao et al.,
"Random-LTD" (arXiv 2211.11586), section 3: each wrapped layer processes a random, growing subset of each sample's
tokens; the other tokens skip the layer. The module is imported only if the configuration or a script uses it.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from deepspeed._absent import absent_members
from deepspeed.config.intake import parse_section
from deepspeed.config.training import RandomLTDConfig
from deepspeed.errors import CheckpointError, ConfigError
from deepspeed.ops.random_ltd.dropping_utils import GatherTokens, ScatterTokens, bert_sample_tokens, gpt_sample_tokens

_SECTION = "data_efficiency.data_routing.random_ltd"
_INNER = "random_ltd_layer."  # prefix of the names of a wrapped layer's weights
#: names, in transformers, of a layer's arguments with one entry per token, [B, S, ..]
_BY_TOKEN = ("position_ids", "position_embeddings")


@absent_members("runtime.data_pipeline.data_routing.scheduler:RandomLTDScheduler")
class RandomLTDScheduler:
    """Computes the number of tokens that the wrapped layers keep in a step.

    The number is min_value + (max_value - min_value) * steps / require_steps, rounded down to a multiple of
    `seq_per_step`, and `max_value` after `require_steps` steps (arXiv 2211.11586, section 3).

    >>> schedule = RandomLTDScheduler(
    ...     {
    ...         "total_layer_num": 4,
    ...         "random_ltd_layer_num": 2,
    ...         "random_ltd_layer_id": [1, 2],
    ...         "random_ltd_schedule": {
    ...             "min_value": 16,
    ...             "max_value": 64,
    ...             "schedule_type": "fixed_linear",
    ...             "schedule_config": {"require_steps": 6, "seq_per_step": 16},
    ...         },
    ...     }
    ... )
    >>> [schedule.update_seq(step) or schedule.get_current_seq() for step in (0, 2, 3, 6)]
    [16, 32, 32, 64]

    Args:
        config: the section.
        global_batch_size: samples per step, to count the tokens that layers process.

    Raises:
        ConfigError: a key is missing or wrong.
    """

    def __init__(self, config: Mapping[str, Any] | RandomLTDConfig, global_batch_size: int = 1) -> None:
        if not isinstance(config, RandomLTDConfig):
            known = {
                name: value for name, value in config.items() if name not in ("global_batch_size", "micro_batch_size")
            }
            global_batch_size = config.get("global_batch_size", global_batch_size)
            config = parse_section(RandomLTDConfig, known, _SECTION)
        _check(config)
        schedule = config.random_ltd_schedule
        self.config = config
        self.global_batch_size = global_batch_size
        self.model_layer_num: int = config.total_layer_num  # type: ignore[assignment]
        self.random_ltd_layer_num: int = config.random_ltd_layer_num  # type: ignore[assignment]
        self._layer_ids: list[int] = list(config.random_ltd_layer_id or ())
        self._least, self._most = int(schedule["min_value"]), int(schedule["max_value"])
        self._num_steps = int(schedule["schedule_config"]["require_steps"])
        self._multiple = int(schedule["schedule_config"]["seq_per_step"])
        self.state: dict[str, Any] = {}
        self.has_layers = False  # set by `initialize_layers`
        self.reset_to_init()

    def reset_to_init(self) -> None:
        """Restart with the smallest number of tokens."""
        self.state = {"current_value": self._least, "consumed_layer_tokens": 0, "current_steps": -1}

    def get_current_seq(self) -> int:
        """Return the number of tokens to keep."""
        return int(self.state["current_value"])

    def set_current_seq(self, seq_length: int) -> None:
        """Set the number of tokens to keep until the next `update_seq`."""
        self.state["current_value"] = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """Return the number of layers that drop tokens."""
        return self.random_ltd_layer_num

    def update_seq(self, global_steps: int) -> None:
        """Move to a step, and count the tokens of its layers."""
        self.state["current_value"] = self._value(global_steps)
        if self.state["current_steps"] != global_steps:
            self.state["consumed_layer_tokens"] += self._layer_tokens(self.get_current_seq())
            self.state["current_steps"] = global_steps

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Return the number of tokens that all layers process in the first `train_iters` steps, counted per layer."""
        return sum(self._layer_tokens(self._value(step)) for step in range(train_iters))

    def get_state(self) -> dict[str, Any]:
        """Return the state for `set_state`."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {**self.state, "min_value": self._least, "max_value": self._most}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a CheckpointError for a state that `load_state_dict` cannot load."""
        if "current_value" not in state:
            raise CheckpointError("random_ltd: found a state without current_value; load another checkpoint")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.check_state_dict(state_dict)
        self.state.update({name: state_dict[name] for name in self.state if name in state_dict})

    def _value(self, steps: int) -> int:
        grown = self._least + (self._most - self._least) * steps / self._num_steps
        return int(min(grown - grown % self._multiple, self._most))

    def _layer_tokens(self, kept: int) -> int:
        whole = self.model_layer_num - self.random_ltd_layer_num
        return self.global_batch_size * (kept * self.random_ltd_layer_num + self._most * whole)

    def place_of(self, number: int) -> int | None:
        """Return the index of layer `number` among the layers that drop tokens; None if it drops none."""
        return self._layer_ids.index(number) if number in self._layer_ids else None


def _check(config: RandomLTDConfig) -> None:
    for name in ("total_layer_num", "random_ltd_layer_num", "random_ltd_layer_id"):
        if getattr(config, name) is None:
            raise ConfigError(f"{_SECTION}.{name}: found nothing; give it, as the number of layers of the model")
    ids, total = config.random_ltd_layer_id or [], config.total_layer_num or 0
    if (
        len(ids) != config.random_ltd_layer_num
        or len(set(ids)) != len(ids)
        or not all(0 <= each < total for each in ids)
    ):
        raise ConfigError(
            f"{_SECTION}.random_ltd_layer_id: found {ids}; give {config.random_ltd_layer_num} numbers "
            f"(random_ltd_layer_num) of 0 to {total - 1}, each once"
        )
    schedule = config.random_ltd_schedule
    if schedule.get("schedule_type") != "fixed_linear":
        raise ConfigError(
            f"{_SECTION}.random_ltd_schedule.schedule_type: found {schedule.get('schedule_type')!r}; there is "
            "'fixed_linear'"
        )
    options = schedule.get("schedule_config") or {}
    found = {
        **{name: schedule.get(name) for name in ("min_value", "max_value")},
        **{f"schedule_config.{name}": options.get(name) for name in ("require_steps", "seq_per_step")},
    }
    for name, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{_SECTION}.random_ltd_schedule.{name}: found {value!r}; give a whole number above 0")
    if schedule["min_value"] > schedule["max_value"]:
        raise ConfigError(
            f"{_SECTION}.random_ltd_schedule.min_value: found {schedule['min_value']}, above max_value "
            f"{schedule['max_value']}; give a smaller one"
        )
    if schedule["min_value"] < options["seq_per_step"]:
        raise ConfigError(
            f"{_SECTION}.random_ltd_schedule.min_value: found {schedule['min_value']}, below seq_per_step "
            f"{options['seq_per_step']}, a multiple of which is kept: at first that were none; give as much or more"
        )


@absent_members("runtime.data_pipeline.data_routing.basic_layer:RandomLayerTokenDrop")
class RandomLayerTokenDrop(nn.Module):
    """A wrapper that processes a random subset of the tokens in training, and all tokens otherwise.

    `convert_to_random_ltd` creates it. The layer's first argument is the hidden states, and it returns the states alone
    or first in a tuple. The mask, `position_ids` and `position_embeddings` are reduced to the same tokens. Attributes
    that the wrapper lacks are read from the layer, except names that begin with an underscore.

    Args:
        layer: a layer that accepts any number of tokens.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.random_ltd_layer = layer
        self.random_ltd_scheduler: RandomLTDScheduler | None = None
        self.random_ltd_layer_id: int | None = None
        self.reserved_length: int | None = None  # of the last forward
        self.model_type = "decoder"
        self.mask_name: str | None = None
        self.batch_first = True

    def init_config(
        self, config: Mapping[str, Any] | RandomLTDConfig, scheduler: RandomLTDScheduler, random_ltd_layer_id: int
    ) -> None:
        """Drop tokens from now on, as the schedule defines.

        Args:
            random_ltd_layer_id: the index of this layer among the layers that drop tokens.
        """
        if not isinstance(config, RandomLTDConfig):
            config = parse_section(RandomLTDConfig, config, _SECTION)
        self.random_ltd_scheduler = scheduler
        self.random_ltd_layer_id = random_ltd_layer_id
        self.model_type = config.model_type
        self.mask_name = config.model_mask_name
        self.batch_first = config.hidden_state_order == "batch_seq_dim"

    def get_bsh(self, hidden_stats: Tensor) -> tuple[int, int, int]:
        """Return batch, tokens and hidden size of states [B, S, H]."""
        batch, length, hidden = hidden_stats.shape
        return batch, length, hidden

    def get_sbh(self, hidden_stats: Tensor) -> tuple[int, int, int]:
        """Return batch, tokens and hidden size of states [S, B, H]."""
        length, batch, hidden = hidden_stats.shape
        return batch, length, hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "random_ltd_layer":
                raise
            return getattr(self.random_ltd_layer, name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch, length, _ = self.get_bsh(hidden_states) if self.batch_first else self.get_sbh(hidden_states)
        kept = length
        if self.training and self.random_ltd_scheduler is not None:
            kept = min(self.random_ltd_scheduler.get_current_seq(), length)
        self.reserved_length = kept
        if kept == length:
            return self.random_ltd_layer(hidden_states, *args, **kwargs)
        kwargs = self._named(args, kwargs)
        mask = None if self.mask_name is None else kwargs.get(self.mask_name)
        if mask is not None and not isinstance(mask, Tensor):
            raise ConfigError(
                f"{_SECTION}.model_mask_name: found a mask of type {type(mask).__name__}, which cannot be cut to "
                "tokens; let the model make a tensor, or none"
            )
        sample = gpt_sample_tokens if self.model_type == "decoder" else bert_sample_tokens
        indices, mask = sample(kept, length, batch, 1, hidden_states.device, mask)
        if mask is not None:
            kwargs[self.mask_name] = mask if self.model_type == "decoder" else mask[0]  # type: ignore[index]
        for name in _BY_TOKEN:
            if kwargs.get(name) is not None:
                kwargs[name] = _by_token(name, kwargs[name], indices[0], length)
        hidden_states, part = GatherTokens.apply(hidden_states, indices[0], self.batch_first)
        outputs = self.random_ltd_layer(part, **kwargs)
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        whole = ScatterTokens.apply(hidden_states, first, indices[0], self.batch_first)
        return whole if isinstance(outputs, Tensor) else (whole, *outputs[1:])

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments except the first by name, because the arguments to reduce are found by name."""
        names = [
            each.name
            for each in inspect.signature(self.random_ltd_layer.forward).parameters.values()
            if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        if len(args) + 1 > len(names):
            raise TypeError(
                f"{type(self.random_ltd_layer).__name__}.forward: found {len(args) + 1} arguments by position, and "
                f"takes {len(names)} that have names; pass those, so that what is by token can be cut"
            )
        given = dict(zip(names[1:], args, strict=False))
        if both := given.keys() & kwargs.keys():
            raise TypeError(f"{type(self.random_ltd_layer).__name__}.forward: found {', '.join(sorted(both))} twice")
        return {**given, **kwargs}


def _by_token(name: str, value: Any, indices: Tensor, length: int) -> Any:
    """Reduce a tensor [B or 1, S, ..], or a tuple of tensors, to tokens [B, R]. A tensor without S does not change."""
    if isinstance(value, tuple | list):
        return type(value)(_by_token(name, each, indices, length) for each in value)
    if not isinstance(value, Tensor) or length not in value.shape:
        return value
    if value.dim() < 2 or value.shape[1] != length or value.shape[0] not in (1, len(indices)):
        raise ConfigError(
            f"random_ltd: {name}: found shape {tuple(value.shape)} for states of {len(indices)} x {length} tokens; "
            "give batch (or 1) x tokens x .., so that it can be cut to the tokens that are kept"
        )
    value = value.expand(len(indices), *value.shape[1:])
    index = indices.long().reshape(*indices.shape, *[1] * (value.dim() - 2))
    return value.gather(1, index.expand(-1, -1, *value.shape[2:]))


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module]) -> Any:
    """Wrap all layers of a class. The layers that the configuration names drop tokens.

    Call it on the engine from `initialize`, on every rank, before `load_checkpoint`.

    Args:
        model: an engine; or a module, but then its layers process all tokens.
        convert_type: the class of the layers.

    Returns:
        `model`.
    """
    root = model.module if isinstance(getattr(model, "module", None), nn.Module) else model
    if not any(isinstance(each, convert_type) for each in root.modules()):
        raise ConfigError(
            f"convert_to_random_ltd: found no layer of type {convert_type.__name__} in the model; name another"
        )
    for parent in list(root.modules()):
        if isinstance(parent, RandomLayerTokenDrop | convert_type):
            continue  # wrap no layer twice, and no layer inside another
        for name, child in list(parent.named_children()):
            if isinstance(child, convert_type):
                wrapped = RandomLayerTokenDrop(child)
                wrapped.train(child.training)
                setattr(parent, name, wrapped)
    if hasattr(model, "random_ltd_initialize"):
        model.random_ltd_initialize()
    return model


def initialize_layers(model: nn.Module, scheduler: RandomLTDScheduler) -> None:
    """Connect the wrapped layers of a model to their schedule. Called by `engine.random_ltd_initialize`.

    Raises:
        ConfigError: the number of wrapped layers is not `total_layer_num`.
    """
    layers = [each for each in model.modules() if isinstance(each, RandomLayerTokenDrop)]
    if len(layers) != scheduler.model_layer_num:
        raise ConfigError(
            f"{_SECTION}.total_layer_num: found {scheduler.model_layer_num}, but convert_to_random_ltd has wrapped "
            f"{len(layers)} layers; give their number"
        )
    scheduler.has_layers = True
    for number, layer in enumerate(layers):
        place = scheduler.place_of(number)
        if place is not None:
            layer.init_config(scheduler.config, scheduler, place)


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict with the names from before `convert_to_random_ltd`."""
    return remove_random_ltd_state_dict(model.state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the names from before `convert_to_random_ltd`."""
    return {
        name.replace(_INNER, ""): remove_random_ltd_state_dict(value) if isinstance(value, Mapping) else value
        for name, value in state_dict.items()
    }
