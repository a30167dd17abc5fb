"""`checkpoint.on_sigterm`: a job that is told to end saves first, all ranks after the same step.

Schedulers announce the end of a job by SIGTERM, some to every process, some to one. A rank that has it says so in the
job's store, with the number of the next step. The others look there after each step, and as no rank ends a step in
which another has no part, all of them know before they have made that one.
"""

import itertools
import os
import signal
import threading
from types import FrameType
from typing import Any

import torch.distributed as torch_dist
from torch.distributed import Store

from deepspeed.log import warn_once

EXIT_CODE = 128 + signal.SIGTERM
_numbers = itertools.count()  # of engines, which ranks make in the same order


class SigtermWatch:
    """Notes SIGTERM in place of ending, until `close`. Made by every rank, in the main thread.

    Args:
        store: of the job; None with one rank.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._key = f"deepspeed/sigterm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_numbers)}"
        self._was_told = False
        self._former: Any = None
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._former = signal.signal(signal.SIGTERM, self._note)
        else:
            warn_once("checkpoint.on_sigterm: initialize was not called in the main thread, which alone hears signals")

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler. A second signal changes nothing: launchers and schedulers both send one."""
        self._was_told = True
        if callable(self._former):
            self._former(number, frame)

    def is_due(self, step: int) -> bool:
        """Whether the job is to end now. Called by every rank after each step, with the number of steps made."""
        if self._store is None:
            return self._was_told
        if self._was_told:
            self._store.compare_set(self._key, "", str(step + 1))  # the first rank's word counts
        return self._store.check([self._key]) and int(self._store.get(self._key)) <= step

    def close(self) -> None:
        """Let SIGTERM do what it did before, unless the script has set another handler meanwhile."""
        if self._is_installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._former)
        self._is_installed = False


def watch_sigterm() -> SigtermWatch:
    """The watch for an engine that is being built."""
    alone = not torch_dist.is_initialized() or torch_dist.get_world_size() == 1
    return SigtermWatch(None if alone else torch_dist.distributed_c10d._get_default_store())
