"""A weight of two modules gets the gradient of one of them."""

import pytest
from deepspeed.engine.engine import DeepSpeedEngine
from torch.nn import functional

CONFIG = {"zero_optimization": {"stage": 1}}
USES = ("tied",)
FIRST = ("gradient", "embed.weight")


def plant(patches):
    forward, embedding = DeepSpeedEngine.forward, functional.embedding

    def once(tokens, weight, *others, **named):
        return embedding(tokens, weight.detach(), *others, **named)

    def run(self, *inputs, **named):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(functional, "embedding", once)
            return forward(self, *inputs, **named)

    patches.setattr(DeepSpeedEngine, "forward", run)
