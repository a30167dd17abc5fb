"""`DataAnalyzer`: computes metrics of all samples of a data set, and writes the index files for a curriculum.

In the map step, each worker computes the metrics of its share of the samples, and writes them to its own files. In the
reduce step, one worker merges these files. The results are in `save_path`, in one folder per metric. Each file is an
indexed data set (`indexed_dataset.py`):

    NAME_sample_to_metric                   the value of each sample
    NAME_index_to_metric                    the distinct values in ascending order
    NAME_index_to_sample                    the samples of each distinct value
    NAME_index_to_sample_percentile_merged  the same samples, easy ones first, in up to 100 groups of one percent
    NAME_metric_value                       the sum over all samples, for an accumulated metric

Source: Li et al., "DeepSpeed Data Efficiency" (arXiv 2212.03597), section 3.1.
"""

import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Subset

from deepspeed import comm
from deepspeed._absent import absent_members
from deepspeed.comm.values import all_gather_values
from deepspeed.data.indexed_dataset import (
    MMapIndexedDataset,
    as_dtype,
    close_mmap_dataset_builder,
    create_mmap_dataset_builder,
    find_fit_int_dtype,
    valid_dtypes,
)
from deepspeed.errors import ConfigError, counted, first_line

_Result = TypeVar("_Result")
_ONE = "single_value_per_sample"
_SUM = "accumulate_value_over_samples"
_LENGTHS = "data_efficiency.data_sampling.dynamic_batching"


def split_index(start_idx: int, end_idx: int, num_partitions: int) -> list[tuple[int, int]]:
    """Return the bounds of `num_partitions` parts of a range, whose sizes differ by at most one.

    >>> split_index(0, 10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    bounds = [start_idx + part * (end_idx - start_idx) // num_partitions for part in range(num_partitions + 1)]
    return list(itertools.pairwise(bounds))


def split_dataset(
    dataset: Any, num_workers: int, worker_id: int, num_threads: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the bounds of the shares of all workers, and of this worker's threads."""
    workers = split_index(0, len(dataset), num_workers)
    return workers, split_index(*workers[worker_id], num_threads)


@absent_members("runtime.data_pipeline.data_sampling.data_analyzer:DataAnalyzer")
class DataAnalyzer:
    """Computes metrics of the samples of a data set in several workers, and merges the results.

    Every worker, on any machine, calls `run_map`. After all workers have finished, one of them calls `run_reduce`.

    Args:
        dataset: a data set with `__len__` and `__getitem__`.
        num_workers, worker_id: the number of workers, and the number of this worker.
        num_threads: number of processes of this worker.
        num_threads_reduce: ignored; `run_reduce` sorts once.
        specific_threads: numbers of the processes to run; empty: all.
        batch_size: number of samples per call of a metric.
        metric_names: names of the metrics; each has a folder in `save_path`.
        metric_functions: functions from a batch to a tensor: one value per sample, or a vector to accumulate.
        metric_types: "single_value_per_sample" or "accumulate_value_over_samples".
        metric_dtypes: torch or numpy dtypes of the values.
        save_path: a folder that all workers can access.
        collate_fn: makes a batch of samples; None: torch's.
        custom_map_init, custom_map_update, custom_map_finalize: replacements for `init_metric_results`,
            `update_metric_results` and `finalize_metric_results`, with the same arguments.
        custom_reduce: a replacement for `run_reduce`; it gets the data set, metric names, types, the folder, and the
            numbers of workers and processes.
        sample_indices: position in the data set -> sample number in the index files; None: the position.

    Raises:
        ConfigError: lists have different lengths, or a type is unknown.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], torch.Tensor]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., Any] | None = None,
        custom_map_finalize: Callable[..., Any] | None = None,
        custom_reduce: Callable[..., Any] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        lists = {
            "metric_names": metric_names,
            "metric_functions": metric_functions,
            "metric_types": metric_types,
            "metric_dtypes": metric_dtypes,
        }
        if len({len(each) for each in lists.values()}) > 1:
            found = ", ".join(f"{name} of {len(each)}" for name, each in lists.items())
            raise ConfigError(f"DataAnalyzer: found {found}; give each metric a name, a function, a type and a dtype")
        for name, kind, dtype in zip(metric_names, metric_types, metric_dtypes, strict=True):
            if kind not in (_ONE, _SUM):
                raise ConfigError(f"DataAnalyzer: metric {name!r}: found type {kind!r}; choose {_ONE!r} or {_SUM!r}")
            if _numpy_dtype(dtype) not in {np.dtype(each) for each in valid_dtypes}:
                raise ConfigError(
                    f"DataAnalyzer: metric {name!r}: found dtype {dtype}, which no index can hold; give integers"
                )
        if not 0 <= worker_id < num_workers:
            raise ConfigError(
                f"DataAnalyzer: found worker_id {worker_id} of {counted(num_workers, 'worker')}; count from 0"
            )
        self.dataset = dataset
        self.num_workers = num_workers
        self.worker_id = worker_id
        self.num_threads = num_threads
        self.num_threads_reduce = num_threads_reduce
        self.specific_threads = list(specific_threads)
        self.batch_size = batch_size
        self.metric_names = list(metric_names)
        self.metric_functions = list(metric_functions)
        self.metric_types = list(metric_types)
        self.metric_dtypes = list(metric_dtypes)
        self.save_path = save_path
        self.collate_fn = collate_fn
        self.custom_map_init = custom_map_init
        self.custom_map_update = custom_map_update
        self.custom_map_finalize = custom_map_finalize
        self.custom_reduce = custom_reduce
        self.sample_indices = sample_indices

    def run_map_reduce(self, comm_group: ProcessGroup | None = None) -> None:
        """Map on every rank, and reduce on the first rank. A collective over `comm_group` with torch.distributed.

        Raises:
            ConfigError: another rank failed. A rank that fails raises its own error.
        """
        run_together(self.run_map, comm_group)
        run_together(self.run_reduce if self.worker_id == 0 else lambda: None, comm_group)

    # ---- map --------------------------------------------------------------------------------------------------

    def run_map(self) -> None:
        """Compute the metrics of this worker's samples, and write them to its own files.

        Raises:
            ConfigError: a process failed; its error was printed.
        """
        threads = self.specific_threads or range(self.num_threads)
        if self.num_threads == 1:
            self.run_map_helper(0)
            return
        context = multiprocessing.get_context("fork")  # metrics may be functions that cannot be pickled
        running = {thread: context.Process(target=self._run_apart, args=(thread,)) for thread in threads}
        for process in running.values():
            process.start()
        for process in running.values():
            process.join()
        if failed := [thread for thread, process in running.items() if process.exitcode != 0]:
            raise ConfigError(
                f"DataAnalyzer.run_map: found {counted(len(failed), 'process', 'processes')} of {len(running)} to have "
                f"failed ({', '.join(map(str, failed))}); see the errors printed above, and run them again with "
                f"specific_threads={failed}"
            )

    def _run_apart(self, thread_id: int) -> None:
        torch.set_num_threads(1)  # other processes use the other cores
        self.run_map_helper(thread_id)

    def run_map_helper(self, thread_id: int) -> None:
        """Compute the metrics of the samples of one process."""
        start, end = split_dataset(self.dataset, self.num_workers, self.worker_id, self.num_threads)[1][thread_id]
        loader = DataLoader(
            Subset(self.dataset, range(start, end)), batch_size=self.batch_size, collate_fn=self.collate_fn
        )
        init = self.custom_map_init or self.init_metric_results
        update = self.custom_map_update or self.update_metric_results
        finalize = self.custom_map_finalize or self.finalize_metric_results
        results = init(
            thread_id, self.metric_names, self.metric_types, self.metric_dtypes, self.save_path, self.worker_id
        )
        first = start
        for data in loader if end > start else ():
            update(data, self.metric_types, self.metric_dtypes, self.metric_functions, results, first)
            first += self.batch_size
        finalize(self.metric_types, self.metric_dtypes, results)

    def init_metric_results(
        self,
        thread_id: int,
        metric_names: Sequence[str],
        metric_types: Sequence[str],
        metric_dtypes: Sequence[Any],
        save_path: str,
        worker_id: int,
    ) -> list[dict[str, Any]]:
        """Return the containers for the values of a process, one per metric."""
        return [{"values": [], "fname": self._share_of(name, worker_id, thread_id, save_path)} for name in metric_names]

    def update_metric_results(
        self,
        data: Any,
        metric_types: Sequence[str],
        metric_dtypes: Sequence[Any],
        metric_functions: Sequence[Callable[[Any], torch.Tensor]],
        metric_results: list[dict[str, Any]],
        batch_start_idx: int = 0,
    ) -> None:
        """Collect the metrics of a batch.

        Args:
            batch_start_idx: index of the first sample.

        Raises:
            ConfigError: a function did not return numbers, or not one per sample.
        """
        for kind, function, result in zip(metric_types, metric_functions, metric_results, strict=True):
            values = _as_array(function(data), batch_start_idx)
            if kind == _SUM:
                total = result["values"]
                result["values"] = [values.astype(np.result_type(values, np.int64)) if not total else total[0] + values]
                continue
            if values.ndim != 1:
                raise ConfigError(
                    f"DataAnalyzer: found a metric that returns shape {tuple(values.shape)} for the batch "
                    f"from sample {batch_start_idx} on; let it return one value for each sample"
                )
            result["values"].append(values)

    def finalize_metric_results(
        self, metric_types: Sequence[str], metric_dtypes: Sequence[Any], metric_results: list[dict[str, Any]]
    ) -> None:
        """Write the values of a process."""
        for dtype, result in zip(metric_dtypes, metric_results, strict=True):
            parts = [as_dtype(each.reshape(-1), _numpy_dtype(dtype)) for each in result["values"]]
            builder = create_mmap_dataset_builder(result["fname"], _numpy_dtype(dtype))
            if parts:
                builder.add_item(np.concatenate(parts))
            close_mmap_dataset_builder(builder, result["fname"])

    def _share_of(self, metric: str, worker: int, thread: int, save_path: str | None = None) -> str:
        folder = Path(save_path or self.save_path, metric, f"worker{worker}_thread{thread}")
        kind = self.metric_types[self.metric_names.index(metric)]
        return str(folder / f"{metric}_{'sample_to_metric' if kind == _ONE else 'metric_value'}")

    # ---- reduce -----------------------------------------------------------------------------------------------

    def run_reduce(self) -> None:
        """Merge the files of all workers, and write the index files.

        Raises:
            ConfigError: a worker's files are missing or belong to another data set.
        """
        if self.custom_reduce is not None:
            self.custom_reduce(
                self.dataset, self.metric_names, self.metric_types, self.save_path, self.num_workers, self.num_threads
            )
            return
        for name, kind in zip(self.metric_names, self.metric_types, strict=True):
            shares = [
                MMapIndexedDataset(self._share_of(name, worker, thread))
                for worker in range(self.num_workers)
                for thread in range(self.num_threads)
            ]
            base = str(Path(self.save_path, name, name))
            parts = [share[0] for share in shares if len(share)]
            if kind == _SUM:
                total = (
                    np.sum(parts, axis=0, dtype=np.result_type(*parts, np.int64)) if parts else np.empty(0, np.int64)
                )
                _write(f"{base}_metric_value", total[None])
                continue
            values = np.concatenate(parts) if parts else np.empty(0, np.int64)
            if len(values) != len(self.dataset):
                raise ConfigError(
                    f"DataAnalyzer.run_reduce: found {name} of {counted(len(values), 'sample')}, the data set has "
                    f"{len(self.dataset)}; run run_map of every worker with the same num_workers and num_threads"
                )
            _write(f"{base}_sample_to_metric", values[:, None])
            self._write_index(base, values)

    def _write_index(self, base: str, values: np.ndarray) -> None:
        """Write the samples sorted by value; samples of equal value are in the order of the data set."""
        numbers = np.arange(len(values)) if self.sample_indices is None else np.asarray(self.sample_indices)
        order = np.argsort(values, kind="stable")
        numbers = numbers[order].astype(find_fit_int_dtype(0, int(numbers.max(initial=0))))
        there, firsts = np.unique(values[order], return_index=True)
        _write(f"{base}_index_to_metric", there[:, None])
        _write_groups(f"{base}_index_to_sample", numbers, firsts)
        hundredths = np.unique([len(numbers) * part // 100 for part in range(100)])
        _write_groups(f"{base}_index_to_sample_percentile_merged", numbers, hundredths)


def run_together(work: Callable[[], _Result], group: ProcessGroup | None) -> _Result:
    """Run what each rank does by itself, and raise on all ranks where one fails, so that none waits for it.

    A collective over `group`, where torch.distributed runs.

    Raises:
        ConfigError: another rank failed; one that fails raises its own error.
    """
    if not comm.is_initialized():
        return work()
    try:
        result = work()
    except Exception as error:
        all_gather_values(f"{type(error).__name__}: {first_line(error)}", group)
        raise
    for rank, failure in enumerate(all_gather_values(None, group)):
        if failure is not None:
            raise ConfigError(f"DataAnalyzer: rank {rank} failed with {failure}; see its own output")
    return result


@absent_members("runtime.data_pipeline.data_sampling.data_analyzer:DistributedDataAnalyzer")
class DistributedDataAnalyzer:
    """A `DataAnalyzer` whose workers are the ranks of a group. All ranks must access the same folder.

    Args:
        num_workers, worker_id: ignored; the group determines them.
        device: ignored; values are collected on the host.
        comm_group: the process group; None: all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], torch.Tensor]] = (),
        metric_types: Sequence[str] = (),
        save_path: str = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: str | None = None,
        comm_group: ProcessGroup | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        self.comm_group = comm_group
        self.analyzer = DataAnalyzer(
            dataset,
            num_workers=comm.get_world_size(comm_group),
            worker_id=comm.get_rank(comm_group),
            num_threads=num_threads,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            metric_dtypes=[np.int64] * len(metric_names),
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )

    def run_map_reduce(self) -> None:
        """Compute the metrics of all samples, and write the index files. A collective of the group."""
        self.analyzer.run_map_reduce(self.comm_group)


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype for a dtype of torch or numpy."""
    return torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)


def _write(fname: str, rows: np.ndarray) -> None:
    """Write integers in the smallest dtype that holds them."""
    dtype = find_fit_int_dtype(int(rows.min(initial=0)), int(rows.max(initial=0)))
    builder = create_mmap_dataset_builder(fname, dtype)
    builder.add_rows(rows)
    close_mmap_dataset_builder(builder, fname)


def _write_groups(fname: str, numbers: np.ndarray, firsts: np.ndarray) -> None:
    """Write parts of an array, which begin at `firsts`."""
    builder = create_mmap_dataset_builder(fname, numbers.dtype)
    for group in np.split(numbers, firsts[1:]):
        builder.add_item(group)
    close_mmap_dataset_builder(builder, fname)


def _as_array(found: Any, first: int) -> np.ndarray:
    """Return the numbers that a metric's function has returned for the batch from sample `first` on."""
    try:
        return torch.as_tensor(found).detach().cpu().numpy()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"DataAnalyzer: found a metric that returns a {type(found).__name__} that is no array of numbers for the "
            f"batch from sample {first} on; let it return a tensor with one value for each sample"
        ) from error


def lengths_of_samples(
    dataset: Any, folder: str | None, collate_fn: Callable[[list[Any]], Any] | None, function: Any
) -> np.ndarray:
    """Read the lengths of all samples. Compute them first if a rank finds no files. A collective."""
    if folder is None:
        raise ConfigError(f"{_LENGTHS}.metrics_path: found nothing; give a folder, or pass dataset_seqlens")
    path = str(Path(folder, "seqlen", "seqlen_sample_to_metric"))
    if not all(all_gather_values(MMapIndexedDataset.exists(path), comm.get_world_group())):
        if function is None:
            raise ConfigError(
                f"{_LENGTHS}.metrics_path: found no lengths at {path}; pass batch_seqlens_fn to compute them"
            )
        DistributedDataAnalyzer(
            dataset,
            metric_names=["seqlen"],
            metric_functions=[function],
            metric_types=["single_value_per_sample"],
            save_path=folder,
            collate_fn=collate_fn,
        ).run_map_reduce()
    return run_together(lambda: _read_lengths(dataset, path), None)


def _read_lengths(dataset: Any, path: str) -> np.ndarray:
    found = MMapIndexedDataset(path)
    if (found.sizes != 1).any():
        first = int((found.sizes != 1).argmax())
        raise ConfigError(
            f"{_LENGTHS}.metrics_path: found {found.size(first)} lengths of sample {first} at {path}, which has to be "
            "one; let batch_seqlens_fn compute them into another folder"
        )
    lengths = np.array([each[0] for each in found], np.int64)
    if len(lengths) != len(dataset):
        raise ConfigError(
            f"{_LENGTHS}.metrics_path: found the lengths of {len(lengths)} samples at {path}, the data set has "
            f"{len(dataset)}; give another folder"
        )
    return lengths
