"""`activation_checkpointing`: how `deepspeed.checkpointing` keeps the inputs of recomputed blocks."""

from deepspeed.config.base import Flag, Int, Section, key, quiet, refused, warned

_MEMORY = "it is not in this version; use torch.utils.checkpoint, which recomputes without it"


class ActivationCheckpointingConfig(Section):
    """`activation_checkpointing`."""

    partition_activations: Flag = key(
        False, "Partition saved inputs over model-parallel ranks.", support=refused(_MEMORY)
    )
    cpu_checkpointing: Flag = key(False, "Keep saved inputs in host memory.", support=refused(_MEMORY))
    contiguous_memory_optimization: Flag = key(False, "Keep them in one buffer.", support=refused(_MEMORY))
    number_checkpoints: Int | None = key(
        None, "How many that buffer holds.", ge=1, support=quiet("contiguous_memory_optimization only")
    )
    synchronize_checkpoint_boundary: Flag = key(
        False, "Wait for the device at each boundary.", support=warned("nothing waits there")
    )
    profile: Flag = key(False, "Log the time of each block.", support=warned("nothing is logged"))
    use_reentrant: Flag = key(True, "Recompute in the reentrant way.", support=quiet("read by pipeline models only"))
