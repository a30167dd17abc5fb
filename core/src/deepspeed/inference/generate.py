"""`model.generate` of an injected model uses a preallocated cache and, where possible, its own decoding loop.

The cache is a `Cache` of transformers. Its class is created on first use, because core imports transformers only when a
transformers model generates.

The loop implements greedy and sampled generation over fused blocks, with less overhead per token than transformers.

`model.generate` of transformers still does all work before the first token: it reads the configuration, creates logits
processors and stopping criteria, pads, and repeats prompts. Then it calls this loop instead of its own. The loop uses
logits, processors, random numbers and criteria in the same order, so the tokens are the same.
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

# Settings that, if not None in the arguments or a configuration, request a cache or a loop of transformers.
_OF_THEIR_OWN = (
    "cache_implementation",
    "prompt_lookup_num_tokens",
    *("penalty_alpha", "dola_layers", "constraints", "force_words_ids"),  # loops on the hub, which it downloads
)
# Arguments of `generate` that only transformers' loops support or receive.
_FOR_THEIR_LOOPS = ("custom_generate", "synced_gpus", "tokenizer", "assistant_tokenizer", "negative_prompt_ids")


def can_generate(model: nn.Module) -> bool:
    """Return whether `model` is a decoder with transformers' `generate`."""
    asks = getattr(model, "can_generate", None)
    return callable(asks) and bool(asks()) and not getattr(model.config, "is_encoder_decoder", False)


class StaticGeneration:
    """Replaces `model.generate`, and passes an empty cache for `max_tokens` tokens if the caller passes no cache.

    A caller's own cache, `use_cache=False` and `cache_implementation` are honored, also from the model's
    `generation_config`. Generation modes that transformers loads from the hub are left to transformers. Greedy and
    sampled generation of a model in the table of decoders runs in our loop, any other generation in transformers'
    loops. Tokens and random numbers equal those of the plain model.

    Args:
        decoder: decoder of the model; None: use transformers' loops.
    """

    def __init__(self, model: nn.Module, max_tokens: int, decoder: "Decoder | None" = None) -> None:
        self.model, self.max_tokens, self.decoder = model, max_tokens, decoder
        self.around_token: Callable[[], AbstractContextManager[None]] = nullcontext  # for each token but the first
        self._cache_argument = cache_argument(type(model).forward) or "past_key_values"
        self.original: Any = model.generate
        model.generate = self  # type: ignore[assignment]

    def __call__(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Generate with the arguments and results of transformers' `generate`.

        Raises:
            ConfigError: prompt and new tokens together exceed max_out_tokens.
        """
        config = args[0] if args else kwargs.get("generation_config")
        if not self._is_theirs(config, kwargs):
            self._check_length(inputs, config, kwargs)
            kwargs[self._cache_argument] = static_cache(self.max_tokens)
            if (loop := self._loop(args, config, kwargs)) is not None:
                kwargs["custom_generate"] = loop
        return self.original(inputs, *args, **kwargs)

    def _loop(self, args: tuple[Any, ...], config: Any, kwargs: dict[str, Any]) -> "DecodeLoop | None":
        """Return our loop, or None if it does not support the call."""
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
        """Return whether the caller or the model requests a cache or a loop of transformers."""
        if any(kwargs.get(name) is not None for name in ("past_key_values", "cache", "assistant_model")):
            return True
        if any(self._setting(name, config, kwargs) is not None for name in _OF_THEIR_OWN):
            return True
        num_groups = self._setting("num_beam_groups", config, kwargs)
        return (num_groups or 1) > 1 or self._setting("use_cache", config, kwargs) is False

    def _setting(self, name: str, config: Any, kwargs: dict[str, Any]) -> Any:
        """Look up a setting like transformers: in the arguments, then the caller's configuration, then the model's."""
        if name in kwargs:
            return kwargs[name]
        given = getattr(config, name, None)
        if given is not None:
            return given
        found = getattr(self.model.generation_config, name, None)
        # configurations of older models say "hybrid", which transformers 5 treats as None
        return None if name == "cache_implementation" and found == "hybrid" else found

    def release(self) -> None:
        """Restore the model's own `generate`."""
        del self.model.generate


def check_fits(num_tokens: int, max_tokens: int) -> None:
    """Raise a ConfigError if a sequence of this length, with its prompt, is longer than the cache."""
    if num_tokens > max_tokens:
        raise ConfigError(
            f"generation needs {counted(num_tokens, 'token')}, prompt and new ones, and the cache holds "
            f"max_out_tokens = {max_tokens}; set max_out_tokens to at least the longest sequence, or generate fewer"
        )


def static_cache(max_tokens: int) -> Any:
    """Create a cache for sequences of up to `max_tokens` tokens, with the prompt. The first tokens allocate its memory.

    It behaves like transformers' `DynamicCache`: attention sees only the tokens written so far, so masks match.
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
            """Append the new tokens [B, G, T, D], and return all tokens."""
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            start = self.get_seq_length()
            end = start + key_states.shape[-2]
            check_fits(end, self.max_tokens)
            written = []
            for buffer, known, new in zip(
                self._own_buffers(key_states, value_states, start),
                (self.keys, self.values),
                (key_states, value_states),
                strict=True,
            ):
                if start and known.data_ptr() != buffer.data_ptr():  # a reordered or repeated copy
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
            """Key and value buffers, [B, G, max_tokens, D]; only the first tokens are written."""
            assert self._buffers is not None
            return self._buffers

        def get_max_length(self) -> int:
            """Return the number of tokens that fit."""
            return self.max_tokens

        def reset(self) -> None:
            """Forget all tokens, keep the memory."""
            if self.is_initialized:
                self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]

    return Cache, PreallocatedLayer


# Arguments of the forward, besides tokens, that our loop supports. With others (images) transformers' loop runs.
_FORWARD_KWARGS = {"attention_mask", "position_ids", "past_key_values", "cache", "logits_to_keep", "use_cache"}


def cache_of(given: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a forward, or None.

    The cache is recognized by its methods, not by its name: transformers renamed `past_key_values` to `cache` in 5.24,
    and a block that overlooks its cache gives wrong tokens without an error.
    """
    return next((each for each in given.values() if hasattr(each, "get_seq_length")), None)


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name of the cache argument of a model's forward; None if it has no known one."""
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


class DecodeLoop:
    """`DecodeLoop` generates the tokens of one call of `generate(custom_generate=...)` of transformers.

    Args:
        decoder: decoder of the model.
        streamer: streamer of the call, or None; transformers passes it only to its own loops.
        max_tokens: capacity of the cache.
        around_token: creates a context around the computation of each token after the first.
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
        """Return the tokens of prompt and generation, (B, tokens), like transformers' loop."""
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
    """Holds the tokens so far, and which sequences have not ended."""

    def __init__(self, prompt: Tensor, config: Any, criteria: Any, streamer: Any) -> None:
        self._criteria, self._streamer, self._pad = criteria, streamer, config._pad_token_tensor
        self._count = prompt.shape[1]
        self._buffer = prompt.new_empty(prompt.shape[0], max(config.max_length, self._count + 1))
        self._buffer[:, : self._count] = prompt
        self._has_ends = any(hasattr(each, "eos_token_id") for each in criteria)
        self._last = _only_length(criteria)
        self._going_on = torch.ones(prompt.shape[0], dtype=torch.long, device=prompt.device)

    def tokens(self) -> Tensor:
        """Return all tokens so far, (B, tokens), contiguous."""
        return self._buffer[:, : self._count].contiguous()

    def take(self, chosen: Tensor) -> Tensor:
        """Append the chosen tokens, (B,), with padding for sequences that have ended, and return them."""
        if self._has_ends:
            chosen = chosen * self._going_on + self._pad * (1 - self._going_on)
        if self._count == self._buffer.shape[1]:  # a caller's criterion allows more than the configured length
            self._buffer = torch.cat((self._buffer, torch.empty_like(self._buffer)), dim=1)
        self._buffer.select(1, self._count).copy_(chosen)
        self._count += 1
        if self._streamer is not None:
            self._streamer.put(chosen.cpu())
        return chosen

    def reached(self) -> bool:
        """Return whether all sequences have ended."""
        if self._last is not None:
            return self._count >= self._last
        self._going_on = self._going_on & ~self._criteria(self.tokens(), None)
        return bool(self._going_on.max() == 0)


def _only_length(criteria: Any) -> int | None:
    """Return the length at which all sequences end, if the criteria only check the length and never warn; else None."""
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
    """Return the loop of transformers that `generate` would have called."""
    from transformers.generation.utils import GENERATION_MODES_MAPPING

    loop: Callable[..., Any] = getattr(type(model), GENERATION_MODES_MAPPING[config.get_generation_mode()])
    return loop
