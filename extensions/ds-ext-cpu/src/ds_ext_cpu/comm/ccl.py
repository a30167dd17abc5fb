"""`ccl` is a torch process group between the processes of one host, implemented in C++ (`csrc/comm/`).

`deepspeed.init_distributed(dist_backend="ccl")` registers `ccl`; programs without DeepSpeed call `register()` before
`torch.distributed.init_process_group("ccl")`. If oneCCL's binding for torch is installed, `ccl` is that binding.

`connect` checks that all ranks are on one host, and maps one shared memory segment. The segment's name is removed when
all ranks have mapped it. A segment that a killed rank left is removed when the next group is created (`sweep`).
"""

import contextlib
import errno
import importlib
import importlib.util
import os
import re
import secrets
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from deepspeed.errors import CommError, counted, stated
from torch.distributed import Store

from ds_ext_cpu.op_builder.comm import CCLCommBuilder

#: import name of Intel's oneCCL binding, which registers itself with torch
ONECCL_MODULE = "oneccl_bindings_for_pytorch"
TRANSPORT_VARIABLE = "DS_CCL_TRANSPORT"
_FOLDER = Path("/dev/shm")  # noqa: S108 -- the system's shared memory
_REMEDY = 'ask for gloo: init_distributed(dist_backend="gloo")'


def register() -> None:
    """Register `ccl` with torch.distributed; idempotent. The library is compiled later, by the first process group."""
    if importlib.util.find_spec(ONECCL_MODULE) is not None:
        importlib.import_module(ONECCL_MODULE)
    elif "ccl" not in torch_dist.Backend.backend_list:
        torch_dist.Backend.register_backend("ccl", _create, extended_api=True, devices=["cpu"])


def transport(group: torch_dist.ProcessGroup | None = None) -> str:
    """Return the transport of `group` (None: all ranks): `"read"`, from the memory of peers, or `"shm"`.

    Raises:
        CommError: the group does not use this library.
    """
    group = torch_dist.group.WORLD if group is None else group
    library: Any = None if group is None else group._get_backend(torch.device("cpu"))
    if not hasattr(library, "transport"):
        raise CommError("transport() was asked of a group that ds-ext-cpu's ccl does not serve")
    return str(library.transport)


def _create(options: Any, _: object) -> torch_dist.ProcessGroup:
    """Create the group's backend. torch calls this on all ranks of a group together."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return connect(options.store, options.group_rank, ranks, options.timeout)


def connect(store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> Any:
    """Create the `ProcessGroupCCL` of a group. All ranks of the group call this together.

    Args:
        store: a store that only this group uses.
        rank: the rank of this process in the group.
        ranks: the global ranks of the group.
        timeout: how long to wait for a peer, here and in collectives without their own timeout.

    Raises:
        CommError: the ranks are not on one host, there are too many, or there is not enough shared memory.
        OpUnavailable: the library cannot be compiled here.
    """
    wish = os.environ.get(TRANSPORT_VARIABLE, "").strip()
    if wish not in ("", "read", "shm"):
        raise CommError(
            f"{stated(TRANSPORT_VARIABLE)}: 'read' (ranks read each other's memory) or 'shm' (everything passes "
            "through shared memory) is expected; unset it to have the ranks choose"
        )
    module = CCLCommBuilder().load()
    size = len(ranks)
    if size > module.MAX_RANKS:
        raise CommError(f"ccl: found {counted(size, 'rank')}, and it has at most {module.MAX_RANKS}; {_REMEDY}")
    store.set(f"host/{rank}", f"{_host()} {socket.gethostname()}")
    with _segment(store, rank, ranks, module) as descriptor:
        try:
            return module.ProcessGroupCCL(
                descriptor, rank, size, list(ranks), timeout // timedelta(milliseconds=1), wish
            )
        except torch_dist.DistError as error:
            raise CommError(f"ccl: {error}") from None


@contextlib.contextmanager
def _segment(store: Store, rank: int, ranks: Sequence[int], module: Any) -> Iterator[int]:
    """Open the shared memory and yield its descriptor. Its name exists until the first rank leaves this context."""
    if rank > 0:
        answer = store.get("segment").decode()
        if not answer.startswith(_PREFIX):
            raise CommError(answer)
        descriptor = os.open(_FOLDER / answer, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        return
    sweep(module)
    name = f"{_PREFIX}{_own_mark(module)}.{secrets.token_hex(8)}"
    descriptor = -1
    try:
        try:
            _check_hosts([store.get(f"host/{peer}").decode() for peer in range(len(ranks))], ranks)
            descriptor = _make(name, module.segment_bytes(len(ranks)))
        except CommError as error:
            store.set("segment", str(error))
            raise
        store.set("segment", name)
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)
            (_FOLDER / name).unlink(missing_ok=True)


def sweep(module: Any) -> None:
    """Remove the segments of ended processes of this user and this PID namespace."""
    user, space = os.getuid(), _name_space()
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        found = _NAME.fullmatch(path.name)
        if found is None or (int(found["user"]), int(found["space"])) != (user, space):
            continue
        if module.start_time(int(found["process"])) != int(found["start"]):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # removed by another process, or not ours
                path.unlink()


_PREFIX = "ds_ccl."
_NAME = re.compile(r"ds_ccl\.(?P<user>\d+)\.(?P<space>\d+)\.(?P<process>\d+)\.(?P<start>\d+)\.[0-9a-f]+")


def _own_mark(module: Any) -> str:
    return f"{os.getuid()}.{_name_space()}.{os.getpid()}.{module.start_time(os.getpid())}"


def _name_space() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _host() -> str:
    """Return an id that is equal on processes that can share memory: the boot id, and the device of /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{_FOLDER.stat().st_dev}"


def _check_hosts(hosts: Sequence[str], ranks: Sequence[int]) -> None:
    by_host: dict[str, list[int]] = {}
    for host, rank in zip(hosts, ranks, strict=True):
        by_host.setdefault(host, []).append(rank)
    if len(by_host) > 1:
        places = "; ".join(f"{', '.join(map(str, found))} on {host.split()[-1]}" for host, found in by_host.items())
        raise CommError(
            f"ccl serves ranks that share the memory of one host, and these are in {len(by_host)} places (ranks "
            f"{places}; containers of one host need one /dev/shm); {_REMEDY}"
        )


def _make(name: str, num_bytes: int) -> int:
    path = _FOLDER / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # without this, a later lack of memory would kill the process
    except OSError as error:
        os.close(descriptor)
        path.unlink()
        if error.errno != errno.ENOSPC:
            raise
        raise CommError(
            f"ccl: {num_bytes >> 10} KiB of shared memory are needed, and {_FOLDER} is full; make it larger (docker "
            f"run --shm-size=1g), or {_REMEDY}"
        ) from None
    return descriptor
