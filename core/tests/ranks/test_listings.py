"""Training scripts as DeepSpeed's users write them run as they stand, through `deepspeed` and through plain python.

`listings/diy_model.txt` is a published tutorial's whole script (fp16, ZeRO-2, optimizer offload, no arguments);
`getting_started.txt` is DeepSpeed's own three-line loop with what it takes for granted put before it, and its config
(`"zero_optimization": true`). Only the length of the dataset is cut.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.cli.verify import EQUAL
from deepspeed.cli.verify import main as ds_verify
from deepspeed.testing.tiers import swept

LISTINGS = Path(__file__).with_name("listings")
ROOT = Path(__file__).parents[3]
LAUNCHES = {
    "python": (["python"], 1),
    "deepspeed": (["deepspeed", "--num_accelerators", "2"], 2),
    "deepspeed --num_gpus": (["deepspeed", "--num_gpus", "2"], 2),
}


def run(command: list[str], folder: Path) -> str:
    """Standard output of a job; its errors are shown if it fails."""
    command = [str(Path(sys.executable).with_name(command[0])), *command[1:]]
    launcher_names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {k: v for k, v in os.environ.items() if k not in launcher_names} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("launch", swept(LAUNCHES, lambda launch: launch == "deepspeed"))
def test_the_tutorials_script_runs_as_it_stands(warm, launch: str, tmp_path: Path) -> None:
    listing = (LISTINGS / "diy_model.txt").read_text()
    (tmp_path / "train.py").write_text(listing.replace("return 1000", "return 64"))
    command, num_ranks = LAUNCHES[launch]

    output = run([*command, "train.py"], tmp_path)

    losses = [float(text) for text in re.findall(r"Epoch \d+, Batch 0, Loss: (\d+\.\d+)", output)]
    assert len(losses) == 10 * num_ranks
    # Random labels of ten classes: whatever is learned, the loss stays near ln 10.
    assert all(abs(loss - math.log(10)) < 0.5 for loss in losses), losses


@pytest.mark.parametrize("launch", swept(LAUNCHES, lambda launch: launch == "python"))
def test_the_three_line_loop_takes_its_config_from_the_command_line(warm, launch: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text((LISTINGS / "getting_started.txt").read_text())
    (tmp_path / "ds_config.json").write_text((LISTINGS / "getting_started.json").read_text())
    command, num_ranks = LAUNCHES[launch]

    output = run([*command, "train.py", "--deepspeed", "--deepspeed_config", "ds_config.json"], tmp_path)

    found = re.findall(r"stage (\d), steps (\d+), loss (\d+\.\d+)", output)
    # `"zero_optimization": true` is the oldest spelling of stage 1.
    assert [(stage, steps) for stage, steps, _ in found] == [("1", "8")] * num_ranks
    assert all(math.isfinite(float(loss)) for _, _, loss in found)


def block_of(page: str) -> str:
    """The first script of a page."""
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found is not None, page
    return found[1]


#: script, and its words after that
VERIFIED = {
    "diy_model": (lambda: (LISTINGS / "diy_model.txt").read_text().replace("return 1000", "return 64"), []),
    "getting_started": (
        (LISTINGS / "getting_started.txt").read_text,
        ["--deepspeed", "--deepspeed_config", str(LISTINGS / "getting_started.json")],
    ),
    "train_gpt": ((ROOT / "examples/train_gpt.py").read_text, ["--text-megabytes", "0.2", "--output", "runs"]),
    "train_elastic": ((ROOT / "examples/train_elastic.py").read_text, ["--output", "runs"]),
    "README": (lambda: block_of("README.md"), []),
    "first-training": (lambda: block_of("docs/tutorial/first-training.md"), []),
}


@pytest.mark.parametrize("name", swept(VERIFIED, lambda name: name == "diy_model"))
def test_ds_verify_finds_a_listing_equal_to_plain_torch(warm, name, tmp_path, monkeypatch, capfd):
    read, words = VERIFIED[name]
    for beside in (*(ROOT / "examples").glob("*.py"), ROOT / "examples/ds_config.json"):
        (tmp_path / beside.name).write_text(beside.read_text())
    (tmp_path / "train.py").write_text(read())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    of_launcher = [] if "--local_rank" in (tmp_path / "train.py").read_text() else ["--no_local_rank"]

    code = ds_verify(["--steps", "3", "--json", "verdict.json", *of_launcher, "train.py", *words])

    captured = capfd.readouterr()
    assert code == EQUAL, captured.out + captured.err
    verdict = json.loads(Path("verdict.json").read_text())
    assert (verdict["verdict"], verdict["steps"], verdict["faults"]) == ("equal", 3, [])
