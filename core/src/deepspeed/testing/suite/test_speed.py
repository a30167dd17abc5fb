"""Speed: the fraction of the device's own peak rates that operations reach. The run measures both.

There are two peak rates: the bytes per second that a copy of a large tensor reads and writes, and the operations per
second of a product of two large square matrices. Memory-bound operators are compared with the copy, by the bytes that
they must move. A linear layer and a whole training step are compared with the product, by the operations of their
matrix products. A fraction needs no data sheet, and is valid on a slow device too.

The peak and the compared operation take turns. The result is the median fraction over several rounds, so short
disturbances change little. Still, run these tests alone: other work on the machine makes results meaningless. The
record contains all measurements (`figures` of the level), even if a fraction was too small.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.testing.models import GPT, GPTConfig, make_engine
from deepspeed.testing.suite import fixtures

#: name of the operation -> minimum share of the device's peak rate
AT_LEAST = {
    "sum of two tensors": 0.7,
    "sum over a tensor": 0.5,
    "cast to half": 0.5,
    "optimizer step": 0.5,
    "linear layer": 0.6,
    "training step": 0.3,
}
#: bytes of all tensors of one call, for all operators: more than caches hold
_BYTES = 256 << 20
_ROUNDS, _ROUND_S = 5, 0.05
#: minimum seconds of the matrix product, and its maximum number of rows
_PRODUCT_S, _MOST_ROWS = 0.01, 8192


class TimedCall(NamedTuple):
    """A call to measure, and the number of bytes or operations it takes (`amount`)."""

    call: Callable[[], Any]
    amount: float


def rates(calls: Mapping[str, TimedCall]) -> dict[str, list[float]]:
    """Return name -> bytes or operations per second in each round. The calls take turns in each round."""
    times = {name: _times(call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            found[name].append(times[name] * call.amount / _seconds(call, times[name]))
    return found


def _times(work: TimedCall) -> int:
    """Return the number of calls per round, after a warm-up call."""
    _seconds(work, 1)
    return max(1, round(_ROUND_S / max(_seconds(work, 1), 1e-6)))


def _seconds(work: TimedCall, calls: int) -> float:
    synchronize = get_accelerator().synchronize
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        work.call()
    synchronize()
    return time.perf_counter() - begin


def figure(what: str, rates: Sequence[float], device_rates: Sequence[float], unit: str) -> dict[str, Any]:
    """Return the record of one measurement: the medians, over the rounds, of both rates and of the share.

    Args:
        what: a name of `AT_LEAST`.
        rates: bytes or operations per second, by round.
        device_rates: the peak rates (copy or product) in the same rounds.
        unit: "GB/s" or "TFLOP/s", for both.
    """
    scale = {"GB/s": 1e9, "TFLOP/s": 1e12}[unit]
    share = statistics.median(own / device for own, device in zip(rates, device_rates, strict=True))
    noted = {"what": what, "share": round(share, 3), "at_least": AT_LEAST[what], "enough": share >= AT_LEAST[what]}
    medians = [statistics.median(each) / scale for each in (rates, device_rates)]
    return {**noted, "rate": medians[0], "device_rate": medians[1], "unit": unit}


def judge(found: Mapping[str, Any]) -> None:
    """Fail the test if the share of a figure is too small."""
    assert found["enough"], (
        f"{found['what']}: {found['rate']:.3g} of the device's {found['device_rate']:.3g} {found['unit']} is a share "
        f"of {found['share']:.2f}, and at least {found['at_least']:.2f} is asked for"
    )


# ----- bound by memory -----------------------------------------------------------------------------------------------


def _elements(bytes_per_index: int) -> int:
    """Return the number of elements per tensor, if element i of all tensors takes `bytes_per_index` bytes together."""
    return _BYTES // bytes_per_index


def copy(device: torch.device) -> TimedCall:
    numel = _elements(8)
    source, target = torch.ones(numel, device=device), torch.empty(numel, device=device)
    return TimedCall(lambda: target.copy_(source), 8 * numel)


def sum_of_two(device: torch.device) -> TimedCall:
    numel = _elements(12)
    x, y, out = (torch.ones(numel, device=device) for _ in range(3))
    return TimedCall(lambda: torch.add(x, y, out=out), 12 * numel)


def sum_over(device: torch.device) -> TimedCall:
    numel = _elements(4)
    x, out = torch.ones(1, numel, device=device), torch.empty(1, device=device)
    return TimedCall(lambda: torch.sum(x, 1, out=out), 4 * numel)


def cast(device: torch.device) -> TimedCall:
    half = next(
        (each for each in (torch.bfloat16, torch.float16) if each in get_accelerator().supported_dtypes()), None
    )
    if half is None:
        pytest.skip("half precision: supported_dtypes() has neither bf16 nor fp16")
    numel = _elements(6)
    source, target = torch.ones(numel, device=device), torch.empty(numel, device=device, dtype=half)
    return TimedCall(lambda: target.copy_(source), 6 * numel)


def optimizer_step(device: torch.device) -> TimedCall:
    """Return an AdamW step on one tensor. It reads weight, gradient and two states; it writes weight and states."""
    numel = _elements(16)
    param = torch.nn.Parameter(torch.ones(numel, device=device))
    param.grad = torch.full_like(param, 1e-3)
    return TimedCall(FusedAdam([param], lr=1e-3).step, 28 * numel)


_BOUND_BY_MEMORY = {
    "sum of two tensors": sum_of_two,
    "sum over a tensor": sum_over,
    "cast to half": cast,
    "optimizer step": optimizer_step,
}


@pytest.mark.parametrize("what", _BOUND_BY_MEMORY)
def test_share_of_the_copy_bandwidth(
    device: torch.device, what: str, record_property: Callable[[str, object], None]
) -> None:
    work = _BOUND_BY_MEMORY[what](device)
    found = rates({"copy": copy(device), what: work})
    noted = figure(what, found[what], found["copy"], "GB/s")
    record_property("figure", noted)
    judge(noted)


# ----- bound by matrix products --------------------------------------------------------------------------------------


def _product_dtype() -> torch.dtype:
    """Return bf16 if the device supports it and has its own memory, else fp32: a host may lack bf16 arithmetic."""
    accelerator = get_accelerator()
    is_host = accelerator.on_accelerator(torch.empty(0))
    return torch.bfloat16 if accelerator.is_bf16_supported() and not is_host else torch.float32


def product(device: torch.device, dtype: torch.dtype) -> tuple[int, TimedCall]:
    """Return the number of rows of the square matrices, and the timed call of their product."""
    rows = 512
    while True:
        x, y = (torch.randn(rows, rows, device=device, dtype=dtype) for _ in range(2))
        work = TimedCall(functools.partial(torch.mm, x, y, out=torch.empty_like(x)), 2 * rows**3)
        if rows >= _MOST_ROWS or min(_seconds(work, 1) for _ in range(3)) > _PRODUCT_S:
            return rows, work
        rows *= 2


def linear_layer(device: torch.device, dtype: torch.dtype, rows: int) -> TimedCall:
    """Return the timed forward and backward of a layer that doubles the width: three products."""
    layer = torch.nn.Linear(rows, 2 * rows, device=device, dtype=dtype)
    x = torch.randn(rows, rows, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(rows, 2 * rows, device=device, dtype=dtype)

    def call() -> None:
        layer.weight.grad = x.grad = None
        layer(x).backward(gradient)

    return TimedCall(call, 3 * 2 * 2 * rows**3)


def test_share_of_the_matmul_rate(device: torch.device, record_property: Callable[[str, object], None]) -> None:
    dtype = _product_dtype()
    rows, work = product(device, dtype)
    found = rates({"product": work, "linear layer": linear_layer(device, dtype, rows)})
    noted = figure("linear layer", found["linear layer"], found["product"], "TFLOP/s")
    record_property("figure", noted)
    judge(noted)


def step_operations(config: GPTConfig, batch: int) -> float:
    """Return the operations of a step's matrix products: 2 per weight and token in the forward, 4 in the backward.

    Attention adds two products of each token with each token of its sequence. The savings of the causal mask are not
    subtracted.
    """
    weights = config.num_layers * 12 * config.width**2 + config.width * config.vocab_size
    attention = config.num_layers * 2 * config.sequence_length * config.width
    return 3.0 * 2 * (weights + attention) * batch * config.sequence_length


def measure_step() -> dict[str, list[float]]:
    """Measure the operations per second of the product and of training steps on one rank."""
    accelerator = get_accelerator()
    accelerator.set_device(dist.get_local_rank())
    device = torch.device(accelerator.current_device_name())
    dtype = _product_dtype()
    rows, work = product(device, dtype)
    config = GPTConfig(vocab_size=rows, sequence_length=rows // 4, num_layers=2, num_heads=8, width=rows // 2)
    batch = 2
    engine = make_engine(
        GPT(config),
        train_micro_batch_size_per_gpu=batch,
        zero_optimization={"reduce_bucket_size": 500_000_000},
        bf16={"enabled": dtype is torch.bfloat16},
    )
    tokens = torch.randint(config.vocab_size, (batch, config.sequence_length + 1)).to(engine.device)

    def step() -> None:
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:].contiguous()))
        engine.step()

    found = rates({"product": work, "training step": TimedCall(step, step_operations(config, batch))})
    engine.destroy()
    return found


def test_share_of_the_matmul_rate_in_training(record_property: Callable[[str, object], None]) -> None:
    (found,) = fixtures.on_ranks(1, measure_step)
    noted = figure("training step", found["training step"], found["product"], "TFLOP/s")
    record_property("figure", noted)
    judge(noted)
