"""Graphs: a device replays recorded work on the same memory, or reports no support and runs the work eagerly."""

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.testing import requirements


def test_without_a_graph_the_work_simply_runs(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    x = torch.ones(10, device=device)
    with accelerator.capture_to_graph(None):
        x += 1
    assert torch.equal(x.cpu(), torch.full((10,), 2.0))


def test_a_graph_can_be_replayed_or_is_none(accelerator: DeepSpeedAccelerator) -> None:
    graph = accelerator.create_graph()
    assert graph is None or callable(graph.replay)
    assert accelerator.is_graph_supported() == (graph is not None)


def test_replaying_no_graph_does_nothing(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    graph = accelerator.create_graph()
    if graph is not None:
        pytest.skip("graphs: create_graph() is not None")
    x = torch.ones(10, device=device)
    with accelerator.capture_to_graph(graph):
        x += 1
    accelerator.replay_graph(graph)
    assert torch.equal(x.cpu(), torch.full((10,), 2.0))


@requirements.graphs
def test_a_graph_runs_again_on_new_values(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    x, y = torch.ones(1000, device=device), torch.zeros(1000, device=device)
    side = accelerator.Stream()
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):  # kernels are loaded before they are recorded
        y.copy_(x * 2 + 1)
    accelerator.current_stream().wait_stream(side)
    graph = accelerator.create_graph()
    with accelerator.capture_to_graph(graph):
        y.copy_(x * 2 + 1)
    for value in (5.0, 7.0):
        x.fill_(value)
        accelerator.replay_graph(graph)
        accelerator.synchronize()
        assert torch.equal(y.cpu(), torch.full((1000,), 2 * value + 1))


@requirements.graphs
def test_graphs_share_a_pool(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    x = torch.ones(1000, device=device)
    first, second = accelerator.create_graph(), accelerator.create_graph()
    with accelerator.capture_to_graph(first):
        y = x + 1
    with accelerator.capture_to_graph(second, pool=first.pool()):
        z = y + 1
    for graph in (first, second):
        accelerator.replay_graph(graph)
    accelerator.synchronize()
    assert torch.equal(z.cpu(), torch.full((1000,), 3.0))
