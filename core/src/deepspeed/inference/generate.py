"""`model.generate` of an injected model: transformers' own loop, over a preallocated cache."""

from typing import Any

from torch import nn

from deepspeed.errors import ConfigError
from deepspeed.inference.kv_cache import static_cache


def can_generate(model: nn.Module) -> bool:
    """Whether it is a decoder with transformers' `generate`."""
    asks = getattr(model, "can_generate", None)
    return callable(asks) and bool(asks()) and not getattr(model.config, "is_encoder_decoder", False)


class StaticGeneration:
    """Takes the place of `model.generate`: passes an empty cache of `max_tokens` where the caller passes none.

    A caller's `past_key_values`, `use_cache=False` and `cache_implementation` are honored. Greedy, sampled and beam
    search run in transformers' loop, so tokens and random numbers are those of the plain model.
    """

    def __init__(self, model: nn.Module, max_tokens: int) -> None:
        self.model, self.max_tokens = model, max_tokens
        self.original: Any = model.generate
        model.generate = self  # type: ignore[assignment]

    def __call__(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers' `generate`.

        Raises:
            ConfigError: prompt and new tokens are more than max_out_tokens.
        """
        config = args[0] if args else kwargs.get("generation_config")
        if not _chooses_cache(config, kwargs):
            self._check_length(inputs, config, kwargs)
            kwargs["past_key_values"] = static_cache(self.max_tokens)
        return self.original(inputs, *args, **kwargs)

    def _check_length(self, inputs: Any, config: Any, kwargs: dict[str, Any]) -> None:
        given = inputs if inputs is not None else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        num_prompt = 1 if given is None else given.shape[1]
        num_new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
        needed = kwargs.get("max_length", num_prompt) if num_new is None else num_prompt + num_new
        if needed > self.max_tokens:
            raise ConfigError(
                f"generate: a prompt of {num_prompt} tokens and new ones to a length of {needed}, but max_out_tokens "
                f"is {self.max_tokens}; set max_out_tokens to at least {needed}, or generate fewer"
            )

    def release(self) -> None:
        """Give the model its own `generate` back."""
        del self.model.generate


def _chooses_cache(config: Any, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("past_key_values") is not None:
        return True
    for name in ("cache_implementation", "prompt_lookup_num_tokens"):
        if kwargs.get(name, getattr(config, name, None)) is not None:
            return True
    if kwargs.get("assistant_model") is not None:
        return True
    return kwargs.get("use_cache", getattr(config, "use_cache", True)) is False
