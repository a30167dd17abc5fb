"""The load of a job of 16 to 1,024 ranks on its store, its launcher and each rank before the first step.

    python benchmarks/scale.py                    # all parts, some ten minutes
    python benchmarks/scale.py --ranks 16 64 --parts meetings meshes

Ranks are simulated (`deepspeed.testing.many_ranks`): threads of one process with a simulated clock and a real
`TCPStore`. Operations and bytes (of keys and values) are exact and printed per rank, so a job that grows linearly has
equal lines. `store ms` is the CPU time of the store's thread for the whole job, and depends on the machine. gloo's
connections are real, up to `--gloo-ranks`. Parts:

- clients: connections to the store, one after the other, which takes minutes for 1,024;
- meetings: a call where all ranks meet, at the same time or with one late rank;
- waits: ranks that wait long in a collective for a late rank;
- ends: each rank of one half writes its end twice, as under the launcher; the others read who has ended;
- meshes: the groups of a mesh of four axes, with tp 8, sp 2, pp 4 if there are enough ranks;
- gathers: values that ranks compare in `initialize` at stages 0 to 3; only the first rank's code runs;
- gloo: gloo's requests to connect all ranks, with torch's default and with TORCH_GLOO_LAZY_INIT=1;
- launcher: `--dry_run` of hosts with 8 slots, and the nodes' agents: they meet, wait for an end, and re-form.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as torch_dist
from deepspeed.comm import failure, own_group, parted
from deepspeed.comm.values import Arrivals
from deepspeed.comm.watch import Collective, Issued
from deepspeed.launcher import nodes
from deepspeed.launcher.membership import Membership
from deepspeed.launcher.plan import NodeFailure
from deepspeed.parallel import mesh as mesh_module
from deepspeed.parallel.layout import grid
from deepspeed.testing.many_ranks import CountingStore, ManyRanks
from torch import float32

Row = dict[str, Any]
SLOTS = 8
LATE_S = (0.0, 5.0, 60.0)
LIMIT = timedelta(seconds=60)


# ---- the store -------------------------------------------------------------------------------------------------------


class TimedStore:
    """A `TCPStore` in this process, and the CPU time of its thread."""

    def __init__(self) -> None:
        before = set(os.listdir("/proc/self/task"))
        self.store = torch_dist.TCPStore("127.0.0.1", 0, 1, True, LIMIT, wait_for_workers=False)
        self._threads = set(os.listdir("/proc/self/task")) - before

    def cpu_ms(self) -> float:
        """Return the CPU milliseconds so far."""
        spent_ns = [int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in self._threads]
        return sum(spent_ns) / 1e6


def simulate(
    num_ranks: int, job: Callable[[ManyRanks], Callable[[int], Any]], starts_s: list[float], *clocked: ModuleType
) -> Row:
    """Run a job, and return a row with the ranks' load on the store and the store's CPU time."""
    timed = TimedStore()
    ranks = ManyRanks(num_ranks, timed.store)
    before_ms = timed.cpu_ms()
    with ranks.simulated(*clocked):
        ranks.run(job(ranks), starts_s)
    return row_of(num_ranks, ranks.store, timed.cpu_ms() - before_ms)


def row_of(num_ranks: int, store: CountingStore, store_ms: float) -> Row:
    return {
        "ranks": num_ranks,
        "operations": store.num_operations / num_ranks,
        "bytes": store.num_bytes / num_ranks,
        "store_ms": store_ms,
    }


def first_is_late(num_ranks: int, late_s: float) -> list[float]:
    return [late_s] + [0.0] * (num_ranks - 1)


# ---- parts -----------------------------------------------------------------------------------------------------------


def clients(num_ranks: int) -> Iterator[Row]:
    """Connect one client after the other."""
    timed = TimedStore()
    before_ms = timed.cpu_ms()
    port = timed.store.port
    # no number of ranks: with it, torch waits a random time before each connection
    made = [
        torch_dist.TCPStore("127.0.0.1", port, None, False, LIMIT, wait_for_workers=False) for _ in range(num_ranks)
    ]
    yield {"ranks": num_ranks, "connections": len(made), "store_ms": timed.cpu_ms() - before_ms}


def meetings(num_ranks: int) -> Iterator[Row]:
    """Simulate a save with a late first rank."""

    def job(_: ManyRanks) -> Callable[[int], int]:
        return lambda _: Arrivals(range(num_ranks), "a group", 600.0).wait_for_all("save_checkpoint")

    for late_s in LATE_S:
        yield {"late_s": late_s, **simulate(num_ranks, job, first_is_late(num_ranks, late_s))}


def waits(num_ranks: int) -> Iterator[Row]:
    """Simulate ten polls of all ranks for the first rank, which is late for the collective after 200 others."""
    name = "deepspeed/failure/0/0/0"

    def job(ranks: ManyRanks) -> Callable[[int], None]:
        members_of_all = list(range(num_ranks))
        ranks.num_started = {f"{name}{number}": 200 for number in range(10)}

        def look(rank: int) -> None:
            if rank == 0:
                return
            with patch.object(torch_dist.distributed_c10d, "_get_process_group_name", lambda _: "0"):
                issued = Issued(rank, num_ranks, failure.FailureRecord(None))  # type: ignore[arg-type]  # its name only
            for _ in range(200):
                issued.add(Collective("reduce-scatter", 4_000_000, float32, "gradients"))
            parted.put_note(ranks.store, "reduce-scatter", name, "", members_of_all, 200)  # type: ignore[arg-type]
            for _ in range(10):
                ranks.sleep(1.0)
                assert parted.find(members_of_all, "a sum", lambda *_: True, kind=name) is None
                assert not issued.crossing()
            parted.take_note_back(ranks.store, name)  # type: ignore[arg-type]

        return look

    yield simulate(num_ranks, job, [0.0] * num_ranks)


def ends(num_ranks: int) -> Iterator[Row]:
    """Simulate ranks and launchers that note the end of half of the ranks. The others look once."""

    def job(ranks: ManyRanks) -> Callable[[int], None]:
        def end_or_look(rank: int) -> None:
            if rank < num_ranks // 2:
                failure.note_end(ranks.store, rank)  # type: ignore[arg-type]  # counts
                failure.note_end(ranks.store, rank)  # type: ignore[arg-type]
            else:
                assert len(failure.ended_of(range(num_ranks))) == num_ranks // 2

        return end_or_look

    yield simulate(num_ranks, job, [0.0] * num_ranks)


class World:
    """A stand-in for the world group of a rank."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def size(self) -> int:
        """Return the number of ranks."""
        return self._num_ranks


def axes_of(num_ranks: int) -> dict[str, int]:
    tp = min(8, num_ranks // 2)
    sp = 2 if num_ranks // tp >= 8 else 1
    pp = 4 if num_ranks // (tp * sp) >= 8 else 1
    return {"pp": pp, "dp": num_ranks // (tp * sp * pp), "sp": sp, "tp": tp}


def meshes(num_ranks: int) -> Iterator[Row]:
    """Create a mesh on every rank, without the library's part of each group."""
    axes, seconds, made = axes_of(num_ranks), list[float](), list[int]()
    worlds = [World(num_ranks) for _ in range(num_ranks)]

    class Group:
        @property
        def WORLD(self) -> World:
            return worlds[torch_dist.get_rank()]

    def new_group(of: list[int], **_: Any) -> World:
        made.append(len(of))
        return World(len(of))

    def job(_: ManyRanks) -> Callable[[int], None]:
        def make(_: int) -> None:
            start = time.thread_time()
            mesh_module.Mesh(grid(**axes, ranks=tuple(range(num_ranks))))
            seconds.append(time.thread_time() - start)

        return make

    own = SimpleNamespace(get_world_group=lambda: Group().WORLD, get_rank=lambda: int(torch_dist.get_rank()))
    with (
        patch.object(own_group, "torch_dist", SimpleNamespace(group=Group(), new_group=new_group)),
        patch.object(own_group, "timeout_of", lambda _: LIMIT),
        patch.object(mesh_module, "dist", own),
        patch.object(torch_dist, "get_backend", lambda _: "gloo"),
    ):
        found = simulate(num_ranks, job, [0.0] * num_ranks)
    named = " x ".join(f"{axis} {size}" for axis, size in axes.items())
    yield {**found, "mesh": named, "groups": len(made) / num_ranks, "own_cpu_ms": sum(seconds) / num_ranks * 1e3}


INITIALIZE = """
import json, os, sys, time
import torch
import torch.distributed as torch_dist
from torch.testing._internal.distributed.fake_pg import FakeStore
num_ranks, stage = int(sys.argv[1]), int(sys.argv[2])
torch_dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
os.environ.update(RANK="0", WORLD_SIZE=str(num_ranks), LOCAL_RANK="0")
import deepspeed
from deepspeed.comm import values
gathered = []
def all_gather(tensor, group, backend, call=""):
    gathered.append(tensor.numel() * tensor.element_size())
    return [tensor.clone().cpu()] * torch_dist.get_world_size(group if backend is None else backend.group)
values._all_gather = all_gather
met = []
values.Arrivals.wait_for_all = lambda self, call: met.append(call) or len(met)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(100)))
start = time.process_time()
deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
})
print(json.dumps({"gathers": len(gathered), "bytes": sum(gathered), "own_cpu_ms": (time.process_time() - start) * 1e3}))
"""


def gathers(num_ranks: int) -> Iterator[Row]:
    """Run `initialize` on the first rank only. `bytes`: sent by each rank, and received from every other rank."""
    for stage in range(4):
        command = [sys.executable, "-c", INITIALIZE, str(num_ranks), str(stage)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        yield {"ranks": num_ranks, "stage": stage, **json.loads(output.splitlines()[-1])}


class PythonStore(torch_dist.Store):
    """A counting store for torch's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = CountingStore(torch_dist.HashStore())
        for name in ("set", "get", "add", "check", "wait", "multi_get", "multi_set", "append"):
            setattr(type(self), name, _forwarded(name))

    def has_extended_api(self) -> bool:
        """Return True, like a TCPStore."""
        return True


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.counting, name)(*args)


def gloo(num_ranks: int) -> Iterator[Row]:
    """Create each rank's process group in a thread, and run a barrier."""
    for is_lazy in (False, True):
        os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(is_lazy))
        store, kept = PythonStore(), [None] * num_ranks

        def connect(rank: int, store: PythonStore = store, kept: list[Any] = kept) -> None:
            kept[rank] = torch_dist.ProcessGroupGloo(torch_dist.PrefixStore("0", store), rank, len(kept), LIMIT)
            kept[rank].barrier().wait()

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield {"lazy": is_lazy, **row_of(num_ranks, store.counting, 0.0)}


def launcher(num_ranks: int) -> Iterator[Row]:
    """Measure the launcher for `num_ranks` on hosts with 8 slots."""
    num_hosts = num_ranks // SLOTS
    with tempfile.TemporaryDirectory() as folder:
        hostfile, script = Path(folder) / "hostfile", Path(folder) / "train.py"
        hostfile.write_text("".join(f"worker-{host} slots={SLOTS}\n" for host in range(num_hosts)))
        script.touch()
        program = Path(sys.executable).with_name("deepspeed")
        flags = ["--launcher", "ssh", "--force_multi", "--no_ssh_check", "--master_addr", "worker-0", "--dry_run"]
        command = [str(program), "--hostfile", str(hostfile), *flags, str(script)]
        before = os.times()
        output = subprocess.run(command, check=True, capture_output=True).stdout
        after = os.times()
    cpu_ms = (after.children_user + after.children_system - before.children_user - before.children_system) * 1e3
    yield {"hosts": num_hosts, "what": "commands", "bytes": len(output) / num_hosts, "own_cpu_ms": cpu_ms}
    for what, job in (("meet", meet_nodes), ("wait for an end", watch_nodes)):
        for late_s in LATE_S[1:]:
            found = simulate(num_hosts, job, first_is_late(num_hosts, late_s), nodes)
            yield {"hosts": num_hosts, "what": what, "late_s": late_s, **found}
    yield {"hosts": num_hosts, "what": "re-form after a loss", **reform(num_hosts)}


def meet_nodes(ranks: ManyRanks) -> Callable[[int], None]:
    def meet(node: int) -> None:
        rendezvous = nodes.NodeRendezvous("worker-0", 0, None, node, ranks.world_size)
        rendezvous._meet(ranks.store)  # type: ignore[arg-type]

    return meet


def watch_nodes(ranks: ManyRanks) -> Callable[[int], None]:
    def watch(node: int) -> None:
        """Let node 0 fail late. The other nodes poll like their threads, and read the cause."""
        peers = nodes.NodePeers(ranks.store, node, ranks.world_size)  # type: ignore[arg-type]
        if node == 0:
            peers.post(NodeFailure(0, 1, 1, False, "RuntimeError: no memory"))
        while not (node == 0 or peers.failures()):
            ranks.sleep(nodes._interval_s(ranks.world_size))

    return watch


def reform(num_hosts: int) -> Row:
    """Form an elastic job, lose a node and re-form. Return messages and bytes to nodes, and the rules' CPU time."""
    sent: list[int] = []
    rules = Membership(1, num_hosts, 3, num_hosts, lambda _, what: sent.append(len(json.dumps(what))), lambda _: None)
    start = time.process_time()
    for node in range(num_hosts):
        rules.join(node, {"name": f"worker-{node}", "node_rank": node, "num_ranks": SLOTS})
        rules.take(node, {"kind": "ready"})
    rules.lose(num_hosts - 1)
    for node in range(num_hosts - 1):
        rules.take(node, {"kind": "ready", "round": 0})
    spent_ms = (time.process_time() - start) * 1e3
    return {"messages": len(sent) / num_hosts, "bytes": sum(sent) / num_hosts, "own_cpu_ms": spent_ms}


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {
    each.__name__: each for each in (clients, meetings, waits, ends, meshes, gathers, gloo, launcher)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64, 256, 1024])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--gloo-ranks", type=int, default=64, help="the most that connect for real")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for part in arguments.parts:
        for num_ranks in arguments.ranks:
            if part == "gloo" and num_ranks > arguments.gloo_ranks:
                continue
            for row in PARTS[part](num_ranks):
                rows.append({"part": part, **row})
                print(*(f"{name} {_shown(value)}" for name, value in rows[-1].items()), sep="  ", flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1))


def _shown(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
