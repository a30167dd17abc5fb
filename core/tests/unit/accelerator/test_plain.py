"""The plain device: the host by torch alone."""

import pytest
import torch
from deepspeed.accelerator import plain as host
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.errors import ConfigError, StateError

MIB = 2**20


@pytest.fixture
def plain(monkeypatch):
    for variable in ("LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    return PlainAccelerator()


@pytest.mark.parametrize("name", ["BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long"])
def test_tensor_constructors_are_torchs_classes(plain, name):
    """As on DeepSpeed's CPU: scripts give them sizes, and ask by `isinstance`."""
    kind = getattr(plain, f"{name}Tensor")
    assert kind is getattr(torch, f"{name}Tensor")
    assert kind(2, 3).shape == (2, 3)
    assert isinstance(kind([1, 2]), kind)


def test_names_have_no_index(plain):
    assert (plain.device_name(), plain.device_name(3), plain.current_device_name()) == ("cpu", "cpu", "cpu")
    assert plain.on_accelerator(torch.ones(1))
    assert not plain.on_accelerator(torch.ones(1, device="meta"))


def test_device_index_follows_the_launcher_until_it_is_set(plain, monkeypatch):
    assert plain.current_device() == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert plain.current_device() == 3
    monkeypatch.setenv("LOCAL_RANK", "")
    with pytest.raises(ConfigError, match="LOCAL_RANK must be an integer of at least -1, found ''"):
        plain.current_device()
    plain.set_device(1)
    assert plain.current_device() == 1
    plain.set_device(-1)
    assert plain.current_device() == 1


def test_device_count_follows_the_launcher(plain, monkeypatch):
    assert plain.device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert plain.device_count() == 4
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert plain.device_count() == 2
    monkeypatch.setenv("LOCAL_SIZE", "two")
    with pytest.raises(ConfigError, match="LOCAL_SIZE must be an integer of at least 0, found 'two'"):
        plain.device_count()


def test_random_numbers_repeat_from_seed_and_from_state(plain):
    before = plain.get_rng_state()
    try:
        plain.manual_seed(7)
        assert plain.initial_seed() == 7
        state = plain.get_rng_state(0)
        first, second = torch.rand(4), torch.rand(4)
        plain.set_rng_state(state, 0)
        assert torch.equal(torch.rand(4), first)
        assert not torch.equal(first, second)
        plain.manual_seed_all(7)
        assert torch.equal(torch.rand(4), first)
        assert torch.equal(torch.rand(4, generator=plain.default_generator(0)), second)
    finally:
        plain.set_rng_state(before)


def test_streams_do_nothing_in_every_form_of_use(plain):
    stream = plain.Stream(priority=-1)
    other = plain.Stream()
    with plain.stream(stream), stream, plain.stream(None):
        stream.wait_stream(plain.current_stream())
        stream.wait_stream(other)
        stream.wait_event(other.record_event())
        event = stream.record_event(plain.Event(enable_timing=True))
    event.wait(stream)
    event.synchronize()
    stream.synchronize()
    plain.synchronize(0)
    assert stream.query()
    assert event.query()
    assert plain.current_stream() is plain.default_stream(0)


def test_events_read_the_clock_in_milliseconds(plain, monkeypatch):
    clock = iter([5_000_000, 7_500_000])
    monkeypatch.setattr("deepspeed.accelerator.plain.time.perf_counter_ns", lambda: next(clock))
    start, end = plain.Event(), plain.Event()
    with pytest.raises(StateError, match="the start event was not recorded"):
        start.elapsed_time(end)
    start.record()
    with pytest.raises(StateError, match="the end event was not recorded"):
        start.elapsed_time(end)
    end.record(plain.current_stream())
    assert start.elapsed_time(end) == 2.5


def test_memory_figures_move_with_the_process(plain):
    before = plain.memory_allocated()
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    with_tensor = plain.memory_allocated()
    assert with_tensor >= before + 48 * MIB
    assert plain.max_memory_allocated() >= with_tensor
    del tensor
    plain.reset_peak_memory_stats()
    after_reset = plain.max_memory_allocated()
    assert after_reset < with_tensor - 16 * MIB
    stats = plain.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
    assert 0 < plain.available_memory() <= plain.total_memory()
    assert plain.memory_cached() > 0
    assert plain.max_memory_cached() > 0
    plain.empty_cache()


def test_peak_without_the_kernels_help(monkeypatch):
    figures = iter([100, 300, 200, 250, 240])
    monkeypatch.setattr(host, "resident_bytes", lambda: next(figures))
    monkeypatch.setattr(host, "_system_peak_bytes", lambda: 900)
    monkeypatch.setattr(host, "_reset_system_peak", lambda: False)
    peak = host.PeakMemory()
    assert peak.read() == 900  # 100 now
    peak.reset()  # 300 now
    assert [peak.read() for _ in range(3)] == [300, 300, 300]


def test_peak_is_never_below_the_present(monkeypatch):
    monkeypatch.setattr(host, "resident_bytes", lambda: 500)
    monkeypatch.setattr(host, "_system_peak_bytes", lambda: 400)
    assert host.PeakMemory().read() == 500


@pytest.mark.parametrize(
    "version", ["memory.max memory.current", "memory/memory.limit_in_bytes memory/memory.usage_in_bytes"]
)
def test_a_containers_limit_counts(monkeypatch, tmp_path, version):
    limit, use = (tmp_path / name for name in version.split())
    limit.parent.mkdir(exist_ok=True)
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    limit.write_text(f"{8 * MIB}\n")
    use.write_text(f"{3 * MIB}\n")
    assert host.total_bytes() == 8 * MIB
    assert host.available_bytes() == 5 * MIB
    use.write_text(f"{9 * MIB}\n")
    assert host.available_bytes() == 0


def test_no_limit_is_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    machine = host.total_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert host.total_bytes() == machine


def test_pinning_gives_the_tensor_back_unless_alignment_asks_for_a_copy(plain):
    tensor = torch.arange(1000, dtype=torch.float32)[1:].view(27, 37)
    assert tensor.data_ptr() % 512
    assert plain.pin_memory(tensor) is tensor
    assert plain.is_pinned(tensor)
    aligned = plain.pin_memory(tensor, align_bytes=512)
    assert aligned.data_ptr() % 512 == 0
    assert torch.equal(aligned, tensor)
    assert plain.pin_memory(aligned, align_bytes=512) is aligned
    assert plain.pin_memory(tensor.t(), align_bytes=512).is_contiguous()
    with pytest.raises(ValueError, match="align_bytes=6 is no multiple of the 4 bytes"):
        plain.pin_memory(tensor, align_bytes=6)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2)])
def test_alignment_of_small_and_empty_tensors(plain, shape):
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    aligned = plain.pin_memory(tensor, align_bytes=4096)
    assert aligned.shape == tensor.shape
    assert torch.equal(aligned, tensor)


def test_every_stated_dtype_computes_forward_and_backward(plain):
    assert plain.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    for dtype in plain.supported_dtypes():
        layer = torch.nn.Linear(8, 8).to(dtype)
        loss = torch.nn.functional.layer_norm(layer(torch.ones(2, 8, dtype=dtype)), (8,)).softmax(-1)[:, 0].sum()
        loss.backward()
        assert torch.isfinite(layer.weight.grad).all()


def test_tensor_constructors(plain):
    made = {
        "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.float64,
        "FloatTensor": torch.float32, "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64,
    }  # fmt: skip
    for name, dtype in made.items():
        tensor = getattr(plain, name)([1, 2])
        assert (tensor.dtype, tensor.tolist(), tensor.device.type) == (dtype, [1, 2], "cpu")
