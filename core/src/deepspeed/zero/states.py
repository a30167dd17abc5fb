"""`States`: whether the weights and optimizer states of this rank can be used: all there, and all of one step.

Whoever reads or writes them asks before: a backward, a step, a save, `safe_get_full_fp32_param`.
"""

import itertools
from collections.abc import Callable

from deepspeed.comm import failure
from deepspeed.errors import StateError, first_line
from deepspeed.zero.offload.moved_states import MovedStates
from deepspeed.zero.outside_changes import OutsideChanges

#: of those made in this process; ranks make them in the same order
_numbers = itertools.count()


class States:
    """`States` refuses calls that need states which were moved, or which something that failed has left half written.

    Attributes:
        moved: in host memory since `offload_states`; None: they are where a step needs them.
        outside_changes: of the attached parameters; None before there are any.
        broken_by: what failed and left weights of two steps, or of two checkpoints; None: nothing did.
        wait_for_copy: returns when no `PendingTensor` is read any more; called before states change or move.
    """

    def __init__(self) -> None:
        self.moved: MovedStates | None = None
        self.outside_changes: OutsideChanges | None = None
        self.broken_by: str | None = None
        self.wait_for_copy: Callable[[], None] = lambda: None
        self._number, self._num_restored = next(_numbers), 0
        self._num_told = failure.num_told()

    def require(self, asked: str, *, weights_only: bool = False) -> None:
        """Refuse what needs states that are all there, and all of one step.

        Args:
            asked: what the user called.
            weights_only: it reads no states but the weights that modules compute with.

        Raises:
            StateError: they are where `offload_states` has moved them, or something failed while they were written;
                names the call to make.
        """
        self.require_unmoved(asked, weights_only=weights_only)
        if self.broken_by is None and self._num_told != failure.num_told():
            self._num_told = failure.num_told()
            self.broken_by = failure.broken(self._name) or None
        if self.broken_by is not None:
            raise StateError(
                f"{asked}: {self.broken_by}, so weights may be of two steps; load a checkpoint with the optimizer's "
                "states, on all ranks, or make a new engine"
            )

    def require_unmoved(self, asked: str, *, weights_only: bool = False) -> None:
        """Refuse what needs states that `offload_states` has moved. Unlike `require`, let states of two steps pass,
        which a load replaces.

        Raises:
            StateError: if they were moved; names the call to make.
        """
        moved = self.moved
        if moved is not None and (moved.has_weights or not weights_only):
            kinds = ", ".join(sorted(moved.kinds))
            raise StateError(
                f"{asked}: found {kinds} in host memory since offload_states(); call engine.reload_states() first"
            )

    @property
    def _name(self) -> str:
        """The name that these states have until they are restored again."""
        return f"{self._number}/{self._num_restored}"

    def break_by(self, error: BaseException) -> None:
        """An update failed on this rank; peers, on which it may have been made, refuse to go on as soon as they hear of
        the failure, so that none waits for this rank."""
        self.broken_by = f"the last step failed inside its update ({first_line(error)})"
        failure.note_broken(self._name, self.broken_by)

    def restored(self) -> None:
        """All states were loaded, on all ranks."""
        self.broken_by = None
        self._num_restored += 1

    def reload(self, *, non_blocking: bool) -> None:
        """Move states back to where a step needs them, if `offload_states` has moved them."""
        moved, self.moved = self.moved, None
        if moved is not None:
            moved.put_back(non_blocking=non_blocking)

    def take_outside_changes(self) -> None:
        """Take the values that others than the engine gave to parameters; see `outside_changes.py`. Called before
        master weights are read or written.

        Raises:
            StateError: names a parameter whose value cannot be taken.
        """
        if self.outside_changes is not None and self.moved is None:
            self.outside_changes.take()

    def refuse_converted(self) -> None:
        """A forward has failed: say so if the module was converted since `initialize`.

        Raises:
            StateError: names the parameter and the way; from the exception that is being handled.
        """
        if self.outside_changes is not None and self.moved is None:
            self.outside_changes.refuse_converted()
