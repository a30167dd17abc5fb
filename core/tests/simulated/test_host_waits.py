"""How often the host waits for the device in one step, which on a fast device is time in which nothing is queued."""

import contextlib
from itertools import product
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch_group import TorchGroup
from deepspeed.testing.tiers import swept
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode


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
        "whether tensors are the same view": lambda: x.is_set_to(x),
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
    assert [name for name, count in counts.items() if count == 0] == list(counts)[:7]
    assert [name for name, count in counts.items() if count == 1] == list(counts)[7:]


# ----- one step ------------------------------------------------------------------------------------------------------

PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True, "check_grad_overflow": False}},
    "checked bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
}


def waits_of_a_step(stage, precision, clipping):
    """Of the third step: the waits of forward, backward and step; those for its norm; its collectives of few numbers
    on the device."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 128,
            "stage3_param_persistence_threshold": 0,
        },
        "steps_per_print": 1000,
        **PRECISIONS[precision],
    }
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    engine = deepspeed.initialize(model=model, config=config)[0]
    x = torch.ones(2, 8, device=engine.device, dtype=next(engine.module.parameters()).dtype)
    numels = []

    def noting(backend, full_N, *, tag=None):
        numels.append(full_N.numel())
        return all_reduce(backend, full_N, tag=tag)

    all_reduce = TorchGroup.all_reduce
    with mock.patch.object(TorchGroup, "all_reduce", noting):
        for _ in range(3):
            numels.clear()
            forward, loss = waits_of(lambda: engine(x).float().square().mean())
            backward, _ = waits_of(lambda: engine.backward(loss))  # noqa: B023 - called at once
            step, _ = waits_of(engine.step)
    reading, _ = waits_of(engine.get_global_grad_norm)
    engine.destroy()
    return (forward, backward, step), reading, sum(numel < 8 for numel in numels)


@pytest.mark.parametrize(
    ("stage", "precision", "clipping"),
    swept(
        product((0, 1, 2, 3), ("fp32", "bf16"), (0.0, 0.5)),
        lambda stage, precision, clipping: (precision == "bf16") is (clipping > 0),
    ),
)
def test_a_step_never_waits(sim, sim_ranks, stage, precision, clipping):
    for ranks, num_small in ((sim, 0), (sim_ranks, 1)):  # besides the one between hosts
        for waits, reading, small in ranks(waits_of_a_step, stage, precision, clipping):
            assert waits == (0, 0, 0)
            assert reading == 1  # who asks for the norm waits
            assert small == num_small


@pytest.mark.parametrize("precision", ["fp16", "checked bf16"])
def test_whether_a_step_is_made_is_the_one_wait(sim_ranks, precision):
    for waits, reading, _ in sim_ranks(waits_of_a_step, 2, precision, 0.5):
        assert (waits, reading) == ((0, 0, 1), 0)


# ----- what else costs the host --------------------------------------------------------------------------------------


def calls_of_a_step(stage):
    """In the second step of a bf16 model of 12 parameters and 1.6 million elements: calls of the optimizer, and
    operators that make a norm."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1000},
        "steps_per_print": 1000,
    }
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    engine = deepspeed.initialize(model=model, config=config)[0]
    x = torch.ones(2, 512, device=engine.device, dtype=torch.bfloat16)
    for _ in range(2):
        engine.backward(engine(x).float().square().mean())
        with _count_optimizer_calls() as calls, _count_operators("norm") as norms:
            engine.step()
    engine.destroy()
    return len(calls), len(norms)


@contextlib.contextmanager
def _count_optimizer_calls():
    calls = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


@contextlib.contextmanager
def _count_operators(word):
    found = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if word in str(operator):
                found.append(str(operator))
            return operator(*args, **(kwargs or {}))

    with Watching():
        yield found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_is_one_call_however_many_parameters_there_are(sim_ranks, stage):
    for optimizer_calls, norm_calls in sim_ranks(calls_of_a_step, stage):
        assert optimizer_calls == 1
        assert norm_calls <= 2
