"""A checkpoint goes to a disk that is full: the error names it, training goes on, the last checkpoint loads.

This file is also the program that trains, in a mount namespace of its own with a tmpfs of 4 MiB.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT = 'mount -t tmpfs -o size=4m tmpfs "$1" && exec "$2" "$3" "$1"'


def has_namespaces():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="no mount namespaces for users here")
def test_training_goes_on_after_a_save_on_a_full_disk(tmp_path):
    command = [*NAMESPACE, "sh", "-ec", MOUNT, "sh", str(tmp_path), sys.executable, __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


def main(directory):
    import deepspeed
    import torch
    from deepspeed.checkpoint.survey import saved_tags
    from deepspeed.errors import CheckpointError

    def create():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256))  # 1 MiB
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 1},
            "checkpoint": {"keep_last": 1},
        }
        return deepspeed.initialize(model=net, config=config)[0]

    def train(engine, first, last):
        losses = []
        for step in range(first, last):
            batch = torch.randn(2, 256, generator=torch.Generator().manual_seed(step))
            loss = engine(batch).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

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


if __name__ == "__main__":
    main(sys.argv[1])
