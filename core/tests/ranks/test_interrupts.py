"""Ctrl-C and SystemExit in a save or a load, on one rank or on all: no rank is left waiting, and the next save and load
work."""

import os
import signal

import pytest
import torch
from deepspeed.checkpoint.checkpointer import Ranks
from deepspeed.errors import CheckpointError, CommError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.models import make_engine
from deepspeed.testing.tiers import swept

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


def create_engine(stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    zero = {"stage3_param_persistence_threshold": 0}
    return make_engine(model, stage, zero_optimization=zero, optimizer=ADAMW)


def train_step(engine):
    engine.backward(engine(torch.full((2, 8), engine.global_rank + 1.0)).square().mean())
    engine.step()


class Interrupts:
    """Makes the n-th use of something an interrupt, on the given ranks."""

    def __init__(self, monkeypatch, place, ranks, raises):
        self.at, self.count = -1, 0
        self._is_hit = torch.distributed.get_rank() in ranks
        self._raises = raises
        together, outer = Ranks.together, self

        def interrupted_together(ranks, step, what, **keys):
            def interrupted():
                outer.come()
                return step()

            return together(ranks, interrupted if place == "step" else step, what, **keys)

        monkeypatch.setattr(Ranks, "together", interrupted_together)
        if place == "gather":
            make = Ranks.__getattribute__

            def interrupted_attribute(ranks, name):
                found = make(ranks, name)
                if name != "gather":
                    return found

                def gather(value):
                    outer.come()
                    return found(value)

                return gather

            monkeypatch.setattr(Ranks, "__getattribute__", interrupted_attribute)

    def come(self):
        self.count += 1
        if self._is_hit and self.count == self.at:
            self._raises()

    def begin(self, at):
        self.at, self.count = at, 0


def stop():
    raise SystemExit("stop")


def press_keys():
    os.kill(os.getpid(), signal.SIGINT)


WAYS = {"exit": stop, "keys": press_keys}


def interrupt_everywhere(folder, stage, call, place, way, ranks):
    """What each rank got where the n-th step, or gather, of the call was interrupted."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = create_engine(stage)
    train_step(engine)
    engine.save_checkpoint(folder, "good")
    use = {
        "save": lambda: engine.save_checkpoint(folder, "other"),
        "load": lambda: engine.load_checkpoint(folder, "good"),
    }[call]
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupts = Interrupts(monkeypatch, place, ranks, WAYS[way])
        use()
        for at in range(1, interrupts.count + 1):
            interrupts.begin(at)
            try:
                use()
                found.append("no error")
            except (CheckpointError, CommError, KeyboardInterrupt, SystemExit) as error:
                found.append(f"{type(error).__name__}: {error}")
            interrupts.begin(-1)
            if call == "save":
                assert not os.path.exists(f"{folder}/other.tmp")
            engine.load_checkpoint(folder, "good")
        use()
    train_step(engine)
    weights = [float(param.detach().double().sum()) for param in engine.module.parameters()]
    engine.destroy()
    signal.signal(signal.SIGINT, former)
    return found, weights


CASES = [
    (stage, call, place, way, ranks)
    for stage in (1, 3)
    for call in ("save", "load")
    for place, way in (("step", "exit"), ("step", "keys"), ("gather", "keys"))
    for ranks in ((1,), (0, 1))
]
IN_EVERY_RUN = {
    (3, "save", "step", "exit", (1,)),
    (1, "load", "gather", "keys", (0, 1)),
    (1, "load", "step", "keys", (1,)),
}


@pytest.mark.parametrize(("stage", "call", "place", "way", "ranks"), swept(CASES, lambda *case: case in IN_EVERY_RUN))
def test_an_interrupt_leaves_no_rank_waiting(tmp_path, stage, call, place, way, ranks):
    own = "SystemExit: stop" if way == "exit" else "KeyboardInterrupt"
    results = run_ranks(2, interrupt_everywhere, str(tmp_path), stage, call, place, way, ranks, timeout_s=60)
    assert len(results[0][0]) == len(results[1][0]) > 4
    for rank, (found, _) in enumerate(results):
        for place_of, each in enumerate(found):
            if rank in ranks:
                assert each.startswith(own), found
            elif place == "step" or place_of < len(found) - 1:  # the last gather is followed by nothing
                assert f"rank 1: {own}" in each, found
    if stage == 1:
        assert results[0][1] == results[1][1]
