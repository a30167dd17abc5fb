"""Random numbers: seeds repeat, states are saved and restored, and each device has an independent generator."""

import random

import torch

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.testing import requirements


def _draw(device: torch.device | str) -> torch.Tensor:
    return torch.rand(64, device=device).cpu()


def test_a_seed_repeats_and_another_differs(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    accelerator.manual_seed(1234)
    first = _draw(device)
    second = _draw(device)
    accelerator.manual_seed(1234)
    assert torch.equal(_draw(device), first)
    assert not torch.equal(second, first)
    accelerator.manual_seed(1235)
    assert not torch.equal(_draw(device), first)


def test_the_seed_is_remembered(accelerator: DeepSpeedAccelerator) -> None:
    for seed in (42, 43):
        accelerator.manual_seed(seed)
        assert accelerator.initial_seed() == seed


def test_a_state_is_a_copy_on_the_host(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    state = accelerator.get_rng_state()
    kept = state.clone()
    assert state.dtype == torch.uint8
    assert state.device.type == "cpu"
    _draw(device)
    assert torch.equal(state, kept)  # drawing does not change the returned state


def test_a_state_is_restored(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    accelerator.manual_seed(7)
    _draw(device)
    state = accelerator.get_rng_state()
    first = _draw(device)
    assert not torch.equal(_draw(device), first)
    accelerator.set_rng_state(state)
    assert torch.equal(accelerator.get_rng_state(), state)
    assert torch.equal(_draw(device), first)


def test_a_state_is_restored_by_index(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    index = accelerator.current_device()
    state = accelerator.get_rng_state(index)
    first = _draw(device)
    accelerator.set_rng_state(state, index)
    assert torch.equal(_draw(device), first)


def test_dropout_draws_from_it(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    ones = torch.ones(1000, device=device)
    state = accelerator.get_rng_state()
    first = torch.nn.functional.dropout(ones, 0.5)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(ones, 0.5), first)
    assert 300 < int(first.count_nonzero()) < 700


def test_the_default_generator_is_the_one_drawn_from(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    generator = accelerator.default_generator(accelerator.current_device())
    assert isinstance(generator, torch.Generator)
    generator.manual_seed(99)
    first = _draw(device)
    generator.manual_seed(99)
    assert torch.equal(_draw(device), first)


@requirements.own_generator
def test_the_hosts_generator_is_left_alone(accelerator: DeepSpeedAccelerator, device: torch.device) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    accelerator.manual_seed(6)
    accelerator.manual_seed_all(6)
    _draw(device)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.default_generator.initial_seed() == 5


def test_manual_seed_all_reaches_every_device(accelerator: DeepSpeedAccelerator) -> None:
    names = [accelerator.device_name(index) for index in range(accelerator.device_count())]
    draws = []
    for _ in range(2):
        accelerator.manual_seed_all(11)
        draws.append([_draw(names[0])] if len(set(names)) == 1 else [_draw(name) for name in names])
    for first, second in zip(*draws, strict=True):
        assert torch.equal(first, second)


@requirements.several_devices
@requirements.own_generator
def test_each_device_has_its_own_generator(accelerator: DeepSpeedAccelerator) -> None:
    accelerator.manual_seed_all(3)
    other = accelerator.get_rng_state(1)
    _draw(accelerator.device_name(0))
    assert torch.equal(accelerator.get_rng_state(1), other)
    first = _draw(accelerator.device_name(1))
    mine = accelerator.get_rng_state(0)
    accelerator.set_rng_state(other, 1)
    assert torch.equal(accelerator.get_rng_state(0), mine)
    assert torch.equal(_draw(accelerator.device_name(1)), first)


def test_random_is_torchs_module(accelerator: DeepSpeedAccelerator) -> None:
    module = accelerator.random()
    before = module.get_rng_state()
    with module.fork_rng(devices=[]):
        torch.rand(1)
    assert torch.equal(module.get_rng_state(), before)
    assert module is not random  # Python's own module has separate states
