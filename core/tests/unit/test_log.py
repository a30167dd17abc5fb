"""The logger: who speaks, at which level, once or always, and where it is written."""

import argparse
import io
import json
import logging
import os
import subprocess
import sys

import pytest
from deepspeed import log


@pytest.fixture
def at_info():
    before = log.logger.level
    log.logger.setLevel(logging.INFO)
    yield
    log.logger.setLevel(before)


@pytest.mark.parametrize(
    ("rank", "ranks", "speaks"),
    [
        ("0", None, True),
        ("1", None, False),
        ("1", [1, 3], True),
        ("2", [1, 3], False),
        ("5", [-1], True),
        (None, None, True),
        ("0", [], False),
        ("", None, True),
        ("one", None, True),  # `init_distributed` refuses it
        ("9" * 5000, [0], True),
    ],
)
def test_log_dist_speaks_on_the_ranks_that_were_named(lines, at_info, monkeypatch, rank, ranks, speaks):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    log.log_dist("hello", ranks)
    assert lines == ([("INFO", "hello")] if speaks else [])


def test_log_dist_keeps_to_the_level(lines, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    log.log_dist("quiet")
    log.log_dist("loud", level=logging.ERROR)
    assert lines == [("ERROR", "loud")]


def test_report_speaks_whatever_the_level(lines, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    log.report("asked for")
    monkeypatch.setenv("RANK", "1")
    log.report("not here")
    log.report("here", ranks=[1])
    assert [text for _, text in lines] == ["asked for", "here"]


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        (None, ["progress", "asked for"]),
        (logging.INFO, ["progress", "asked for"]),
        (logging.WARNING, ["asked for"]),
        (logging.ERROR, []),
    ],
)
def test_progress_is_shown_by_default_and_follows_the_level(lines, monkeypatch, level, wanted):
    monkeypatch.delenv("RANK", raising=False)
    before = log.logger.level
    if level is not None:
        log.logger.setLevel(level)
    try:
        log.announce("progress")
        log.announce("asked for", is_asked_for=True)
    finally:
        log.logger.setLevel(before)
    assert lines == [("INFO", text) for text in wanted]


def test_warn_once(lines):
    for _ in range(3):
        log.warn_once("a warning of test_log")
        log.warn_once("another warning of test_log")
    assert lines == [("WARNING", "a warning of test_log"), ("WARNING", "another warning of test_log")]


def test_a_line_has_its_rank_and_goes_to_todays_stderr(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("RANK", "3")
    log.logger.warning("look")
    line = stderr.getvalue()
    assert line.endswith("[WARNING] [rank 3] look\n")


def test_a_root_logger_with_handlers_does_not_repeat_it(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    handler = logging.StreamHandler(stderr)
    logging.getLogger().addHandler(handler)
    log.logger.warning("only once")
    logging.getLogger().removeHandler(handler)
    assert stderr.getvalue().count("only once") == 1


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        (None, "Level 25"),  # between INFO and WARNING
        ("warning", "WARNING"),
        ("debug", "DEBUG"),
        ("ERROR", "ERROR"),
        ("nonsense", "WARNING"),
        ("", "Level 25"),
        (" debug ", "DEBUG"),
        ("a\x1b[31m", "WARNING"),
    ],
)
def test_the_level_of_the_environment(level, wanted):
    environment = {name: value for name, value in os.environ.items() if name != "DS_LOG_LEVEL"}
    if level is not None:
        environment["DS_LOG_LEVEL"] = level
    script = "import logging; from deepspeed.log import logger; print(logging.getLevelName(logger.level))"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == wanted
    told = "found no level of that name; taking WARNING. Use DEBUG, INFO, WARNING, ERROR or CRITICAL"
    assert (told in done.stderr) is (level is not None and level.strip().upper() not in ("", *log.LEVELS))
    assert "\x1b" not in done.stderr


def test_levels_by_name(at_info):
    assert [log.get_log_level_from_string(name) for name in ("debug", "INFO", "Error")] == [10, 20, 40]
    custom = logging.getLogger("custom")
    log.set_log_level_from_string("critical", custom)
    assert custom.level == logging.CRITICAL
    log.set_log_level_from_string("warning")
    assert log.get_current_level() == logging.WARNING
    assert [log.should_log_le(name) for name in ("info", "warning", "error")] == [False, True, True]
    with pytest.raises(ValueError, match="found 'loud'; use debug, info, warning, error or critical"):
        log.should_log_le("loud")


def test_a_logger_of_ones_own_has_one_handler(capsys):
    made = log.LoggerFactory.create_logger("one's own", level=logging.INFO)
    assert log.LoggerFactory.create_logger("one's own", level=logging.INFO) is made
    made.info("hello")
    assert capsys.readouterr().err.count("hello") == 1
    with pytest.raises(ValueError, match="found no name"):
        log.LoggerFactory.create_logger()


def test_what_is_said_once(lines, at_info):
    for _ in range(2):
        log.warning_once("a warning of this test")
        log.log_dist_once("a line of this test", ranks=[0])
    assert lines == [("WARNING", "a warning of this test"), ("INFO", "a line of this test")]


def test_messages_and_json_of_some_ranks(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "1")
    assert log.get_dist_msg("hello", [1]) == "[Rank 1] hello"
    assert log.get_dist_msg("hello") is None
    log.print_dist("to all", [-1])
    log.print_dist("to rank 0")
    assert capsys.readouterr().out == "[Rank 1] to all\n"
    log.print_json_dist({"loss": 2.5}, [1], tmp_path / "1.json")
    log.print_json_dist({"loss": 2.5}, [0], tmp_path / "0.json")
    assert [path.name for path in tmp_path.iterdir()] == ["1.json"]
    assert json.loads((tmp_path / "1.json").read_text()) == {"loss": 2.5, "rank": 1}
    with pytest.raises(ValueError, match="found no path"):
        log.print_json_dist({}, [1])


def test_a_configuration_is_a_line_for_each_attribute(lines, at_info):
    log.print_configuration(argparse.Namespace(b=[2], a=1), "arguments")
    assert lines == [("INFO", text) for text in ("arguments:", f"  a {'.' * 28} 1", f"  b {'.' * 28} [2]")]
