"""What a stage sends stays as it was when it was sent."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.pipe.messages import Outbox


@pytest.mark.parametrize("trains", [True, False])
def test_memory_that_a_layer_uses_again_is_copied(trains):
    """A peer may read it when the next micro-batch is in it."""
    sent = []
    work = SimpleNamespace(poll=lambda: False, wait=lambda: None)
    group = SimpleNamespace(_device_types=[torch.device("cpu")])
    outbox = Outbox(SimpleNamespace(group=group, send=lambda tensor, to, tag: sent.append(tensor) or work))
    hidden, mask = torch.ones(3, requires_grad=trains), torch.zeros(3)
    outbox.send_activations(None, [hidden * 2, mask], to=1, with_header=False)
    mask.fill_(1)
    assert [each.tolist() for each in sent] == [[2.0] * 3, [0.0] * 3]
