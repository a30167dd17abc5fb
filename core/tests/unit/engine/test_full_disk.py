"""A disk that is full: the error names file and place, training goes on where it can, the last checkpoint loads.

This file is also the programs that train, in a mount namespace of their own with a small tmpfs: one saves checkpoints
there, one converts them, the others have swap files there.
"""

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT = 'mount -t tmpfs -o size="$4" tmpfs "$1" && exec "$2" "$3" "$1" "$5"'


def has_namespaces():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="no mount namespaces for users here")
@pytest.mark.parametrize("program", ["checkpoints", "conversions", "offload_optimizer", "offload_param"])
def test_training_goes_on_beside_a_full_disk(tmp_path, program):
    size = "16m" if program.startswith("offload") else "4m"
    command = [*NAMESPACE, "sh", "-ec", MOUNT, "sh", str(tmp_path), sys.executable, __file__, size, program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


def create(stage=1, width=512, **section):
    import deepspeed
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(256, width), torch.nn.Tanh(), torch.nn.Linear(width, 256))  # 1 MiB
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **section},
        "checkpoint": {"keep_last": 1},
    }
    return deepspeed.initialize(model=net, config=config)[0]


def train(engine, first, last):
    import torch

    losses = []
    for step in range(first, last):
        batch = torch.randn(2, 256, generator=torch.Generator().manual_seed(step))
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save_checkpoints(directory):
    from deepspeed.checkpoint.tags import saved_tags
    from deepspeed.errors import CheckpointError

    expected = train(create(), 0, 6)
    engine = create()
    losses = train(engine, 0, 2)
    with pytest.raises(CheckpointError) as caught:  # 1 MiB of weights and 3 MiB of states do not fit
        engine.save_checkpoint(directory)
    name = os.path.join(directory, ".global_step2.staging", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert f"cannot write {name}: No space left on device" in str(caught.value), caught.value
    assert set(os.listdir(directory)) <= {"zero_to_fp32.py"}, "what was written is removed"
    assert engine.load_checkpoint(directory) == (None, None)

    losses += train(engine, 2, 3)
    subprocess.run(["mount", "-o", "remount,size=6m", directory], check=True)
    engine.save_checkpoint(directory)
    losses += train(engine, 3, 4)
    Path(directory, "filler").write_bytes(bytes(1 << 20))
    with pytest.raises(CheckpointError, match="No space left on device"):
        engine.save_checkpoint(directory)
    losses += train(engine, 4, 6)
    assert losses == expected, "the state of training is intact"

    (tag,) = saved_tags(Path(directory))
    assert tag.name == "global_step3"
    assert not tag.faults(content=True)
    resumed = create()
    resumed.load_checkpoint(directory)
    assert train(resumed, 3, 6) == expected[3:]


def convert_checkpoints(directory):
    """A conversion that does not fit leaves nothing, and the checkpoint as it was."""
    from deepspeed.checkpoint.convert import convert
    from deepspeed.checkpoint.tags import saved_tags
    from deepspeed.errors import CheckpointError

    checkpoints = f"{directory}.checkpoints"  # on another disk
    engine = create()
    train(engine, 0, 2)
    engine.save_checkpoint(checkpoints)
    for to in ("dcp", "torchtitan", "universal"):  # 1 MiB of weights and 2 MiB of states, beside a filler
        subprocess.run(["mount", "-o", "remount,size=4m", directory], check=True)
        Path(directory, "filler").write_bytes(bytes(2 << 20))
        with pytest.raises(CheckpointError, match=rf"cannot write {directory}/\S+: No space left .* MiB are free"):
            convert(checkpoints, f"{directory}/{to}", to)
        left = [path for path in Path(directory).rglob("*") if path.is_file()]
        assert left == [Path(directory, "filler")], to
        (tag,) = saved_tags(Path(checkpoints))
        assert not tag.faults(content=True)
        subprocess.run(["mount", "-o", "remount,size=8m", directory], check=True)
        convert(checkpoints, f"{directory}/{to}", to)
        shutil.rmtree(f"{directory}/{to}")


def fill(directory):
    """Give all of the disk to one file."""
    free = os.statvfs(directory)
    with open(f"{directory}/filler", "ab") as file:
        if free.f_bavail:
            os.posix_fallocate(file.fileno(), file.tell(), free.f_bavail * free.f_frsize)


def swap(directory, what):
    """Swap files have their space before training starts, so that it needs no more; a save may."""
    from deepspeed.errors import ConfigError, StateError

    checkpoints = f"{directory}.checkpoints"  # on another disk
    stage, keys = 1, {"device": "nvme", "nvme_path": directory}
    section = {what: keys, "sub_group_size": 10_000, "stage3_param_persistence_threshold": 0}
    if what == "offload_param":
        stage, keys["max_in_cpu"] = 3, 0
    expected = train(create(), 0, 8)
    with pytest.raises((ConfigError, OSError), match=rf"{directory}.* free .*|No space left .*{directory}") as caught:
        create(stage, width=10_000, **section)
    assert "larger" in str(caught.value)
    del caught
    gc.collect()
    assert os.listdir(directory) == []

    engine = create(stage, **section)
    (file,) = Path(directory).glob("*/*.swap")
    losses = train(engine, 0, 2)
    fill(directory)
    losses += train(engine, 2, 3)
    if what == "offload_optimizer":  # what a save assembles is on that disk too
        with pytest.raises(OSError, match=rf"swap file: No space left on device: allocation of .*{directory}"):
            engine.save_checkpoint(checkpoints)
        os.unlink(f"{directory}/filler")
    losses += train(engine, 3, 4)
    engine.save_checkpoint(checkpoints)
    losses += train(engine, 4, 6)
    assert losses == expected[:6]

    # a write that fails although its space was there: another program has taken it
    subprocess.run(
        ["fallocate", "--punch-hole", "--offset", "0", "--length", str(file.stat().st_size), file], check=True
    )
    fill(directory)
    with pytest.raises(
        OSError, match=r"swap file: No space left on device: write of \d+ bytes at offset \d+"
    ) as caught:
        train(engine, 6, 8)
    assert str(file) in str(caught.value)
    with pytest.raises((StateError, OSError), match=r"load a checkpoint|No space left on device: write of"):
        train(engine, 7, 8)
    os.unlink(f"{directory}/filler")
    engine.load_checkpoint(checkpoints)  # which writes it all again
    assert train(engine, 4, 8) == expected[4:]
    engine.destroy()
    assert os.listdir(directory) == []
    resumed = create(stage, **section)
    resumed.load_checkpoint(checkpoints)
    assert train(resumed, 4, 8) == expected[4:]


if __name__ == "__main__":
    if sys.argv[2] == "checkpoints":
        save_checkpoints(sys.argv[1])
    elif sys.argv[2] == "conversions":
        convert_checkpoints(sys.argv[1])
    else:
        swap(sys.argv[1], sys.argv[2])
