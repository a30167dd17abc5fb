"""Stage 0: plain data parallelism. Every rank has averaged gradients whole, and shows them as `param.grad`.

What it holds is the base class's (`holding.py`); how a step goes, `strategy.py`.
"""

from torch import Tensor

from deepspeed.zero.flat_group import FlatGroup
from deepspeed.zero.strategy import Sharding


class Stage0(Sharding):
    """Every rank holds parameters, gradients and optimizer state whole; 16 bytes per parameter in fp32."""

    shows_gradients = True

    def _norm_part(self) -> list[Tensor]:
        units = self._reduced_units()
        own = ((group, grads.tensor_split(group.ranks.world_size)[group.ranks.rank]) for group, grads in units)
        return [group.ranks.counted(grads) for group, grads in own]

    def _counts(self, group: FlatGroup) -> bool:
        return group.ranks.rank == 0 and super()._counts(group)

    def _after_launch(self) -> None:
        """Wait, so that `param.grad` can be read, and clipped, when the backward is over."""
        self.reduce()

    def _after_reduce(self) -> None:
        if self.average_factor == 1.0:
            try:
                self._shown.show(self.groups, self.buckets, self._used_anywhere)
            except RuntimeError:  # torch: a gradient of another dtype than the parameter's
                self.refuse_converted()
                raise
