"""`Scheduler` runs many requests on one `InferenceEngineV2`, by split-fuse (DeepSpeed-FastGen, arXiv 2401.08671).

Every step computes about the same number of tokens: one per generating sequence, and parts of prompts for the rest of
the budget. Long prompts are split, and short prompts share a step. So a long prompt does not delay the others, and each
forward has enough rows to justify reading the weights.

[Note: out of blocks] Sequences are admitted without blocks for the tokens they will generate, so blocks can run out.
Then the newest request releases its blocks. Later its prompt and its generated tokens are computed again, and it
continues with the same tokens. A request that would not fit into the whole cache is refused, and the oldest request
never releases its blocks, so every step makes progress.

[Note: a request that fails] A forward serves all its requests, but each token is chosen for a single request. If the
choice fails, only this request ends: its blocks are freed at once, and the other requests have advanced. The error is
raised by the call after the one that returned their tokens, so that no token is lost.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, SupportsFloat

import torch
from torch import Tensor

from deepspeed.errors import ConfigError, DeepSpeedError, StateError, counted, first_line, whole_number
from deepspeed.inference.v2.engine_v2 import InferenceEngineV2

Finish = Literal["", "stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """`Sampling` says how the next token is chosen from the logits. Each request has its own random generator, so that
    its tokens do not depend on other requests.

    temperature: divides the logits; 0: choose the greatest logit.
    top_k: number of greatest logits to choose from; 0: all.
    top_p: choose from the most likely tokens whose total probability reaches this value (arXiv 1904.09751).
    seed: seed of the generator, -2**63 to 2**64 - 1 as in torch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        found = repr(self)
        try:
            numbers = {name: _number(name, getattr(self, name)) for name in ("temperature", "top_p")}
            numbers |= {name: whole_number(name, getattr(self, name), least=None) for name in ("top_k", "seed")}
        except ConfigError as error:
            raise self._refusal(found) from error
        for name, number in numbers.items():  # numbers of other libraries become Python's
            object.__setattr__(self, name, number)
        is_sampling = 0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1
        if not (is_sampling and -(2**63) <= self.seed < 2**64):
            raise self._refusal(found)

    @staticmethod
    def _refusal(found: str) -> ConfigError:
        return ConfigError(
            f"Sampling: found {found}, but temperature is a number of 0 or more, top_k an integer of 0 or more, top_p "
            "is above 0, at most 1, and seed is an integer from -2**63 to 2**64 - 1"
        )

    def probabilities(self, logits: Tensor) -> Tensor:
        """Map logits, [vocabulary], to fp32 probabilities, 0 for excluded tokens. Logits: finite or -inf, not all -inf.

        >>> Sampling(temperature=1.0, top_k=2).probabilities(torch.tensor([0.0, 1.0, 0.0, 1.0]))
        tensor([0.0000, 0.5000, 0.0000, 0.5000])
        """
        below = logits.float()
        below = below - below.max()
        # with a tiny temperature, 0 / 0 would be nan for the greatest, and without the subtraction it would be inf
        scaled = (below / self.temperature).masked_fill(below == 0, 0.0)
        if 0 < self.top_k < len(scaled):
            least = scaled.topk(self.top_k).values[-1]
            scaled = scaled.masked_fill(scaled < least, float("-inf"))
        found = scaled.softmax(-1)
        if self.top_p < 1:
            ordered, indices = found.sort(descending=True)
            is_beyond = ordered.cumsum(-1) - ordered >= self.top_p  # keep the first token that reaches top_p
            found = found.index_fill(0, indices[is_beyond], 0.0)
            found = found / found.sum()
        return found


@dataclass(frozen=True)
class NewToken:
    """A token of a request. finish: "" if more tokens follow, "stop" at a stop token, "length" at max_new_tokens."""

    uid: int
    token: int
    finish: Finish


class RequestError(DeepSpeedError, RuntimeError):
    """The next token of request `uid` could not be chosen, and the request has ended.

    See [Note: a request that fails]. `__cause__` is the original error.
    """

    uid: int

    def __init__(self, uid: int, reason: str, who: str = "") -> None:
        self.uid, self.reason = uid, reason
        super().__init__(f"{who or f'request {uid}'}: {reason}")


@dataclass(eq=False)
class Request:
    """A request generates tokens after its prompt; `pending` holds the tokens that are not computed yet."""

    uid: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_tokens: frozenset[int]
    sampling: Sampling
    generated: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    random: torch.Generator = field(default_factory=torch.Generator)

    @property
    def generates(self) -> bool:
        """Whether only the last generated token is pending."""
        return len(self.pending) == 1 and bool(self.generated)

    def restart(self) -> None:
        """Make all tokens pending, so that they are computed again before the next token."""
        self.pending = [*self.prompt, *self.generated]

    def finish_after(self, token: int) -> Finish:
        """Return how the request ends with the new token `token`; "" if it continues."""
        if token in self.stop_tokens:
            return "stop"
        return "length" if len(self.generated) == self.max_new_tokens else ""


class Scheduler:
    """Schedules requests. Call `submit` at any time between steps, and `step` as long as `has_work`.

    Args:
        engine: the engine; only the scheduler may use its sequences.
        token_budget: tokens per step; None: state_manager.max_ragged_batch_size.
        max_sequences: maximum number of sequences in the cache at once; None: the limit of the engine's forward.

    Raises:
        ConfigError: a limit is above the engine's.
    """

    def __init__(
        self, engine: InferenceEngineV2, token_budget: int | None = None, max_sequences: int | None = None
    ) -> None:
        limits = engine.config.state_manager
        most = min(limits.max_tracked_sequences, limits.max_ragged_sequence_count)
        self.engine = engine
        self.token_budget = _within("token_budget", token_budget, limits.max_ragged_batch_size)
        self.max_sequences = _within("max_sequences", max_sequences, most)
        self._uids = count(max(engine.tracked_uids, default=-1) + 1)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest first
        self._failed: deque[RequestError] = deque()  # errors that are not raised yet

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished, or has failed and `step` has not raised the error yet."""
        return bool(self._waiting or self._running or self._failed)

    @property
    def num_waiting(self) -> int:
        """The number of requests without tokens in the cache."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The number of requests with tokens in the cache."""
        return len(self._running)

    # ----- requests --------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Iterable[int],
        max_new_tokens: int,
        *,
        stop_tokens: Iterable[int] | int = (),
        sampling: Sampling | None = None,
    ) -> int:
        """Add a request, and return the uid of its tokens.

        Args:
            prompt: integers, or a tensor of integers.
            max_new_tokens: the maximum number; a stop token ends the request earlier.
            stop_tokens: like `prompt`, or one integer; a request ends at the first of them, which is returned too.

        Raises:
            ConfigError: a token is no integer or not in the vocabulary, or there are more tokens than a sequence or
                the cache can hold.
        """
        tokens = tuple(_integers("submit: prompt", prompt))
        count = whole_number("submit: max_new_tokens", max_new_tokens, least=None)
        stops = frozenset(_integers("submit: stop_tokens", stop_tokens, of_one=True))
        self._check(tokens, count)
        request = Request(next(self._uids), tokens, count, stops, sampling or Sampling())
        request.random.manual_seed(request.sampling.seed)
        request.restart()
        self._waiting.append(request)
        return request.uid

    def _check(self, prompt: tuple[int, ...], max_new_tokens: int) -> None:
        engine, block_size = self.engine, self.engine.block_size
        if not prompt or max_new_tokens < 1:
            raise ConfigError(
                f"submit: found a prompt of {counted(len(prompt), 'token')} and max_new_tokens {max_new_tokens}; give "
                "one or more of both"
            )
        if min(prompt) < 0 or max(prompt) >= engine.vocabulary:
            found = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ConfigError(f"submit: the prompt holds {found}, but the model knows 0 to {engine.vocabulary - 1}")
        total = len(prompt) + max_new_tokens - 1  # the last one is not computed
        capacity = min(engine.max_context, engine.num_blocks * block_size)
        if total > capacity:
            raise ConfigError(
                f"submit: a prompt of {counted(len(prompt), 'token')} and {max_new_tokens} new ones are more than the "
                f"{capacity + 1} that one sequence can have: max_context is {engine.max_context}, and the cache has "
                f"{counted(engine.num_blocks, 'block')} of {counted(block_size, 'token')}"
            )

    def cancel(self, uid: int) -> bool:
        """Remove a request, or its pending error. Return whether it existed; it may have finished already."""
        for request in self._running:
            if request.uid == uid:
                self._forget(request)
                return True
        before = len(self._waiting) + len(self._failed)
        self._waiting = deque(request for request in self._waiting if request.uid != uid)
        self._failed = deque(error for error in self._failed if error.uid != uid)
        return len(self._waiting) + len(self._failed) < before

    # ----- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> list[NewToken]:
        """Run one forward, and return a new token of each request whose pending tokens were all computed.

        Raises:
            RequestError: a request has failed; raised once each, see [Note: a request that fails]. Call `step` again.
            StateError: nothing can be computed, because other sequences occupy the engine's blocks.
        """
        if self._failed:
            raise self._failed.popleft()
        if not self.has_work:
            return []
        plan = self._plan()
        if not plan:
            raise StateError(
                f"step: nothing can be computed for {counted(self.num_waiting, 'waiting request')}: sequences that are "
                "not the scheduler's have the engine's blocks; flush them"
            )
        tokens = [torch.tensor(request.pending[:number]) for request, number in plan]
        logits = self.engine.put([request.uid for request, _ in plan], tokens, do_checks=False)
        done = []
        for row, (request, number) in enumerate(plan):
            del request.pending[:number]
            if not request.pending:
                done.append((row, request))
        found = self._advance(logits, done) if done else []
        if self._failed and not found:
            raise self._failed.popleft()
        return found

    def _plan(self) -> list[tuple[Request, int]]:
        """Return (request, number of tokens) of the next step: generating requests, then prompts, oldest first."""
        plan: list[tuple[Request, int]] = []
        left, blocks = self.token_budget, int(self.engine.free_blocks)
        order = [each for each in self._running if each.generates]
        order += [each for each in self._running if not each.generates]
        for request in order:
            if left == 0 or request not in self._running:  # it has just released its blocks
                continue
            wanted = min(left, len(request.pending))
            number, needed = self.engine.query(request.uid, wanted, blocks)
            while number < min(wanted, 1) and (newest := self._newest_but(request, plan)) is not None:
                self._put_back(newest)
                blocks = int(self.engine.free_blocks) - sum(self._needed(*each) for each in plan)
                number, needed = self.engine.query(request.uid, wanted, blocks)
            if number:
                plan.append((request, number))
                left, blocks = left - number, blocks - needed
        while self._waiting and left and len(self._running) < self.max_sequences:
            request = self._waiting[0]
            _, whole = self.engine.query(request.uid, len(request.pending), self.engine.num_blocks)
            if self._running and whole + len(self._running) > blocks:  # keep a block for each running request
                break
            number, needed = self.engine.query(request.uid, min(left, len(request.pending)), blocks)
            if not number:
                break
            self._running.append(self._waiting.popleft())
            plan.append((request, number))
            left, blocks = left - number, blocks - needed
        self._running.sort(key=lambda request: request.uid)
        return plan

    def _needed(self, request: Request, number: int) -> int:
        return self.engine.query(request.uid, number, self.engine.num_blocks)[1]

    def _newest_but(self, request: Request, plan: Sequence[tuple[Request, int]]) -> Request | None:
        """Return the newest unplanned request if it is newer than `request`, else None; see [Note: out of blocks]."""
        planned = {each.uid for each, _ in plan}
        newest = max((each for each in self._running if each.uid not in planned), key=lambda each: each.uid)
        return newest if newest.uid > request.uid else None

    def _put_back(self, request: Request) -> None:
        self._forget(request)
        request.restart()
        self._waiting.appendleft(request)

    def _forget(self, request: Request) -> None:
        self._running.remove(request)
        if self.engine.num_tokens(request.uid):  # 0 if its first forward failed
            self.engine.flush(request.uid)

    def _advance(self, logits: Tensor, done: Sequence[tuple[int, Request]]) -> list[NewToken]:
        """Choose the next token of each request in `done`, from its row of the logits."""
        best, greatest = logits.argmax(-1).tolist(), logits.amax(-1).tolist()
        found = []
        for row, request in done:
            try:
                token = _chosen(request, logits[row], best[row], greatest[row])
            except Exception as error:  # noqa: BLE001 - of whatever kind, it is of this request
                failed = RequestError(request.uid, first_line(error))
                failed.__cause__ = error
                self._failed.append(failed)
                self._forget(request)
                continue
            request.generated.append(token)
            request.pending = [token]
            finish = request.finish_after(token)
            if finish:
                self._forget(request)
            found.append(NewToken(request.uid, token, finish))
        return found

    # ----- loops -----------------------------------------------------------------------------------------------------

    def stream(self) -> Iterator[NewToken]:
        """Yield the tokens of all requests until none is left; more requests may be submitted meanwhile.

        Raises:
            RequestError: see `step`; call `stream` again for the other requests.
        """
        while self.has_work:
            yield from self.step()


def generate(
    engine: InferenceEngineV2,
    prompts: Iterable[Iterable[int]],
    max_new_tokens: int | Iterable[int],
    *,
    stop_tokens: Iterable[int] | int = (),
    sampling: Sampling | None = None,
    token_budget: int | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt.

    Args:
        max_new_tokens: one number for each prompt, or for all.
        stop_tokens, sampling: see `Scheduler.submit`. Prompt i uses the seed `sampling.seed` + i.

    Raises:
        ConfigError: see `Scheduler` and its `submit`.
        RequestError: the first prompt that failed; the others end with it.
    """
    scheduler, given = Scheduler(engine, token_budget), list(prompts)
    stops = _integers("generate: stop_tokens", stop_tokens, of_one=True)
    each = _listed(max_new_tokens)
    counts = [max_new_tokens] * len(given) if each is None else each
    if len(counts) != len(given):
        raise ConfigError(
            f"generate: found {counted(len(given), 'prompt')} and {counted(len(counts), 'number')} of new tokens"
        )
    base = sampling or Sampling()
    uids = []
    for index, (prompt, number) in enumerate(zip(given, counts, strict=True)):
        own = Sampling(base.temperature, base.top_k, base.top_p, base.seed + index)
        uids.append(scheduler.submit(prompt, number, stop_tokens=stops, sampling=own))
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    try:
        for new in scheduler.stream():
            found[new.uid].append(new.token)
    except RequestError as error:
        raise RequestError(error.uid, error.reason, f"generate: prompts[{uids.index(error.uid)}]") from error
    finally:
        for uid in uids:  # free the blocks, because the caller keeps the engine
            scheduler.cancel(uid)
    return [found[uid] for uid in uids]


def _chosen(request: Request, logits: Tensor, best: int, greatest: float) -> int:
    """Choose a token. best, greatest: index and value of the greatest logit."""
    if not math.isfinite(greatest):
        raise ArithmeticError(
            f"the greatest logit of its next token is {greatest}, so that none can be chosen; look for weights that "
            "are not finite, and for activations beyond 65504 if the model is in fp16"
        )
    if request.sampling.temperature == 0:
        return best
    chances = request.sampling.probabilities(logits).cpu()
    return int(torch.multinomial(chances, 1, generator=request.random))


def _listed(given: Any) -> list[Any] | None:
    """Return the items of an iterable, tensor or array as a list; None if `given` is a single value or a string."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else None


def _integers(asked: str, given: Any, *, of_one: bool = False) -> list[int]:
    """Return a list of integers. of_one: whether a single value is accepted too."""
    values = _listed(given)
    if values is None and not of_one:
        raise ConfigError(f"{asked}: asked for {given!r}, allowed are integers in a list or a tensor")
    return [whole_number(asked, value, least=None) for value in ([given] if values is None else values)]


def _number(name: str, value: Any) -> float:
    """Convert a number of any library, such as a tensor with one element, to float."""
    if not isinstance(value, SupportsFloat) or isinstance(value, bool):
        raise ConfigError(f"{name}: found {value!r}, which is no number")
    try:
        return float(value)
    except (ValueError, RuntimeError, OverflowError) as error:  # of several numbers, or too large
        raise ConfigError(f"{name}: found {value!r}: {first_line(error)}") from error


def _within(name: str, asked: int | None, most: int) -> int:
    if asked is None:
        return most
    if not 1 <= asked <= most:
        raise ConfigError(f"Scheduler: {name} is {asked}, but the engine's limits allow 1 to {most}")
    return asked
