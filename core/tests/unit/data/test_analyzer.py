"""The data analyzer: its index files are DeepSpeed's, whoever shares the work."""

from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.data.analyzer import DataAnalyzer, split_dataset, split_index
from deepspeed.data.indexed_dataset import MMapIndexedDataset
from deepspeed.errors import ConfigError

NUM_SAMPLES = 40
LENGTHS = [1 + number * 7 % 20 for number in range(NUM_SAMPLES)]  # each of 1 to 20 twice
NAMES = ["length", "tenth", "counts"]


def analyzer(folder, **keys):
    return DataAnalyzer(
        list(range(NUM_SAMPLES)),
        **{
            "batch_size": 7,
            "metric_names": NAMES,
            "metric_functions": [
                lambda batch: torch.tensor([LENGTHS[number] for number in batch]),
                lambda batch: batch // 10,
                lambda batch: torch.bincount(batch % 3, minlength=3),
            ],
            "metric_types": ["single_value_per_sample"] * 2 + ["accumulate_value_over_samples"],
            "metric_dtypes": [torch.int64, np.int32, np.int64],
            "save_path": str(folder),
            **keys,
        },
    )


def rows(folder, metric, name):
    return [row.tolist() for row in MMapIndexedDataset(Path(folder, metric, f"{metric}_{name}"))]


def test_the_index_files(tmp_path):
    analyzer(tmp_path).run_map_reduce()
    order = sorted(range(NUM_SAMPLES), key=lambda number: LENGTHS[number])
    assert rows(tmp_path, "length", "sample_to_metric") == [[length] for length in LENGTHS]
    assert rows(tmp_path, "length", "index_to_metric") == [[value] for value in range(1, 21)]
    assert rows(tmp_path, "length", "index_to_sample") == [order[two : two + 2] for two in range(0, NUM_SAMPLES, 2)]
    assert sum(rows(tmp_path, "length", "index_to_sample_percentile_merged"), []) == order
    assert rows(tmp_path, "tenth", "index_to_sample") == [list(range(ten, ten + 10)) for ten in range(0, 40, 10)]
    assert rows(tmp_path, "counts", "metric_value") == [[14, 13, 13]]
    assert MMapIndexedDataset(tmp_path / "tenth" / "tenth_index_to_metric").dtype == np.uint8


@pytest.mark.parametrize(("num_workers", "num_threads"), [(1, 3), (3, 1), (2, 2), (41, 1)])
def test_whoever_shares_the_work(tmp_path, num_workers, num_threads):
    analyzer(tmp_path / "alone").run_map_reduce()
    for worker in range(num_workers):
        analyzer(tmp_path / "shared", num_workers=num_workers, worker_id=worker, num_threads=num_threads).run_map()
    analyzer(tmp_path / "shared", num_workers=num_workers, num_threads=num_threads).run_reduce()
    files = sorted((tmp_path / "alone").glob("*/*.*"))
    assert len(files) == 2 * (2 * 4 + 1)
    for file in files:
        assert file.read_bytes() == (tmp_path / "shared" / file.relative_to(tmp_path / "alone")).read_bytes(), file


def test_samples_under_numbers_of_ones_own(tmp_path):
    analyzer(tmp_path, sample_indices=[100 + number for number in range(NUM_SAMPLES)]).run_map_reduce()
    assert rows(tmp_path, "tenth", "index_to_sample")[1] == list(range(110, 120))


def test_functions_of_the_users(tmp_path):
    seen = []

    def init(*given):
        seen.append(("init", *given[:2], given[5]))
        return []

    def update(data, types, dtypes, functions, results, start):
        results.append(data.tolist())
        seen.append(("update", start))

    def finalize(types, dtypes, results):
        seen.append(("finalize", sum(results, [])))

    def reduce(dataset, names, *rest):
        seen.append(("reduce", len(dataset), names))

    own = {"custom_map_init": init, "custom_map_update": update, "custom_map_finalize": finalize}
    analyzer(tmp_path, batch_size=30, custom_reduce=reduce, **own).run_map_reduce()
    assert seen == [
        ("init", 0, NAMES, 0),
        ("update", 0),
        ("update", 30),
        ("finalize", list(range(NUM_SAMPLES))),
        ("reduce", NUM_SAMPLES, NAMES),
    ]


def fails(batch):
    if 20 in batch:
        raise ValueError("a metric that fails")
    return batch


def test_a_process_that_fails_is_named(tmp_path, capfd):
    broken = analyzer(
        tmp_path,
        num_threads=2,
        metric_names=["broken"],
        metric_functions=[fails],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[np.int64],
    )
    with pytest.raises(ConfigError, match=r"found 1 process of 2 to have failed \(1\).*specific_threads=\[1\]"):
        broken.run_map()
    assert "a metric that fails" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"metric_dtypes": [np.int64]},
            "found metric_names of 3, metric_functions of 3, metric_types of 3, metric_dtypes",
        ),
        ({"metric_types": ["mean"] * 3}, "metric 'length': found type 'mean'; choose 'single_value_per_sample'"),
        ({"metric_dtypes": [np.complex64] * 3}, "metric 'length': found dtype .*, which no index can hold"),
        ({"worker_id": 1}, "found worker_id 1 of 1 worker; count from 0"),
        (
            {"metric_functions": [lambda batch: batch[None]] * 3},
            r"returns shape \(1, 7\) for the batch from sample 0 on",
        ),
        ({"metric_functions": [lambda batch: None] * 3}, "returns a NoneType that is no array of numbers"),
        ({"metric_functions": [lambda batch: ["long"]] * 3}, "returns a list that is no array of numbers"),
        ({"metric_functions": [lambda batch: batch[:1]] * 3}, "found length of 6 samples, the data set has 40"),
    ],
)
def test_what_is_refused(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        analyzer(tmp_path, **keys).run_map_reduce()


def test_a_value_that_its_type_does_not_hold(tmp_path):
    with pytest.raises(ValueError, match="found numbers from 15 to 240, which dtype int8 does not hold"):
        analyzer(
            tmp_path,
            metric_names=["length"],
            metric_functions=[lambda batch: torch.tensor([LENGTHS[number] * 15 for number in batch])],
            metric_types=["single_value_per_sample"],
            metric_dtypes=[torch.int8],
        ).run_map_reduce()


def test_reduce_before_all_have_mapped(tmp_path):
    analyzer(tmp_path, num_workers=2).run_map()
    with pytest.raises(ConfigError, match="found no file .*worker1_thread0.*"):
        analyzer(tmp_path, num_workers=2).run_reduce()


def test_shares():
    assert split_index(0, 10, 3) == [(0, 3), (3, 6), (6, 10)]
    assert split_dataset(range(10), 2, 1, 2) == ([(0, 5), (5, 10)], [(5, 7), (7, 10)])
