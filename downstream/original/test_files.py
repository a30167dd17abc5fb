"""What DeepSpeed itself saves loads here, and what is saved here for it loads there; losses continue."""

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("train.py")
SAVED_THERE = ("0-fp32", "0-bf16", "1-fp32", "2-bf16", "3-fp32-subgroups", "3-bf16")
SAVED_HERE = {
    "1-fp32-written": "1-fp32",
    "2-bf16-written": "2-bf16",
    "3-fp32-written": "3-fp32",
    "3-bf16-written": "3-bf16",
    "3-fp32-subgroups-written": "3-fp32-subgroups",
}


def run(python, *arguments):
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [python, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def check(folder, case, target, world_size):
    unbroken = json.loads((folder / f"{case}.save.json").read_text())[3:]
    found = json.loads((folder / f"{case}.{target}.{world_size}.json").read_text())
    tolerance = 1e-5 if "fp32" in case and "fp32" in target else 1e-2
    assert found == pytest.approx(unbroken, rel=tolerance), (case, target)


def test_from_there_to_here(original, ours, tmp_path):
    run(original, "save", tmp_path, 2, *SAVED_THERE)
    targets = ("1-fp32", "3-fp32", "2-bf16")
    pairs = [(case, target) for case in SAVED_THERE for target in targets]
    for world_size in (1, 2, 3):
        run(ours, "load", tmp_path, world_size, *(f"{case}={target}" for case, target in pairs))
        for case, target in pairs:
            check(tmp_path, case, target, world_size)


def test_from_here_to_there(original, ours, tmp_path):
    run(ours, "save", tmp_path, 2, *SAVED_HERE)
    run(original, "load", tmp_path, 2, *(f"{case}={target}" for case, target in SAVED_HERE.items()))
    for case, target in SAVED_HERE.items():
        check(tmp_path, case, target, 2)


@pytest.mark.timeout(900)  # eight jobs, with imports of two libraries each
def test_universal_checkpoints_made_here_are_those_made_there(original, ours, tmp_path):
    """DeepSpeed goes on from ours as from its own, of the same training, at another number of ranks. It does not take
    frozen parameters from either, so the losses are not those of the unbroken run."""
    cases = ("1-fp32", "2-bf16", "3-fp32")
    found = {}
    for python, name in ((original, "there"), (ours, "here")):
        folder = tmp_path / name
        run(python, "save", folder, 2, *cases)
        for case in cases:
            folders = ("--input_folder", folder / case / "global_step3", "--output_folder", folder / case / "universal")
            words = [python, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, folders), "--inject_missing_state"]
            subprocess.run(words, env={**os.environ, "DS_ACCELERATOR": "cpu"}, check=True, capture_output=True)
        run(original, "load", folder, 3, *(f"{case}={case}-universal" for case in cases))
        paths = {case: folder / f"{case}.{case}-universal.3.json" for case in cases}
        found[name] = {case: json.loads(path.read_text()) for case, path in paths.items()}
    for case in cases:
        tolerance = 1e-5 if "fp32" in case else 1e-2
        assert found["here"][case] == pytest.approx(found["there"][case], rel=tolerance), case
