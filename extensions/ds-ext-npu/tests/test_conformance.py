"""The conformance suite against the stand-in, by its command: the device is one per process and for good."""

import json
import os
import subprocess
import sys

# What the stand-in and this extension decide; ranks and training are asked in test_training.py.
THEMES = ("identity", "memory", "streams", "rng", "optimizer_kernels", "tensor_kernels")


def test_the_accelerator_conforms(installed, tmp_path):
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "deepspeed.cli.conformance", "--accelerator", "npu", "--json", str(record)]
    environment = {**os.environ, **installed}
    done = subprocess.run(
        [*command, "-k", " or ".join(THEMES)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ds-ext-npu" in record.read_text()
    tests = json.loads(record.read_text())["tests"]
    assert {test["theme"] for test in tests} >= set(THEMES)


def test_the_report_tells_that_the_vendors_operators_serve(installed):
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.cli.report", "--json"],
        env={**os.environ, **installed, "DS_ACCELERATOR": "npu"},
        capture_output=True,
        text=True,
        check=True,
    )
    ops = {op["op"]: (op["source"], op["state"], op["remark"]) for op in json.loads(done.stdout)["ops"]}
    assert ops["fused_adam"] == ops["transformer_inference"] == ("device", "by itself", "")
