"""The `mpu` of sequence-parallel training: `deepspeed.initialize(mpu=...)` reads the layout of the ranks from it."""

from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.errors import ConfigError, counted, either
from deepspeed.parallel import groups
from deepspeed.parallel.layout import read_layout
from deepspeed.parallel.mesh import Mesh


class SequenceParallelUnit:
    """A mesh under the names of Megatron's `mpu`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """Ranks that share a sequence."""
        return self.mesh.group("sp")

    def get_sequence_parallel_world_size(self) -> int:
        """Ranks that share a sequence."""
        return self.mesh.size("sp")

    def get_sequence_parallel_rank(self) -> int:
        """This rank's part of the sequence."""
        return self.mesh.rank("sp")

    def get_data_parallel_group(self) -> ProcessGroup:
        """Ranks that see different samples."""
        return self.mesh.group("dp")

    def get_data_parallel_world_size(self) -> int:
        """Ranks that see different samples."""
        return self.mesh.size("dp")

    def get_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.rank("dp")

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """Ranks that average a gradient."""
        return self.mesh.gradient_group()

    def get_sequence_data_parallel_world_size(self) -> int:
        """Ranks that average a gradient."""
        return self.mesh.size("dp", "sp")

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.rank("dp", "sp")

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """Ranks that hold the parts of one layer."""
        return self.mesh.group("tp")

    def get_tensor_model_parallel_world_size(self) -> int:
        """Ranks that hold the parts of one layer; 1 without tensor parallelism."""
        return self.mesh.size("tp")

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.rank("tp")

    # Megatron's older names
    get_model_parallel_group = get_tensor_model_parallel_group
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_rank = get_tensor_model_parallel_rank


def sequence_parallel_unit(sequence_parallel_size: int) -> SequenceParallelUnit:
    """The unit of a mesh in which so many neighbors share a sequence; `groups` answers from it. A collective of all
    ranks.

    A mesh that was chosen before and has that size stays, with its other axes; else the other ranks are data parallel.

    Raises:
        ConfigError: if the size does not divide the number of ranks.
    """
    world_size = dist.get_world_group().size()
    if sequence_parallel_size < 1 or world_size % sequence_parallel_size:
        divisors = either(size for size in range(1, world_size + 1) if world_size % size == 0)
        raise ConfigError(
            f"sequence_parallel_size: found {sequence_parallel_size} for {counted(world_size, 'rank')}; give {divisors}"
        )
    mesh = groups.viewed_mesh()
    if mesh.size("sp") != sequence_parallel_size:
        mesh = Mesh(read_layout({"sp": sequence_parallel_size}, world_size))
        groups.view(mesh)
    return SequenceParallelUnit(mesh)
