"""Read this process's place in the job from the environment: its rank, the world size and the address of rank 0.

`start.init_distributed` calls `find_placement`. Each reader takes the environment and returns a `RankPlacement`, or
None if another launcher started this process. An incomplete environment raises `CommError` with the missing names.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed.errors import CommError, counted, environment_int, shown, stated
from deepspeed.log import warn_once

# rank, size and local rank under the names of Open MPI, MVAPICH, and MPICH with Intel MPI
_MPI_NAMES = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
_LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class RankPlacement:
    """The place of one process in a job. `source` describes, for messages, where it was found."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    source: str

    def __post_init__(self) -> None:
        if not (self.world_size >= 1 and 0 <= self.rank < self.world_size and self.local_rank >= 0):
            raise CommError(
                f"{self.source} gives rank {self.rank} of {self.world_size} and local rank {self.local_rank};"
                " the rank must be at least 0 and below the world size"
            )

    def export(self) -> None:
        """Set the environment variables that torch and other libraries read."""
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.world_size)
        os.environ["LOCAL_RANK"] = str(self.local_rank)
        if self.world_size > 1:
            os.environ["MASTER_ADDR"] = self.master_addr
            os.environ["MASTER_PORT"] = str(self.master_port)


def find_placement(
    rank: int, world_size: int, default_port: int, use_mpi: bool, has_init_method: bool = False
) -> RankPlacement:
    """Return the placement from the first source that has one: arguments, launcher, MPI, Slurm, a single process."""
    env = os.environ
    if rank >= 0 or world_size >= 0:
        return _from_arguments(env, rank, world_size, default_port, has_init_method)
    found = _from_launcher(env, default_port, has_init_method)
    if found is None and use_mpi:
        found = _from_mpi(env, default_port)
    if found is None:
        found = _from_slurm(env, default_port)
    return found or RankPlacement(0, 1, 0, _LOCALHOST, default_port, "no environment (a single process)")


def loopback_address(host: str) -> str | None:
    """Return `host` as a loopback address, which only this machine can reach; None if `host` is no loopback."""
    if host == "localhost":
        return _LOCALHOST
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:  # another name
        return None


def first_slurm_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `gpu[003-005,9],login` -> `gpu003`."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    prefix, number, suffix = match.groups() if match else ("", None, None)
    host = f"{prefix}{number or ''}{suffix or ''}"
    if not host:
        raise CommError(f"the Slurm node list {nodelist!r} names no host; set MASTER_ADDR to the host of rank 0")
    return host


def _from_arguments(
    env: Mapping[str, str], rank: int, world_size: int, default_port: int, has_init_method: bool
) -> RankPlacement:
    if rank < 0 or world_size < 1:
        raise CommError(f"init_distributed got rank={rank} and world_size={world_size}; give both, or neither")
    source = "the arguments of init_distributed"
    addr = _address(env)
    if addr is None and world_size > 1 and not has_init_method:
        raise _half_set(source, f"rank={rank}, world_size={world_size}", ["MASTER_ADDR"])
    return RankPlacement(rank, world_size, _local_rank(env, rank), addr or _LOCALHOST, _port(env, default_port), source)


def is_rank(env: Mapping[str, str]) -> bool:
    """True if these are the variables of a process that a launcher, MPI or Slurm's srun started as one of several."""
    names = ("RANK", "WORLD_SIZE", *(rank_key for _, rank_key, _, _ in _MPI_NAMES))
    return any(name in env for name in names) or ("SLURM_STEP_ID" in env and "SLURM_PROCID" in env)


def _from_launcher(env: Mapping[str, str], default_port: int, has_init_method: bool) -> RankPlacement | None:
    """Read the variables of torchrun, the `deepspeed` launcher, accelerate, or a user's own exports."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    source = "the environment (RANK, WORLD_SIZE)"
    required = ["RANK", "WORLD_SIZE"]
    if env.get("WORLD_SIZE") != "1" and not has_init_method:
        required += ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in required if name not in env]
    if missing:
        present = ", ".join(stated(name) for name in required if name in env)
        raise _half_set(source, present, missing)
    rank = _integer(env, "RANK")
    addr = _address(env) or _LOCALHOST
    return RankPlacement(rank, _size(env, "WORLD_SIZE"), _local_rank(env, rank), addr, _port(env, default_port), source)


def _from_mpi(env: Mapping[str, str], default_port: int) -> RankPlacement | None:
    for name, rank_key, size_key, local_key in _MPI_NAMES:
        # srun --mpi=pmi2 sets PMI_RANK too; then Slurm's own variables have more details and need no library.
        if rank_key not in env or (rank_key == "PMI_RANK" and "SLURM_PROCID" in env):
            continue
        if size_key not in env:
            raise _half_set(name, stated(rank_key), [size_key])
        rank, world_size = _integer(env, rank_key), _size(env, size_key)
        if local_key in env:
            local_rank = _integer(env, local_key)
        else:
            local_rank = _local_rank(env, rank)
        addr = _address(env) or (_LOCALHOST if world_size == 1 else _master_by_mpi(name))
        return RankPlacement(rank, world_size, local_rank, addr, _port(env, default_port), name)
    return None


def _master_by_mpi(name: str) -> str:
    """The address of rank 0, broadcast by MPI."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise CommError(
            f"{name} started this process, but mpi4py, which finds the address of rank 0, cannot be imported ({error});"
            " run `pip install mpi4py`, or set MASTER_ADDR and MASTER_PORT"
        ) from error
    return str(MPI.COMM_WORLD.bcast(_own_address(), root=0))


def _own_address() -> str:
    """The address by which other machines reach this host: the address of its name, or the name if that is loopback."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return socket.gethostname()
    return socket.gethostname() if address.startswith("127.") else address


def _from_slurm(env: Mapping[str, str], default_port: int) -> RankPlacement | None:
    """Place a task that srun started. In a batch script or an salloc shell the same names describe the whole job."""
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return None
    size_key = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    if size_key not in env:
        raise _half_set("Slurm", stated("SLURM_PROCID"), ["SLURM_NTASKS"])
    world_size = _size(env, size_key)
    if world_size == 1:
        return None
    addr = _address(env)
    if addr is None:
        nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if nodelist is None:
            raise _half_set("Slurm", f"{size_key}={world_size}", ["SLURM_JOB_NODELIST or MASTER_ADDR"])
        addr = first_slurm_host(nodelist)
    rank = _integer(env, "SLURM_PROCID")
    local_rank = _integer(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else _local_rank(env, rank)
    return RankPlacement(rank, world_size, local_rank, addr, _port(env, default_port), "Slurm (srun)")


def _local_rank(env: Mapping[str, str], rank: int) -> int:
    """Return LOCAL_RANK; if unset, assume that ranks fill machines that all have as many devices as this one."""
    if "LOCAL_RANK" in env and env["LOCAL_RANK"] != "-1":
        return _integer(env, "LOCAL_RANK")
    if rank == 0:
        return 0
    from deepspeed.accelerator import get_accelerator

    num_devices = max(1, get_accelerator().device_count())
    warn_once(
        f"LOCAL_RANK is not set; taking {rank % num_devices}: rank {rank} modulo {counted(num_devices, 'device')}",
        (-1,),
    )
    return rank % num_devices


def _port(env: Mapping[str, str], default_port: int) -> int:
    if "MASTER_PORT" not in env:
        return default_port
    return environment_int("MASTER_PORT", most=2**16 - 1, error=CommError, environment=env)


def _address(env: Mapping[str, str]) -> str | None:
    """Return MASTER_ADDR, None if unset. Raises `CommError` if it cannot be a host name or address."""
    address = env.get("MASTER_ADDR")
    if address is not None and not re.fullmatch(r"[^\s\x00-\x1f]{1,255}", address):
        raise CommError(f"the environment variable MASTER_ADDR: found {shown(address)}; set it to the host of rank 0")
    return address


def _integer(env: Mapping[str, str], name: str) -> int:
    return environment_int(name, error=CommError, environment=env)


def _size(env: Mapping[str, str], name: str) -> int:
    return environment_int(name, least=1, error=CommError, environment=env)


def _half_set(source: str, present: str, missing: list[str]) -> CommError:
    return CommError(
        f"{source}: half set: found {present}, missing {', '.join(missing)}; start the script with `deepspeed` or"
        " `torchrun`, which set all of them, set the missing ones, or unset all to run as a single rank"
    )
