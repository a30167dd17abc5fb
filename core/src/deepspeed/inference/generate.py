"""`model.generate` of an injected model: over a cache that is allocated once, by a loop of its own where that serves.

The cache is a `Cache` of transformers. Its class is made on first use, because core imports transformers only when a
model of it generates.

The loop is that of greedy and sampled generation over fused blocks, transformers' own, with less around each token.

`model.generate` of transformers does everything before the first token: it reads the configuration, makes the objects
that process logits and stop, pads, and repeats prompts. Then it calls this loop in the place of its own. Logits,
processors, random numbers and ends are used in the same order, so the tokens are the same.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.errors import ConfigError, counted

if TYPE_CHECKING:
    from deepspeed.inference.injection.decoder import Decoder, DecodeStep

# What asks for a cache or a loop of transformers' own, where it is not None: as an argument, or in a configuration.
_OF_THEIR_OWN = (
    "cache_implementation",
    "prompt_lookup_num_tokens",
    *("penalty_alpha", "dola_layers", "constraints", "force_words_ids"),  # loops on the hub, which it downloads
)
# Arguments of `generate` that only transformers' loops know, or that they are handed and ours would not be.
_FOR_THEIR_LOOPS = ("custom_generate", "synced_gpus", "tokenizer", "assistant_tokenizer", "negative_prompt_ids")


def can_generate(model: nn.Module) -> bool:
    """Whether it is a decoder with transformers' `generate`."""
    asks = getattr(model, "can_generate", None)
    return callable(asks) and bool(asks()) and not getattr(model.config, "is_encoder_decoder", False)


class StaticGeneration:
    """Takes the place of `model.generate`: passes an empty cache of `max_tokens` where the caller passes none.

    A caller's own cache, `use_cache=False` and `cache_implementation` are honored, also in the model's own
    `generation_config`, and ways of generation that transformers loads from the hub are left to it. Greedy and sampled
    generation of a model in the table of decoders runs in a loop of our own, all else in transformers' loops; tokens
    and random numbers are those of the plain model.

    Args:
        decoder: of the model; None: transformers' loops run.
    """

    def __init__(self, model: nn.Module, max_tokens: int, decoder: "Decoder | None" = None) -> None:
        self.model, self.max_tokens, self.decoder = model, max_tokens, decoder
        self.around_token: Callable[[], AbstractContextManager[None]] = nullcontext  # but for the first one's
        self._cache_argument = cache_argument(type(model).forward) or "past_key_values"
        self.original: Any = model.generate
        model.generate = self  # type: ignore[assignment]

    def __call__(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers' `generate` does, with its arguments and results.

        Raises:
            ConfigError: prompt and new tokens are more than max_out_tokens.
        """
        config = args[0] if args else kwargs.get("generation_config")
        if not self._is_theirs(config, kwargs):
            self._check_length(inputs, config, kwargs)
            kwargs[self._cache_argument] = static_cache(self.max_tokens)
            if (loop := self._loop(args, config, kwargs)) is not None:
                kwargs["custom_generate"] = loop
        return self.original(inputs, *args, **kwargs)

    def _loop(self, args: tuple[Any, ...], config: Any, kwargs: dict[str, Any]) -> "DecodeLoop | None":
        """Return our own loop; None where it does not serve what the caller asks for."""
        if self.decoder is None or len(args) > 1 or any(kwargs.get(name) is not None for name in _FOR_THEIR_LOOPS):
            return None
        if not hasattr(self.model, "_prefill"):  # transformers before 5.0
            return None
        beams = kwargs.get("num_beams") or getattr(config or self.model.generation_config, "num_beams", None)
        if (beams or 1) > 1 or not self.decoder.serves():
            return None
        return DecodeLoop(self.decoder, kwargs.get("streamer"), self.max_tokens, self.around_token)

    def _check_length(self, inputs: Any, config: Any, kwargs: dict[str, Any]) -> None:
        given = inputs if inputs is not None else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        num_prompt = 1 if given is None else given.shape[1]
        num_new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
        needed = kwargs.get("max_length", num_prompt) if num_new is None else num_prompt + num_new
        if needed > self.max_tokens:
            raise ConfigError(
                f"generate: a prompt of {counted(num_prompt, 'token')} and new ones to a length of {needed}, but "
                f"max_out_tokens is {self.max_tokens}; set max_out_tokens to at least {needed}, or generate fewer"
            )

    def _is_theirs(self, config: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether the caller or the model asks for caches or loops of transformers."""
        if any(kwargs.get(name) is not None for name in ("past_key_values", "cache", "assistant_model")):
            return True
        if any(self._setting(name, config, kwargs) is not None for name in _OF_THEIR_OWN):
            return True
        num_groups = self._setting("num_beam_groups", config, kwargs)
        return (num_groups or 1) > 1 or self._setting("use_cache", config, kwargs) is False

    def _setting(self, name: str, config: Any, kwargs: dict[str, Any]) -> Any:
        """Find a setting as transformers does: in the arguments, else the caller's configuration, else the model's."""
        if name in kwargs:
            return kwargs[name]
        given = getattr(config, name, None)
        if given is not None:
            return given
        found = getattr(self.model.generation_config, name, None)
        # what files of older models say; transformers 5 takes it for none
        return None if name == "cache_implementation" and found == "hybrid" else found

    def release(self) -> None:
        """Give the model its own `generate` back."""
        del self.model.generate


def static_cache(max_tokens: int) -> Any:
    """An empty cache for sequences of up to `max_tokens` tokens, prompt included; memory comes with the first tokens.

    It behaves as transformers' `DynamicCache`: attention sees as many tokens as were written, so masks fit them.
    """
    cache_class, layer_class = _classes()
    return cache_class(layer_class_to_replicate=lambda: layer_class(max_tokens))


@cache
def _classes() -> tuple[Any, Any]:
    from transformers.cache_utils import Cache, DynamicLayer

    class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
        """Keys and values [B, G, S, D], views of the first S tokens of buffers [B, G, max_tokens, D]."""

        def __init__(self, max_tokens: int) -> None:
            super().__init__()
            self.keys: Any  # Tensor, once initialized
            self.values: Any
            self.max_tokens = max_tokens
            self._buffers: tuple[Tensor, Tensor] | None = None

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            """Write the new tokens [B, G, T, D] behind the others; all of them are returned."""
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            start = self.get_seq_length()
            end = start + key_states.shape[-2]
            if end > self.max_tokens:
                raise ConfigError(
                    f"generation needs {counted(end, 'token')}, prompt and new ones, and the cache holds "
                    f"max_out_tokens = {self.max_tokens}; set max_out_tokens to at least the longest sequence, or "
                    "generate fewer"
                )
            written = []
            for buffer, known, new in zip(
                self._own_buffers(key_states, value_states, start),
                (self.keys, self.values),
                (key_states, value_states),
                strict=True,
            ):
                if start and known.data_ptr() != buffer.data_ptr():  # reordered or repeated: a copy of its own
                    buffer[:, :, :start].copy_(known)
                buffer[:, :, start:end].copy_(new)
                written.append(buffer[:, :, :end])
            self.keys, self.values = written
            return self.keys, self.values

        def _own_buffers(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
            fits = self._buffers is not None and self._buffers[0].shape[0] == keys.shape[0]
            if not fits:
                shapes = [(*part.shape[:2], self.max_tokens, part.shape[3]) for part in (keys, values)]
                key_buffer, value_buffer = (
                    torch.empty(shape, dtype=part.dtype, device=part.device)
                    for shape, part in zip(shapes, (keys, values), strict=True)
                )
                self._buffers = key_buffer, value_buffer
            assert self._buffers is not None
            return self._buffers

        @property
        def buffers(self) -> tuple[Tensor, Tensor]:
            """Keys and values, [B, G, max_tokens, D], of which the first tokens are written."""
            assert self._buffers is not None
            return self._buffers

        def get_max_length(self) -> int:
            """Tokens that fit."""
            return self.max_tokens

        def reset(self) -> None:
            """Forget all tokens, keep the memory."""
            if self.is_initialized:
                self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]

    return Cache, PreallocatedLayer


# What the model's forward may be given besides tokens. Others (types of tokens, images) are for its own forward.
_FORWARD_KWARGS = {"attention_mask", "position_ids", "past_key_values", "cache", "logits_to_keep", "use_cache"}


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a forward, or None.

    It is known by what it can, not by its name: transformers renamed `past_key_values` to `cache` in 5.24, and a block
    that overlooks its cache gives wrong tokens without an error.
    """
    return next((each for each in given.values() if hasattr(each, "get_seq_length")), None)


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name by which the forward of a model takes its cache; None where it has none that is known."""
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


class DecodeLoop:
    """`DecodeLoop` generates the tokens of one call of `generate(custom_generate=...)` of transformers.

    Args:
        decoder: of the model.
        streamer: of the call, or None; transformers hands it to its own loops alone.
        max_tokens: that the cache holds.
        around_token: a context in which each token after the first is computed.
    """

    def __init__(
        self,
        decoder: "Decoder",
        streamer: Any,
        max_tokens: int,
        around_token: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._decoder, self._streamer, self._max_tokens = decoder, streamer, max_tokens
        self._around_token = around_token

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """The tokens of prompt and generation, (B, tokens), as transformers' loop gives them."""
        words = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
        }
        if not _serves(input_ids, generation_config, model_kwargs):
            own = _own_loop(model, generation_config)
            if self._streamer is not None:
                words["streamer"] = self._streamer
            return own(model, input_ids, **words, **model_kwargs)
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        ends = _Ends(input_ids, generation_config, stopping_criteria, self._streamer)
        step: Callable[[Tensor], Tensor] | None = None
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
        del outputs
        while True:
            scores = logits_processor(ends.tokens(), logits) if logits_processor else logits
            if generation_config.do_sample:
                chosen = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
            else:
                chosen = torch.argmax(scores, dim=-1)
            chosen = ends.take(chosen)
            if ends.reached():
                break
            if step is None:
                step = self._start(model_kwargs)
            with self._around_token():
                logits = step(chosen).float()
        if self._streamer is not None:
            self._streamer.end()
        return ends.tokens()

    def _start(self, model_kwargs: dict[str, Any]) -> "DecodeStep":
        positions = model_kwargs["position_ids"][:, -1]
        mask = model_kwargs.get("attention_mask")
        return self._decoder.start(cache_of(model_kwargs), mask, positions, self._max_tokens)


class _Ends:
    """The tokens so far, and which sequences go on."""

    def __init__(self, prompt: Tensor, config: Any, criteria: Any, streamer: Any) -> None:
        self._criteria, self._streamer, self._pad = criteria, streamer, config._pad_token_tensor
        self._count = prompt.shape[1]
        self._buffer = prompt.new_empty(prompt.shape[0], max(config.max_length, self._count + 1))
        self._buffer[:, : self._count] = prompt
        self._has_ends = any(hasattr(each, "eos_token_id") for each in criteria)
        self._last = _only_length(criteria)
        self._going_on = torch.ones(prompt.shape[0], dtype=torch.long, device=prompt.device)

    def tokens(self) -> Tensor:
        """(B, tokens), contiguous."""
        return self._buffer[:, : self._count].contiguous()

    def take(self, chosen: Tensor) -> Tensor:
        """Append the chosen tokens, (B,); those of sequences that have ended become padding. Returns them."""
        if self._has_ends:
            chosen = chosen * self._going_on + self._pad * (1 - self._going_on)
        if self._count == self._buffer.shape[1]:  # a criterion of the caller's goes beyond the configured length
            self._buffer = torch.cat((self._buffer, torch.empty_like(self._buffer)), dim=1)
        self._buffer.select(1, self._count).copy_(chosen)
        self._count += 1
        if self._streamer is not None:
            self._streamer.put(chosen.cpu())
        return chosen

    def reached(self) -> bool:
        """Whether all sequences have ended."""
        if self._last is not None:
            return self._count >= self._last
        self._going_on = self._going_on & ~self._criteria(self.tokens(), None)
        return bool(self._going_on.max() == 0)


def _only_length(criteria: Any) -> int | None:
    """The length at which all sequences end, where no criterion looks at tokens or warns before; else None."""
    ends = []
    for each in criteria:
        if (
            type(each).__name__ != "MaxLengthCriteria"
            or type(each).__module__ != "transformers.generation.stopping_criteria"
        ):
            return None
        if each.max_position_embeddings is not None and each.max_length > each.max_position_embeddings:
            return None
        ends.append(int(each.max_length))
    return min(ends, default=None)


def _serves(input_ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> bool:
    given = {name for name, value in model_kwargs.items() if value is not None}
    if given - _FORWARD_KWARGS or "position_ids" not in given or config.return_dict_in_generate:
        return False
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        return False
    cache = cache_of(model_kwargs)
    return cache is not None and cache.get_seq_length() == 0 and _mode(config) in ("greedy_search", "sample")


def _mode(config: Any) -> str:
    return str(config.get_generation_mode().value)


def _own_loop(model: Any, config: Any) -> Callable[..., Any]:
    """The loop of transformers that `generate` would have called."""
    from transformers.generation.utils import GENERATION_MODES_MAPPING

    loop: Callable[..., Any] = getattr(type(model), GENERATION_MODES_MAPPING[config.get_generation_mode()])
    return loop
