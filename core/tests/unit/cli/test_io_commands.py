"""`ds_io` and `ds_nvme_tune`: what they print, and that nothing of them stays in the folder."""

import json
import os
import signal

import pytest
from deepspeed.cli import io_speed, nvme_tune
from deepspeed.cli.io_speed import Parameters, Speed
from deepspeed.cli.nvme_tune import Trial, best_of
from deepspeed.config import DeepSpeedConfig

SMALL = ("--io_size", "64K", "--loops", "1")


@pytest.fixture(autouse=True)
def left_as_it_was(tmp_path):
    before = sorted(tmp_path.iterdir())
    yield
    assert sorted(tmp_path.iterdir()) == before


def test_ds_io_measures_one_choice(tmp_path, capsys):
    assert io_speed.main(["--folder", str(tmp_path), *SMALL, "--json", "--block_size", "4K", "--io_parallel", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["aio"] == {
        "block_size": 4096,
        "queue_depth": 8,
        "intra_op_parallelism": 2,
        "single_submit": False,
        "overlap_events": True,
    }
    assert told["read"] > 0
    assert told["write"] > 0
    assert (told["folder"], told["io_size"]) == (str(tmp_path), 65536)
    assert told["engine"] in ("io_uring", "threads")
    assert io_speed.main(["--folder", str(tmp_path), *SMALL, "--read"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("read ")
    assert "write" not in line
    assert line.endswith(f" GB/s: {told['folder']} ({told['file_system']}, O_DIRECT, {told['engine']})") or (
        not told["direct"]
    )


def test_ds_nvme_tune_ends_with_a_section_that_the_configuration_takes(tmp_path, capsys):
    choice = ("--block_size", "64K,4K", "--queue_depth", "4", "--intra_op_parallelism", "1,2")
    assert nvme_tune.main(["--nvme_dir", str(tmp_path), *SMALL, *choice]) == 0
    table, _, section = capsys.readouterr().out.partition("The best, to paste into the configuration:\n")
    assert "Fastest in" in table
    config = DeepSpeedConfig({"train_batch_size": 1, **json.loads("{" + section + "}")})
    assert config.aio.block_size in (4096, 65536)
    assert nvme_tune.main(["--folder", str(tmp_path), *SMALL, *choice, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["measured"]) == 2 * 2 * 4
    assert told["best"]["aio"]["queue_depth"] == 4


def test_the_best_is_the_smallest_of_the_fast_ones():
    slow, small, fast = (Trial(Parameters(size), Speed(rate, 1e9)) for size, rate in ((1, 1e9), (2, 2e9), (3, 2.05e9)))
    assert best_of([slow, small, fast]) is small


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_command_removes_its_files(tmp_path, capsys, monkeypatch, number):
    def be_ended(bench, parameters):
        assert os.path.getsize(bench.path) == 65536
        os.kill(os.getpid(), number)
        return bench.measure(parameters)

    monkeypatch.setattr(io_speed.Bench, "measure", be_ended)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run under nohup
    try:
        assert nvme_tune.main(["--nvme_dir", str(tmp_path), *SMALL]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "interrupted; its files are removed" in capsys.readouterr().err


def test_what_cannot_be_measured_is_one_line(tmp_path, capsys, monkeypatch):
    assert io_speed.main(["--folder", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith(f"ds_io: {tmp_path / 'none'} does not exist; create it")
    with monkeypatch.context() as patched:
        patched.setenv("DS_OPS_DISABLE", "async_io")
        assert io_speed.main(["--folder", str(tmp_path), *SMALL]) == 1
        assert capsys.readouterr().err.endswith("disabled by DS_OPS_DISABLE=async_io\n")
    assert nvme_tune.main(["--folder", str(tmp_path), "--io_size", "1000000000G"]) == 1
    assert "are needed; free" in capsys.readouterr().err
    for wrong in (["--io_size", "1X"], ["--loops", "0"], ["--read", "--write"]):
        with pytest.raises(SystemExit) as ended:
            io_speed.main(["--folder", str(tmp_path), *wrong])
        assert ended.value.code == 2
