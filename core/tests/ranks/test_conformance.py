"""The plain accelerator does what every accelerator has to do, on torch's own ops."""

import json
import os
import subprocess
import sys

import pytest
from deepspeed.testing.tiers import swept


@pytest.mark.sweep  # each test of the suite is run on the cpu accelerator too, and the command on the simulated device
def test_the_plain_device_conforms(warm, tmp_path):
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "deepspeed.cli.conformance", "--accelerator", "plain", "--json", str(record)]
    environment = {**os.environ, "DS_OPS_DISABLE": "all"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    told = json.loads(record.read_text())
    failed = [(test["name"], test["reason"]) for test in told["tests"] if test["outcome"] in ("failed", "error")]
    assert failed == []
    assert done.returncode == 0, done.stderr
    assert told["methods"]["not asked"] == []
    assert told["accelerator"]["class"] == "PlainAccelerator"
    trained = [test["name"] for test in told["tests"] if test["theme"] == "training" and test["outcome"] == "passed"]
    assert len(trained) == 14


@pytest.mark.parametrize(
    ("words", "number"),
    swept(
        [("out_of_memory or not_compile", 3), ("killed and step", 1), ("killed and save", 1)],
        lambda words, number: number == 3,
    ),
)
def test_the_plain_device_survives_planted_faults(warm, tmp_path, words, number):
    files = {name: tmp_path / f"r.{name}" for name in ("json", "md", "svg")}
    command = [sys.executable, "-m", "deepspeed.cli.conformance", "--accelerator", "plain", "--level", "4", "-k", words]
    command += ["--json", str(files["json"]), "--report", str(files["md"]), "--badge", str(files["svg"])]
    environment = {**os.environ, "DS_OPS_DISABLE": "all"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(files["json"].read_text())
    assert [test["outcome"] for test in told["tests"]] == ["passed"] * number
    assert {test["level"] for test in told["tests"]} == {4}
    assert told["level"]["levels"]["4"] | {"lacking": []} == {
        **{"name": "survives faults", "verdict": "partial", "passed": number, "failed": 0, "skipped": 0, "expected": 0},
        **{"lacking": [], "figures": []},
    }
    assert (told["level"]["asked"], told["level"]["reached"]) == (4, None)
    assert "| 4 survives faults | partial |" in files["md"].read_text()
    assert "conformance partial" in files["svg"].read_text()
