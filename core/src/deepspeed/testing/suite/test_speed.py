"""Speed: the share of the device's own rates that work reaches, all of them measured in this run.

The measures are what the device does when nothing is in the way: the bytes that a copy of a large tensor reads and
writes in a second, and the operations of a product of two large square matrices. Operators that are bound by memory
are compared with the copy, by the bytes that they have to move; a linear layer and a whole training step with the
product, by the operations of their matrix products. A share needs no data sheet, and holds on a slow device as well.

The measure and what is compared with it take turns, and the share is the median of those of some rounds, so that a
machine which is busy, or free, for a moment changes little. A run beside other work says little all the same: let it be
the only one. What was measured stands in the record (`figures` of the level), whether the share was enough or not.
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

#: what is measured -> the share of the device's rate that it has to reach
AT_LEAST = {
    "sum of two tensors": 0.7,
    "sum over a tensor": 0.5,
    "cast to half": 0.5,
    "optimizer step": 0.5,
    "linear layer": 0.6,
    "training step": 0.3,
}
#: bytes of the tensors that one call works on, the same for all: more than caches hold
_BYTES = 256 << 20
_ROUNDS, _ROUND_S = 5, 0.05
#: a product is measured that takes so long, with at most so many rows
_PRODUCT_S, _MOST_ROWS = 0.01, 8192


class TimedCall(NamedTuple):
    """One call that is measured: `amount` bytes or operations."""

    call: Callable[[], Any]
    amount: float


def rates(calls: Mapping[str, TimedCall]) -> dict[str, list[float]]:
    """Name -> amount per second in each of some rounds, in which all take turns."""
    times = {name: _times(call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            found[name].append(times[name] * call.amount / _seconds(call, times[name]))
    return found


def _times(work: TimedCall) -> int:
    """Return how many calls take a round; after one that warms up."""
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
    """Return what the record notes of one measurement: medians, of the rates and of the share in each round.

    Args:
        what: a name of `AT_LEAST`.
        rates: bytes or operations per second, by round.
        device_rates: those of the copy or of the product, in the same rounds.
        unit: "GB/s" or "TFLOP/s", in which both are noted.
    """
    scale = {"GB/s": 1e9, "TFLOP/s": 1e12}[unit]
    share = statistics.median(own / device for own, device in zip(rates, device_rates, strict=True))
    noted = {"what": what, "share": round(share, 3), "at_least": AT_LEAST[what], "enough": share >= AT_LEAST[what]}
    medians = [statistics.median(each) / scale for each in (rates, device_rates)]
    return {**noted, "rate": medians[0], "device_rate": medians[1], "unit": unit}


def judge(found: Mapping[str, Any]) -> None:
    """Fail the test where the share of a figure is not enough."""
    assert found["enough"], (
        f"{found['what']}: {found['rate']:.3g} of the device's {found['device_rate']:.3g} {found['unit']} is a share "
        f"of {found['share']:.2f}, and at least {found['at_least']:.2f} is asked for"
    )


# ----- bound by memory -----------------------------------------------------------------------------------------------


def _elements(bytes_per_index: int) -> int:
    """Return of how many elements tensors make up `_BYTES`, where one index of all takes so many bytes."""
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
    """The step of AdamW over one tensor: weight, gradient and two states are read, all but the gradient written."""
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
    """bf16 where a device with a memory of its own trains in it; else fp32: a host may lack the arithmetic for bf16."""
    accelerator = get_accelerator()
    is_host = accelerator.on_accelerator(torch.empty(0))
    return torch.bfloat16 if accelerator.is_bf16_supported() and not is_host else torch.float32


def product(device: torch.device, dtype: torch.dtype) -> tuple[int, TimedCall]:
    """Rows of the square matrices, and their product."""
    rows = 512
    while True:
        x, y = (torch.randn(rows, rows, device=device, dtype=dtype) for _ in range(2))
        work = TimedCall(functools.partial(torch.mm, x, y, out=torch.empty_like(x)), 2 * rows**3)
        if rows >= _MOST_ROWS or min(_seconds(work, 1) for _ in range(3)) > _PRODUCT_S:
            return rows, work
        rows *= 2


def linear_layer(device: torch.device, dtype: torch.dtype, rows: int) -> TimedCall:
    """Forward and backward of a layer that makes a row twice as wide: three products."""
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
    """Operations of the matrix products of a step: two per weight and token in the forward, twice that in the backward.

    Attention adds two products of a token with each token of its sequence; what the causal mask saves is not counted
    as saved.
    """
    weights = config.num_layers * 12 * config.width**2 + config.width * config.vocab_size
    attention = config.num_layers * 2 * config.sequence_length * config.width
    return 3.0 * 2 * (weights + attention) * batch * config.sequence_length


def measure_step() -> dict[str, list[float]]:
    """Return operations per second of the product and of training steps, measured on one rank."""
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
