"""The Trainer trains on two ranks, its losses fall, and a resumed run repeats the uninterrupted one.

Optimizer and schedule are the Trainer's own under stage 1, and come from the DeepSpeed config under stage 2 (bf16).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("train.py")
BIN = Path(sys.executable).parent
LAUNCHES = {
    "deepspeed": [str(BIN / "deepspeed"), "--num_accelerators", "2", "--no_local_rank"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"],
}


def run(launch: str, folder: Path, *flags: str) -> dict:
    """What the script wrote; its errors are shown if it fails."""
    launcher_names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher_names}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*LAUNCHES[launch], str(SCRIPT), "--folder", str(folder), *flags]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize(
    ("launch", "flags"), [("deepspeed", ["--stage", "1"]), ("torchrun", ["--stage", "2", "--from-config"])]
)
def test_trains_saves_and_resumes(launch: str, flags: list[str], tmp_path: Path) -> None:
    whole = run(launch, tmp_path, *flags)
    resumed = run(launch, tmp_path, *flags, "--resume-from", str(tmp_path / "checkpoint-8"))

    assert whole["stage"] == int(flags[1])
    losses = list(whole["losses"].values())
    assert len(losses) == 16
    assert losses[-1] < losses[0] - 0.5, losses
    assert (tmp_path / "checkpoint-8" / "global_step8").is_dir()
    # the resumed run's log begins with what the checkpoint brought of the first eight steps
    assert list(resumed["losses"]) == list(whole["losses"])
    assert list(resumed["losses"].values())[8:] == pytest.approx(losses[8:], rel=1e-6)
    assert list(resumed["norms"].values())[8:] == pytest.approx(list(whole["norms"].values())[8:], rel=1e-4)
