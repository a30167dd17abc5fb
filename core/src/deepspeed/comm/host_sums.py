"""`HostSums`: sums of a few numbers of the host over the ranks of a group whose library serves a device only.

A collective of the device gives its result to the device, and a host that reads it waits for all work that was queued
before. What the hosts know, such as which parameters got a gradient, is summed over gloo instead: the host waits for
the hosts of its peers, and the device goes on. Used by `zero/step_agreement.py`.
"""

import time

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import Work
from deepspeed.comm.give_up import join
from deepspeed.comm.issued import Collective
from deepspeed.comm.own_group import host_group
from deepspeed.comm.record import comms_logger, waited
from deepspeed.comm.watch import Watch
from deepspeed.comm.work import as_work
from deepspeed.errors import CommError


class HostSums:
    """`HostSums` sums a few numbers of the hosts across the ranks of a group, by gloo connections of its own.

    Args:
        group: the group of a device; this process is a member of the group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._device_group = group
        self._watch = Watch(group)
        self._is_connected = self._is_refused = False
        join(self)

    def connect(self) -> bool:
        """Make the connections; idempotent. Called by all ranks together. The first sum does it, too.

        Returns:
            Whether there are any; False, on all ranks alike, where a rank cannot reach the others.
        """
        if not (self._is_connected or self._is_refused):
            group = host_group(self._device_group, self._watch.meet())
            self._is_refused = group is None
            if group is not None:
                self._watch.group = group
                self._is_connected = True
        return self._is_connected

    def sum(self, values: list[float]) -> list[float]:
        """`values` summed over the ranks, in fp64. A collective.

        Raises:
            CommError: a peer failed, with its exception; or there are no connections.
        """
        if not self.connect():
            raise CommError("found no connections between hosts; set GLOO_SOCKET_IFNAME to the name of an interface")
        sums_N = torch.tensor(values, dtype=torch.float64, device="cpu")
        collective = Collective("an all-reduce between hosts", len(values), sums_N.dtype, "")
        start = time.perf_counter()
        waited(self._watch.start(lambda: _all_reduce(sums_N, self._watch.group), collective).wait)
        if comms_logger.wants("all_reduce", prof=False):
            comms_logger.add("all_reduce", sums_N.nbytes, time.perf_counter() - start)
        return sums_N.tolist()  # type: ignore[no-any-return]

    def abandon(self) -> None:
        """This rank failed: peers that wait for it in a sum raise. Waits for nobody.

        A rank whose peer failed calls it, too, so that those which go on make new connections together.
        """
        self._watch.abandon([], failed=True)
        self._is_connected = False


def _all_reduce(sums_N: torch.Tensor, group: ProcessGroup) -> Work:
    return as_work(torch_dist.all_reduce(sums_N, group=group, async_op=True))
