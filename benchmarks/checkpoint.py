"""How fast a checkpoint is saved and loaded, and for how long a save blocks, beside the disk, torch.save and DCP.

    python benchmarks/checkpoint.py --mib 1024 --rounds 5 --directory /where/checkpoints/go

One process has a model and an optimizer shard (bf16 weights 1/7, fp32 masters and two moments 6/7 of the bytes, as
under ZeRO stage 1 on one rank with bf16). All programs take turns, the first round is not counted, and each figure is a
median with the smallest and largest. `fio` writes as many bytes in order, and fsyncs.

"blocked" is the part of an asynchronous save in which training waits; "until whole" ends when the checkpoint can be
loaded. "steps" compares training steps (matrix products on one thread) that are made meanwhile with undisturbed ones.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.checkpoint import Checkpointer
from deepspeed.checkpoint.background import BackgroundWriter

MIB = 2**20
UNDISTURBED = "steps, undisturbed"


def make_states(num_mib: int) -> tuple[dict, dict]:
    """A model file's and a shard's content of `num_mib` MiB together, in tensors of at most 64 MiB."""
    numel = num_mib * MIB // 14
    width = 16 * MIB
    module = {f"w{i}": torch.randn(min(width, numel - i)).bfloat16() for i in range(0, numel, width)}
    masters = [torch.randn(numel) for _ in range(3)]
    model_state = {"module": module, "param_shapes": [], "dp_world_size": 1, "mp_world_size": 1}
    shard = {
        "zero_stage": 1,
        "partition_count": [1],
        "single_partition_of_fp32_groups": masters[:1],
        "base_optimizer_state": {"state": {0: {"exp_avg": masters[1], "exp_avg_sq": masters[2]}}, "param_groups": []},
    }
    return model_state, {"optimizer_state_dict": shard}


def tensors_of(states: tuple[dict, dict]) -> dict[str, torch.Tensor]:
    """The same tensors by name, for DCP."""
    shard = states[1]["optimizer_state_dict"]
    moments = shard["base_optimizer_state"]["state"][0]
    return {**states[0]["module"], "master": shard["single_partition_of_fp32_groups"][0], **moments}


def fio(path: Path, num_mib: int) -> float:
    """Seconds in which fio writes a new file in order; its own start is not counted."""
    command = [
        *("fio", "--name=write", f"--filename={path}", "--rw=write", "--bs=8m", f"--size={num_mib}m"),
        *("--ioengine=psync", "--fallocate=none", "--end_fsync=1", "--thread", "--output-format=json"),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    path.unlink()
    return float(json.loads(done.stdout)["jobs"][0]["job_runtime"]) / 1e3


def torch_save(path: Path, states: tuple[dict, dict]) -> None:
    with open(path, "wb") as file:
        torch.save(states, file)
        file.flush()
        os.fsync(file.fileno())


def touch_all(checkpointer: Checkpointer, directory: Path) -> None:
    """Load and copy everything, as a resume does."""
    found = checkpointer.load(directory)
    assert found is not None
    assert found.shard_state is not None
    for tensor in tensors_of((found.model_state, found.shard_state)).values():
        tensor.clone()


class Programs:
    """What is measured. Each method is a program; `times` has seconds by name."""

    def __init__(self, root: Path, num_mib: int) -> None:
        self.root, self.num_mib = root, num_mib
        self.states = make_states(num_mib)
        self.tensors = tensors_of(self.states)
        self.into = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        self.plain = Checkpointer()
        self.background = Checkpointer(background=BackgroundWriter())
        self.weights = torch.randn(512, 512)
        self.times: dict[str, list[float]] = {}

    def measure(self, name: str, program: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        result = program()
        self.times.setdefault(name, []).append(time.perf_counter() - start_s)
        return result

    def save(self, checkpointer: Checkpointer, name: str) -> None:
        checkpointer.save(self.root / name, "tag", model_state=self.states[0], shard_state=self.states[1])

    def step(self) -> None:
        for _ in range(8):
            self.weights @ self.weights

    def steps_until(self, is_over: Callable[[], bool], name: str) -> None:
        while not is_over():
            self.measure(name, self.step)

    def asynchronous(self, name: str, begin: Callable[[], Any], wait: Callable[[Any], Any], is_over: Any) -> None:
        """One asynchronous save, with steps until it is over."""
        start_s = time.perf_counter()
        pending = self.measure(f"{name}, blocked", begin)
        self.steps_until(lambda: is_over(pending), f"steps during {name}")
        wait(pending)
        self.times.setdefault(f"{name}, until whole", []).append(time.perf_counter() - start_s)

    def round(self) -> None:
        root = self.root
        self.times.setdefault("fio write, fsync", []).append(fio(root / "disk", self.num_mib))
        self.settle()
        self.measure("torch.save, fsync", lambda: torch_save(root / "plain.pt", self.states))
        self.settle()
        shutil.rmtree(root / "dcp", ignore_errors=True)
        self.measure("DCP save", lambda: dcp.save(self.tensors, checkpoint_id=root / "dcp"))
        self.settle()
        self.measure("Checkpointer.save", lambda: self.save(self.plain, "sync"))
        self.settle()
        for _ in range(40):
            self.measure(UNDISTURBED, self.step)
        self.asynchronous(
            "Checkpointer.save, async",
            lambda: self.save(self.background, "async"),
            lambda _: self.background.wait_for_save(),
            lambda _: (self.root / "async" / "latest").exists() and not list((self.root / "async").glob(".*")),
        )
        self.settle()
        shutil.rmtree(root / "dcp")
        self.asynchronous(
            "DCP async_save",
            lambda: dcp.async_save(self.tensors, checkpoint_id=root / "dcp"),
            lambda future: future.result(),
            lambda future: future.done(),
        )
        self.settle()
        self.measure("torch.load", lambda: torch.load(root / "plain.pt", weights_only=True))
        self.measure("DCP load", lambda: dcp.load(self.into, checkpoint_id=root / "dcp"))
        self.measure("Checkpointer.load and copy", lambda: touch_all(self.plain, root / "sync"))

    def settle(self) -> None:
        """Nobody pays for what another program left to be written."""
        os.sync()


def report(times: dict[str, list[float]], num_mib: int) -> None:
    undisturbed = statistics.median(times[UNDISTURBED])
    for name, values in times.items():
        median = statistics.median(values)
        if name.startswith("steps"):
            note = f"{median / undisturbed:.2f}x"
            print(f"{name:42s} {1e3 * median:9.1f} ms   {note}")
        else:
            spread = f"{min(values):.2f} to {max(values):.2f}"
            print(f"{name:42s} {median:9.3f} s    {num_mib / median:6.0f} MiB/s   {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="a folder on the disk to measure; default: the temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    root = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        programs = Programs(root, args.mib)
        programs.round()
        programs.times.clear()
        for _ in range(args.rounds):
            programs.round()
        programs.background.close()
    finally:
        shutil.rmtree(root)
        dist.destroy_process_group()
    report(programs.times, args.mib)


if __name__ == "__main__":
    main()
