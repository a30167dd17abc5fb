"""`activation_checkpointing`: how `deepspeed.checkpointing` keeps the inputs of recomputed blocks."""

from deepspeed.config.base import Flag, Int, Section, key, quiet


class ActivationCheckpointingConfig(Section):
    """`activation_checkpointing`, which `deepspeed.checkpointing.configure(deepspeed_config=...)` reads."""

    partition_activations: Flag = key(False, "Partition saved inputs over tensor-parallel ranks.")
    cpu_checkpointing: Flag = key(False, "Keep saved inputs in host memory.")
    contiguous_memory_optimization: Flag = key(False, "Keep them in one buffer per size.")
    number_checkpoints: Int | None = key(None, "How many that buffer holds.", ge=1)
    synchronize_checkpoint_boundary: Flag = key(False, "Wait for the device at each boundary.")
    profile: Flag = key(False, "Log the time of each block.")
    use_reentrant: Flag = key(True, "Recompute in the reentrant way.", support=quiet("read by pipeline models only"))
