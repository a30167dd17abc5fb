"""`Stateful`: a stage as a checkpoint and the accessors of states see it: its state out, and back in.

What it holds is in `holding.py`, what a step does with it in `strategy.py`; the form of a state is `state_dict.py`'s.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from deepspeed.comm import failure
from deepspeed.comm.backend import GroupBackend, Work
from deepspeed.comm.give_up import give_up
from deepspeed.errors import StateError, first_line
from deepspeed.zero import managed, named_states
from deepspeed.zero import state_dict as states
from deepspeed.zero.holding import Holding, ShardingOptions
from deepspeed.zero.offload.moved_states import MovedStates
from deepspeed.zero.outside_changes import OutsideChanges
from deepspeed.zero.param_unit import ParamUnit

#: of those made in this process; ranks make them in the same order
_numbers = itertools.count()


class Stateful(Holding):
    """The state of what one rank holds."""

    def __init__(self, options: ShardingOptions, backend: GroupBackend, group: ProcessGroup | None = None) -> None:
        super().__init__(options, backend, group)
        self.moved_states: MovedStates | None = None  # to host memory, for a while
        #: returns when no `PendingTensor` is read any more; called before master weights or states change or move
        self.wait_for_copy: Callable[[], None] = lambda: None
        self.outside_changes: OutsideChanges | None = None  # of the attached parameters
        self.broken_by: str | None = None  # what failed and left weights of two steps, or of two checkpoints
        self._number, self._num_restored = next(_numbers), 0
        self._num_told = failure.num_told()

    # ---- what a stage decides -----------------------------------------------------------------------------------

    def _all_gather_weights(self, index: int) -> Work | None:
        """Start to all-gather the weights of a unit that was just updated."""
        return None

    def release_gathered(self) -> None:
        """Weights are about to be saved, loaded or updated, each rank's part by itself."""

    def accept_load(self) -> None:
        """A load has ended, also by failing, and nothing that it did to parameters is a change of the user's."""

    def _abandon_gathers(self) -> Sequence[tuple[GroupBackend, Work]]:
        """Forget the all-gathers of weights in flight: the group and the work of each."""
        return ()

    def sharded_units(self) -> Sequence[ParamUnit]:
        """Units whose weights are sharded."""
        return ()

    def weights_changed(self, params: Set[Tensor]) -> None:
        """`params` were changed inside `GatheredParameters`. Here every rank holds whole weights, and the change is
        every rank's own."""

    def borrowed_names(self) -> list[str]:
        """Parameters that another engine holds, sharded, for this one, too."""
        return []

    def release_borrowed(self) -> None:
        """The parameters of `borrowed_names` are about to be loaded.

        Raises:
            StateError: the states of an engine that trains them are in host memory since `offload_states`.
        """

    def load_frozen(self, parts: dict[str, Tensor]) -> None:
        """Load what `saved_part` gave for parameters that no optimizer has, or that of another engine. Whole ones come
        with the module's."""

    # ---- the state ----------------------------------------------------------------------------------------------

    @property
    def keeps_parameters_whole(self) -> bool:
        """Whether no parameter is divided among ranks."""
        return self._is_whole

    def state_dict(self, *, is_pending: bool = False) -> dict[str, Any]:
        """This rank's master weights and optimizer state; keys as in DeepSpeed's `*_optim_states.pt`.

        Args:
            is_pending: with `PendingTensor`s, which are copied before `wait_for_copy` returns.
        """
        self.take_outside_changes()
        return states.collect(self, is_pending=is_pending)

    def load_state_dict(self, state: dict[str, Any], *, load_optimizer_states: bool = True) -> None:
        """Take master weights and optimizer state of a run with as many ranks and the same stage."""
        self.check_state(state)
        self.restore_state(state, load_optimizer_states=load_optimizer_states)
        self.weights_from_masters()

    def saved_parameters(self) -> list[list[Parameter]]:
        """Attached parameters in the order in which a checkpoint has them, in its groups."""
        return [[self.params[place] for place in group] for group in self.saved_groups]

    def check_state(self, saved: dict[str, Any], *, with_states: bool = True) -> None:
        """Refuse a state that does not fit, before anything is changed.

        Raises:
            CheckpointError: says what was found.
        """
        states.check(self, saved, with_states=with_states)

    def restore_state(self, saved: dict[str, Any], *, load_optimizer_states: bool) -> None:
        """Put a state back that `check_state` let pass; `weights_from_masters` is to follow."""
        self.wait_for_copy()
        states.restore(self, saved, load_optimizer_states=load_optimizer_states)

    def check_named_states(self, saved: named_states.SavedStates, *, with_states: bool, strict: bool = True) -> None:
        """Refuse states that do not fit, before anything is changed; they may be of another number of ranks, of another
        stage or of another program.

        Raises:
            CheckpointError: says what was found.
        """
        named_states.check(self, saved, with_states=with_states, strict=strict)

    def restore_named_states(self, saved: named_states.SavedStates, *, with_states: bool) -> None:
        """Take what `check_named_states` let pass; `weights_from_masters` is to follow."""
        self.wait_for_copy()
        named_states.restore(self, saved, with_states=with_states)

    def take_outside_changes(self) -> None:
        """Take the values that others than the engine gave to parameters; see `outside_changes.py`. Called before
        master weights are read or written.

        Raises:
            StateError: names a parameter whose value cannot be taken.
        """
        if self.outside_changes is not None and self.moved_states is None:
            self.outside_changes.take()

    def refuse_converted(self) -> None:
        """A forward has failed: say so if the module was converted since `initialize`.

        Raises:
            StateError: names the parameter and the way; from the exception that is being handled.
        """
        if self.outside_changes is not None and self.moved_states is None:
            self.outside_changes.refuse_converted()

    def masters_from_weights(self) -> None:
        """Start the master weights again after the module's weights were loaded or changed from outside."""
        self.wait_for_copy()
        managed.note_write()
        self.take_outside_changes()
        for group in self.groups:
            group.masters_from_weights()

    def weights_from_masters(self) -> None:
        """Bring the master weights of all ranks into the model's weights."""
        self.release_gathered()
        managed.note_write()
        if self.outside_changes is not None:
            self.outside_changes.drop()
        for group in self.groups:
            group.weights_from_masters()
        works = [work for index in range(len(self.groups)) if (work := self._all_gather_weights(index)) is not None]
        for work in works:
            work.wait()

    def require_states(self, asked: str, *, weights_only: bool = False) -> None:
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

    def require_unmoved(self, asked: str, *, weights_only: bool = False) -> None:
        """Refuse what needs states that `offload_states` has moved. Unlike `require_states`, let states of two steps
        pass, which a load replaces.

        Raises:
            StateError: if they were moved; names the call to make.
        """
        moved = self.moved_states
        if moved is not None and (moved.has_weights or not weights_only):
            kinds = ", ".join(sorted(moved.kinds))
            raise StateError(
                f"{asked}: found {kinds} in host memory since offload_states(); call engine.reload_states() first"
            )

    @contextmanager
    def among_peers(self) -> Iterator[None]:
        """Enclose the collectives of a save or a load: if this rank fails inside, peers that wait for it raise."""
        try:
            yield
        except BaseException:
            give_up(self._abandon_gathers())
            for unit in self.sharded_units():
                unit.shards_changed()
            raise
