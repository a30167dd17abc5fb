"""One warm rank: `python -m deepspeed.testing.rank_worker <store>`, started by `distributed.RankPool`.

The rank joins the process group, reports that, and then runs jobs: file, module name, qualified name, arguments.
"""

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import queue
import random
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist

_loaded: dict[str, tuple[int, ModuleType]] = {}
_num_jobs = 0
_MANY_FAILURES = 1000  # more than one job has


def main() -> None:
    """Run jobs until the pipe, which is the standard input, closes."""
    pipe = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # child processes of a job must not inherit the pipe
    faulthandler.enable()  # a crash in C++ leaves a stack in the log
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # A separate thread reads the pipe, so that a hanging job still ends with the test process.
    threading.Thread(target=_read, args=(pipe, jobs), daemon=True).start()
    torch.set_num_threads(1)
    _seed()
    _join(sys.argv[1])
    pipe.send_bytes(pickle.dumps((True, pickle.dumps(None))))
    environment = dict(os.environ)
    while True:
        pipe.send_bytes(_run(jobs.get(), environment))


def _read(pipe: Connection, jobs: "queue.SimpleQueue[bytes]") -> None:
    try:
        while True:
            jobs.put(pipe.recv_bytes())
    except (EOFError, OSError) as error:
        os.write(2, f"rank worker: the test process closed the pipe ({error!r}); ending\n".encode())
        os._exit(0)


def _join(store_path: str) -> None:
    # Host names of build machines often do not resolve; all ranks are on this machine.
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch_dist.FileStore(store_path, world_size)
    torch_dist.init_process_group(_library(), store=store, rank=rank, world_size=world_size)
    torch_dist.barrier()


def _library() -> str:
    """Return "gloo", or the communication library of the accelerator in `DS_ACCELERATOR`."""
    if not os.environ.get("DS_ACCELERATOR"):
        return "gloo"
    from deepspeed.accelerator import get_accelerator  # late: the test process itself may need none

    return get_accelerator().communication_backend_name()


def _run(job: bytes, environment: dict[str, str]) -> bytes:
    """Run a job, tidy up, and return the pickled reply: (True, result) or (False, (exception or None, traceback))."""
    try:
        path, module_name, qualname, pickled_args = pickle.loads(job)
        fn: Any = _load(path, module_name)
        for name in qualname.split("."):
            fn = getattr(fn, name)
        result = fn(*pickle.loads(pickled_args))
        payload = pickle.dumps(result)
        if not torch_dist.is_initialized():
            raise RuntimeError(f"{qualname} ended the process group of the warm ranks; use groups of its own")
        del result
        _tidy(environment)
        return pickle.dumps((True, payload))
    except BaseException as error:  # noqa: BLE001 - a rank reports whatever ended its job, SystemExit too
        return pickle.dumps((False, (_pickled(error), traceback.format_exc())))


def _pickled(error: BaseException) -> bytes | None:
    """Return the pickled exception; None if it cannot be pickled and unpickled."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - any class may refuse to be pickled in its own way; the traceback goes anyway
        return None
    return data


def _load(path: str, module_name: str) -> ModuleType:
    """Import the module of a job: by name for this package, else by path, under its name in the test process."""
    if module_name.split(".", maxsplit=1)[0] == "deepspeed":
        return importlib.import_module(module_name)
    changed_ns = Path(path).stat().st_mtime_ns
    if path in _loaded and _loaded[path][0] == changed_ns:
        return _loaded[path][1]
    # A script's `if __name__ == "__main__"` must not run here.
    name = "__ds_main__" if module_name == "__main__" else module_name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Use the caller's module name, so that classes of the file unpickle on both sides.
    sys.modules[name] = module
    if module_name == "__main__":
        sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    _loaded[path] = (changed_ns, module)
    return module


def _seed() -> None:
    torch.manual_seed(0)  # torch draws a seed of its own in a fresh process
    random.seed(0)
    np.random.seed(0)


def _tidy(environment: dict[str, str]) -> None:
    """Restore the state that a job may have changed, for the next job."""
    _restore_environment(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    _seed()
    _reset_package()
    gc.collect()
    gc.freeze()  # a collection over all of torch's objects takes 0.15 s, and jobs are many


def _restore_environment(environment: dict[str, str]) -> None:
    """Restore only variables that differ: `setenv` may crash while a C++ thread is in `getenv`."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _reset_package() -> None:
    """Reset globals of this package, in the modules that the job has imported."""
    global _num_jobs
    _num_jobs += 1  # the same on all ranks
    accelerator = sys.modules.get("deepspeed.accelerator.current")
    if accelerator is not None:
        accelerator.reset_accelerator()
    groups = sys.modules.get("deepspeed.parallel.groups")
    if groups is not None:
        groups.reset()
    marks = sys.modules.get("deepspeed.zero.param_marks")
    if marks is not None:
        marks.reset_ids()
    start = sys.modules.get("deepspeed.comm.start")
    if start is not None:
        start.set_backend()
    failure = sys.modules.get("deepspeed.comm.failure")
    if failure is not None:
        # a rank may have noticed fewer than another, and would hear of the rest in the next job
        failure.go_to(_num_jobs * _MANY_FAILURES)
    record = sys.modules.get("deepspeed.comm.record")
    if record is not None:
        record.comms_logger.reset()
        record.comms_logger.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)


if __name__ == "__main__":
    main()
