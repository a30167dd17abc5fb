"""Inputs of recomputed blocks on a device: in host memory, in buffers, and under the device's random states."""

import pytest
import torch
from deepspeed.activation import checkpointing
from torch.nn.functional import dropout


def recompute(options):
    """Gradients with and without, and the device types of what was kept."""
    checkpointing.configure(None, **options)
    checkpointing.model_parallel_cuda_manual_seed(4)
    keeping, devices = checkpointing._settings.keeping, []
    pack = keeping.pack

    def record(tensor):
        kept = pack(tensor)
        if kept.shape is not None:
            devices.append(getattr(kept.stored, "tensor", kept.stored).device.type)
        return kept

    keeping.pack = record
    x = torch.linspace(-1, 1, 64).to("sim").requires_grad_()

    def block(hidden):
        with checkpointing.get_cuda_rng_tracker().fork():
            hidden = dropout(hidden, 0.5)
        return dropout(torch.tanh(hidden), 0.5)

    gradients = []
    for run in (block, lambda hidden: checkpointing.checkpoint(block, hidden)):
        checkpointing.model_parallel_cuda_manual_seed(4)
        run(run(x)).sum().backward()
        gradients.append(x.grad.tolist())
        x.grad = None
    return gradients[0] == gradients[1], devices


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"checkpoint_in_cpu": True, "synchronize": True}, "cpu"),
        ({"contiguous_checkpointing": True, "num_checkpoints": 2}, "sim"),
        ({"checkpoint_in_cpu": True, "contiguous_checkpointing": True, "num_checkpoints": 2}, "cpu"),
    ],
)
def test_gradients_and_where_inputs_are_kept(sim, options, device):
    assert sim(recompute, options) == [(True, [device] * 2)]
