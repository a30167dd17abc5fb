"""Stage 0 shows averaged gradients as `param.grad`; what a script makes of them is what the step takes, as in torch."""

import copy

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.testing.distributed import run_ranks
from torch import nn

CLIP = 0.05


def scale(net):
    for param in net.parameters():
        param.grad.mul_(3)


def replace(net):
    for param in net.parameters():
        param.grad = param.grad * 3


def replace_data(net):
    for param in net.parameters():
        param.grad.data = param.grad.data * 3


def transpose(net):
    for param in net.parameters():
        if param.dim() == 2 and param.shape[0] == param.shape[1]:
            param.grad = param.grad.t()


def drop(net):
    net[0].weight.grad = None


def clip(net):
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def nothing(net):
    pass


def inputs(step, micro, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def plain(net, change, num_backwards, clips):
    """Two steps of torch on the batches of both ranks."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    norm = None
    for step in range(2):
        for micro in range(num_backwards):
            for rank in range(2):
                (net(inputs(step, micro, rank)).square().mean() / 2).backward()
            change(net)
        grads = [param.grad for param in net.parameters() if param.grad is not None]
        norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return norm.item()


def every_case_job(clips):
    for change, num_backwards in CASES:
        check(change, num_backwards, clips)


def check(change, num_backwards, clips):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    expected = copy.deepcopy(net)
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": CLIP if clips else 0.0}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    for step in range(2):
        for micro in range(num_backwards):
            engine.backward(engine(inputs(step, micro, dist.get_rank())).square().mean())
            change(net)
        engine.step()
    norm = plain(expected, change, num_backwards, clips)
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    for param, reference in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param, reference, rtol=1e-5, atol=1e-6)
    engine.destroy()


CASES = [
    *((change, 1) for change in (nothing, scale, replace, replace_data, transpose, drop, clip)),
    *((change, 2) for change in (replace, replace_data, drop, scale)),
]


@pytest.mark.parametrize("clips", [False, True])
def test_the_step_takes_what_is_shown(clips):
    run_ranks(2, every_case_job, clips)


def forgetting_job():
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
        config={"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0},
    )
    before = net.bias.detach().clone()
    for _ in range(2):  # the first batch is thrown away
        net.zero_grad()
        engine.backward(engine(torch.ones(3, 4)).mean())
    engine.step()
    torch.testing.assert_close(net.bias.detach(), before - 0.5)


def test_zero_grad_of_the_module_forgets_them():
    run_ranks(2, forgetting_job)


def part_of_the_module_job():
    """The gradients of a backward that the engine's forward has no part in are averaged when it is over."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "Adam"}}
    deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
    net[1](torch.full((1, 6), 1.0 + dist.get_rank())).sum().backward()
    return net[1].weight.grad


def test_those_of_a_part_of_the_module_are_averages():
    for gradient in run_ranks(2, part_of_the_module_job):
        torch.testing.assert_close(gradient, torch.full((2, 6), 1.5))


def kept_tensor_job():
    """What a script does after a step to a tensor that it found in `param.grad` is no part of the next step."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    before = net.bias.detach().clone()
    for _ in range(3):
        engine.backward(engine(torch.ones(3, 4)).mean())
        kept = net.bias.grad
        engine.step()
        kept.data = torch.full((2,), 7.0)
    torch.testing.assert_close(net.bias.detach(), before - 3 * 0.5)


def test_other_data_of_a_kept_one_is_not_taken():
    run_ranks(2, kept_tensor_job)
