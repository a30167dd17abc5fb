"""`make_engine`: an engine for a test in one line, with the config keys that the test is about. And what it trained."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from deepspeed.engine.engine import DeepSpeedEngine

DEFAULTS = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "gradient_clipping": 0.0,  # as plain torch, which results are compared with
    "steps_per_print": float("inf"),
}
SMALL_BUCKETS = {"reduce_bucket_size": 20}
"""Buckets of so few elements that the parameters of a test's model fill several."""


def make_engine(
    model: "torch.nn.Module", stage: int = 0, *, arguments: dict[str, Any] | None = None, **keys: Any
) -> "DeepSpeedEngine":
    """The engine of `deepspeed.initialize(model=model, config=..., **arguments)` on this rank.

    Args:
        model: trained in place, as by `initialize`.
        stage: of ZeRO, 0 to 3.
        arguments: further arguments of `initialize`.
        keys: of the config, over `DEFAULTS`; None omits a key. `zero_optimization` is merged into the stage and
            `SMALL_BUCKETS`.

    Raises:
        ConfigError: as `initialize` does.
    """
    import deepspeed

    zero = {"stage": stage, **SMALL_BUCKETS, **keys.pop("zero_optimization", {})}
    config = {**DEFAULTS, "zero_optimization": zero, **keys}
    config = {name: value for name, value in config.items() if value is not None}
    engine: DeepSpeedEngine = deepspeed.initialize(model=model, config=config, **(arguments or {}))[0]
    return engine


def weight_of(engine: "DeepSpeedEngine") -> float:
    """The one weight of an engine's `models.Scale`; called on all ranks."""
    import deepspeed

    (weight,) = engine.module.parameters()
    with deepspeed.zero.GatheredParameters(weight):
        return weight.item()
