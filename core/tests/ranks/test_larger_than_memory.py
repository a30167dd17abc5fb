"""A run whose states are four times the memory that it may take trains and saves with swap files, and only so.

The limit is that of private memory (RLIMIT_DATA), set when everything is imported and has run once: memory is
enforced, not measured. A load is not part of it, since torch maps a checkpoint's files as private memory.
"""

import os
import resource
import subprocess
import sys

import pytest

SCRIPT = """
import re, resource, sys
import deepspeed
import torch
from torch import nn

WIDTH, LAYERS, STATE_BYTES = 512, 48, 14  # bf16: master weights, two states, reduced gradients
folder, device = sys.argv[1:]
numel = LAYERS * WIDTH * WIDTH
zero = {"stage": 3, "sub_group_size": WIDTH * WIDTH // 2}
zero |= {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0}
if device == "nvme":
    zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
config = {
    "train_batch_size": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": zero,
}

def train(num_layers, tag):
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    engine.save_checkpoint(folder, tag=tag)
    return engine

deepspeed.init_distributed("gloo", verbose=False)
train(1, "small").destroy()
used = int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + STATE_BYTES * numel // 4,) * 2)
engine = train(LAYERS, "large")
print("trained")
"""


#: of glibc: each tensor's memory goes back when it is freed, whatever is allocated beside it
TENSORS_BY_THEMSELVES = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def small_stacks():
    """Stacks of threads are private memory, whether they are used or not."""
    resource.setrlimit(resource.RLIMIT_STACK, (2**19, 2**19))


@pytest.mark.parametrize("device", ["nvme", "none"])
def test_states_of_four_times_the_memory_train_from_swap_files(tmp_path, device):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **TENSORS_BY_THEMSELVES}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), device]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, preexec_fn=small_stacks, timeout=200
    )
    if device == "nvme":
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("trained\n")
    else:
        assert done.returncode != 0
        assert "allocate memory" in done.stderr, done.stderr
