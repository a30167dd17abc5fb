"""deepspeed.checkpointing: values and gradients as without it, one more forward, and where inputs are kept."""

import deepspeed
import pytest
import torch
from deepspeed.activation import checkpointing
from deepspeed.errors import ConfigError
from deepspeed.parallel import groups
from torch.nn.functional import dropout


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(checkpointing, "_settings", None)
    yield
    checkpointing.get_cuda_rng_tracker().reset()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x, scale):
        self.calls += 1
        return dropout(torch.tanh(self.linear(x)) * scale, 0.5), x.sum()


OPTIONS = {
    "plain": {},
    "host": {"checkpoint_in_cpu": True},
    "contiguous": {"contiguous_checkpointing": True, "num_checkpoints": 2},
    "partitioned": {"partition_activations": True},
    "observed": {"synchronize": True, "profile": True},
}


@pytest.fixture
def one_rank(monkeypatch):
    """Tensor parallelism of one rank, without torch.distributed."""

    class Alone:
        rank, world_size = 0, 1

        def allocate(self, numel, dtype, device):
            return torch.empty(numel, dtype=dtype, device=device)

        def all_gather(self, whole, part, tag=None):
            whole.copy_(part)
            return self

        def wait(self):
            pass

    monkeypatch.setattr(checkpointing, "_tensor_parallel", lambda mpu: Alone())


@pytest.mark.parametrize("input_requires_grad", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_same_outputs_and_gradients_with_one_more_forward(options, input_requires_grad, one_rank):
    checkpointing.configure(None, **OPTIONS[options])
    block = Block()
    x = torch.randn(3, 4, requires_grad=input_requires_grad)
    results = []
    for run in (lambda: block(x, 2.0), lambda: deepspeed.checkpointing.checkpoint(block, x, 2.0)):
        torch.manual_seed(5)
        block.zero_grad()
        block.calls, x.grad = 0, None
        out, total = run()
        (out.sum() + total).backward()
        results.append((out.detach(), block.linear.weight.grad.clone(), x.grad, block.calls))
    (plain, plain_grad, plain_x, once), (kept, kept_grad, kept_x, twice) = results
    assert torch.equal(plain, kept)
    assert torch.equal(plain_grad, kept_grad)
    assert not input_requires_grad or torch.equal(plain_x, kept_x)
    assert (once, twice) == (1, 2)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_reentrant_form(options, one_rank):
    checkpointing.configure(None, **OPTIONS[options])
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    gradients, all_outputs = [], []
    for run in (lambda: block(x, 2.0), lambda: checkpointing.CheckpointFunction.apply(block, all_outputs, x, 2.0)):
        torch.manual_seed(5)
        block.zero_grad()
        x.grad = None
        outputs = run()
        (outputs[0].sum() + outputs[1]).backward()
        gradients.append((block.linear.weight.grad.clone(), x.grad.clone()))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert all_outputs[0] is outputs[0]
    assert len(all_outputs) == 2


@pytest.mark.parametrize("which", ["x", "mask"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_input_changed_in_place_is_as_before_or_refused(options, use_reentrant, which, one_rank):
    """Either the backward computes the block again from what its forward had, or it says what autograd would say."""
    checkpointing.configure(None, **OPTIONS[options])
    weight = torch.linspace(0.5, 1, 4).requires_grad_()
    inputs = {"x": torch.randn(3, 4), "mask": torch.tensor([True, False, True, True])}

    def block(weight, x, mask):
        return torch.tanh(x * weight) * mask

    torch.tanh(inputs["x"] * weight).mul(inputs["mask"]).sum().backward()
    wanted, weight.grad = weight.grad, None
    out = checkpointing._checkpoint(block, (weight * 1, *inputs.values()), use_reentrant=use_reentrant)
    inputs[which].zero_()
    if which == "x" and options in ("contiguous", "partitioned"):  # which keep copies
        out.sum().backward()
        assert torch.equal(weight.grad, wanted)
        return
    with pytest.raises(RuntimeError, match="in ?place"):
        out.sum().backward()


def saved_bytes(run, x):
    """What a forward leaves in memory for its backward besides the parameters, and its result."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run(x)
    return sum(storages.values()), result


def test_a_block_keeps_its_inputs_alone():
    layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU()) for _ in range(1)])
    x = torch.randn(16, 8, requires_grad=True)
    whole, _ = saved_bytes(layers, x)
    kept, _ = saved_bytes(lambda x: checkpointing.checkpoint(layers, x), x)
    assert whole > kept == x.untyped_storage().nbytes()


def test_slots_are_used_again_and_their_number_is_a_limit():
    checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=2)
    keeping = checkpointing._settings.keeping
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(3):
        hidden = x
        for _ in range(2):
            hidden = checkpointing.checkpoint(torch.tanh, hidden)
        hidden.sum().backward()
        del hidden
    ((_, pool),) = keeping._pools.items()
    assert pool.buffer.shape == (2, 12)
    assert sorted(pool.free) == [0, 1]
    outputs = [checkpointing.checkpoint(torch.tanh, x) for _ in range(2)]
    with pytest.raises(ValueError, match="number_checkpoints is 2, and one more input of 12 elements"):
        checkpointing.checkpoint(torch.tanh, x)
    checkpointing.reset()
    third = checkpointing.checkpoint(torch.tanh, x)
    x.grad = None
    sum(each.sum() for each in [*outputs, third]).backward()  # those of before the reset are intact
    assert torch.allclose(x.grad, 3 * (1 - torch.tanh(x.detach()) ** 2))


def test_parameters_and_integers_stay_as_they_are():
    checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=1)
    weight, index = torch.nn.Parameter(torch.ones(4)), torch.tensor([1, 2])
    out = checkpointing.checkpoint(lambda weight, index: weight[index] ** 2, weight, index)
    assert checkpointing._settings.keeping._pools == {}
    out.sum().backward()
    assert weight.grad.tolist() == [0, 2, 2, 0]


def test_times_are_logged(monkeypatch):
    lines = []
    monkeypatch.setattr(checkpointing, "report", lines.append)
    checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {"profile": True}})
    x = torch.ones(2, requires_grad=True)
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    assert [line.split(" in ")[0] for line in lines] == [
        f"activation checkpointing: {what} of {torch.sin.__qualname__}" for what in ("forward", "recomputation")
    ]


# ---- named random states --------------------------------------------------------------------------------------------


@pytest.fixture
def tracker(monkeypatch):
    monkeypatch.setattr(groups, "_get_model_parallel_rank", lambda: 3)
    checkpointing.model_parallel_cuda_manual_seed(10)
    return checkpointing.get_cuda_rng_tracker()


def test_a_named_state_goes_on_by_itself(tracker):
    default = torch.rand(4)
    with tracker.fork():
        first = torch.rand(2)
    with tracker.fork():
        second = torch.rand(2)
    assert torch.equal(
        torch.cat((first, second)), torch.rand(4, generator=torch.Generator().manual_seed(10 + 2718 + 3))
    )
    expected = torch.Generator().manual_seed(10)
    assert torch.equal(default, torch.rand(4, generator=expected))
    assert torch.equal(torch.rand(2), torch.rand(2, generator=expected))  # forks did not move it


def test_reconfiguring_seeds_the_named_state_alone(tracker):
    before = torch.get_rng_state()
    checkpointing.model_parallel_reconfigure_tp_seed(20)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork():
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(20 + 2718 + 3)))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_block_computed_again_draws_the_same_numbers(tracker, is_reentrant):
    def block(x):
        with tracker.fork():
            x = dropout(x, 0.5)
        return dropout(x, 0.5) * x

    x = torch.ones(64, requires_grad=True)
    states = tracker.get_states()
    block(x).sum().backward()
    expected, x.grad = x.grad, None
    after = tracker.get_states()
    tracker.set_states(states)
    torch.manual_seed(10)
    run = checkpointing.CheckpointFunction.apply if is_reentrant else checkpointing.checkpoint
    out = run(block, *([[]] if is_reentrant else []), x)
    with tracker.fork():
        torch.rand(5)  # what comes between forward and backward
    between = tracker.get_states()
    out.sum().backward()
    assert torch.equal(x.grad, expected)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], between["model-parallel-rng"])
    assert not torch.equal(after["model-parallel-rng"], between["model-parallel-rng"])


def test_states_need_a_name_and_a_seed_of_their_own(tracker):
    with pytest.raises(ValueError, match="asked for 'data', there are model-parallel-rng"), tracker.fork("data"):
        pass
    with pytest.raises(ValueError, match="the name 'model-parallel-rng' was added already"):
        tracker.add("model-parallel-rng", 1)
    with pytest.raises(ValueError, match="the seed 2731 was added already"):
        tracker.add("other", 2731)


# ---- configure ------------------------------------------------------------------------------------------------------


def test_configure_is_remembered():
    assert not checkpointing.is_configured()
    checkpointing.reset()
    checkpointing.configure(None, num_checkpoints=4)
    assert checkpointing.is_configured()
    assert checkpointing._settings.keeping.num_slots is None  # which says nothing without the buffer


def test_an_argument_beats_the_config():
    section = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 3}
    config = {"activation_checkpointing": section}
    checkpointing.configure(None, deepspeed_config=config, partition_activations=False)
    keeping = checkpointing._settings.keeping
    assert (keeping.partition, keeping.on_host, keeping.num_slots) == (False, False, 3)


def test_a_buffer_needs_a_size():
    with pytest.raises(ConfigError, match=r"contiguous_memory_optimization\) is true without num_checkpoints"):
        checkpointing.configure(None, contiguous_checkpointing=True)
    assert not checkpointing.is_configured()


@pytest.mark.parametrize("number", ["two", -1, 1.5, True])
def test_a_number_of_checkpoints_is_one(number):
    with pytest.raises(ConfigError, match=rf"num_checkpoints: asked for {number!r}, allowed is an integer of"):
        checkpointing.configure(None, num_checkpoints=number)
    assert not checkpointing.is_configured()


def test_an_mpu_without_tensor_parallelism_is_refused_when_it_is_needed():
    checkpointing.configure(object(), partition_activations=True)
    with pytest.raises(ConfigError, match="mpu_ is object, which has none of get_tensor_model_parallel_group"):
        checkpointing.checkpoint(torch.sin, torch.ones(2, requires_grad=True))


def test_a_parsed_config_will_do():
    config = deepspeed.DeepSpeedConfig({"train_batch_size": 1}, world_size=1)
    checkpointing.configure(None, deepspeed_config=config)
    assert checkpointing.is_configured()
