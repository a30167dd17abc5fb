"""Ranks exchange small values: `all_gather_values` gathers plain values of all ranks, as JSON text in tensors; nothing
is pickled. `check_same` compares texts between ranks. `Arrivals` names ranks that do not come to a call.

Ranks use these functions to agree on something other than a tensor: what failed in a save, tags, measured times. A rank
that has failed before brings its failure instead of a value (`bring_failure`).

`Arrivals` is a call that all ranks of a group make; its error names each rank that does not come. A collective cannot
do that: a library waits until its timeout, half an hour by default, and then names its own call. In `Arrivals` each
rank registers in the job's store and waits there for the others. No collective is in flight in the group meanwhile, so
the ranks can continue after a failure. Called at the begin of `save_checkpoint`, `load_checkpoint`, `initialize` and
`zero.Init`, and before ranks connect in a group.

The ranks meet in rounds. One operation of the store ends a round for all ranks. The rank that ends it came last, has
reached its time limit, was interrupted, sees that a peer has ended, or sees that a peer waits for this rank elsewhere
(`parted.py`; then all ranks in the round raise). Unless all ranks came, ranks that still wait or come later meet in the
next round. A rank that is interrupted after all ranks came continues with them and is interrupted later (`failure.py`).
"""

import hashlib
import json
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, Store

from deepspeed.comm import parted
from deepspeed.comm.backend import GroupBackend, host_or_device, no_group_error
from deepspeed.comm.failure import PeerFailed, any_held, clause_of, ended_clause, ended_of, handle_held, held
from deepspeed.errors import CommError, ConfigError, first_line
from deepspeed.log import logger

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between two queries of the store, or of a collective
_POLLS_PER_S = 10_000  # limit for all ranks together
_LONGEST_NAME = 40
_ALL = "all"  # the end of a round in which all ranks came; other ends are the rank that gave up, or a text of `parted`
#: number of objects made in this process, by name; ranks make them in the same order, so keys contain the number
_num_made: Counter[str] = Counter()


class Arrivals:
    """`Arrivals` lets some ranks wait for each other at calls that they make together.

    Args:
        ranks: global ranks, more than one.
        name: equal on all of these ranks.
        limit_s: how long a rank waits for the others; it warns after 10 s.
        refusal: returns an error that ends the wait, or None; called now and then.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        name: str,
        limit_s: float,
        refusal: Callable[[], CommError | None] = lambda: None,
    ) -> None:
        self.limit_s = limit_s
        self._ranks, self._refusal = list(ranks), refusal
        self._prefix = f"deepspeed/arrivals/{name}/{_num_made[name]}"
        self._num_ended: Counter[str] = Counter()  # number of rounds that this rank has seen end, by call
        self._num_deleted: Counter[str] = Counter()
        _num_made[name] += 1

    def wait_for_all(self, call: str) -> int:
        """Wait until every rank has called this with the same `call`, the name of the call in messages. Returns a
        number that is equal on all ranks, and differs the next time.

        Raises:
            CommError: a rank did not come within `limit_s`, or has ended; the error names it, and the group can be used
                as before. Also the error of `refusal`.
            RanksParted: a rank waits for this rank in another call. The caller must treat that as a failed step.
        """
        with held():
            return self._wait_for_all(call)

    def _wait_for_all(self, call: str) -> int:
        store: Store = torch_dist.distributed_c10d._get_default_store()
        own, first = torch_dist.get_rank(), self._num_ended[call]
        wait = _Wait(store, self._ranks, f"{self._prefix}/{call}", call, first, self._refusal)
        while (ended_by := wait.meet(self.limit_s)) != _ALL:
            self._num_ended[call] += 1
            if ended_by.startswith(parted.PARTED):
                if not wait.came_late:
                    raise parted.ranks_parted(ended_by.removeprefix(parted.PARTED))
                wait.begin_next()
                continue
            if ended_by == str(own):
                handle_held()  # if this does not raise, this rank waits again in the next round
                if wait.refused is not None:
                    raise wait.refused
                if wait.absent:
                    waited = f"and waited for {self.limit_s:g} s: {wait.absent}"
                    if wait.ended:
                        waited = f"and {wait.ended} without it"
                    raise CommError(f"rank {own} called {call} {waited}. {parted.advice(call)}")
            wait.begin_next(ended_by)
        if own == self._ranks[0]:
            for number in range(self._num_deleted[call], self._num_ended[call]):  # every rank has seen these rounds end
                store.delete_key(wait.key(number, "count"))
                store.delete_key(wait.key(number, "end"))
            self._num_deleted[call] = self._num_ended[call]
        self._num_ended[call] += 1
        return self._num_ended[call]


class _Wait:
    """The wait of this rank in one call.

    Args:
        prefix: the prefix of the call's keys.
        number: the number of its first round.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        prefix: str,
        call: str,
        number: int,
        refusal: Callable[[], CommError | None],
    ) -> None:
        self._store, self._ranks, self._prefix, self._call = store, ranks, prefix, call
        self._own, self._refusal = torch_dist.get_rank(), refusal
        self._first = self._number = number
        self._gave_up: set[int] = set()
        self._began_s, self._has_warned, self._is_noted = time.monotonic(), False, False
        self.came_late = False
        """Whether the round had ended when this rank came to it."""
        self.absent = ""
        """The ranks that were not in a round that this rank gave up for good, as a clause."""
        self.ended = ""
        """The ranks that will never be in such a round, as a clause."""
        self.refused: CommError | None = None
        """The error that ended such a round otherwise."""

    def meet(self, limit_s: float) -> str:
        """Join the round and wait for its end. Returns how it ended."""
        self.came_late = True
        if self._store.add(self.key(self._number, "count"), 1) == len(self._ranks):
            return self._end(_ALL)
        self._store.set(self.key("last round of", self._own), str(self._number))
        try:
            return self._wait(limit_s)
        finally:
            if self._is_noted:
                self._is_noted = False
                parted.take_note_back(self._store, self._prefix)

    def _wait(self, limit_s: float) -> str:
        end, rank = self.key(self._number, "end"), str(self._own)
        while not self._store.check([end]):
            self.came_late = False
            waited_s = time.monotonic() - self._began_s
            if waited_s > parted.WARNING_S and not self._has_warned:
                self._has_warned = True
                if parted.says_who_is_missing(self._ranks):
                    logger.warning("%s waits: %s. %s", self._call, self._find_absent(), parted.advice(self._call))
            if waited_s > limit_s or self._find_ended():
                self.absent = self._find_absent()  # before others can go to the next round
                return self._end(rank)
            self.refused = self._refusal()
            if any_held() or self.refused is not None:
                return self._end(rank)
            if waited_s > parted.NOTED_S and not self._is_noted:
                parted.put_note(self._store, self._call, self._prefix, end, self._ranks)
                self._is_noted = True
            if waited_s > parted.FIRST_LOOK_S and (found := self._find_parted()):
                return self._end(parted.PARTED + found)
            least_s = max(_SHORTEST_PAUSE_S, len(self._ranks) / _POLLS_PER_S)
            time.sleep(max(least_s, min(waited_s / 10, _LONGEST_PAUSE_S)))
        return self._store.get(end).decode()

    def begin_next(self, gave_up: str = "") -> None:
        """Go to the next round, after the rank `gave_up` ended this one, or ("") because ranks had parted."""
        if gave_up and int(gave_up) != self._own:
            self._gave_up.add(int(gave_up))
        self._number += 1

    def _find_ended(self) -> str:
        """Return a clause that names the ranks that have ended and are not in the round; "" if there are none."""
        if ended := ended_of(self._ranks):
            rounds = self._last_rounds()
            self.ended = clause_of(rank for rank in ended if rounds[rank] < self._number)
        return self.ended

    def _find_parted(self) -> str:
        """Return a text that names a rank that waits for this rank in another call; "" if none is known."""
        kind = self._prefix
        return parted.parting(self._ranks, self._call, lambda _, note: note.kind != kind, calls=True, kind=kind)

    def _last_rounds(self) -> dict[int, int]:
        """Return the last round that each rank joined, by rank; -1 for a rank that joined none."""
        keys = {rank: self.key("last round of", rank) for rank in self._ranks}
        found = parted.values_in(self._store, list(keys.values()))
        return {rank: int(found.get(key, -1)) for rank, key in keys.items()}

    def _find_absent(self) -> str:
        """Return a clause that names the global ranks that are not in the round."""
        rounds = self._last_rounds()
        left = {rank for rank in self._gave_up if rounds[rank] < self._number}
        # if a rank gave up, do not name ranks that have not seen the end of the previous round yet
        begin = self._first if left else self._number
        missing = {rank for rank, number in rounds.items() if number < begin}
        found = [f"rank {_named(missing)} has not called it"] if missing else []
        found += [f"rank {_named(left)} has called it and given up"] if left else []
        return ", ".join(found)

    def key(self, *names: object) -> str:
        return "/".join(map(str, (self._prefix, *names)))

    def _end(self, by: str) -> str:
        """End the round, unless another rank has. Returns how it ended."""
        return self._store.compare_set(self.key(self._number, "end"), "", by).decode()


def name_of(ranks: Sequence[int]) -> str:
    """Return a name for `ranks`, equal on all of them, and short since many keys contain it."""
    text = "_".join(map(str, ranks))
    return text if len(text) <= _LONGEST_NAME else f"{len(ranks)}_{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _named(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


_FAILURE, _MEETING = b"!", b"="  # prefixes; no JSON text begins with them
_SOON_S = 0.5


class HeardFailure(PeerFailed):
    """A rank brought its failure to a gather where the other ranks brought a value. All ranks took part."""


def all_gather_values(
    value: Any, group: ProcessGroup | None = None, *, backend: GroupBackend | None = None, call: str = "values"
) -> list[Any]:
    """Return every rank's `value`, in rank order. A collective: every rank of `group` calls it.

    Args:
        value: a JSON value: None, booleans, numbers (infinity and NaN too), strings, lists, dicts with string keys.
            Tuples arrive as lists.
        group: default: all ranks.
        backend: the group's backend, for values that are gathered in a step; errors then name a peer that has failed
            in the step (`give_up`).
        call: with `backend`, the name of the common call; if ranks gather for different calls, the error names both.

    Raises:
        TypeError: `value` is not a JSON value; raised before the collective begins.
        CommError: there is no process group, or a rank of it did not come within the group's timeout, or has ended.
        HeardFailure: a rank brought a failure.
    """
    group = group if backend is None else backend.group
    group = torch_dist.group.WORLD if group is None else group
    if group is None:
        raise no_group_error("all_gather_values")
    texts = _all_gather_texts(json.dumps(value).encode(), lambda tensor: _all_gather(tensor, group, backend, call))
    _refuse_other_calls(texts, "")
    return [json.loads(text) for text in texts]


def check_same(facts: Mapping[str, str], group: ProcessGroup | None = None) -> None:
    """Compare texts with the other ranks, which pass the same keys. A collective over `group`.

    Raises:
        ConfigError: on every rank, for the first key with texts that differ; names the ranks that differ from rank 0.
    """
    everything = _digest("".join(map(_digest, facts.values())))
    if len(set(all_gather_values(everything, group))) == 1:
        return
    by_rank = all_gather_values([_digest(text) for text in facts.values()], group)
    for (name, text), digests in zip(facts.items(), zip(*by_rank, strict=True), strict=True):
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise ConfigError(
                f"initialize: {name} must be the same on all ranks, and {named_ranks(others)} "
                f"{'differs' if len(others) == 1 else 'differ'} from rank 0. This rank "
                f"({torch_dist.get_rank(group)}) has: {textwrap.shorten(text, 200) or 'nothing'}. Build the "
                "same model and optimizer, and give the same configuration, on every rank"
            )


def named_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def meet(call: str) -> None:
    """Meet all ranks at the end of the same call. A collective.

    Raises:
        HeardFailure: a rank brought a failure, or is at another place.
    """
    group = torch_dist.group.WORLD
    assert group is not None
    _refuse_other_calls(
        _all_gather_texts(_MEETING + call.encode(), lambda tensor: _all_gather(tensor, group, None)), call
    )


def _refuse_other_calls(texts: Sequence[bytes], call: str) -> None:
    """Raise `HeardFailure` unless all `texts` are for the end of `call`, or with `call` "" all are values."""
    for text in texts:
        if text.startswith(_FAILURE):
            cause = text.removeprefix(_FAILURE).decode()
            raise HeardFailure(f"rank {torch_dist.get_rank()} cannot go on: {cause}", cause)
    places = [text.removeprefix(_MEETING).decode() if text.startswith(_MEETING) else "" for text in texts]
    if set(places) != {call}:
        at = "; ".join(f"rank {rank} {f'ends {place}' if place else 'does not'}" for rank, place in enumerate(places))
        raise HeardFailure(f"ranks are at different places: {at}. All ranks make the same calls, of the same arguments")


def bring_failure(cause: str, give_up: Callable[[], None], limit_s: float) -> None:
    """Take part in the next `all_gather_values` of all ranks with a failure, which makes it raise. A collective.

    Args:
        cause: which rank failed, and why.
        give_up: called if the other ranks do not come soon, since they may be in another collective.
        limit_s: how long to wait for them.

    Raises:
        CommError: a rank did not come within `limit_s`.
    """
    _all_gather_texts(_FAILURE + cause.encode(), lambda tensor: _gather_within(tensor, limit_s, give_up))


def all_gather_within(value: Any, limit_s: float) -> list[Any]:
    """Call `all_gather_values` over all ranks with a time limit.

    Raises:
        CommError: a rank did not come within `limit_s`.
    """
    texts = _all_gather_texts(json.dumps(value).encode(), lambda tensor: _gather_within(tensor, limit_s))
    _refuse_other_calls(texts, "")
    return [json.loads(text) for text in texts]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _gather_within(
    tensor: torch.Tensor, limit_s: float, give_up: Callable[[], None] | None = None
) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(torch_dist.get_world_size())]
    work = torch_dist.all_gather(gathered, tensor, async_op=True)
    assert work is not None
    start_s = time.monotonic()
    while not work.is_completed():
        waited_s = time.monotonic() - start_s
        if waited_s > _SOON_S and give_up is not None:
            give_up()
            give_up = None
        if waited_s > limit_s:
            raise CommError(f"rank {torch_dist.get_rank()} waited {limit_s:g} s for them")
        time.sleep(min(max(waited_s / 10, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
    work.wait()
    return gathered


def _all_gather_texts(text: bytes, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[bytes]:
    sizes = [int(size) for size in gather(torch.tensor([len(text)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return [theirs[:size].numpy().tobytes() for theirs, size in zip(gather(padded), sizes, strict=True)]


def _all_gather(
    tensor: torch.Tensor, group: ProcessGroup, backend: GroupBackend | None, call: str = ""
) -> list[torch.Tensor]:
    """Gather 1-D tensors of equal size from every rank. Returns them on the host."""
    tensor = tensor.to(host_or_device(group))
    if backend is not None:
        gathered_N = tensor.new_empty(tensor.numel() * backend.world_size)
        backend.all_gather(gathered_N, tensor, tag=call).wait()
        return list(gathered_N.cpu().split(tensor.numel()))
    gathered = [torch.empty_like(tensor) for _ in range(torch_dist.get_world_size(group))]
    try:
        torch_dist.all_gather(gathered, tensor, group=group)
    except RuntimeError as error:
        waited = f"rank {torch_dist.get_rank()} waited for a value from every rank of its group, and "
        calls = "All ranks call initialize(), save_checkpoint(), save_16bit_model() and load_checkpoint()"
        if ended := ended_clause(group):  # more informative than the library's message about a connection
            own_words = "its own output says why, or it left this call out"
            raise CommError(f"{waited}{ended}: {own_words}. {calls}") from None
        raise CommError(
            f"{waited}not all came: {first_line(error)}. {calls}; see whether one of them did not, or failed before"
        ) from error
    return [theirs.cpu() for theirs in gathered]


def dtype_name(dtype: "torch.dtype") -> str:
    """Return torch's name of a torch.dtype, such as "bfloat16", for messages and files."""
    return str(dtype).removeprefix("torch.")
