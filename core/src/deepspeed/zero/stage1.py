"""Stage 1: each rank updates, and keeps the optimizer state of, its own part of the parameters.

Against stage 0: parameters are views of one flat buffer per group, cut in W partitions; a full bucket is summed into
its one owner instead of into everyone; after the update the owners' weights go round. Bytes per parameter: 8 + 8/W
in fp32, 4 + 12/W in low precision (ZeRO, arXiv 1910.02054, section 5.1: P_os).
"""

from collections.abc import Sequence

from torch import Tensor

from deepspeed.comm.backend import Piece, Work
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.layout import BucketSpec, even_cuts, parameter_cuts
from deepspeed.zero.strategy import Sharding
from deepspeed.zero.update import Batch


class Stage1(Sharding):
    """Optimizer states are sharded."""

    stage = 1
    _sums_to_owners = True

    @property
    def _owner_rank(self) -> int:
        return self.rank

    def _cuts(self, numels: Sequence[int]) -> tuple[int, ...]:
        cut = parameter_cuts if self._is_whole else even_cuts
        return cut(numels, self.world_size)

    def _is_flat(self) -> bool:
        return True

    def _is_holder(self, spec: BucketSpec) -> bool:
        return spec.owner == self.rank

    def _exchange(self, bucket: Bucket, wire_N: Tensor) -> Work:
        return self.backend.reduce_to_owners(wire_N, [Piece(0, bucket.spec.numel, bucket.spec.owner)], self.group)

    def _publish(self, batch: Batch) -> Work | None:
        assert batch.group is not None
        flat_N = self.groups[batch.group].flat_N
        assert flat_N is not None
        return self.backend.gather_from_owners(flat_N, batch.pieces, self.group)

    def _owned_gradients(self) -> list[Tensor]:
        return [group.partition_of(grads) for group, grads in zip(self.groups, self._gradients, strict=True)]

    def _norm_part(self) -> list[Tensor]:
        return self._reduced

    def _after_launch(self) -> None:
        """Nobody reads gradients before the step: the exchanges go on."""

    def _after_reduce(self) -> None:
        """No rank has whole gradients to show: `param.grad` stays None; `safe_get_full_grad` collects one."""
