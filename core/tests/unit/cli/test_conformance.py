"""`ds_conformance`: its exit codes, its list of expected failures, errors of one line, and what it writes."""

import importlib.util
import io
import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
from deepspeed.cli import conformance
from deepspeed.cli.conformance import (
    as_badge,
    as_markdown,
    conclusion,
    follow,
    left_out_rows,
    level_rows,
    main,
    skip_rows,
    standing,
    theme_rows,
)
from deepspeed.testing import forked
from deepspeed.testing.recording import judge
from deepspeed.testing.suite import DEFAULT_LEVEL, NEEDED, THEMES
from rich.console import Console

QUICK = ("--accelerator", "plain", "-k", "graphs")


class Fork:
    """In place of `subprocess.Popen`: pytest by a fork of a process that has torch.

    For runs that end before their progress is told: pytest takes the pipe, its standard input, for itself.
    """

    def __init__(self, command, env, stdout, stderr, pass_fds):
        (progress,) = pass_fds
        at = command.index("--ds-progress") + 1
        words = [*command[1:at], "0", *command[at + 1 :]]
        self._process = forked.start(0, words, env, progress, stdout.fileno(), errors=stderr.fileno())
        self.returncode = None

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.returncode = self._process.wait()


@pytest.fixture
def forks(monkeypatch):
    monkeypatch.setattr(conformance, "subprocess", SimpleNamespace(Popen=Fork, run=subprocess.run))


def one_line(capsys):
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1, told.err
    return told.err.removeprefix("ds_conformance: ")


# ----- a run ---------------------------------------------------------------------------------------------------------


def test_a_run_of_some_tests_is_partial(tmp_path, capsys):
    record, page, badge = (tmp_path / name for name in ("r.json", "r.md", "r.svg"))
    assert main([*QUICK, "--json", str(record), "--report", str(page), "--badge", str(badge)]) == 0
    told = json.loads(record.read_text())
    assert {test["theme"] for test in told["tests"]} == {"graphs"}
    assert told["accelerator"]["class"] == "PlainAccelerator"
    assert "create_graph" in told["methods"]["asked"]
    assert ["graphs", False, "is_graph_supported() is False"] in told["capabilities"]
    left_out = told["left out"]
    assert ["test_names_are_torch_devices", "identity"] in left_out
    asked = {theme for theme, level in THEMES.items() if level <= DEFAULT_LEVEL}
    assert {theme for _, theme in left_out} == asked - {"graphs"}
    assert told["format"] == 2
    assert (told["level"]["asked"], told["level"]["reached"]) == (DEFAULT_LEVEL, None)
    assert {name: about["verdict"] for name, about in told["level"]["levels"].items()} == {
        "1": "partial",
        "2": "partial",
    }
    assert told["level"]["levels"]["1"]["passed"] == 3
    assert {test["level"] for test in told["tests"]} == {1}
    assert "conformance partial" in badge.read_text()
    verdict = f"partial: 3 passed, 2 skipped; {len(left_out)} tests were left out"
    assert page.read_text().startswith(f"# Conformance of PlainAccelerator\n\n{verdict}\n")
    shown = capsys.readouterr()
    assert "graphs: is_graph_supported() is False" in " ".join(shown.out.split())
    assert verdict in " ".join(shown.out.split())
    assert shown.err == "graphs: 3 passed, 2 skipped\n"  # in a pipe: a plain line as each theme ends


def test_an_expected_failure_that_passes_fails_the_run(tmp_path, capsys):
    listed = tmp_path / "known.txt"
    listed.write_text("# known\ntest_replaying_no_graph_does_nothing  # it did nothing\n")
    assert main([*QUICK, "--expected-failures", str(listed)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "FAILED test_replaying_no_graph_does_nothing: [XPASS(strict)] it did nothing" in shown
    assert "does not conform: 2 passed, 1 failed, 2 skipped" in shown


# ----- what cannot be run --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forks")
def test_an_accelerator_that_is_not_installed(capsys):
    assert main(["--accelerator", "nowhere"]) == 2
    told = one_line(capsys)
    assert told.startswith("--accelerator nowhere: no accelerator named 'nowhere'")
    assert "DS_ACCELERATOR" not in told  # which the user did not set


def test_an_accelerator_without_a_device(tmp_path, monkeypatch, capsys):
    install_crashing(tmp_path, monkeypatch, CRASHES.replace('Offer("crashing")', 'Offer("crashing", available=False)'))
    assert main(["--accelerator", "crashing"]) == 2
    told = one_line(capsys)
    assert told.startswith("--accelerator crashing: that accelerator cannot be used here")
    assert told.endswith("; omit --accelerator to choose another\n")


def test_no_test_of_that_name(capsys):
    assert main(["--accelerator", "plain", "-k", "weather"]) == 2
    assert "no test matches -k 'weather'" in one_line(capsys)


def test_a_list_that_is_not_there(tmp_path, capsys):
    assert main([*QUICK, "--expected-failures", str(tmp_path / "none")]) == 2
    assert "No such file" in one_line(capsys)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"what is this\n", ", line 1: what is this has no reason; "),
        (b"\xff\xfe\x00", ": not UTF-8 text\n"),
        (b"test_of_old[1]  # renamed since\n", " names no tests of the suite: test_of_old[1]; "),
    ],
)
def test_a_list_of_nonsense_is_named_by_its_own_path(tmp_path, capsys, content, told):
    listed = tmp_path / "known.txt"
    listed.write_bytes(content)
    assert main([*QUICK, "--expected-failures", str(listed)]) == 2
    assert one_line(capsys).startswith(f"{listed}{told}")


def test_a_report_that_cannot_be_written(tmp_path, capsys):
    assert main([*QUICK, "--report", str(tmp_path / "none/r.md")]) == 2
    assert "cannot write" in one_line(capsys)  # before anything was run


def test_a_level_that_is_none(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--level", "9"])
    assert ended.value.code == 2
    assert "argument --level: invalid choice: 9" in capsys.readouterr().err


def test_without_pytest(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([]) == 2
    assert "pip install pytest" in one_line(capsys)


CRASHES = """
import os
from deepspeed.accelerator.plain import PlainAccelerator
from deepspeed.plugins import Offer, hookimpl

class Crashing(PlainAccelerator):
    def create_graph(self):
        os.abort()

@hookimpl
def ds_probe():
    return Offer("crashing")

@hookimpl
def ds_accelerator():
    return Crashing()
"""


def install_crashing(tmp_path, monkeypatch, code):
    info = tmp_path / "ds_ext_crashing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-ext-crashing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deepspeed.accelerators]\ncrashing = ds_ext_crashing\n")
    (tmp_path / "ds_ext_crashing.py").write_text(code)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_a_device_that_takes_the_process_along(tmp_path, monkeypatch, capsys):
    install_crashing(tmp_path, monkeypatch, CRASHES)
    assert main(["--accelerator", "crashing", "-k", "graph_can"]) == 2
    assert "ended by SIGABRT in test_a_graph_can_be_replayed_or_is_none" in one_line(capsys)


def test_a_driver_that_crashes_as_the_process_ends_does_not_conform(tmp_path, monkeypatch, capsys):
    at_exit = CRASHES.replace("os.abort()", "atexit.register(os.abort)").replace(
        "import os", "import atexit\nimport os"
    )
    install_crashing(tmp_path, monkeypatch, at_exit)
    assert main(["--accelerator", "crashing", "-k", "graph_can"]) == 2
    assert "ended by SIGABRT" in capsys.readouterr().err.splitlines()[-1]


NAMELESS = CRASHES.replace("import os\n", "").replace(
    "    def create_graph(self):\n        os.abort()\n", "    _communication_backend_name = ''\n"
)


def test_an_accelerator_without_a_communication_library_has_no_ranks(tmp_path, monkeypatch, capsys):
    install_crashing(tmp_path, monkeypatch, NAMELESS)
    record = tmp_path / "r.json"
    words = "communication or training"
    assert main(["--accelerator", "crashing", "-k", words, "--json", str(record)]) == 0
    told = json.loads(record.read_text())
    assert {test["outcome"] for test in told["tests"]} == {"skipped"}
    why = "it names no torch.distributed backend"
    for name in ("a communication library", "ranks", "two ranks"):
        assert [name, False, why] in told["capabilities"]
    assert f"two ranks: {why}" in " ".join(capsys.readouterr().out.split())


# ----- the report ----------------------------------------------------------------------------------------------------


@pytest.fixture
def record():
    tests = [
        ("test_a", "memory", "passed", ""),
        ("test_b[1|2]", "memory", "failed", "assert 1 | 2"),
        ("test_c", "streams", "skipped", "streams: none"),
        ("test_d", "streams", "skipped", "streams: none"),
        ("test_e", "streams", "expected", "known"),
    ]
    keys = ("name", "theme", "outcome", "reason")
    return {
        "accelerator": {"class": "XYZ_Accelerator", "origin": "ds-ext-xyz 1.0", "device": "xyz:0"},
        "versions": {"torch": "2.9"},
        "capabilities": [["streams", False, "none"]],
        "ops": [],
        "tests": [dict(zip(keys, test, strict=True)) for test in tests],
        "level": judge([], 2, False),
        "left out": [],
        "methods": {"asked": ["device"], "not asked": ["synchronize"]},
    }


def test_the_page(record):
    page = as_markdown(record)
    assert "does not conform: 1 passed, 1 failed, 2 skipped, 1 expected" in page
    assert "| test_b[1\\|2] | assert 1 \\| 2 |" in page
    assert "1 of 2 documented methods were asked; not: synchronize." in page
    assert "## Ops" not in page  # a section without rows is left out


def test_tests_are_counted_by_theme_and_reason(record):
    assert theme_rows(record) == [["memory", "1", "1", "", "", ""], ["streams", "", "", "", "2", "1"]]
    assert skip_rows(record) == [["2", "streams: none"]]


def test_what_was_left_out_makes_it_partial_and_is_listed(record):
    record["tests"] = [test for test in record["tests"] if test["outcome"] != "failed"]
    assert conclusion(record) == "conforms: 1 passed, 2 skipped, 1 expected"
    record["left out"] = [["test_b", "memory"], ["test_f", "rng"], ["test_g", "rng"]]
    verdict = "partial: 1 passed, 2 skipped, 1 expected; 3 tests were left out"
    assert conclusion(record) == verdict
    assert left_out_rows(record) == [["memory", "1", "test_b"], ["rng", "2", "the whole theme"]]
    record["left out"] += [["test_c[1]", "memory"], ["test_c[2]", "memory"]]
    assert left_out_rows(record)[0] == ["memory", "3", "test_b, test_c (2 cases)"]
    assert "| rng | 2 | the whole theme |" in as_markdown(record).partition("## Left out")[2]


def test_a_failure_among_some_tests_does_not_conform(record):
    record["left out"] = [["test_f", "rng"]]
    assert conclusion(record).startswith("does not conform: 1 passed, 1 failed")
    assert conclusion(record).endswith("; 1 test was left out")


# ----- levels --------------------------------------------------------------------------------------------------------


def told(*outcomes, level):
    """Tests of a level, which pass where the level needs them, and further ones that came to `outcomes`."""
    needed = [{"name": f"{name}[a case]", "level": level, "outcome": "passed"} for name in NEEDED[level]]
    return [*needed, *({"name": "test_another", "level": level, "outcome": outcome} for outcome in outcomes)]


@pytest.mark.parametrize(
    ("first", "second", "reached", "words"),
    [
        ([], [], 2, "level 2 is reached, as was asked for"),
        (["skipped"], ["passed", "skipped"], 2, "level 2 is reached, as was asked for"),
        ([], ["failed"], 1, "level 1 is reached of 2 asked for: 1 test of level 2 failed"),
        ([], ["error", "expected"], 1, "level 1 is reached of 2 asked for: 2 tests of level 2 failed"),
        (["failed"], [], 0, "no level is reached of 2 asked for: 1 test of level 1 failed"),
        (["expected"], ["failed"], 0, "no level is reached of 2 asked for: 1 test of level 1 failed"),
    ],
)
def test_a_level_is_reached_when_it_and_all_below_passed(record, first, second, reached, words):
    record["level"] = judge([*told(*first, level=1), *told(*second, level=2)], 2, False)
    assert record["level"]["reached"] == reached
    assert standing(record) == words
    assert f"## Levels\n\n{words}\n\n| level | verdict |" in as_markdown(record)


def test_a_level_whose_needed_test_was_skipped_is_not_reached(record):
    tests = [{**test, "outcome": "skipped"} for test in told(level=1)] + told("passed", level=1)[-1:]
    record["level"] = judge(tests, 1, False)
    assert record["level"]["reached"] == 0
    assert level_rows(record) == [["1 trains", "lacking", "1", "", "1", "", ", ".join(NEEDED[1])]]
    assert standing(record).endswith(f"level 1 needs a case that passes of {', '.join(NEEDED[1])}")


def test_levels_above_the_one_asked_for_and_tests_of_others_are_not_judged():
    tests = [*told(level=1), *told("failed", level=2), {"name": "test_of_a_vendor", "level": None, "outcome": "failed"}]
    found = judge(tests, 1, False)
    assert found["reached"] == 1
    assert list(found["levels"]) == ["1"]


def test_a_part_of_the_suite_reaches_no_level(record):
    record["level"] = judge([*told(level=1), *told("failed", level=2)], 2, True)
    assert record["level"]["reached"] is None
    assert [about["verdict"] for about in record["level"]["levels"].values()] == ["partial", "failed"]
    assert standing(record) == "no level is reached by a part of the suite; level 2 was asked for"


@pytest.mark.parametrize(
    ("reached", "right"), [(None, "partial"), (0, "none"), *((level, f"L{level}") for level in (1, 2, 3, 4))]
)
def test_the_badge(record, reached, right):
    record["level"] = {**record["level"], "reached": reached}
    root = ElementTree.fromstring(as_badge(record))
    assert root.attrib["aria-label"] == f"ds-core: conformance {right}"
    texts = [each for each in root.iter() if each.tag.endswith("}text")]
    assert [each.text for each in texts] == ["ds-core", f"conformance {right}"]
    ends = [int(each.attrib["x"]) + int(each.attrib["textLength"]) for each in texts]
    rests = [each for each in root.iter() if each.tag.endswith("}rect") and "fill" in each.attrib]
    assert ends[0] < int(rests[1].attrib["x"]) < ends[1] < int(root.attrib["width"])


def progress(*tests):
    """The lines that pytest writes for `tests`, each (theme, outcome)."""
    sizes = {theme: sum(each == theme for each, _ in tests) for theme, _ in tests}
    lines = [{"themes": sizes}, *({"theme": theme, "outcome": outcome} for theme, outcome in tests)]
    return io.StringIO("".join(json.dumps(line) + "\n" for line in lines))


def test_progress_is_a_line_per_theme_in_a_pipe_and_a_bar_on_a_terminal():
    tests = (("rng", "passed"), ("rng", "skipped"), ("graphs", "failed"))
    pipe, terminal = (Console(file=io.StringIO(), force_terminal=kind, width=80) for kind in (False, True))
    follow(progress(*tests), pipe)
    assert pipe.file.getvalue() == "rng: 1 passed, 1 skipped\ngraphs: 1 failed\n"
    follow(progress(*tests), terminal)
    assert "graphs" in terminal.file.getvalue()
    assert "3/3" in terminal.file.getvalue()


def test_a_suite_that_ended_before_its_first_test_has_no_progress():
    console = Console(file=io.StringIO(), force_terminal=False)
    follow(io.StringIO(), console)
    assert console.file.getvalue() == ""


def test_errors_count_as_failures(record):
    record["tests"] = [{"name": "test_a", "theme": "", "outcome": "error", "reason": "setup"}]
    assert conclusion(record) == "does not conform: 1 error"
