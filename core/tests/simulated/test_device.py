"""The simulated device by itself: the choice of its accelerator, memory, streams, events, random numbers, one rank."""

import os
import subprocess
import sys

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.current import explain


def refusal(call):
    """What `call` was refused with."""
    try:
        call()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    raise AssertionError("it was not refused")


# ----- choice --------------------------------------------------------------------------------------------------------


def chosen(name):
    os.environ.pop("DS_ACCELERATOR")
    if name:
        os.environ["DS_ACCELERATOR"] = name
    accelerator = get_accelerator()
    return type(accelerator).__name__, accelerator.current_device_name(), explain().plugin


@pytest.mark.parametrize(("name", "answer"), [("sim", "sim"), ("", "sim"), ("cpu", "cpu")])
def test_its_entry_point_is_found_and_its_offer_is_the_highest(sim, name, answer):
    kind, device, plugin = sim(chosen, name)[0]
    assert (kind, device, plugin) == (
        {"sim": "Sim_Accelerator", "cpu": "CPU_Accelerator"}[answer],
        {"sim": "sim:0", "cpu": "cpu"}[answer],
        answer,
    )


def faces():
    accelerator = get_accelerator()
    assert accelerator.device_count() == 2
    assert accelerator.is_available()
    assert not accelerator.is_synchronized_device()
    assert accelerator.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    with accelerator.device(1):
        assert accelerator.current_device_name() == "sim:1"
        assert torch.empty(1, device="sim").device.index == 1
    assert accelerator.current_device() == 0
    assert "sim:2" in refusal(lambda: accelerator.set_device(2))
    assert accelerator.on_accelerator(accelerator.FloatTensor([1.0]))
    assert not accelerator.on_accelerator(torch.ones(1))
    assert accelerator.create_graph() is None
    assert accelerator.amp() is None
    accelerator.lazy_call(lambda: None)
    accelerator.range_push("a")
    accelerator.range_pop()


def test_the_base_answers_from_torch(sim):
    sim(faces)


def test_the_accelerator_is_under_sixty_lines():
    from pathlib import Path

    package = Path(__file__).parent / "ds_ext_sim"
    lines = [line for name in ("plugin.py", "accelerator.py") for line in (package / name).read_text().splitlines()]
    assert len(lines) < 60


NAMED = """if 1:
    import torch, deepspeed
    from deepspeed.accelerator import get_accelerator
    accelerator = get_accelerator()
    assert accelerator.current_device_name() == "card:0", accelerator.current_device_name()
    assert torch.get_device_module("card") is torch.card
    layer = torch.nn.Linear(2, 2).to("card")
    with torch.card.stream(torch.card.Stream()):
        layer(torch.ones(1, 2, device="card:0")).sum().backward()
    for call in (lambda: torch.ones(1, device="card:9"), lambda: torch.card.install(name="sim")):
        try:
            call()
        except RuntimeError as error:
            print(error)
    from ds_ext_sim.torch_sim import Event, install
    Event().record()
    install(name="card")
    engine, *_ = deepspeed.initialize(model=layer, config={"train_batch_size": 1, "optimizer": {"type": "Adam"}})
    engine.backward(engine(torch.ones(1, 2, device="card")).sum())
    engine.step()
    print(torch.distributed.get_backend(), layer.weight.device)
    print(torch.card.schedule(), torch.card.waiting_jobs(), accelerator.is_synchronized_device())
    print(accelerator.device_count())"""


def test_the_environment_gives_it_another_name_schedule_and_number(installed):
    chosen = {"DS_SIM_NAME": "card", "DS_SIM_SCHEDULE": "none", "SIM_VISIBLE_DEVICES": "1", "DS_ACCELERATOR": "sim"}
    environment = {**os.environ, **installed, **chosen}
    ended = subprocess.run(
        [sys.executable, "-c", NAMED], env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("card:9 does not exist")
    assert lines[1] == "the simulated device is installed as 'card' and cannot become 'sim' as well"
    assert lines[2] == "simccl card:0"
    assert lines[3] == "none 0 True"
    assert lines[4] == "1"


# ----- tensors -------------------------------------------------------------------------------------------------------


def mixed_devices():
    x, other, host = torch.ones(2, 2, device="sim"), torch.ones(2, 2, device="sim:1"), torch.ones(2, 2)
    calls = [
        lambda: x + host,
        lambda: x + other,
        lambda: x.mm(host),
        lambda: torch.cat([x, host]),
        lambda: torch.where(x > 0, x, host),
        lambda: host.add_(x),
        lambda: torch._foreach_add_([x, x], [host, host]),
        lambda: torch.nn.functional.embedding(torch.zeros(1, dtype=torch.long), x),
        lambda: torch.nn.functional.linear(x, host),
        lambda: torch._fused_adam_(
            [x],
            [x],
            [x],
            [host],
            [],
            [torch.ones(())],
            amsgrad=False,
            lr=1.0,
            beta1=0.9,
            beta2=0.9,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        ),
    ]
    for call in calls:
        assert "same device" in refusal(call)
    assert "numpy" in refusal(x.numpy)
    library = torch.library.Library("ds_of_test", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x.clone(), "CPU")
    assert torch.equal(torch.ops.ds_of_test.same(host), host)
    assert "no kernel for the device sim" in refusal(lambda: torch.ops.ds_of_test.same(x))
    assert torch.equal((x + torch.tensor(1.0)).cpu(), host + 1)
    assert x[torch.tensor([0])].shape == (1, 2)


def test_tensors_of_two_devices_and_operators_for_the_host_are_refused(sim):
    sim(mixed_devices)


def operators():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 6, generator=g), torch.randn(6, 5, generator=g)
    pairs = {
        "matmul": lambda a, b: a @ b,
        "views": lambda a, b: a.t().reshape(3, 8).narrow(1, 2, 3).unsqueeze(0).expand(2, 3, 3).sum(0),
        "softmax": lambda a, b: torch.softmax(a, -1),
        "sort": lambda a, b: a.sort(dim=1).values,
        "topk": lambda a, b: torch.topk(a, 2).indices,
        "split": lambda a, b: torch.cat([part * 2 for part in a.split([2, 4], dim=1)], dim=1),
        "out": lambda a, b: torch.add(a, a, out=torch.empty(0, device=a.device)),
        "foreach": lambda a, b: torch.stack(torch._foreach_mul([a, a + 1], 3.0)),
        "inplace": lambda a, b: a.clone().transpose(0, 1).add_(1).mul_(2),
        "index": lambda a, b: a[a > 0],
        "put": lambda a, b: a.clone().index_put_((torch.tensor([0, 1], device=a.device),), a[0]),
        "conv": lambda a, b: torch.nn.functional.conv1d(a.view(1, 4, 6), a.view(2, 4, 3)),
        "attention": lambda a, b: torch.nn.functional.scaled_dot_product_attention(*[a.view(1, 2, 3, 4)] * 3),
        "resize": lambda a, b: torch.zeros(2, device=a.device).resize_(5)[:2],
        "complex": lambda a, b: torch.view_as_real(torch.fft.rfft(a)),
        "norm": lambda a, b: torch.linalg.vector_norm(a),
    }
    for name, function in pairs.items():
        here, there = function(a, b), function(a.to("sim"), b.to("sim"))
        assert there.device.type == "sim", name
        assert torch.equal(here, there.cpu()), name


def test_operators_give_what_the_host_gives(sim):
    sim(operators)


def refusals():
    x, lengths = torch.ones(2, 3, 4, device="sim"), torch.tensor([1], device="sim")
    layer = torch.nn.LSTM(4, 5).to("sim")
    embedding = torch.nn.Embedding(4, 3, sparse=True).to("sim")
    calls = {
        "_thnn_fused_lstm_cell has no kernel for the device sim": lambda: layer(x),
        "to_sparse gives a sparse tensor; sim has strided tensors only": x[0].to_sparse,
        "backend": lambda: embedding(lengths).sum().backward(),
        "quantize_per_tensor gives a quantized tensor": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "SparseCsrsim": lambda: torch.empty(2, 2, layout=torch.sparse_csr, device="sim"),
        "NestedTensor": lambda: torch.nested.nested_tensor([x[0], x[1]]).unbind(),
        "only tensors of the host can be pinned": lambda: torch.empty(2, device="sim", pin_memory=True),
        "to be on cpu": lambda: torch.tensor_split(x, lengths),
        "Dlpack": lambda: torch.from_dlpack(x),
    }
    for reason, call in calls.items():
        assert reason in refusal(call), reason
    torch.sim.synchronize()
    assert x.sum().item() == 24


def test_what_it_does_not_do_is_refused(sim):
    sim(refusals)


def read_by_address():
    x = torch.ones(4, device="sim")
    assert torch.ones(4).data_ptr() != x.data_ptr()
    code = """if 1:
        import ctypes, torch
        from deepspeed.accelerator import get_accelerator
        get_accelerator()
        x = torch.ones(4, device="sim")
        print("reading", flush=True)
        ctypes.string_at(x.data_ptr(), 4)"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout


def test_the_host_cannot_read_an_address_of_the_device(sim):
    code, told = sim(read_by_address)[0]
    assert told == "reading\n"
    assert code < 0  # by a signal


def fresh_memory():
    assert torch.empty(100, device="sim").isnan().all()
    torch.ones(100, device="sim")
    assert torch.empty(100, device="sim").isnan().all()


def test_memory_that_nobody_wrote_is_nan(sim):
    sim(fresh_memory)


# ----- memory --------------------------------------------------------------------------------------------------------


def figures():
    accelerator = get_accelerator()
    accelerator.empty_cache()
    before, on_second = accelerator.memory_allocated(), accelerator.memory_allocated(1)  # of jobs before
    x = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    assert accelerator.memory_allocated() == before + (1 << 20)
    assert accelerator.memory_allocated(1) == on_second
    del x
    assert accelerator.memory_allocated() == before
    assert accelerator.max_memory_allocated() >= before + (1 << 20)
    assert accelerator.memory_reserved() >= before + (1 << 20)
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == before
    free = accelerator.available_memory()
    accelerator.empty_cache()
    assert accelerator.available_memory() >= free + (1 << 20)
    assert accelerator.memory_stats()["allocated_bytes.all.current"] == before
    assert accelerator.total_memory() == 4 << 30
    ooms = accelerator.memory_stats()["num_ooms"]  # of jobs before this one
    torch.sim.set_total_memory(1 << 20)
    error = refusal(lambda: torch.empty(2 << 20, dtype=torch.uint8, device="sim"))
    torch.sim.set_total_memory(4 << 30)
    assert "out of memory" in error
    assert accelerator.memory_stats()["num_ooms"] == ooms + 1


def test_memory_figures_and_the_limit(sim):
    sim(figures)


def pinned():
    accelerator = get_accelerator()
    host = torch.arange(10.0)
    assert not accelerator.is_pinned(host)
    assert accelerator.is_pinned(accelerator.pin_memory(host))
    assert accelerator.is_pinned(accelerator.pin_memory(host)[3:])
    aligned = accelerator.pin_memory(host, align_bytes=4096)
    assert aligned.data_ptr() % 4096 == 0
    assert torch.equal(aligned, host)


def test_pinned_memory(sim):
    sim(pinned)


# ----- streams and events --------------------------------------------------------------------------------------------


def late_copies():
    accelerator = get_accelerator()
    lane, event = accelerator.Stream(), accelerator.Event()
    device = torch.zeros(4, device="sim")
    host = torch.ones(4).pin_memory()
    accelerator.synchronize()

    with accelerator.stream(lane):
        assert accelerator.current_stream() == lane
        device.copy_(host, non_blocking=True)
        event.record(lane)
    assert accelerator.current_stream() == accelerator.default_stream()
    assert device.sum().item() == 0  # the default stream did not wait
    host.fill_(2)  # too early: the copy has not been made yet
    accelerator.current_stream().wait_event(event)
    assert device.sum().item() == 8

    back = torch.zeros(4).pin_memory()
    lane.wait_stream(accelerator.current_stream())
    with accelerator.stream(lane):
        back.copy_(device, non_blocking=True)
    assert back.sum().item() == 0
    lane.synchronize()
    assert back.sum().item() == 8

    with accelerator.stream(lane):
        back.copy_(device * 2, non_blocking=False)  # waits
    assert back.sum().item() == 16
    with accelerator.stream(lane):
        back.copy_(device, non_blocking=True)
    accelerator.synchronize()
    assert back.sum().item() == 8

    pageable = torch.zeros(4)
    pageable.copy_(device, non_blocking=True)  # goes through the host, which waits
    assert pageable.sum().item() == 8


def test_a_copy_is_made_when_somebody_waits_for_it(sim):
    sim(late_copies)


def freed_too_early():
    accelerator = get_accelerator()
    lane = accelerator.Stream()

    def send(tells):
        source = torch.ones(1000, device="sim")
        host = torch.zeros(1000).pin_memory()
        lane.wait_stream(accelerator.current_stream())
        with accelerator.stream(lane):
            host.copy_(source, non_blocking=True)
        if tells:
            source.record_stream(lane)
        del source
        torch.zeros(1000, device="sim").sum().item()
        lane.synchronize()
        return host.sum().item()

    assert send(tells=True) == 1000
    assert send(tells=False) == 0


def test_memory_that_another_stream_still_reads_is_kept_if_it_is_told(sim):
    sim(freed_too_early)


def events():
    accelerator = get_accelerator()
    start, end = accelerator.Event(enable_timing=True), accelerator.Event(enable_timing=True)
    lane = accelerator.Stream()
    host, device = torch.ones(1 << 16).pin_memory(), torch.empty(1 << 16, device="sim")
    accelerator.synchronize()
    start.record(lane)
    assert start.query()
    with accelerator.stream(lane):
        device.copy_(host, non_blocking=True)
    end.record(lane)
    assert "completed" in refusal(lambda: start.elapsed_time(end))
    assert end.query()  # being asked, by torch, made it go on
    assert start.elapsed_time(end) > 0
    plain = accelerator.Event()
    plain.record()
    assert "enable_timing" in refusal(lambda: start.elapsed_time(plain))
    assert lane.query()


def test_events_measure_and_can_be_asked(sim):
    sim(events)


# ----- random numbers ------------------------------------------------------------------------------------------------


def random_numbers():
    accelerator = get_accelerator()
    accelerator.manual_seed_all(7)
    assert accelerator.initial_seed() == 7
    state, other = accelerator.get_rng_state(), accelerator.get_rng_state(1)
    host = torch.get_rng_state()
    first = torch.rand(5, device="sim")
    assert torch.equal(torch.rand(5, device="sim:1").cpu(), first.cpu())
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(accelerator.get_rng_state(), state)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="sim"), first)
    accelerator.set_rng_state(other, 1)
    assert torch.equal(torch.rand(5, device="sim:1").cpu(), first.cpu())
    generator = torch.Generator(device="sim").manual_seed(3)
    assert torch.equal(
        torch.randn(3, device="sim", generator=generator).cpu(), torch.randn(3, generator=torch.manual_seed(3))
    )
    accelerator.manual_seed(1)
    dropped = torch.nn.functional.dropout(torch.ones(100, device="sim"), 0.5)
    accelerator.default_generator(0).manual_seed(1)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(100, device="sim"), 0.5), dropped)
    assert 0 < dropped.count_nonzero().item() < 100
    with torch.random.fork_rng([0], device_type="sim"):
        torch.rand(1, device="sim")


def test_each_device_has_its_generator(sim):
    sim(random_numbers)


# ----- one rank ------------------------------------------------------------------------------------------------------


def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    config["gradient_clipping"] = 0.0  # the scale is rounded where it is applied, in the host's kernel or before
    engine, *_ = deepspeed.initialize(model=model, config=config)
    x, y = torch.randn(4, 8), torch.randn(4, 1)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, str(engine.device)


def test_one_rank_trains_as_on_the_host(sim, cpu):
    (losses, device), (expected, _) = sim(train)[0], cpu(train)[0]
    assert device == "sim:0"
    assert losses == expected
    assert losses[-1] < losses[0]
