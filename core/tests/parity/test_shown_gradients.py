"""Stage 0 shows averaged gradients as `param.grad`; what a script makes of them is what the step takes, as in torch."""

import copy

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
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


def hooked_job(stage, changes, zero):
    """Hooks of the script's own, of before `initialize` and after it, on small and large parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 128), nn.Linear(128, 80), nn.Linear(80, 2))
    expected = copy.deepcopy(net)
    seen = {}

    def watch(when):
        handles = []
        for name, param in net.named_parameters():

            def note(param, key=(when, name)):
                seen.setdefault(key, []).append(param.grad.clone())
                if changes:
                    param.grad.mul_(2)

            handles.append(param.register_post_accumulate_grad_hook(note))
        return handles

    early = watch("before")
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    late = watch("after")
    factor = 4 if changes else 1
    for micro in range(2):
        engine.backward(engine(inputs(0, micro, dist.get_rank())).square().mean())
        engine.step()
    own = copy.deepcopy(expected)
    for micro in range(2):
        own.zero_grad()
        (own(inputs(0, micro, dist.get_rank())).square().mean() / 2).backward()
        for name, param in own.named_parameters():
            for when, by in (("before", 1), ("after", 2 if changes else 1)):
                found = seen[when, name][micro]
                torch.testing.assert_close(found.view(param.shape), param.grad * by, rtol=1e-5, atol=1e-6)
        for rank in range(2):
            (expected(inputs(0, micro, rank)).square().mean() * factor / 4).backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    with deepspeed.zero.GatheredParameters(net.parameters()):
        for param, reference in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(param.detach(), reference.detach(), rtol=1e-5, atol=1e-6)
    for handle in (early.pop(), late.pop()):
        handle.remove()
    counts = {key: len(values) for key, values in seen.items()}
    engine.backward(engine(inputs(0, 0, dist.get_rank())).square().mean())
    more = {key: len(seen[key]) - counts[key] for key in seen}
    assert more == {key: int(key[1] != "2.bias") for key in seen}, "removed hooks are not called, all others are"
    engine.destroy()
    calls = len(late)
    net[0].bias.register_post_accumulate_grad_hook(lambda _: late.append(None))
    (net[0].bias * 2).sum().backward()
    assert len(late) == calls + 1
    assert net[0].bias.grad is not None


@pytest.mark.parametrize(
    ("stage", "changes", "zero"),
    swept(
        [
            (stage, changes, zero)
            for stage in range(4)
            for changes in (False, True)
            for zero in ({}, {"overlap_comm": False}, {"stage3_param_persistence_threshold": 0})
            if stage == 3 or "stage3_param_persistence_threshold" not in zero
        ],
        lambda stage, changes, zero: changes and ("overlap_comm" in zero) == (stage == 1),
    ),
)
def test_hooks_of_the_script_have_the_gradient_of_their_rank(stage, changes, zero):
    run_ranks(2, hooked_job, stage, changes, zero)
