"""The loop of greedy and sampled generation over fused blocks: transformers' own, with less around each token.

`model.generate` of transformers does everything before the first token: it reads the configuration, makes the objects
that process logits and stop, pads, and repeats prompts. Then it calls this loop in the place of its own. Logits,
processors, random numbers and ends are used in the same order, so the tokens are the same.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepspeed.inference.injection.decoder import Decoder, DecodeStep

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
