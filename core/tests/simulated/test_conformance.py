"""The conformance suite on a device with a memory, streams and generators of its own, by `ds_conformance`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.testing.recording import judge

EXPECTED = Path(__file__).with_name("expected_failures.txt")
# What the simulated device has to show: with less, most of the suite would be skipped.
CAPABILITIES = {
    *("memory of its own", "streams", "classes of streams and events", "several devices", "bf16", "fp16"),
    *("memory figures", "peak memory", "memory statistics", "a generator of its own"),
    *("variables of visible devices", "an installed plugin", "ranks", "two ranks"),
}


@pytest.fixture(scope="module")
def run(installed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("conformance")
    command = [
        *(sys.executable, "-m", "deepspeed.cli.conformance", "--accelerator", "sim"),
        *("--json", str(folder / "record.json"), "--report", str(folder / "report.md")),
        *("--expected-failures", str(EXPECTED)),
    ]
    environment = {**os.environ, **installed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done, json.loads((folder / "record.json").read_text()), (folder / "report.md").read_text()


def test_the_simulated_device_conforms(run):
    done, record, _ = run
    failed = [(test["name"], test["reason"]) for test in record["tests"] if test["outcome"] in ("failed", "error")]
    assert failed == []
    assert done.returncode == 0, done.stdout


def test_every_documented_method_was_asked_of_it(run):
    assert run[1]["methods"]["not asked"] == []


def test_its_capabilities_are_put_to_the_test(run):
    _, record, _ = run
    assert {name for name, has, _ in record["capabilities"] if has} >= CAPABILITIES
    passed = {test["theme"] for test in record["tests"] if test["outcome"] == "passed"}
    assert {"streams", "memory", "rng", "communication", "training", "hygiene"} <= passed


def test_skips_have_reasons_that_name_no_device(run):
    reasons = {test["reason"] for test in run[1]["tests"] if test["outcome"] == "skipped"}
    assert all(reason for reason in reasons)
    assert not [reason for reason in reasons if "sim" in reason and not reason.startswith("a kernel for")]


def test_the_report_says_what_was_found(run):
    done, record, page = run
    assert "Sim_Accelerator" in done.stdout
    assert page.startswith("# Conformance of Sim_Accelerator\n\nconforms: ")
    assert "| streams | yes |  |" in page
    assert f"{len(record['methods']['asked'])} of {len(record['methods']['asked'])} documented methods" in page


def test_it_reaches_the_level_that_was_asked_for(run):
    done, record, page = run
    assert record["level"]["reached"] == record["level"]["asked"] == 2
    assert "level 2 is reached, as was asked for" in done.stdout
    assert "| 1 trains | passed |" in page
    assert "| 2 numerics | passed |" in page


@pytest.mark.parametrize(
    ("fault", "test", "reached"),
    [
        ("IgnoresTheSeed", "test_a_seed_repeats_and_another_differs", 1),
        ("PinsNothing", "test_pinned_tensors_are_equal_and_on_the_host", 0),
    ],
)
def test_a_planted_fault_lowers_the_level(run, on_device, tmp_path, fault, test, reached):
    """The whole run of the honest device, with what its test came to on the one with the fault."""
    outcomes = {outcome for outcome, _ in on_device(fault, [test], str(tmp_path))[test]}
    outcome = "failed" if "failed" in outcomes else "passed"
    tests = run[1]["tests"]
    spoiled = [{**each, "outcome": outcome} if each["name"].startswith(test) else each for each in tests]
    assert spoiled != tests
    assert judge(spoiled, 2, False)["reached"] == reached
