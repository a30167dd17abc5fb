"""Time of saving and loading a checkpoint, and blocking time of a save, against the disk, torch.save and DCP.

    python benchmarks/checkpoint.py --mib 1024 --rounds 5 --directory /where/checkpoints/go

One process has a model and an optimizer shard, as in ZeRO stage 1 on one rank with bf16: 1/7 of the bytes are bf16
weights, 6/7 are fp32 master weights and two moments. All programs take turns. The first round is dropped, and each
figure is a median with minimum and maximum. Before each save, all dirty pages are written back and the program's last
checkpoint is removed. Before each load, the file is evicted from the page cache.

fio measures the disk's rate with the same number of bytes, sequentially, with psync and blocks of 8 MiB. Writes go
through the page cache or use O_DIRECT, fsync included; the faster rate counts. Reads go through the page cache, which
reads ahead: O_DIRECT reads with one request in flight are slower.

A load ends when the job's own tensors have the states, as in a resume: DCP loads into them, the others load and copy.
"blocked" is the time that training waits for an asynchronous save: in the call, and before the next update for the copy
of the optimizer states, which overlaps with that step's forward and backward. "until whole" ends when the checkpoint
can be loaded. "steps" are training steps of a small model on one thread, during the save and undisturbed. By default, a
step takes about a tenth of the time of 256 tokens in a model with the saved number of parameters. So the step hides
less of the copy than a step of that model.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.checkpoint import Checkpointer
from deepspeed.checkpoint.background import BackgroundWriter
from deepspeed.checkpoint.stores import map_tensors
from deepspeed.zero.redistribute import PendingTensor

MIB = 2**20
STEPS = "steps"
BUFFERED, DIRECT, READ = "fio write, fsync", "fio write, O_DIRECT, fsync", "fio read"
SAVE, LOAD, ASYNC = "Checkpointer.save", "Checkpointer.load and copy", "Checkpointer.save, async"
TRUSTING = "Checkpointer.load(verify=False), copy"


def make_states(num_mib: int) -> tuple[dict, dict]:
    """Create the states of a model file and a shard, together `num_mib` MiB, in tensors."""
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
    """Return name -> tensor of the states."""
    shard = states[1]["optimizer_state_dict"]
    moments = shard["base_optimizer_state"]["state"][0]
    return {**states[0]["module"], "master": shard["single_partition_of_fp32_groups"][0], **moments}


def fio(path: Path, num_mib: int, kind: str, *options: str) -> float:
    """Return the seconds that fio takes to write or read a file sequentially, without fio's startup."""
    command = [
        *("fio", f"--name={kind}", f"--filename={path}", f"--rw={kind}", "--bs=8m", f"--size={num_mib}m"),
        *("--ioengine=psync", "--thread", "--output-format=json", *options),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["jobs"][0]["job_runtime"]) / 1e3


def torch_save(path: Path, states: tuple[dict, dict]) -> None:
    with open(path, "wb") as file:
        torch.save(states, file)
        file.flush()
        os.fsync(file.fileno())


def forget(folder: Path) -> None:
    """Evict the files in `folder` from the page cache."""
    os.sync()
    for path in folder.rglob("*") if folder.is_dir() else [folder]:
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Training:
    """Runs steps of a small model. As in larger models, matrix products and the update take the CPU time."""

    def __init__(self, num_rows: int) -> None:
        layers = [layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batch = torch.randn(num_rows, 512)

    def step(self, before_update: Callable[[], Any] = lambda: None) -> None:
        self.model(self.batch).square().mean().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Programs:
    """The programs to measure. `times` has the seconds by name."""

    def __init__(self, root: Path, num_mib: int, num_rows: int) -> None:
        self.root, self.num_mib = root, num_mib
        self.states = make_states(num_mib)
        self.tensors = tensors_of(self.states)
        self.job = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.plain, self.trusting = Checkpointer(), Checkpointer(verify=False)
        self.background = Checkpointer(background=BackgroundWriter())
        self.training = Training(num_rows)
        self.times: dict[str, list[float]] = {}

    def measure(self, name: str, program: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        result = program()
        self.times.setdefault(name, []).append(time.perf_counter() - start_s)
        return result

    def save(self, checkpointer: Checkpointer, name: str) -> None:
        model_state, shard_state = self.states
        if checkpointer.copies_later:  # the engine passes master weights and moments like this
            shard_state = map_tensors(shard_state, PendingTensor.of)
        checkpointer.save(self.root / name, "tag", model_state=model_state, shard_state=shard_state)

    def copy(self, states: tuple[dict, dict]) -> None:
        for name, tensor in tensors_of(states).items():
            self.job[name].copy_(tensor)

    def load(self, checkpointer: Checkpointer, part: str) -> None:
        found = self.measure(part, lambda: checkpointer.load(self.root / "sync"))
        self.copy((found.model_state, found.shard_state))

    def asynchronous(
        self,
        name: str,
        begin: Callable[[], Any],
        wait: Callable[[Any], Any],
        is_over: Any,
        wait_for_copy: Callable[[], Any] = lambda: None,
    ) -> None:
        """Measure an asynchronous save, with training steps until it ends."""
        start_s = time.perf_counter()
        pending = self.measure(f"{name}, in the call", begin)
        self.measure(
            f"{STEPS}, the first of {name}",
            lambda: self.training.step(lambda: self.measure(f"{name}, before the update", wait_for_copy)),
        )
        blocked_s = [self.times[f"{name}, {part}"][-1] for part in ("in the call", "before the update")]
        self.times.setdefault(f"{name}, blocked", []).append(sum(blocked_s))
        while not is_over(pending):
            self.measure(f"{STEPS} during {name}", self.training.step)
        wait(pending)
        self.times.setdefault(f"{name}, until whole", []).append(time.perf_counter() - start_s)

    def round(self) -> None:
        self.disk()
        self.saves()
        self.asynchronous_saves()
        self.loads()

    def clear(self, name: str) -> Path:
        """Remove a program's checkpoint, write back all dirty pages, and return the path."""
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        os.sync()
        return path

    def disk(self) -> None:
        for name, options in ((DIRECT, ["--direct=1"]), (BUFFERED, [])):
            path = self.clear("disk")
            seconds = fio(path, self.num_mib, "write", "--fallocate=none", "--end_fsync=1", *options)
            self.times.setdefault(name, []).append(seconds)
        forget(path)
        self.times.setdefault(READ, []).append(fio(path, self.num_mib, "read", "--invalidate=1"))

    def saves(self) -> None:
        path = self.clear("plain.pt")
        self.measure("torch.save, fsync", lambda: torch_save(path, self.states))
        folder = self.clear("dcp")
        self.measure("DCP save", lambda: dcp.save(self.tensors, checkpoint_id=folder))
        self.clear("sync")
        self.measure(SAVE, lambda: self.save(self.plain, "sync"))

    def asynchronous_saves(self) -> None:
        folder = self.clear("async")
        for _ in range(10):
            self.measure(f"{STEPS}, undisturbed", self.training.step)
        self.asynchronous(
            ASYNC,
            lambda: self.save(self.background, folder.name),
            lambda _: self.background.wait_for_save(),
            lambda _: (folder / "latest").exists() and not list(folder.glob(".*")),
            self.background.wait_for_copy,
        )
        folder = self.clear("dcp")
        self.asynchronous(
            "DCP async_save",
            lambda: dcp.async_save(self.tensors, checkpoint_id=folder),
            lambda future: future.result(),
            lambda future: future.done(),
        )

    def loads(self) -> None:
        plain = self.root / "plain.pt"
        programs: dict[str, Callable[[], Any]] = {
            "torch.load and copy": lambda: self.copy(torch.load(plain, weights_only=True)),
            "torch.load(mmap=True) and copy": lambda: self.copy(torch.load(plain, weights_only=True, mmap=True)),
            "DCP load": lambda: dcp.load(self.job, checkpoint_id=self.root / "dcp"),
            LOAD: lambda: self.load(self.plain, "Checkpointer.load"),
            TRUSTING: lambda: self.load(self.trusting, "Checkpointer.load(verify=False)"),
        }
        for name, program in programs.items():
            forget(self.root)
            self.measure(name, program)
            self.check_and_clear()

    def check_and_clear(self) -> None:
        """Check that the loaded tensors equal the saved tensors, then zero them."""
        for name, tensor in self.tensors.items():
            assert torch.equal(self.job[name], tensor), name
            self.job[name].zero_()


def report(times: Mapping[str, list[float]], num_mib: int) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        median, spread = medians[name], f"{min(values):.3f} to {max(values):.3f}"
        rate = "" if name.startswith(STEPS) else f"{num_mib / median:6.0f} MiB/s"
        print(f"{name:42s} {median:8.3f} s   {spread:16s} {rate}")
    write, read = min(medians[BUFFERED], medians[DIRECT]), medians[READ]
    undisturbed = medians[f"{STEPS}, undisturbed"]
    print()
    for what, ratio, target in (
        ("save, of the disk's rate", write / medians[SAVE], 0.90),
        ("load and copy, of the disk's rate", read / medians[LOAD], 0.80),
        ("the same, verify=False", read / medians[TRUSTING], 0.80),
    ):
        print(f"{what:42s} {ratio:8.2f}     {'met' if ratio >= target else 'MISSED'} (at least {target:.2f})")
    blocked, peer = medians[f"{ASYNC}, blocked"], "DCP async_save"
    steps = {name: medians[f"{STEPS} during {name}"] / undisturbed for name in (ASYNC, peer)}
    for what, ratio, target in (
        ("async save: blocked, of the synchronous", blocked / medians[SAVE], 0.10),
        ("async save: steps meanwhile", steps[ASYNC], 1.15),
    ):
        print(f"{what:42s} {ratio:8.2f}     {'met' if ratio < target else 'MISSED'} (below {target:.2f})")
    print(f"{peer + ': blocked, of DCP save':42s} {medians[f'{peer}, blocked'] / medians['DCP save']:8.2f}")
    print(f"{peer + ': steps meanwhile':42s} {steps[peer]:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1024, help="of a training step's batch")
    parser.add_argument("--directory", type=Path, help="a folder on the disk to measure; default: the temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    root = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        programs = Programs(root, args.mib, args.rows)
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
