"""Stand-ins for the packages that monitors write through: as small as what is called, and noting every call."""

import sys
from types import ModuleType

import pytest


@pytest.fixture
def wandb(monkeypatch):
    """A module `wandb`; `calls` are (what, arguments)."""

    class Run:
        def log(self, data, step=None, commit=None):
            module.calls.append(("log", (data, step, commit)))

        def finish(self):
            module.calls.append(("finish", ()))

    def init(**arguments):
        module.calls.append(("init", arguments))
        return Run()

    module = ModuleType("wandb")
    module.calls, module.init = [], init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def comet_ml(monkeypatch):
    """A module `comet_ml`; `calls` are (what, arguments)."""

    class Experiment:
        def set_name(self, name):
            module.calls.append(("set_name", name))

        def log_metric(self, name, value, step):
            module.calls.append(("log_metric", (name, value, step)))

        def end(self):
            module.calls.append(("end", ()))

    def start(**arguments):
        module.calls.append(("start", arguments))
        return Experiment()

    module = ModuleType("comet_ml")
    module.calls, module.start = [], start
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    return module


@pytest.fixture
def summary_writer(monkeypatch):
    """In the place of `torch.utils.tensorboard`, which cannot be imported without the package tensorboard."""

    class SummaryWriter:
        def __init__(self, log_dir):
            module.calls.append(("init", log_dir))

        def add_scalar(self, name, value, step):
            module.calls.append(("add_scalar", (name, value, step)))

        def flush(self):
            module.calls.append(("flush", ()))

        def close(self):
            module.calls.append(("close", ()))

    module = ModuleType("torch.utils.tensorboard")
    module.calls, module.SummaryWriter = [], SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return module


@pytest.fixture
def another_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
