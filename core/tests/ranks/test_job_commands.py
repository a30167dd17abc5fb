"""Commands that run as a job: `ds_bench` measures its collectives, `ds_report --all-ranks` compares its ranks."""

import io
import json
import platform

import pytest
import torch
from deepspeed.cli import collectives
from deepspeed.cli.collectives import MODULE, Timing, figures, sizes
from deepspeed.cli.report_parts import differences, show
from deepspeed.errors import ConfigError
from deepspeed.testing.distributed import run_ranks
from rich.console import Console

OPERATIONS = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "pt2pt"]


def options(*words):
    return collectives._parser().parse_args(words)


@pytest.mark.parametrize(
    ("op", "share"),
    [("all-reduce", 1.5), ("all-gather", 0.75), ("reduce-scatter", 0.75), ("all-to-all", 0.75)]
    + [("broadcast", 1), ("pt2pt", 1)],
)
def test_bandwidths_of_four_ranks(op, share):
    assert figures(op, 1 << 20, 0.5, 4) == Timing(op, 1 << 20, 500_000.0, 2 << 20, share * (2 << 20))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--maxsize 12", [4096]),
        ("--maxsize 12 --scan", [1024, 2048, 4096]),
        ("--size 3K --scan", [1024, 2048]),
        ("--size 100 --scan", [100]),
    ],
)
def test_sizes(words, found):
    assert sizes(options(*words.split())) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--maxsize 9", "found '9'; give an exponent from 10 to 40"),
        ("--mem-factor 2", "found '2'; give a number between 0 and 1"),
        ("--dtype quad", "found 'quad'; give one of bfloat16, float16"),
        ("--num_gpus 0", "'0' must be a whole number, 1 or more"),
    ],
)
def test_a_wrong_command_line(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        collectives.main(words.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_job_that_runs_takes_no_number_of_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        collectives.main(["--num_gpus", "2"])
    assert "a launcher has already started this one (WORLD_SIZE=2)" in capsys.readouterr().err


def measure(words):
    shown = []
    rows = collectives.measure(options(*words), shown.append)
    assert shown == rows
    return rows


@pytest.mark.parametrize(
    "words", [(), ("--async-op", "--dist", "torch"), ("--dtype", "int32", "--pt2pt", "--broadcast")]
)
def test_every_rank_gets_the_figures_of_the_slowest(words):
    sizes = ("--scan", "--maxsize", "11", "--trials", "2", "--warmups", "1")
    first, second = run_ranks(2, measure, (*words, *sizes))
    assert first == second
    asked = ["pt2pt", "broadcast"] if "--pt2pt" in words else OPERATIONS
    assert [(row.op, row.num_bytes) for row in first] == [(op, size) for op in asked for size in (1024, 2048)]
    assert all(row.latency_us > 0 and row.algbw >= row.busbw * 0.99 > 0 for row in first)


def test_messages_have_a_multiple_of_the_ranks():
    rows = run_ranks(3, measure, ("--size", "1000", "--all-gather", "--trials", "1", "--warmups", "1"))[0]
    assert [row.num_bytes for row in rows] == [996]


def measure_alone():
    with pytest.raises(ConfigError, match="found 1 rank, which has nobody to exchange with"):
        collectives.measure(options())
    return True


def test_one_rank_has_nobody_to_exchange_with():
    assert run_ranks(1, measure_alone) == [True]


@pytest.fixture
def run_module(warm, fork_module, monkeypatch):
    """`python -m`, which no launcher has started."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return fork_module


def test_the_command_starts_its_ranks(run_module, tmp_path):
    words = ["--num_gpus", "2", "--all-reduce", "--maxsize", "10", "--plot", str(tmp_path / "bandwidth.png")]
    done = run_module(MODULE, *words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["num_ranks"], found["dtype"]) == (2, "float32")
    assert [(row["op"], row["num_bytes"]) for row in found["rows"]] == [("all-reduce", 1024)]
    assert (tmp_path / "bandwidth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "found"),
    [(["1"], "found 1 rank, which has nobody to exchange with"), (["2", "--size", "4"], "found a message of 4 bytes")],
)
def test_a_job_that_cannot_be_measured_says_why_once(run_module, words, found):
    done = run_module(MODULE, "--num_gpus", *words)
    assert done.returncode == 1
    assert done.stderr.count(found) == 1, done.stderr


def test_the_table_has_a_heading_per_operation(capsys):
    show = collectives._printer(options("--bw-unit", "GBps"))
    for op in ("all-reduce", "pt2pt"):
        show(Timing(op, 1 << 20, 500.0, 2e9, 1e9))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[:3] == [
        ["all-reduce"],
        ["size", "latency", "(us)", "algbw", "(GBps)", "busbw", "(GBps)"],
        ["1.0", "MB", "500.0", "2.000", "1.000"],
    ]
    assert lines[3] == ["pt2pt"]


def test_a_plot_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--plot .*bandwidth\.xyz"):
        collectives.plot([Timing("all-reduce", 1024, 1.0, 1.0, 1.0)], str(tmp_path / "bandwidth.xyz"), "Gbps")


# ---- ds_report --all-ranks -------------------------------------------------------------------------------------------


def test_a_report_compares_the_ranks_of_a_job(run_module):
    words = ("--module", "deepspeed.cli.report", "--all-ranks", "--hide_operator_status", "--json")
    done = run_module("deepspeed.launcher.runner", "--num_gpus", "2", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["different"] == {}
    assert [facts["host"] for facts in found["ranks"]] == [platform.node()] * 2
    assert found["ranks"][1]["versions.torch"] == torch.__version__


def test_a_report_of_all_ranks_needs_a_job(run_module):
    done = run_module("deepspeed.cli.report", "--all-ranks", "--hide_operator_status")
    assert done.returncode == 1
    assert "--all-ranks compares the ranks of a job, and no launcher has started this process" in done.stderr


def test_what_differs_is_shown_with_its_ranks():
    by_rank = [
        {"host": f"worker-{rank // 2}", "versions.torch": "2.13.0" if rank != 3 else "2.12.0", "ops.adam": "cached"}
        for rank in range(6)
    ]
    del by_rank[4]["ops.adam"]
    assert differences(by_rank) == {
        "host": {"worker-0": [0, 1], "worker-1": [2, 3], "worker-2": [4, 5]},
        "versions.torch": {"2.13.0": [0, 1, 2, 4, 5], "2.12.0": [3]},
        "ops.adam": {"cached": [0, 1, 2, 3, 5], "absent": [4]},
    }
    console = Console(file=io.StringIO(), width=100)
    show(by_rank, console)
    lines = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in console.file.getvalue().splitlines()]
    assert ["versions.torch", "2.13.0", "0-2, 4-5"] in lines
    assert ["", "2.12.0", "3"] in lines
    assert ["worker-1", "2-3"] in lines
