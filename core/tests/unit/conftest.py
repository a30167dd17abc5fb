"""What several floors share: engines over one rank, and the lines that are logged."""

import logging

import pytest


@pytest.fixture
def make_engine(single_rank):
    """Builds an engine over one rank: `make_engine(model, arguments={...of initialize}, **config keys)`."""
    import deepspeed

    engines = []

    def make(model, *, arguments=None, **config):
        defaults = {
            "train_batch_size": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
            "gradient_clipping": 0.0,  # as plain torch, which results are compared with
        }
        config = {name: value for name, value in {**defaults, **config}.items() if value is not None}
        engine, *_ = deepspeed.initialize(model=model, config=config, **(arguments or {}))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.destroy()


@pytest.fixture
def lines():
    """Messages of the project's logger, as (level, text)."""
    from deepspeed.log import logger

    class Listener(logging.Handler):
        def emit(self, record):
            seen.append((record.levelname, record.getMessage()))

    seen = []
    listener = Listener()
    logger.addHandler(listener)
    yield seen
    logger.removeHandler(listener)
