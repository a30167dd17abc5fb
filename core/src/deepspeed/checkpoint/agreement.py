"""`Ranks`: the ranks that share a checkpoint take each step together, and fail together.

After each step they gather what failed. When one cannot write or read, all raise with its reason; no rank waits in a
collective for one that has already failed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar, cast

from deepspeed.checkpoint.load import Position
from deepspeed.comm.failure import PeerFailed, held, let_through
from deepspeed.errors import CheckpointError, DeepSpeedError

T = TypeVar("T")
Gather = Callable[[str | None], list[str | None]]


def alone(value: str | None) -> list[str | None]:
    """The gather of one rank."""
    return [value]


@dataclass(frozen=True)
class Ranks:
    """This rank among those that share a checkpoint."""

    position: Position
    commits: bool
    """Whether this rank makes, commits and names checkpoints; exactly one does."""
    gather: Gather
    """A collective: takes this rank's text or None, returns every rank's, in rank order."""

    def together(
        self, step: Callable[[], T], what: str, *, among: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> T:
        """Run `step` on every rank; raise on every rank when it failed on one.

        An interrupt (Ctrl-C, SystemExit) is a failure, too. It is raised in a step, or after it; see `comm/failure.py`.

        The rank that failed raises its own error, the others a `CheckpointError` with that error's text: whichever
        traceback is the last on the screen says what is wrong.

        Args:
            what: completes "cannot ...".
            among: around a step that is a collective (`Sharding.among_peers`): lets peers that wait in it know that
                this rank fails. They raise `PeerFailed`, which is a consequence, not a cause. It sees the error on all
                ranks, also where the collective had ended.
        """
        with held():
            result, consequence = None, None
            try:
                with among(), let_through():
                    result = step()
            except PeerFailed as error:
                consequence = error
            except BaseException as error:
                self.gather(_reason(error))
                raise
            failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(self.gather(None)) if reason is not None]
            if failed:
                with among():
                    raise CheckpointError(f"cannot {what}: {'; '.join(dict.fromkeys(failed))}") from (
                        consequence or PeerFailed(failed[0], failed[0])
                    )
            if consequence is not None:
                raise consequence
            return cast(T, result)


def _reason(error: BaseException) -> str:
    """An error in one line for the other ranks. Ours are sentences; others say little without their type."""
    if isinstance(error, DeepSpeedError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
