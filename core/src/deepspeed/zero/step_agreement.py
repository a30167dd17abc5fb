"""`StepAgreement` makes ranks agree once per step on the norm, the used parameters and the late gradients.

`Gradients` calls it. If the gradients are in host memory, one small all-reduce carries everything. If they are on a
device, the CPU does not wait for it: the CPUs sum the flags (parameters used, gradients late) among themselves, and the
squares and their sum over the ranks stay on the device. So a norm is a float or a 0-D tensor (`Scalar`), which is read
only by code that needs its value. `ExactAgreement` makes the norm independent of how gradients are divided.

A parameter that all ranks of a divided model have counts on only one of them. `UseSlots` numbers the parameters.

`HostSums` sums a few CPU numbers over the ranks of a group whose library serves only a device. A collective on the
device leaves its result on the device, and a CPU that reads the result waits for all work that was queued before. So
facts that the CPUs know, such as which parameters got a gradient, are summed over gloo: a CPU waits for the CPUs of its
peers while the device continues.
"""

import math
import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend, Work, as_work
from deepspeed.comm.give_up import join
from deepspeed.comm.own_group import host_group
from deepspeed.comm.record import comms_logger, waited
from deepspeed.comm.watch import Collective, Watch
from deepspeed.errors import CommError
from deepspeed.optim.norm import ExactSquares
from deepspeed.parallel.model_part import counted_numel, is_tensor_parallel
from deepspeed.zero.placement import GRADIENT, exact_norms, read
from deepspeed.zero.unit import ParamShard
from deepspeed.zero.unit_groups import UnitRanks


class HostSums:
    """`HostSums` sums a few CPU numbers over the ranks of a group, through its own gloo connections.

    Args:
        group: a device's process group; this process is a member.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._device_group = group
        self._watch = Watch(group)
        self._is_connected = self._is_refused = False
        join(self)

    def connect(self) -> bool:
        """Create the connections. Idempotent; all ranks call it together. The first sum also does this.

        Returns:
            Whether there are connections; False on all ranks if one rank cannot reach the others.
        """
        if not (self._is_connected or self._is_refused):
            group = host_group(self._device_group, self._watch.meet())
            self._is_refused = group is None
            if group is not None:
                self._watch.group = group
                self._is_connected = True
        return self._is_connected

    def sum(self, values: list[float]) -> list[float]:
        """Return `values` summed over the ranks, in fp64. A collective.

        Raises:
            CommError: if a peer failed (with its exception), or if there are no connections.
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
        """Make peers that wait for this rank in a sum raise, because this rank failed. Waits for no rank.

        A rank whose peer failed calls it too, so that the remaining ranks create new connections together.
        """
        self._watch.abandon([], failed=True)
        self._is_connected = False


def _all_reduce(sums_N: torch.Tensor, group: ProcessGroup) -> Work:
    return as_work(torch_dist.all_reduce(sums_N, group=group, async_op=True))


#: a CPU number, or a 0-D fp32 tensor on the device
Scalar = float | Tensor


def norms_of_own_parts(shards: Iterable[ParamShard], params: Sequence[Tensor]) -> list[Tensor]:
    """Return 0-D norms of the reduced gradients that no tensor-parallel peer has.

    Args:
        params: all attached parameters; a shard has the index of its parameter.
    """
    own = [shard for shard in shards if is_tensor_parallel(params[shard.index])]
    parts = ((shard, shard.placement.read(shard, GRADIENT, shard.grad)) for shard in own)
    return exact_norms([_counted(grad, shard, params[shard.index]) for shard, grad in parts if grad is not None])


def _counted(grad: Tensor, shard: ParamShard, param: Tensor) -> Tensor:
    """Return the part of a shard's gradient that no earlier tensor-parallel rank has."""
    numel = counted_numel(param)
    return grad if numel is None else grad.reshape(-1)[: max(0, numel - shard.fragment.param_start)]


def sum_over_model(square_sum: Scalar, model_ranks: Sequence[GroupBackend], device: torch.device) -> Scalar:
    """Return the sum over the ranks with other parts of the same model. A collective of each of `model_ranks`."""
    if not model_ranks:
        return square_sum
    total_1 = torch.empty(1, dtype=torch.float32, device=device)
    if isinstance(square_sum, Tensor):
        total_1.copy_(square_sum)
    else:
        total_1.fill_(square_sum)
    for ranks in model_ranks:
        ranks.all_reduce(total_1).wait()
    return total_1[0] if isinstance(square_sum, Tensor) else total_1.item()


class UseSlots:
    """`UseSlots` numbers the parameters, so that ranks can add up which of them got a gradient on some rank.

    A parameter that all ranks hold has one slot. An expert's parameter has one slot for each set of experts, because
    ranks with another set have another parameter in its place.

    Args:
        ranks: the ranks of each attached parameter.
    """

    def __init__(self, ranks: Iterable[UnitRanks]) -> None:
        self._own: list[int] = []  # by parameter
        self.count = 0
        for each in ranks:
            self._own.append(self.count + each.part)
            self.count += each.num_parts
        self._is_plain = self.count == len(self._own)  # no experts: slots are parameters

    def spread(self, used: Sequence[bool]) -> list[float]:
        """Return this rank's contribution to the sum: one number per slot."""
        if self._is_plain:
            return list(map(float, used))
        slots = [0.0] * self.count
        for slot, is_used in zip(self._own, used, strict=True):
            slots[slot] = float(is_used)
        return slots

    def own(self, sums: Sequence[float]) -> list[bool]:
        """Return by parameter whether a rank that holds it used it, from the sums over all ranks."""
        slots = sums[: self.count] if self._is_plain else map(sums.__getitem__, self._own)
        return [each > 0 for each in slots]


class StepAgreement:
    """`StepAgreement` lets all ranks agree once per step on the norm, the used parameters and the late gradients.

    Args:
        backend: the backend of the ranks that agree.
        model_ranks: one backend per axis (tp, pp) along which the caller divided the model.
        is_offloaded: whether the optimizer runs on the CPU, which then reads the norm anyway.
    """

    def __init__(
        self, backend: GroupBackend, model_ranks: Sequence[GroupBackend] = (), *, is_offloaded: bool = False
    ) -> None:
        self._backend = backend
        self._model_ranks = model_ranks
        self._is_offloaded = is_offloaded
        self._device = torch.device("cpu")
        self._slots = UseSlots([])
        self._hosts: HostSums | None = None  # None: one rank, gradients in host memory, or no connections
        self._on_host = True  # squares are added up on the CPU
        self._reads_flags = False  # flags can be summed on the device only

    def attach(self, ranks: Iterable[UnitRanks], device: torch.device, numel: int) -> None:
        """Set the parameters that have flags. All ranks call it together, and again after parameters were added.

        Args:
            ranks: the ranks of each parameter.
            device: device of the weights.
            numel: number of elements of all parameters.
        """
        self._slots = UseSlots(ranks)
        self._device = device
        if device.type != "cpu" and self._backend.world_size > 1 and self._hosts is None:
            hosts = HostSums(self._backend.group)
            self._hosts = hosts if hosts.connect() else None
            self._reads_flags = self._hosts is None
        self._on_host = device.type == "cpu" or (self._is_offloaded and not self._reads_flags)

    def agree(
        self, norms: Sequence[Tensor], used: Sequence[bool], late: Sequence[bool]
    ) -> tuple[Scalar, list[bool], list[float]]:
        """Return (sum of the squares of `norms`, by parameter whether it was used, by bucket how many ranks are late)
        over the ranks. A collective.

        Args:
            norms: this rank's norms, 0-D.
            used: by parameter, whether this rank has a gradient.
            late: by bucket, whether this rank has a gradient that came after the launch.
        """
        if self._backend.world_size == 1:
            return self.own_squares(norms), list(used), list(map(float, late))
        squares, flags = self._sum(norms, [*self._slots.spread(used), *map(float, late)])
        return squares, self._slots.own(flags), flags[self._slots.count :]

    def agree_over_stages(self, used: Sequence[bool], ranks: Sequence[UnitRanks]) -> list[bool]:
        """Return by parameter whether some rank has used it in any of the pipeline stages that hold it. A collective
        of these stages; within each stage the ranks have agreed on `used`.

        Args:
            ranks: the ranks of each parameter.
        """
        agreed = list(used)
        by_group: dict[GroupBackend, list[int]] = {}
        for index, each in enumerate(ranks):
            if each.is_tied and each.replicate_group is not None:
                by_group.setdefault(each.replicate_group, []).append(index)
        for group, indices in by_group.items():
            flags_N = torch.tensor([float(used[index]) for index in indices], device=self._device)
            group.all_reduce(flags_N).wait()
            for index, flag in zip(indices, flags_N.tolist(), strict=True):
                agreed[index] = flag > 0
        return agreed

    def sum_squares(self, norms: Sequence[Tensor]) -> Scalar:
        """Return the sum of the squares of `norms` over the ranks. A collective."""
        if self._on_host:
            return self._sum_values([square_sum(norms)])[0]
        squares_1 = self._squares(norms)
        self._backend.all_reduce(squares_1).wait()
        return squares_1[0]

    def own_squares(self, norms: Sequence[Tensor]) -> Scalar:
        """Return the sum of the squares of `norms` of this rank alone."""
        return square_sum(norms) if self._on_host else self._squares(norms)[0]

    def root_over_model(self, squares: Scalar) -> Scalar:
        """Return the root of the sum over the ranks with other parts of the model; nan if it is undefined. A collective
        of each of `model_ranks`."""
        squares = sum_over_model(squares, self._model_ranks, self._device)
        if isinstance(squares, Tensor) and not self._is_offloaded:
            return squares.sqrt()
        squares = float(squares)
        return math.sqrt(squares) if squares >= 0 else math.nan

    def _sum(self, norms: Sequence[Tensor], flags: list[float]) -> tuple[Scalar, list[float]]:
        if self._on_host:
            squares, *flags = self._sum_values([square_sum(norms), *flags])
            return squares, flags
        if self._reads_flags:
            return self._sum_and_read(norms, flags)
        flags = self._sum_values(flags)
        return self.sum_squares(norms), flags

    def _sum_values(self, values: list[float]) -> list[float]:
        """Return CPU numbers summed over the ranks."""
        if self._backend.world_size == 1:
            return values
        if self._hosts is not None:
            return self._hosts.sum(values)
        values_N = torch.tensor(values, dtype=torch.float64, device="cpu")
        sums_N = self._backend.allocate(len(values), values_N.dtype, values_N.device).copy_(values_N)
        self._backend.all_reduce(sums_N).wait()
        return sums_N.tolist()  # type: ignore[no-any-return]

    def _sum_and_read(self, norms: Sequence[Tensor], flags: list[float]) -> tuple[float, list[float]]:
        """Sum the squares and the flags over the ranks in one all-reduce on the device; the CPU waits for it."""
        sums_N = self._backend.allocate(1 + len(flags), torch.float32, self._device)
        sums_N[:1] = self._squares(norms)
        sums_N[1:] = torch.tensor(flags, dtype=torch.float32, device=self._device)
        self._backend.all_reduce(sums_N).wait()
        squares, *flags = sums_N.tolist()
        return squares, flags

    def _squares(self, norms: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of `norms`: [1] on the device, fp32 because some devices lack fp64."""
        squares_1 = self._backend.allocate(1, torch.float32, self._device)
        if not norms:
            return squares_1.zero_()
        return squares_1.copy_(torch.stack([norm.to(squares_1) for norm in norms]).square().sum())


class ExactAgreement(StepAgreement):
    """`ExactAgreement` agrees on the same bits for every number of ranks, however gradients are divided.

    The `norms` of its methods are this rank's gradients themselves, 1-D, without elements that another rank also has.
    Ranks first agree on the largest magnitude, then on the sums of squares (`ExactSquares`).
    """

    _squares_of = ExactSquares(0)

    def attach(self, ranks: Iterable[UnitRanks], device: torch.device, numel: int) -> None:
        super().attach(ranks, device, numel)
        self._squares_of = ExactSquares(numel)

    def sum_squares(self, norms: Sequence[Tensor]) -> Scalar:
        largest = self._largest(norms)
        folds_F = self._squares_of.folds(norms, largest)
        if self._on_host:
            return self._total(self._sum_values(folds_F.tolist()), largest)
        sums_F = self._backend.allocate(folds_F.numel(), folds_F.dtype, self._device).copy_(folds_F)
        self._backend.all_reduce(sums_F).wait()
        return self._squares_of.total(sums_F, largest).to(torch.float32)

    def own_squares(self, norms: Sequence[Tensor]) -> Scalar:
        largest = self._own_largest(norms)
        total = self._squares_of.total(self._squares_of.folds(norms, largest), largest)
        return total.item() if self._on_host else total.to(torch.float32)

    def _sum(self, norms: Sequence[Tensor], flags: list[float]) -> tuple[Scalar, list[float]]:
        if not self._on_host:
            return self.sum_squares(norms), self._sum_values(flags)
        largest = self._largest(norms)
        folds = self._squares_of.folds(norms, largest).tolist()
        sums = self._sum_values([*folds, *flags])
        return self._total(sums[: len(folds)], largest), sums[len(folds) :]

    def _total(self, sums: list[float], largest: Tensor) -> float:
        return self._squares_of.total(torch.tensor(sums, dtype=torch.float64), largest.cpu()).item()

    def _own_largest(self, norms: Sequence[Tensor]) -> Tensor:
        """Return the largest magnitude on this rank, on the device of its gradients."""
        return ExactSquares.largest(norms).to(norms[0].device if norms else self._device)

    def _largest(self, norms: Sequence[Tensor]) -> Tensor:
        """Return the largest magnitude on all ranks, 0-D fp64; ranks sum a vector with one place per rank."""
        largest, world_size = self._own_largest(norms), self._backend.world_size
        if world_size == 1:
            return largest
        if self._on_host:
            places = [0.0] * world_size
            places[self._backend.rank] = largest.item()
            return torch.tensor(self._sum_values(places), dtype=torch.float64).amax().to(largest.device)
        places_W = self._backend.allocate(world_size, torch.float64, self._device).zero_()
        places_W[self._backend.rank] = largest
        self._backend.all_reduce(places_W).wait()
        return places_W.amax()


def square_sum(norms: Sequence[Tensor]) -> float:
    """Return the sum of the squares of 0-D tensors; wait once for all those on a device."""
    return sum(value**2 for value in read(norms))
