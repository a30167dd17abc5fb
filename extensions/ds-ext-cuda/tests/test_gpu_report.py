"""The report of `nox -s gpu`: which commands it runs, what it writes, and what it says where there is no GPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from deepspeed.plugins import Offer

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "gpu_report.py"
XML = """<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">
<testcase classname="a" name="passes"/><testcase classname="a" name="fails"><failure/></testcase>
<testcase classname="a" name="is_skipped"><skipped/></testcase></testsuite></testsuites>"""
ROWS = [{"variant": "ddp", "ms": {"median": 2.0, "min": 1.5}}, {"variant": "stage3", "to_ddp": 0.51234}]


@pytest.fixture
def gpu_report(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_report", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_report", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def usable(gpu_report, monkeypatch):
    """A machine with two cards, as the program sees it."""
    monkeypatch.setattr(gpu_report, "ds_probe", lambda: Offer("cuda", 100, reason="two stand-ins"))
    monkeypatch.setattr(gpu_report, "describe_machine", lambda: {"cards": ["stand-in", "stand-in"], "torch": "2.13"})
    monkeypatch.setattr(gpu_report, "_count_cards", lambda is_usable: 2)


def test_the_commands_name_files_and_flags_that_exist(gpu_report, tmp_path):
    parts = gpu_report.parts(2, tmp_path)
    names = [part.name for part in parts]
    assert names == ["conformance", "kernels", "training", "bandwidth", "train_step_1", "train_step_2"]
    for part in parts:
        assert part.command[0] == sys.executable
        assert part.figures.parent == tmp_path
        assert any(str(part.figures) in word for word in part.command)
        paths = [word.partition("=")[2] or word for word in part.command[1:] if word.startswith(("/", "--ignore="))]
        assert all(Path(path).exists() for path in paths if path != str(part.figures)), part
    assert [part.name for part in gpu_report.parts(1, tmp_path)][-2:] == ["bandwidth", "train_step_1"]


def test_without_a_gpu_it_says_what_to_do(gpu_report, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_report, "ds_probe", lambda: Offer("cuda", 100, available=False, reason="no card"))
    assert gpu_report.main(["--output", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert "no card" in said
    assert "CUDA build of torch" in said
    assert not (tmp_path / "new").exists()


def test_a_dry_run_prints_the_commands_anywhere(gpu_report, capsys, tmp_path):
    assert gpu_report.main(["--dry-run", "--cards", "4", "--output", str(tmp_path / "new")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"conformance: {sys.executable} -m pytest")
    assert "--device cuda --ranks 4" in lines[-1]
    assert not (tmp_path / "new").exists()


def test_an_unknown_part_is_named(gpu_report, capsys):
    assert gpu_report.main(["--dry-run", "--only", "speed"]) == 2
    assert "found speed; the parts are conformance, kernels" in capsys.readouterr().err


def test_the_report_is_written_after_each_part(gpu_report, usable, tmp_path):
    seen = []

    def execute(part):
        report = tmp_path / "report.json"
        seen.append(len(json.loads(report.read_text())["parts"]) if report.exists() else 0)
        part.figures.write_text(XML if part.figures.suffix == ".xml" else json.dumps(ROWS))
        figures = gpu_report.read_figures(part.figures)
        return gpu_report.Result(part.name, part.title, list(part.command), 0, 1.5, figures)

    assert gpu_report.main(["--output", str(tmp_path)], execute) == 0
    assert seen == [0, 1, 2, 3, 4, 5]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["parts"][0]["figures"] == [
        {"tests": 3, "failures": 1, "errors": 0, "skipped": 1, "failed": "a::fails"}
    ]
    text = (tmp_path / "report.md").read_text()
    assert "- cards: stand-in, stand-in" in text
    assert "| variant | ms | to_ddp |" in text
    assert "| stage3 |  | 0.5123 |" in text
    assert "| ddp | median 2 min 1.5 |  |" in text


def test_a_part_that_fails_fails_the_run_and_is_in_the_report(gpu_report, usable, monkeypatch, tmp_path):
    fails = gpu_report.Part("fails", "Fails", (sys.executable, "-c", "raise SystemExit(3)"), tmp_path / "fails.json")
    monkeypatch.setattr(gpu_report, "parts", lambda num_cards, output: [fails])
    assert gpu_report.main(["--output", str(tmp_path)]) == 1
    assert "| Fails | 3 |" in (tmp_path / "report.md").read_text()
    assert "No figures: it ended before it wrote any." in (tmp_path / "report.md").read_text()


def test_the_bandwidths_figures_are_rows(gpu_report, tmp_path):
    (tmp_path / "b.json").write_text(json.dumps({"device": "stand-in", "figures": [{"name": "copy"}]}))
    assert gpu_report.read_figures(tmp_path / "b.json") == [{"name": "copy"}]
