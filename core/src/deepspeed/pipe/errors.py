"""`PipelineError`, under DeepSpeed's name."""

from deepspeed.errors import StateError


class PipelineError(StateError):
    """A call that a pipeline's engine or module cannot answer."""
