"""The instructions that a schedule gives to a stage of a pipeline have DeepSpeed's names."""

from typing import Any


class PipeInstruction:
    """An instruction is one thing to do; its arguments become attributes. Two of equal name and arguments are equal."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.kwargs == other.kwargs  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.name, *sorted(self.kwargs.items())))


class OptimizerStep(PipeInstruction):
    """Judge the gradients and update the weights, after all reductions."""


class ReduceGrads(PipeInstruction):
    """Average the gradients over the ranks of the stage that see other samples."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of shared modules over the stages that hold them."""


class BufferOpInstruction(PipeInstruction):
    """The instruction works on what a stage keeps of one micro-batch.

    Args:
        buffer_id: which of the stage's buffers.
        micro: number of the micro-batch in its batch.
        chunk: number of the part among those of the stage; 0 but for interleaved schedules.
    """

    buffer_id: int
    micro: int
    chunk: int

    def __init__(self, buffer_id: int, *, micro: int = 0, chunk: int = 0, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, micro=micro, chunk=chunk, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next micro-batch from the data iterator: inputs on the first stage, labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Run the layers, and on the last stage the loss."""


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of inputs and weights."""


class BackwardInput(BufferOpInstruction):
    """Compute the gradients of the inputs, and of the weights that are not worth deferring."""


class BackwardWeight(BufferOpInstruction):
    """Compute the gradients of weights that a `BackwardInput` has left."""


class SendActivation(BufferOpInstruction):
    """Send the outputs to the next part."""


class RecvActivation(BufferOpInstruction):
    """Receive the inputs from the part before."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of the inputs to the part before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the outputs from the next part."""
