"""simccl: the communication library of the simulated device, made of gloo and copies.

An exchange reads its tensors when it is issued, as the stream's order has them then. Its result comes with `wait`, as a
copy on the stream that is current there: who does not wait, or waits on another stream, sees what was there before. A
tensor of the host is refused, as the libraries of real devices do.
"""

import torch
import torch.distributed as dist

#: copies to host memory that stand for what a library does on the device, where no host waits
own_host_waits = 0


def register(name, device_type):
    """Make the library known to torch.distributed as `name`, for tensors of `device_type`."""

    def create(store, rank, world_size, timeout):
        return SimGroup(store, rank, world_size, timeout, name, device_type)

    dist.Backend.register_backend(name, create, devices=[device_type])


class _Arrival(dist.Work):
    """gloo's work on host memory, and where its results go on the device."""

    def __init__(self, work, pairs):
        super().__init__()
        self._work = work
        self._pairs = pairs  # (of the device, of the host)

    def wait(self, timeout=None):
        if self._work is not None:
            self._work.wait()
            self._work = None
        for target, host in self._pairs:
            target.copy_(host, non_blocking=True)
        self._pairs = []
        return True

    def is_completed(self):
        return self._work is None or self._work.is_completed()

    def get_future(self):
        future = torch.futures.Future()
        self.wait()
        future.set_result(None)
        return future


class SimGroup(dist.ProcessGroup):
    """One group of ranks."""

    def __init__(self, store, rank, world_size, timeout, name, device_type):
        super().__init__(rank, world_size)
        self._name, self._device_type = name, device_type
        self._gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)

    @property
    def _device_types(self):
        return [torch.device(self._device_type)]

    def getBackendName(self):
        return self._name

    # ----- one tensor ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors, opts=None):
        return self._in_place(tensors, self._gloo.allreduce, opts or dist.AllreduceOptions())

    def broadcast(self, tensors, opts):
        return self._in_place(tensors, self._gloo.broadcast, opts)

    def reduce(self, tensors, opts):
        return self._in_place(tensors, self._gloo.reduce, opts)

    def send(self, tensors, rank, tag):
        return _Arrival(self._gloo.send([self._to_host(tensor) for tensor in tensors], rank, tag), [])

    def recv(self, tensors, rank, tag):
        return self._in_place(tensors, lambda hosts, _: self._gloo.recv(hosts, rank, tag), None)

    def _in_place(self, tensors, exchange, opts):
        hosts = [self._to_host(tensor) for tensor in tensors]
        return _Arrival(exchange(hosts, opts), list(zip(tensors, hosts, strict=True)))

    # ----- pieces ----------------------------------------------------------------------------------------------------

    def _allgather_base(self, output, tensor, opts=None):
        host = self._to_host(output)
        work = self._gloo._allgather_base(host, self._to_host(tensor), opts or dist.AllgatherOptions())
        return _Arrival(work, [(output, host)])

    def allgather(self, outputs, tensors, opts=None):
        hosts = [[self._to_host(tensor) for tensor in each] for each in outputs]
        work = self._gloo.allgather(
            hosts, [self._to_host(tensor) for tensor in tensors], opts or dist.AllgatherOptions()
        )
        return _Arrival(work, _paired(outputs, hosts))

    def _reduce_scatter_base(self, output, tensor, opts):
        host = self._to_host(output)
        work = self._gloo._reduce_scatter_base(host, self._to_host(tensor), opts)
        return _Arrival(work, [(output, host)])

    def reduce_scatter(self, outputs, tensors, opts):
        hosts = [self._to_host(tensor) for tensor in outputs]
        parts = [[self._to_host(tensor) for tensor in each] for each in tensors]
        return _Arrival(self._gloo.reduce_scatter(hosts, parts, opts), list(zip(outputs, hosts, strict=True)))

    def gather(self, outputs, tensors, opts):
        hosts = [[self._to_host(tensor) for tensor in each] for each in outputs]
        work = self._gloo.gather(hosts, [self._to_host(tensor) for tensor in tensors], opts)
        return _Arrival(work, _paired(outputs, hosts))

    def scatter(self, outputs, tensors, opts):
        hosts = [self._to_host(tensor) for tensor in outputs]
        parts = [[self._to_host(tensor) for tensor in each] for each in tensors]
        return _Arrival(self._gloo.scatter(hosts, parts, opts), list(zip(outputs, hosts, strict=True)))

    def alltoall_base(self, output, tensor, output_sizes, input_sizes, opts):
        host = self._to_host(output)
        work = self._gloo.alltoall_base(host, self._to_host(tensor), output_sizes, input_sizes, opts)
        return _Arrival(work, [(output, host)])

    # torch 2.13's names
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def barrier(self, opts=None):
        return self._gloo.barrier(opts or dist.BarrierOptions())

    def _to_host(self, tensor):
        """A contiguous copy in page-locked memory: what the current stream has made of `tensor` by now."""
        if tensor.device.type != self._device_type:
            raise RuntimeError(
                f"{self._name}: no backend for a tensor on {tensor.device}; "
                f"only those of {self._device_type} can be exchanged"
            )
        global own_host_waits
        own_host_waits += tensor.numel() > 0
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor.detach())


def _paired(targets, hosts):
    return [pair for mine, theirs in zip(targets, hosts, strict=True) for pair in zip(mine, theirs, strict=True)]
