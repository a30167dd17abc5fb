"""The plain accelerator does what every accelerator has to do, on torch's own ops."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.sweep  # each test of the suite is run on the cpu accelerator too, and the command on the simulated device
def test_the_plain_device_conforms(tmp_path):
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
