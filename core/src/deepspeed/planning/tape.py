"""A tape computes how much memory eager torch saves and allocates for one forward and backward, without running them.

A layer is recorded as the operations of its forward (`blocks.py`). `Tape.profile` then walks back through them like
autograd: an operation allocates the gradients of its inputs while its own gradient and its saved tensors are alive, and
then frees both. A second gradient of a tensor is added into the first in place, if nothing else uses that memory. Views
are no operations. All sizes are in bytes.

Saved tensors follow torch's derivatives (`tools/autograd/derivatives.yaml`): a product saves both factors, a linear
layer its input, silu its input, an attention kernel its inputs, its output and one number per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class SavedBlock:
    """A block of memory in a forward. `uses` counts the operations that saved it."""

    num_bytes: int
    uses: int = 0


@dataclass(eq=False, slots=True)
class Value:
    """A tensor: number and size of its elements, and its memory. `is_input`: it comes from outside the tape."""

    numel: int
    itemsize: int
    memory: SavedBlock
    needs_gradient: bool = True
    is_input: bool = False

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all elements."""
        return self.numel * self.itemsize


@dataclass(slots=True)
class _Operation:
    output: Value
    inputs: tuple[Value, ...]
    saved: tuple[Value, ...]
    passes: bool  # the inputs' gradients are the output's gradient, in the same memory
    temporary: int  # bytes that the backward allocates and frees
    parameters: tuple[str, ...]
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the backward. Until the gradients of `parameters` arrive, at most `peak` bytes are live: activations
    and working memory, without parameter gradients that arrived earlier. `live`: bytes right after."""

    peak: int
    live: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """The memory profile of one tape.

    saved: bytes saved from forward to backward.
    forward_peak: maximum bytes in the forward, with the saved ones.
    output: bytes of the output.
    points: the backward, in order; the last one may have no parameters.
    """

    saved: int
    forward_peak: int
    output: int
    points: tuple[Point, ...]


@dataclass(eq=False)
class Tape:
    """The operations of one forward.

    Args:
        itemsize: bytes per element of activations.
    """

    itemsize: int
    _operations: list[_Operation] = field(default_factory=list)
    _parameter_bytes: dict[str, int] = field(default_factory=dict)
    _outside: dict[int, SavedBlock] = field(default_factory=dict)
    _live: int = 0
    forward_peak: int = 0

    def input(self, numel: int, *, needs_gradient: bool = True, itemsize: int | None = None) -> Value:
        """Return a tensor from outside of the tape. It counts only if an operation saves it."""
        size = self.itemsize if itemsize is None else itemsize
        value = Value(numel, size, SavedBlock(numel * size), needs_gradient, is_input=True)
        self._outside[id(value)] = value.memory
        return value

    def operation(
        self,
        numel: int,
        inputs: Sequence[Value],
        *,
        saved: Sequence[Value] = (),
        saves_output: bool = False,
        saved_extra: int = 0,
        passes: bool = False,
        in_place: bool = False,
        temporary: int = 0,
        forward_temporary: int = 0,
        parameters: Sequence[str] = (),
        itemsize: int | None = None,
    ) -> Value:
        """Record an operation, and return its output.

        Args:
            numel: number of elements of the output.
            saved: inputs that the operation saves.
            saved_extra: bytes of small results that it also saves.
            passes: whether the gradient of each input is the output's gradient.
            in_place: whether the output uses the memory of the first input.
            temporary: bytes that the backward allocates and frees; `forward_temporary`: the same for the forward.
            parameters: names of parameters whose gradients the backward computes; `parameter` must come before.
            itemsize: bytes per element of the output; default: the tape's.
        """
        size = self.itemsize if itemsize is None else itemsize
        memory = inputs[0].memory if in_place else SavedBlock(numel * size)
        output = Value(numel, size, memory)
        kept = [*saved, *((output,) if saves_output else ())]
        if saved_extra:
            kept.append(Value(saved_extra, 1, SavedBlock(saved_extra), needs_gradient=False))
        for value in kept:
            value.memory.uses += 1
        if not in_place:
            self._live += memory.num_bytes
        self.forward_peak = max(self.forward_peak, self._live + forward_temporary)
        size_of_parameters = sum(self._parameter_bytes[name] for name in parameters)
        self._operations.append(
            _Operation(output, tuple(inputs), tuple(kept), passes, temporary, tuple(parameters), size_of_parameters)
        )
        return output

    def parameter(self, name: str, num_bytes: int) -> str:
        """Register a parameter with the size of its gradient, and return its name."""
        self._parameter_bytes[name] = num_bytes
        return name

    def drop(self, *values: Value) -> None:
        """Free values that the forward no longer needs, unless an operation saved them."""
        for value in values:
            if not value.memory.uses and not value.is_input:
                self._live -= value.memory.num_bytes

    def profile(self, output: Value, *, gradient_bytes: int | None = None) -> Profile:
        """Walk back through the operations, and return the profile.

        Args:
            output: output of the tape.
            gradient_bytes: bytes of the incoming gradient; default: the size of the output.
        """
        blocks = {id(value.memory): value.memory for each in self._operations for value in each.saved}
        saved = live = sum(block.num_bytes for block in blocks.values())
        uses = {key: block.uses for key, block in blocks.items()}
        given = _Gradient(output.num_bytes if gradient_bytes is None else gradient_bytes)
        live += given.num_bytes
        gradients: dict[int, _Gradient] = {id(output): given}
        points: list[Point] = []
        peak = live
        for each in reversed(self._operations):
            gradient = gradients.pop(id(each.output), None)
            if gradient is None:
                continue
            made: list[tuple[Value, _Gradient]] = []
            for value in each.inputs:
                if value.needs_gradient:
                    own = gradient if each.passes else _Gradient(value.num_bytes)
                    own.references += each.passes
                    live += 0 if each.passes else own.num_bytes
                    made.append((value, own))
            live += each.parameter_bytes
            peak = max(peak, live + each.temporary)
            for value in each.saved:
                uses[id(value.memory)] -= 1
                if not uses[id(value.memory)]:
                    live -= value.memory.num_bytes
            live -= gradient.release()
            for value, own in made:
                first = gradients.get(id(value))
                if first is None:
                    gradients[id(value)] = own
                elif first.references == 1:  # in place
                    live -= own.release()
                else:
                    total = _Gradient(value.num_bytes)
                    live += total.num_bytes
                    peak = max(peak, live)
                    live -= first.release() + own.release()
                    gradients[id(value)] = total
            if each.parameters:
                live -= each.parameter_bytes  # from here on these gradients count as arrived
                points.append(Point(peak, live, each.parameters))
                peak = live
        points.append(Point(peak, live, ()))
        from_outside = sum(block.num_bytes for block in self._outside.values() if block.uses)
        return Profile(saved, max(self.forward_peak + from_outside, saved), output.num_bytes, tuple(points))


@dataclass(eq=False, slots=True)
class _Gradient:
    num_bytes: int
    references: int = 1

    def release(self) -> int:
        """Drop one reference, and return the bytes that this frees."""
        self.references -= 1
        return 0 if self.references else self.num_bytes
