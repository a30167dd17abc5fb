"""`init_distributed` creates the world group, whatever started this process, and sets what serves its collectives.

It searches for this process's placement in this order: arguments, torchrun and the `deepspeed` launcher (RANK,
WORLD_SIZE), MPI, Slurm, none. `environment.py` reads them; mpi4py is imported only if MPI started this process.

[Note: threads at exit] Before the interpreter ends, `settle_at_exit` lets the threads of collectives finish. A gloo
thread that has just completed a collective still holds its tensors for a moment. If the main thread ends the
interpreter in that moment, the thread needs the GIL to release the tensors. Python then ends the thread, and C++ calls
`terminate called without an active exception`: the process dies of SIGABRT although its work is done (pytorch/pytorch
issue 190489). Scripts rarely call `destroy_process_group()`, and that call does not help while an engine holds the
group. On a loaded machine, 2 of 5 jobs of four ranks died this way, and 1 of 19 jobs of two ranks; with the wait, 0 of
12. The wait narrows the race and cannot close it.
"""

import atexit
import errno
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm import comm
from deepspeed.comm.backend import GroupBackend, no_group_error
from deepspeed.comm.environment import RankPlacement, find_placement, loopback_address
from deepspeed.comm.failure import note_own_end_at_exit
from deepspeed.comm.torch_group import TorchGroup, forget, group_backend, plugin_backend, serve_by
from deepspeed.errors import CommError, counted, environment_int, first_line, shown
from deepspeed.log import log_dist
from deepspeed.uncaught import report_to_launcher

_TASKS = Path("/proc/self/task")
_LIMIT_S = 0.5
_PAUSE_S = 0.001
_NUM_QUIET = 3  # quiet checks in a row; between two checks a thread that waits for the GIL gets it


@functools.cache
def settle_at_exit() -> None:
    """Register `settle` to run when the process exits. `init_distributed` calls it; later calls do nothing."""
    atexit.register(settle)


def settle(limit_s: float = _LIMIT_S) -> bool:
    """Wait until no other thread of this process is running or ready to run. Returns whether that state was reached.

    The wait releases the GIL for the other threads. Without /proc it is a fixed pause.

    Args:
        limit_s: longest wait, for programs with threads that never rest.
    """
    if not _TASKS.is_dir():
        time.sleep(min(limit_s, 0.05))
        return True
    deadline = time.monotonic() + limit_s
    num_quiet = 0
    while num_quiet < _NUM_QUIET:
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
        num_quiet = 0 if _is_another_thread_running() else num_quiet + 1
    return True


def _is_another_thread_running() -> bool:
    me = str(threading.get_native_id())
    for task in _TASKS.iterdir():
        if task.name == me:
            continue
        try:
            # "tid (name) state ...", where the name may hold anything
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if state == "R":
            return True
    return False


DEFAULT_PORT = 29500
TIMEOUT_VARIABLE = "DEEPSPEED_TIMEOUT"
_DEFAULT_MINUTES = "10"
_LONGEST = timedelta(days=3650)  # the longest timeout that torch and the system support


def default_timeout() -> timedelta:
    """Return the timeout of collectives if `init_distributed` gets none: DEEPSPEED_TIMEOUT minutes, or 10.

    Raises `CommError` unless the variable is a positive number of at most 10 years.
    """
    value = os.environ.get(TIMEOUT_VARIABLE) or _DEFAULT_MINUTES
    try:
        timeout = timedelta(minutes=float(value))
    except (ValueError, OverflowError):
        timeout = timedelta(0)
    if not timedelta(0) < timeout <= _LONGEST:
        raise CommError(
            f"{TIMEOUT_VARIABLE}: found {shown(value)}; set it to a positive number of minutes, at most "
            f"{_LONGEST // timedelta(minutes=1)}, or unset it"
        )
    return timeout


def __getattr__(name: str) -> timedelta:
    if name == "DEFAULT_TIMEOUT":  # `deepspeed.constants.default_pg_timeout`, read from the environment
        return default_timeout()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create the world group, once; called by users, by libraries and by `deepspeed.initialize`.

    With `dist_backend` None the accelerator chooses; a plugin provides a name that torch does not know
    (`ds_comm_backend`). `distributed_port` is used if the environment has no port. With `dist_init_required=False` the
    group must exist already. If the group exists, only `configure(config)` is called. Afterwards RANK, WORLD_SIZE and
    LOCAL_RANK are in the environment, and MASTER_ADDR and MASTER_PORT if there is more than one rank. Raises
    `CommError` within `timeout` (None: see `default_timeout`), which names what is missing or cannot be reached.
    """
    if not (timeout is None or isinstance(timeout, timedelta)):
        raise CommError(f"timeout: found {timeout!r}; give a datetime.timedelta, such as timedelta(minutes=30)")
    report_to_launcher()
    if config is not None:
        comm.configure(config)
    settle_at_exit()
    if comm.is_initialized():
        note_own_end_at_exit()
        return
    if dist_init_required is False:
        raise CommError(
            "init_distributed(dist_init_required=False) was asked to use an existing process group, but"
            " torch.distributed is not initialized; leave the argument out, or call"
            " torch.distributed.init_process_group() first"
        )
    if not comm.is_available():
        raise CommError("this torch was built without torch.distributed; install a build that has it")
    library = dist_backend or _accelerator_library()
    _require_library(library)
    placement = find_placement(
        rank, world_size, distributed_port, auto_mpi_discovery, has_init_method=init_method is not None
    )
    placement.export()
    _join(library, placement, init_method, default_timeout() if timeout is None else timeout)
    note_own_end_at_exit()
    if verbose:
        log_dist(
            f"process group of {counted(placement.world_size, 'rank')} over {library}, found in {placement.source}",
            ranks=[0],
        )


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Destroy `group`, or all groups, and free the staging memory of their backends.

    Does not block. While an exception is being handled, as in a `finally`, peers that wait for this rank raise.
    """
    ends_all = group is None or group is torch_dist.group.WORLD
    try:
        forget(None if ends_all else group, failed=sys.exc_info()[1] is not None)
    finally:
        if ends_all:
            set_backend()
        torch_dist.destroy_process_group(group)


def set_backend() -> None:
    """Choose the backend of each group of the current world again, and undo `init_deepspeed_backend`."""
    serve_by(None)


def init_deepspeed_backend(ds_backend: str, timeout: timedelta | None = None, init_method: str | None = None) -> None:
    """Use one backend for all groups of the current world: the backend that a plugin's `ds_comm_backend` returns for
    the name `ds_backend`, or torch.distributed for "torch".

    Raises:
        CommError: before `init_distributed`, or if no plugin provides a backend of this name.
    """
    if not comm.is_initialized():
        raise no_group_error("deepspeed.comm.init_deepspeed_backend()")
    if ds_backend == "torch":
        serve_by(TorchGroup)
        return
    serve_by(functools.partial(_served_by, ds_backend))
    try:
        group_backend()  # for the world group: raises if no plugin knows the name
    except CommError:
        set_backend()
        raise


def _served_by(name: str, group: ProcessGroup) -> GroupBackend:
    offered = plugin_backend(name, group)
    if offered is None:
        raise CommError(
            f"init_deepspeed_backend({name!r}): no installed plugin offers this backend with ds_comm_backend; install"
            ' one, or use "torch"'
        )
    return offered


def is_backend(name: str) -> bool:
    """True if the backend of the world group has this name, for example "gloo"."""
    return comm.is_initialized() and group_backend().name == name


def get_local_rank() -> int:
    """This process's rank on its own machine (LOCAL_RANK); `CommError` before `init_distributed`."""
    if "LOCAL_RANK" not in os.environ:
        raise CommError("get_local_rank: LOCAL_RANK is not set; call deepspeed.init_distributed() first")
    return environment_int("LOCAL_RANK", error=CommError)


def _accelerator_library() -> str:
    from deepspeed.accelerator import get_accelerator

    name = get_accelerator().communication_backend_name()
    if not name:
        raise CommError("the accelerator names no communication backend; give init_distributed(dist_backend=...)")
    return str(name)


def _require_library(library: str) -> None:
    """Let a plugin register the library with torch if torch does not know the name.

    Raises:
        CommError: neither torch nor a plugin has every library that `library` names.
    """
    if _unknown_to_torch(library) is None:
        return
    plugin_backend(library, None)
    if (name := _unknown_to_torch(library)) is None:
        return
    known = [each for each in torch_dist.Backend.backend_list if each not in ("undefined", "fake")]
    available = [each for each in known if torch_dist.is_backend_available(each)]
    raise CommError(
        f"dist_backend: this torch has no communication backend {name!r} (asked for: {library!r}) and no plugin"
        f" gives it; torch has {', '.join(available)}. Leave dist_backend out, for the accelerator's own"
        f" ({_accelerator_library()}), give one of these, or import the package that registers {name!r} first"
    )


def _unknown_to_torch(library: str) -> str | None:
    """The first name in `library`, which may be a list such as "cpu:gloo,xyz:abc", that torch does not know."""
    names = [entry.rpartition(":")[2] for entry in library.split(",")]
    return next((name for name in names if not torch_dist.is_backend_available(name)), None)


def _join(library: str, placement: RankPlacement, init_method: str | None, timeout: timedelta) -> None:
    """Join the world group. Every error becomes a `CommError` with the address that this process tried to reach."""
    start: Callable[[], None]
    if init_method is None and placement.world_size == 1:
        # A single rank needs no peers: a store in this process takes no port and needs no network.
        start = _starter(library, timeout, store=torch_dist.HashStore(), rank=0, world_size=1)
    elif init_method is None and (address := loopback_address(placement.master_addr)) and not _has_agent_store():
        start = _loopback_starter(library, timeout, placement, address)
    elif init_method is None:
        start = _starter(library, timeout, init_method="env://")
    else:
        start = _starter(
            library, timeout, init_method=init_method, rank=placement.rank, world_size=placement.world_size
        )
    began = time.monotonic()
    try:
        start()
    except (RuntimeError, ValueError, OSError) as error:
        raise CommError(_failure(library, placement, init_method, timeout, time.monotonic() - began, error)) from error


def _has_agent_store() -> bool:
    """Whether torchrun already runs a store for this process; `env://` finds it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _loopback_starter(library: str, timeout: timedelta, placement: RankPlacement, address: str) -> Callable[[], None]:
    """Return a function that starts like `env://`, but with a store that listens on `address` only."""

    def start() -> None:
        is_master = placement.rank == 0
        store = torch_dist.TCPStore(
            address,
            placement.master_port,
            placement.world_size,
            is_master,
            timeout,
            multi_tenant=True,
            master_listen_fd=_listen(address, placement.master_port) if is_master else None,
        )
        _starter(library, timeout, store=store, rank=placement.rank, world_size=placement.world_size)()

    return start


def _listen(address: str, port: int) -> int | None:
    """Return a listening socket for the store; None if the port is taken, maybe by a store of this process, which torch
    then shares."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024).detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _starter(library: str, timeout: timedelta, **kwargs: Any) -> Callable[[], None]:
    return lambda: torch_dist.init_process_group(library, timeout=timeout, **kwargs)


def _failure(
    library: str, placement: RankPlacement, init_method: str | None, timeout: timedelta, took_s: float, error: Exception
) -> str:
    where = init_method or f"{placement.master_addr}:{placement.master_port}"
    return (
        f"rank {placement.rank} of {placement.world_size} could not join the process group over {library!r} at {where}"
        f" after {took_s:.1f} s (timeout {timeout.total_seconds():g} s; placement from {placement.source}):"
        f" {first_line(error)}. Check that rank 0 runs on {placement.master_addr}, that the port is free there and open"
        f" to this machine, that all {placement.world_size} ranks were started, and that torch has the {library!r}"
        " backend"
    )
