"""Named random states let the ranks of one model draw equal numbers in some places and different numbers in others.

    model_parallel_manual_seed(1234)            # default state: equal seeds; named state: one seed per rank
    with get_rng_tracker().fork():              # dropout on a divided activation: different numbers on each rank
        x = dropout(x)

This is Megatron-LM's interface, on any accelerator and on the CPU; `checkpointing.py` has the documented names.
`checkpoint` restores the named states and the default state when it recomputes a block.

[Note: whose rank] A program may have engines with different meshes, in which this rank has different tensor-parallel
ranks. The state "model-parallel-rng" of a forward is that of the rank in the mesh of the forward's engine: `fork` makes
it from the last seed when it is first needed. Outside a forward, the engine that was built last counts.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.parallel.running import tensor_rank

MODEL_PARALLEL_RNG = "model-parallel-rng"
_OF_RANK = f"{MODEL_PARALLEL_RNG} of tensor-parallel rank "
#: what Megatron-LM adds to a seed for the tensor-parallel ranks
_TENSOR_PARALLEL_OFFSET = 2718


class RNGStatesTracker:
    """Random states by name."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()
        self._model_parallel: tuple[int, int] | None = None  # seed, and tensor-parallel rank, of "model-parallel-rng"

    def reset(self) -> None:
        """Forget all names."""
        self.states_, self.seeds_, self._model_parallel = {}, set(), None

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the names and their states, for `set_states`."""
        return {name: state.clone() for name, state in self.states_.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states by the result of `get_states`."""
        self.states_ = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Add a named state, as after `manual_seed(seed)`; the current state stays unchanged.

        Raises:
            ValueError: for a name or a seed that was added already.
        """
        if name in self.states_ or seed in self.seeds_:
            taken = f"the name {name!r}" if name in self.states_ else f"the seed {seed}"
            raise ValueError(f"random states: {taken} was added already; call reset(), or give another")
        self._begin(name, seed)
        self.seeds_.add(seed)

    def seed_model_parallel(self, seed: int) -> None:
        """Set "model-parallel-rng" to the state of this tensor-parallel rank; see [Note: whose rank]."""
        rank = _own_rank_now()
        for name in [name for name in self.states_ if name.startswith(_OF_RANK)]:
            del self.states_[name]
        self._begin(MODEL_PARALLEL_RNG, _seed_of_rank(seed, rank))
        self.seeds_.add(_seed_of_rank(seed, rank))
        self._model_parallel = seed, rank

    def _begin(self, name: str, seed: int) -> None:
        accelerator = get_accelerator()
        current = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self.states_[name] = accelerator.get_rng_state()
        accelerator.set_rng_state(current)

    def _of_running_model(self, name: str) -> str:
        """Return the name of the state for the model in its forward; see [Note: whose rank]."""
        if name != MODEL_PARALLEL_RNG or self._model_parallel is None:
            return name
        (seed, seeded), rank = self._model_parallel, _own_rank_now()
        if rank == seeded:
            return name
        name = f"{_OF_RANK}{rank}"
        if name not in self.states_:
            self._begin(name, _seed_of_rank(seed, rank))
        return name

    def require(self, name: str) -> None:
        """Raise ValueError for an unknown name."""
        if name not in self.states_:
            known = ", ".join(self.states_) or "none"
            raise ValueError(
                f"random states: asked for {name!r}, there are {known}; call model_parallel_manual_seed(seed) or "
                "add(name, seed) first"
            )

    @contextmanager
    def restarted(self, text: str) -> Iterator[None]:
        """Replace each named state inside by a state derived from `text` and its name; restore them at the end."""
        former, accelerator = self.states_, get_accelerator()
        if former:
            current = accelerator.get_rng_state()
            self.states_ = {}
            for name in former:
                accelerator.manual_seed(seed_from(f"{text} {name}"))
                self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(current)
        try:
            yield
        finally:
            self.states_ = {**self.states_, **former}

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw random numbers from the named state inside, which advances; restore the previous state at the end.

        Raises:
            ValueError: for an unknown name.
        """
        self.require(name)
        name = self._of_running_model(name)
        accelerator = get_accelerator()
        current = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(current)


_tracker = RNGStatesTracker()
_own_rank: Callable[[], int] | None = None  # None: see [Note: whose rank]


def seed_from(text: str) -> int:
    """Return a seed derived from `text` by a hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def get_rng_tracker() -> RNGStatesTracker:
    """Return the tracker of this process."""
    return _tracker


def use_rank(own_rank: Callable[[], int] | None) -> None:
    """Use `own_rank` for this rank's tensor-parallel index in seeds; None: use that of the running model's mesh."""
    global _own_rank
    _own_rank = own_rank


def model_parallel_manual_seed(seed: int) -> None:
    """Seed the accelerator's default state with `seed`, and the state "model-parallel-rng" with a different seed on
    each tensor-parallel rank. `seed` must be equal on the ranks of a model. Drops all other named states."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.seed_model_parallel(seed)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Reseed "model-parallel-rng", with a different seed on each tensor-parallel rank. Changes nothing else.

    Raises:
        ValueError: if the state does not exist yet.
    """
    _tracker.require(MODEL_PARALLEL_RNG)
    _tracker.seed_model_parallel(seed)


@dataclass(frozen=True)
class RandomStates:
    """`RandomStates` holds the random states of a forward that `torch.utils.checkpoint` may not restore.

    named: the states of the tracker.
    device: the default state of the device; None on the host. torch restores it only if the device's module reports
        that it is initialized.
    """

    named: dict[str, torch.Tensor]
    device: torch.Tensor | None

    @classmethod
    def now(cls) -> "RandomStates":
        """Return the current random states."""
        accelerator = get_accelerator()
        on_host = torch.device(accelerator.current_device_name()).type == "cpu"
        return cls(_tracker.get_states(), None if on_host else accelerator.get_rng_state())

    def restore(self) -> None:
        """Set the random states to these states."""
        _tracker.set_states(self.named)
        if self.device is not None:
            get_accelerator().set_rng_state(self.device)

    def __bool__(self) -> bool:
        return bool(self.named) or self.device is not None


@contextmanager
def restored(states: RandomStates) -> Iterator[None]:
    """Use the random states `states` inside; restore the previous states at the end."""
    former = RandomStates.now()
    states.restore()
    try:
        yield
    finally:
        former.restore()


def _own_rank_now() -> int:
    return tensor_rank() if _own_rank is None else _own_rank()


def _seed_of_rank(seed: int, rank: int) -> int:
    return seed + _TENSOR_PARALLEL_OFFSET + rank
