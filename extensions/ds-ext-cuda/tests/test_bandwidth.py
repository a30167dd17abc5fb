"""The benchmark: every case can be called, counts the bytes it says, and a table comes of it."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "bandwidth.py"


@pytest.fixture(scope="module")
def bandwidth():
    spec = importlib.util.spec_from_file_location("bandwidth", PROGRAM)
    module = sys.modules["bandwidth"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bandwidth"]


@pytest.mark.parametrize("kind", ["optimizer_cases", "token_cases", "row_cases", "quantizer_cases"])
def test_every_case_can_be_called(bandwidth, load_op, device, kind):
    cases = getattr(bandwidth, kind)(load_op, 1 << 14, device)
    for case in cases:
        case.call()
        assert case.num_bytes > 0
    assert len({case.name for case in cases}) == len(cases)


def test_the_bytes_of_adam_are_those_of_its_tensors(bandwidth, load_op, device):
    cases = {case.name: case for case in bandwidth.optimizer_cases(load_op, 1000, device)}
    assert cases["adam fp32"].num_bytes == 1000 * (4 * 4 + 3 * 4)  # reads p, g, m, v; writes p, m, v
    assert cases["adam bf16 gradients and weights"].num_bytes == 1000 * (3 * 4 + 2 + 3 * 4 + 2)


def test_a_figure_is_the_share_of_the_copy(bandwidth):
    case = bandwidth.Case("half as fast", lambda: None, 4000)
    figure = bandwidth._figure(case, [(2.0, 9.0), (1.0, 8.0), (4.0, 7.0)], speed_of_copy=4.0)
    assert (figure.median_us, figure.gb_per_s, figure.share, figure.launch_us) == (2.0, 2.0, 0.5, 8.0)
    assert bandwidth.report(figure).endswith("2 GB/s   50.0%  launch 8 us  under the target")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(bandwidth, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bandwidth.py"])
    assert bandwidth.main() == 2
    assert "finds no GPU" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU")
def test_it_measures_a_gpu(bandwidth, monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["bandwidth.py", "--numel", str(1 << 20), "--rounds", "2", "--json", str(tmp_path / "f")]
    )
    assert bandwidth.main() == 0
    assert "adam fp32" in (tmp_path / "f").read_text()
