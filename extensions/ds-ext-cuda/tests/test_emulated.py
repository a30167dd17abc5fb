"""The emulation itself: what it runs comes out right, and each kind of fault that it promises to find is found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

THREADS, BLOCKS = 64, 3
SOURCE = Path(__file__).parent / "emulated" / "kernels" / "semantics.cu"


@pytest.fixture(scope="module")
def ops(emulated_builder):
    return emulated_builder("probes", [str(SOURCE)], "ds_cuda_probes").load()


@pytest.fixture
def x():
    return torch.arange(THREADS * BLOCKS, dtype=torch.float32)


def by_block(x):
    return x.view(BLOCKS, THREADS)


def test_reductions_of_a_block_one_after_the_other(ops, x):
    wanted = by_block(x).sum(1, keepdim=True).expand(BLOCKS, THREADS) + sum(range(THREADS))
    assert torch.equal(by_block(ops.probe("block_sums", x.clone(), THREADS)), wanted)


def test_shared_memory_behind_a_barrier(ops, x):
    assert torch.equal(by_block(ops.probe("reversed", x.clone(), THREADS)), by_block(x).flip(1))


def test_shuffles_read_the_lane_that_they_name(ops, x):
    found = by_block(ops.probe("shuffles", x.clone(), THREADS))[1, 32:]
    lane = torch.arange(32)
    up, down = (lane - 1).clamp_min(0), torch.where(lane % 8 == 7, lane, lane + 1)
    votes = torch.where(lane < 16, 0.5 * 6, 0.0)  # 0, 3, 6, 9, 12 and 15
    assert torch.equal(found, 5.0 + 100 * up + 1e4 * down + votes)


def test_atomics_and_counting_barriers(ops, x):
    assert set(ops.probe("counts", x, THREADS).tolist()) == {sum(range(THREADS)) + 10}


def test_fp16_and_bf16_round_as_torch_does(ops):
    every = torch.arange(65536, dtype=torch.int32)
    for dtype in (torch.float16, torch.bfloat16):
        exact = every.to(torch.int16).view(dtype).float()
        between = torch.nextafter(exact, torch.tensor(0.0)), torch.nextafter(exact, torch.tensor(torch.inf))
        # halfway to the next number of the dtype: a tie
        ties = (exact + every.roll(-1).to(torch.int16).view(dtype).float()) / 2
        for numbers in (exact, *between, ties):
            rounded = torch.empty(65536, dtype=dtype)
            back = ops.round_trip(numbers, rounded)
            torch.testing.assert_close(rounded, numbers.to(dtype), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(back, rounded.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "kernel", ["reversed_without_barrier", "neighbour_without_barrier", "shared_reused_without_barrier", "unset_shared"]
)
def test_what_has_no_barrier_gives_wrong_numbers(ops, x, kernel):
    right = {
        "reversed_without_barrier": by_block(x).flip(1),
        "neighbour_without_barrier": torch.cat((by_block(x)[:, :1], by_block(x)[:, :-1]), 1),
        "shared_reused_without_barrier": (2 * by_block(x).sum(1, keepdim=True) + THREADS).expand(BLOCKS, THREADS),
        "unset_shared": torch.zeros(BLOCKS, THREADS),
    }[kernel]
    once, twice = ops.probe(kernel, x.clone(), THREADS), ops.probe(kernel, x.clone(), THREADS)
    assert not torch.equal(by_block(once), right)
    assert torch.equal(once.isnan(), twice.isnan())


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "barrier_of_some",
            r"ds::barrier_of_some\(float\*, long\), block \(0, 0, 0\): .* waits at the barrier of .*semantics.cu:\d+",
        ),
        ("two_barriers", r"waits at the barrier of .*semantics.cu:\d+, thread .* at that of .*semantics.cu:\d+"),
        ("shuffle_with_ended_lane", r"reduce.h:\d+ waits for lane 3 of its mask, which has ended"),
        ("shuffle_outside_mask", r"semantics.cu:\d+: reads lane 20, which is not in the mask"),
        ("mask_without_itself", r"lane (1[6-9]|2\d|3[01]) calls with a mask that leaves it out"),
        ("beyond_dynamic_shared", "wrote outside its 256 bytes of dynamic shared memory"),
        ("misaligned", r"thread \(\d+, 0, 0\): .*numbers.h:\d+: misaligned read"),
    ],
)
def test_faults_are_raised(ops, x, kernel, message):
    with pytest.raises(RuntimeError, match=message):
        ops.probe(kernel, x, THREADS)
    assert torch.equal(by_block(ops.probe("reversed", x.fill_(2), THREADS)), torch.full((BLOCKS, THREADS), 2.0))


def test_a_block_that_is_no_multiple_of_a_warp_cannot_shuffle_with_all_lanes(ops, x):
    with pytest.raises(RuntimeError, match="waits for lane 31 of its mask, which the block does not have"):
        ops.probe("block_sums", x, 48)


def test_a_launch_that_hardware_refuses_is_refused_with_the_kernels_name(ops, x):
    with pytest.raises(RuntimeError, match=r"cannot launch ds::reversed\(.*block \(2048, 1, 1\).*invalid conf"):
        ops.probe("reversed", x, 2048)


SANITIZED = """
import sys, torch
torch.ops.load_library(sys.argv[1])
torch.ops.ds_cuda_probes.probe("reversed", torch.ones(192), 64)
print("right kernels run", flush=True)
torch.ops.ds_cuda_probes.probe(sys.argv[2], torch.ones(192), 64)
"""


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        ("beyond_static_shared", "index 64 out of bounds for type 'float [64]'"),
        ("beyond_the_tensor", "AddressSanitizer: heap-buffer-overflow"),
    ],
)
def test_sanitizers_see_accesses_out_of_bounds(emulated_builder, monkeypatch, kernel, found):
    with monkeypatch.context() as patch:
        patch.setenv("DS_CUDA_SANITIZE", "1")
        builder = emulated_builder("probes", [str(SOURCE)], "ds_cuda_probes")
        library = builder.prepare()
        compiler = builder.toolchain().command
    runtimes = [
        subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(library), kernel],
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(str(Path(one.stdout.strip()).resolve()) for one in runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "right kernels run" in done.stdout, done.stderr
    assert done.returncode != 0
    assert found in done.stderr
