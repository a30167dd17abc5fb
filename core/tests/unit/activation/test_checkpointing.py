"""deepspeed.checkpointing: same values and gradients as without it, one more forward, and what it refuses."""

import deepspeed
import pytest
import torch
from deepspeed.activation import checkpointing
from deepspeed.errors import ConfigError


@pytest.fixture(autouse=True)
def forget():
    checkpointing.reset()
    yield
    checkpointing.reset()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x, scale):
        self.calls += 1
        return torch.nn.functional.dropout(torch.tanh(self.linear(x)) * scale, 0.5), x.sum()


@pytest.mark.parametrize("input_requires_grad", [True, False])
def test_same_outputs_and_gradients_with_one_more_forward(input_requires_grad):
    block = Block()
    x = torch.randn(3, 4, requires_grad=input_requires_grad)
    results = []
    for run in (lambda: block(x, 2.0), lambda: deepspeed.checkpointing.checkpoint(block, x, 2.0)):
        torch.manual_seed(5)
        block.zero_grad()
        block.calls = 0
        out, total = run()
        (out.sum() + total).backward()
        results.append((out.detach(), block.linear.weight.grad.clone(), block.calls))
    (plain, plain_grad, once), (kept, kept_grad, twice) = results
    assert torch.equal(plain, kept)
    assert torch.equal(plain_grad, kept_grad)
    assert (once, twice) == (1, 2)


def test_configure_is_remembered_until_reset():
    assert not checkpointing.is_configured()
    checkpointing.configure(None, num_checkpoints=4)
    assert checkpointing.is_configured()
    checkpointing.reset()
    assert not checkpointing.is_configured()


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("partition_activations", "partition_activations"),
        ("contiguous_checkpointing", "contiguous_memory_optimization"),
        ("checkpoint_in_cpu", "cpu_checkpointing"),
    ],
)
def test_other_places_for_inputs_are_refused(argument, key):
    with pytest.raises(ConfigError, match=rf"{argument} \(activation_checkpointing\.{key}\): found True"):
        checkpointing.configure(None, **{argument: True})
    with pytest.raises(ConfigError, match=argument):
        checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {key: True}})
    assert not checkpointing.is_configured()


def test_an_argument_beats_the_config():
    config = {"activation_checkpointing": {"partition_activations": True}}
    checkpointing.configure(None, deepspeed_config=config, partition_activations=False)
    assert checkpointing.is_configured()


def test_a_parsed_config_will_do():
    config = deepspeed.DeepSpeedConfig({"train_batch_size": 1}, world_size=1)
    checkpointing.configure(None, deepspeed_config=config)
    assert checkpointing.is_configured()
