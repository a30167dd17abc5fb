"""How fast a checkpoint is saved and loaded, beside plain writes of as many bytes to the same disk.

    python benchmarks/checkpoint.py --mib 512 --rounds 5 --directory /where/checkpoints/go

One process saves a model file and an optimizer shard (bf16 weights 1/7, fp32 masters and two moments 6/7 of the bytes,
as under ZeRO stage 1 on one rank with bf16). Beside it, in turn: `dd ... conv=fsync` (plain), `dd oflag=direct`, and
`torch.save` of the same state with one fsync. All figures are MiB/s with the bytes on disk, medians over the rounds.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from deepspeed.checkpoint import Checkpointer

MIB = 2**20


def make_states(num_mib: int) -> tuple[dict, dict]:
    """A model file's and a shard's content of `num_mib` MiB together, in tensors of at most 64 MiB."""
    numel = num_mib * MIB // 14
    width = 16 * MIB
    module = {f"w{i}": torch.ones(min(width, numel - i)).bfloat16() for i in range(0, numel, width)}
    masters = [torch.ones(numel) for _ in range(3)]
    model_state = {"module": module, "param_shapes": [], "dp_world_size": 1, "mp_world_size": 1}
    shard = {
        "zero_stage": 1,
        "partition_count": [1],
        "single_partition_of_fp32_groups": masters[:1],
        "base_optimizer_state": {"state": {0: {"exp_avg": masters[1], "exp_avg_sq": masters[2]}}, "param_groups": []},
    }
    return model_state, {"optimizer_state_dict": shard}


def dd(path: Path, num_mib: int, *flags: str) -> None:
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=16M", f"count={num_mib // 16}", "conv=fsync", *flags]
    subprocess.run(command, check=True, capture_output=True)


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
    shard = found.shard_state["optimizer_state_dict"]
    for tensor in (*found.model_state["module"].values(), *shard["single_partition_of_fp32_groups"]):
        tensor.clone()
    for tensor in shard["base_optimizer_state"]["state"][0].values():
        tensor.clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="a folder on the disk to measure; default: the temporary folder")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=args.directory))
    states = make_states(args.mib)
    checkpointer = Checkpointer()

    def save_new() -> None:
        shutil.rmtree(root / "checkpoints", ignore_errors=True)
        save_again()

    def save_again() -> None:
        checkpointer.save(root / "checkpoints", "tag", model_state=states[0], shard_state=states[1])

    programs: dict[str, Callable[[], None]] = {
        "dd, then fsync": lambda: dd(root / "dd", args.mib),
        "dd oflag=direct": lambda: dd(root / "dd", args.mib, "oflag=direct"),
        "torch.save, then fsync": lambda: torch_save(root / "plain.pt", states),
        "Checkpointer.save, new tag": save_new,
        "Checkpointer.save, same tag": save_again,
        "Checkpointer.load and copy": lambda: touch_all(checkpointer, root / "checkpoints"),
    }
    speeds: dict[str, list[float]] = {name: [] for name in programs}
    try:
        for _ in range(1 + args.rounds):
            for name, program in programs.items():
                for left in (root / "dd", root / "plain.pt"):
                    left.unlink(missing_ok=True)
                os.sync()
                start_s = time.perf_counter()
                program()
                speeds[name].append(args.mib / (time.perf_counter() - start_s))
    finally:
        shutil.rmtree(root)
    for name, values in speeds.items():
        print(f"{name:30s} {statistics.median(values[1:]):7.0f} MiB/s   {min(values[1:]):.0f} to {max(values[1:]):.0f}")


if __name__ == "__main__":
    main()
