"""`model.generate` of an injected model: over a cache that is allocated once, by `decode_loop.py` where that serves.

The cache is a `Cache` of transformers. Its class is made on first use, because core imports transformers only when a
model of it generates.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.errors import ConfigError, counted
from deepspeed.inference.decode_loop import DecodeLoop, cache_argument

if TYPE_CHECKING:
    from deepspeed.inference.injection.decoder import Decoder

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

    def _loop(self, args: tuple[Any, ...], config: Any, kwargs: dict[str, Any]) -> DecodeLoop | None:
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
