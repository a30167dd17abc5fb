"""Time on the simulated device: operators and copies that run when somebody waits, in the order of a schedule."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator

# ----- one stream ----------------------------------------------------------------------------------------------------


def waits_within_waits():
    """A side stream waits for the default one, which itself waits for an earlier job of the side stream."""
    torch.sim.set_schedule("early")
    x, y = torch.zeros(4, device="sim"), torch.zeros(4, device="sim")
    torch.sim.synchronize()
    side = torch.sim.Stream()
    y.add_(1)
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        y.add_(1)
    torch.sim.current_stream().wait_event(side.record_event())
    x.fill_(1)
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        y.copy_(x)
    side.synchronize()
    seen = y.tolist()
    torch.sim.set_schedule("late")
    return seen


def test_a_job_behind_a_wait_does_not_run_before_it(sim):
    assert sim(waits_within_waits) == [[1.0] * 4]


def operators_wait():
    torch.sim.set_schedule("late")
    x = torch.ones(4, device="sim")
    torch.sim.synchronize()
    y = (x * 2).add_(1)
    z = torch.nn.functional.softmax(torch.cat([y, y[:2]]), dim=0)
    assert torch.sim.waiting_jobs() >= 4  # nobody asked for a value
    assert y.view(2, 2).t().shape == (2, 2)  # a view is not work
    assert z.sum().item() == pytest.approx(1)
    assert torch.sim.waiting_jobs() == 0
    assert (y.shape, y.tolist()) == ((4,), [3.0] * 4)
    for schedule in ("ordered", "early"):
        torch.sim.set_schedule(schedule)
        assert (x + 1).shape == (4,)
        assert torch.sim.waiting_jobs() > 0
    torch.sim.set_schedule("none")
    assert torch.sim.waiting_jobs() == 0
    y.mul_(x)
    assert torch.sim.waiting_jobs() == 0
    torch.sim.set_schedule("late")
    assert torch.sim.schedule() == "late"
    with pytest.raises(ValueError, match="'soon': one of late, early, ordered, none"):
        torch.sim.set_schedule("soon")


def test_an_operator_runs_when_a_value_is_read(sim):
    sim(operators_wait)


def sizes_of_values():
    x = torch.tensor([1.0, -1.0, 2.0], device="sim")
    assert x[x > 0].tolist() == [1.0, 2.0]
    assert x.nonzero().shape == (3, 1)
    assert x.masked_select(x < 0).shape == (1,)
    x[x < 0] = torch.tensor([5.0], device="sim")
    assert torch.unique(x.round()).tolist() == [1.0, 2.0, 5.0]
    assert torch.equal(x, x.clone())


def test_an_operator_whose_sizes_depend_on_values_waits(sim):
    sim(sizes_of_values)


def errors():
    x = torch.ones(3, 2, device="sim")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # wrong sizes are refused at once
        x @ x
    assert torch.sim.waiting_jobs() > 0
    chosen = x[torch.tensor([7], device="sim")]
    with pytest.raises(IndexError, match="out of bounds"):  # a wrong value when it is read
        torch.sim.synchronize()
    assert chosen.shape == (1, 2)
    torch.sim.synchronize()
    assert x.sum().item() == 6


def test_an_error_in_a_value_comes_late(sim):
    sim(errors)


def scalars_of_the_host():
    scale, rows = torch.tensor(2.0), torch.tensor([1])
    x = torch.arange(3.0, device="sim")
    y, z = x * scale, x[rows]
    scale.fill_(100)
    rows.fill_(0)
    assert (y.sum().item(), z.item()) == (6, 1)
    source = torch.ones(3)
    x.copy_(source, non_blocking=True)  # pageable: it is read before the call returns
    source.fill_(9)
    assert x.sum().item() == 3


def test_values_of_the_host_are_read_when_the_operator_is_called(sim):
    sim(scalars_of_the_host)


def numbers_drawn():
    expected = [torch.randn(40, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    torch.sim.manual_seed(5)
    first = torch.randn(40, device="sim")
    torch.sim.manual_seed(5)  # before the first has been computed
    second = torch.randn(40, device="sim")
    state = torch.sim.get_rng_state()
    third = torch.rand(3, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="sim"), third)
    assert torch.equal(first.cpu(), expected[0])
    assert torch.equal(second.cpu(), expected[1])


def test_random_numbers_are_drawn_in_the_order_of_the_calls(sim):
    sim(numbers_drawn)


# ----- several streams -----------------------------------------------------------------------------------------------


def sum_without_wait(schedule, waits, where):
    """A side stream doubles what the default stream makes, or the other way round, with or without a wait."""
    accelerator = get_accelerator()
    torch.sim.set_schedule(schedule)
    lane, here = accelerator.Stream(), accelerator.current_stream()
    first, second = (lane, here) if where == "default reads" else (here, lane)
    made, read = torch.zeros(4, device="sim"), torch.zeros(4, device="sim")
    accelerator.synchronize()
    with accelerator.stream(first):
        made.add_(1)
        made.mul_(3)
        made.add_(torch.zeros(4, device="sim"))  # more work behind it: not only the last operator is late
    if waits:
        second.wait_stream(first)
    with accelerator.stream(second):
        read.copy_(made * 2)
        answer = read.sum().item()
    accelerator.synchronize()
    torch.sim.set_schedule("late")
    return answer


@pytest.mark.parametrize("schedule", ["late", "early", "ordered", "none"])
@pytest.mark.parametrize("where", ["default reads", "lane reads"])
def test_who_waits_reads_the_right_values(sim, schedule, where):
    assert sim(sum_without_wait, schedule, True, where) == [24]


# "late" lets nothing run for who does not wait; with "early" the default stream finds side streams done.
MISSED = {"late": [True, True], "early": [False, True], "ordered": [False, False], "none": [False, False]}


@pytest.mark.parametrize("schedule", MISSED)
def test_who_does_not_wait_reads_old_values(sim, schedule):
    answers = [sim(sum_without_wait, schedule, False, where)[0] for where in ("default reads", "lane reads")]
    assert [answer == 0 for answer in answers] == MISSED[schedule]


def read_too_late(schedule, waits):
    """The default stream overwrites what a side stream is still to copy."""
    accelerator = get_accelerator()
    torch.sim.set_schedule(schedule)
    lane, here = accelerator.Stream(), accelerator.current_stream()
    source, host = torch.ones(4, device="sim"), torch.zeros(4).pin_memory()
    accelerator.synchronize()
    lane.wait_stream(here)
    with accelerator.stream(lane):
        host.copy_(source, non_blocking=True)
    if waits:
        here.wait_stream(lane)
    source.fill_(7)
    here.synchronize()
    accelerator.synchronize()
    torch.sim.set_schedule("late")
    return host.sum().item()


def test_what_is_overwritten_before_it_was_read_is_lost(sim):
    assert sim(read_too_late, "late", True) == [4]
    assert sim(read_too_late, "late", False) == [28]
    assert sim(read_too_late, "ordered", False) == [4]


def across_devices():
    x = torch.arange(3.0, device="sim:0")
    y = (x + 1).to("sim:1")
    x.zero_()
    assert (y * 2).tolist() == [2.0, 4.0, 6.0]
    back = torch.zeros(3, device="sim:0").copy_(y)
    assert back.tolist() == [1.0, 2.0, 3.0]


def test_a_copy_between_devices_keeps_the_order_of_both(sim):
    sim(across_devices)


def backward_on_a_side_stream():
    accelerator = get_accelerator()
    lane = accelerator.Stream()
    weight = torch.ones(3, device="sim", requires_grad=True)
    lane.wait_stream(accelerator.current_stream())
    with accelerator.stream(lane):
        loss = (weight * 2).square().sum()
    accelerator.current_stream().wait_stream(lane)
    loss.backward()  # autograd runs it where the forward ran, and waits for both
    return weight.grad.tolist()


def test_autograd_waits_for_its_streams(sim):
    assert sim(backward_on_a_side_stream) == [[8.0] * 3]


def many_jobs():
    x = torch.zeros(1, device="sim")
    for _ in range(20_000):
        x.add_(1)
    waiting = torch.sim.waiting_jobs()
    return waiting, x.item()


def test_a_queue_has_an_end(sim):
    waiting, total = sim(many_jobs)[0]
    assert waiting <= 1 << 14
    assert total == 20_000


# ----- the schedule of a process -------------------------------------------------------------------------------------


def behaviour(schedule):
    torch.sim.set_schedule(schedule)
    accelerator = get_accelerator()
    answer = accelerator.is_synchronized_device(), accelerator.resolves_data_dependency()
    torch.sim.set_schedule("late")
    return answer


@pytest.mark.parametrize(
    ("schedule", "answer"),
    [("late", (False, False)), ("early", (False, False)), ("ordered", (False, True)), ("none", (True, True))],
)
def test_the_accelerator_says_what_the_core_may_rely_on(sim, schedule, answer):
    assert sim(behaviour, schedule) == [answer]
