"""`Int8Unit`: frozen parameters whose shards rest in int8 (`zero_quantized_nontrainable_weights`, stage 3).

Made by `module_units.py`. The weights are rounded when the unit is made and when they are changed (`quantized.py` has
blocks and bounds); what is gathered, for modules and for checkpoints, is what the shards hold. A load of that into the
same blocks gives the same weights: see [Note: rounded once] there.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed.comm.backend import Work
from deepspeed.ops.operators import FLOATS
from deepspeed.zero import quantized
from deepspeed.zero.param_unit import ParamUnit
from deepspeed.zero.unit_groups import UnitRanks


class Int8Unit(ParamUnit):
    """An `Int8Unit` is a `ParamUnit` whose shard takes one byte per element and 4 bytes per block. `shard_S` has the
    codes.

    Args:
        params: frozen parameters, in fp32, bf16 or fp16 as weights.
        names, ranks, keys: those of `ParamUnit`; `ranks` has two ranks at least.
    """

    def __init__(self, params: list[Parameter], names: list[str], ranks: UnitRanks, **keys: Any) -> None:
        super().__init__(params, names, ranks, **keys)
        assert self.is_sharded
        self._packing = quantized.ShardPacking(self.shard_S.numel(), quantized.WEIGHT_BITS)
        self._packed_B = self.shard_S.new_empty(self._packing.num_bytes, dtype=torch.int8)
        self.set_shard(self.shard_S)
        self.shard_S = self._packing.codes(self._packed_B)
        self.source_S = None
        for index, param in enumerate(self.params):
            param.ds_tensor = self.shard_of(index)  # type: ignore[attr-defined]

    def set_shard(self, values_S: Tensor) -> None:
        self._packing.pack(self._packing.lasting(values_S), self._packed_B)

    @property
    def kept_bytes(self) -> int:
        return super().kept_bytes - self.shard_S.nbytes + self._packed_B.nbytes  # codes and scales

    def _is_as_sharded(self, index: int) -> bool:
        return False  # codes are not compared with weights

    def _is_all_as_sharded(self) -> bool:
        return True

    def _all_gather(self, full_N: Tensor, quantizes: bool) -> Work:
        return quantized.all_gather_packed(self.ranks, full_N, self._packed_B, self._packing, tag=self.names[0])


def fits_int8(param: Parameter, dtype: torch.dtype | None, ranks: UnitRanks) -> bool:
    """Whether a unit of such parameters may rest in int8: they are frozen, sharded, and the quantizer takes `dtype`."""
    return not param.requires_grad and ranks.world_size > 1 and (dtype or param.dtype) in FLOATS
