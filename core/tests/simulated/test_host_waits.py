"""How often the host waits for the device in one step, which on a fast device is time in which nothing is queued.

The target is none besides the loss that the user reads. `AT_MOST` is what a step does today; lower it with each wait
that goes.
"""

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator

#: by stage: waits of forward, of backward and of step, bf16 with clipping. The one: the sums over ranks are read, of
#: squares, of which parameters were used and of which gradients came late.
AT_MOST = {0: (0, 1, 0), 1: (0, 0, 1), 2: (0, 0, 1)}


def waits_of(action):
    before = torch.sim.host_waits()
    result = action()
    return torch.sim.host_waits() - before, result


# ----- the counting itself -------------------------------------------------------------------------------------------


def counted():
    x, host, pinned = torch.ones(4, device="sim"), torch.ones(4), torch.ones(4).pin_memory()
    accelerator = get_accelerator()
    lane, event = accelerator.Stream(), accelerator.Event()
    actions = {
        "operators": lambda: (x * 2).add_(1).sum(),
        "an asynchronous copy": lambda: pinned.copy_(x, non_blocking=True),
        "an asynchronous copy to the device": lambda: x.copy_(pinned, non_blocking=True),
        "streams that wait": lambda: lane.wait_stream(accelerator.current_stream()),
        "a recorded event": event.record,
        "a collective": lambda: torch.distributed.all_reduce(x),
        "a value": lambda: x.sum().item(),
        "a copy": x.cpu,
        "a copy to the device": lambda: x.copy_(host),
        "sizes that depend on values": x.nonzero,
        "a synchronized event": event.synchronize,
        "a synchronized device": accelerator.synchronize,
    }
    return {name: waits_of(action)[0] for name, action in actions.items()}


def test_what_is_counted(sim):
    counts = sim(counted)[0]
    assert [name for name, count in counts.items() if count == 0] == list(counts)[:6]
    assert [name for name, count in counts.items() if count == 1] == list(counts)[6:]


# ----- one step ------------------------------------------------------------------------------------------------------


def waits_of_a_step(stage):
    """Of the third step: the waits of forward, of backward and of step."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 128},
        "bf16": {"enabled": True},
        "steps_per_print": 1000,
    }
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    engine = deepspeed.initialize(model=model, config=config)[0]
    x = torch.ones(2, 8, dtype=torch.bfloat16, device=engine.device)
    for _ in range(3):
        forward, loss = waits_of(lambda: engine(x).float().square().mean())
        backward, _ = waits_of(lambda: engine.backward(loss))  # noqa: B023 - called at once
        step, _ = waits_of(engine.step)
    engine.destroy()
    return forward, backward, step


@pytest.mark.parametrize("stage", AT_MOST)
def test_a_step_waits_no_more_often_than_today(sim_ranks, stage):
    for waits in sim_ranks(waits_of_a_step, stage):
        assert all(found <= most for found, most in zip(waits, AT_MOST[stage], strict=True)), waits
