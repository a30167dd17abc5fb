"""`all_gather_values`: small plain values from every rank, as JSON text in tensors. Nothing is pickled. `check_same`
compares texts.

Called where ranks must agree on something that is no tensor: what failed in a save, tags, measured times. A rank that
has nothing to agree on, because it failed before, brings that in place of a value (`bring_failure`).
"""

import hashlib
import json
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from deepspeed.comm.backend import GroupBackend, host_or_device, no_group_error
from deepspeed.comm.failure import PeerFailed, ended_clause
from deepspeed.errors import CommError, ConfigError, first_line

_FAILURE, _MEETING = b"!", b"="  # begin no JSON
_SOON_S, _LONGEST_PAUSE_S = 0.5, 0.05


class HeardFailure(PeerFailed):
    """A rank brought its failure to the place where others bring a value: all ranks have been there."""


def all_gather_values(
    value: Any, group: ProcessGroup | None = None, *, backend: GroupBackend | None = None, call: str = "values"
) -> list[Any]:
    """Every rank's `value`, in rank order. A collective: every rank of `group` calls it.

    Args:
        value: what JSON can hold: None, booleans, numbers (infinity and NaN too), strings, lists, dicts with string
            keys. Tuples arrive as lists.
        group: default: all ranks.
        backend: of the group, for values that are gathered in a step: a peer that has failed in it is named
            (`give_up`).
        call: with `backend`, what is called together: a rank that gathers for another call is told of both.

    Raises:
        TypeError: `value` holds something else; raised before the collective begins.
        CommError: there is no process group, or a rank of it did not come until the group's timeout, or ended.
        HeardFailure: a rank came with a failure.
    """
    group = group if backend is None else backend.group
    group = torch_dist.group.WORLD if group is None else group
    if group is None:
        raise no_group_error("all_gather_values")
    texts = _all_gather_texts(json.dumps(value).encode(), lambda tensor: _all_gather(tensor, group, backend, call))
    _refuse_other_calls(texts, "")
    return [json.loads(text) for text in texts]


def check_same(facts: Mapping[str, str], group: ProcessGroup | None = None) -> None:
    """Compare texts with the other ranks, which give the same keys. A collective over `group`.

    Raises:
        ConfigError: on every rank, for the first key whose text differs; it names the ranks.
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
    """ "rank 1", or "ranks 1, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def meet(call: str) -> None:
    """All ranks come to the end of the same call. A collective.

    Raises:
        HeardFailure: a rank came with a failure, or is at another place.
    """
    group = torch_dist.group.WORLD
    assert group is not None
    _refuse_other_calls(
        _all_gather_texts(_MEETING + call.encode(), lambda tensor: _all_gather(tensor, group, None)), call
    )


def _refuse_other_calls(texts: Sequence[bytes], call: str) -> None:
    """`call`: at whose end this rank is; "": it brings a value."""
    for text in texts:
        if text.startswith(_FAILURE):
            cause = text.removeprefix(_FAILURE).decode()
            raise HeardFailure(f"rank {torch_dist.get_rank()} cannot go on: {cause}", cause)
    places = [text.removeprefix(_MEETING).decode() if text.startswith(_MEETING) else "" for text in texts]
    if set(places) != {call}:
        at = "; ".join(f"rank {rank} {f'ends {place}' if place else 'does not'}" for rank, place in enumerate(places))
        raise HeardFailure(f"ranks are at different places: {at}. All ranks make the same calls, of the same arguments")


def bring_failure(cause: str, give_up: Callable[[], None], limit_s: float) -> None:
    """Come to the next `all_gather_values` of all ranks without a value: it raises there. A collective.

    Args:
        cause: which rank failed, and why.
        give_up: called where the others do not come soon, as they may be in another collective.
        limit_s: how long to wait for them.

    Raises:
        CommError: they did not come within it.
    """
    _all_gather_texts(_FAILURE + cause.encode(), lambda tensor: _gather_within(tensor, limit_s, give_up))


def all_gather_within(value: Any, limit_s: float) -> list[Any]:
    """`all_gather_values` of all ranks, with a time limit.

    Raises:
        CommError: a rank did not come within it.
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
        time.sleep(min(max(waited_s / 10, 0.001), _LONGEST_PAUSE_S))
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
    """Every rank's 1-D tensor of one size, on the host."""
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
        if ended := ended_clause(group):  # which says more than the library's words about a connection
            own_words = "its own output says why, or it left this call out"
            raise CommError(f"{waited}{ended}: {own_words}. {calls}") from None
        raise CommError(
            f"{waited}not all came: {first_line(error)}. {calls}; see whether one of them did not, or failed before"
        ) from error
    return [theirs.cpu() for theirs in gathered]
