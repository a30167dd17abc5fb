"""The scheduler over `InferenceEngineV2`: each step's tokens, and the tokens of transformers whatever it decides."""

import copy
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from deepspeed.errors import ConfigError, StateError
from deepspeed.inference.v2 import InferenceEngineV2, RequestError, Sampling, Scheduler, generate
from deepspeed.inference.v2.scheduler import NewToken
from deepspeed.testing.distributed import run_ranks

VOCAB = 61


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, **sizes, **ids)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # logits that are far apart
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def make_engine(num_blocks: int = 64, **limits: Any) -> InferenceEngineV2:
    memory = {"mode": "allocate", "size": num_blocks}
    return InferenceEngineV2(make_model(), {"state_manager": {"kv_block_size": 4, "memory_config": memory, **limits}})


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(3, VOCAB - 1) for _ in range(length)] for length in lengths]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    given, keys = torch.tensor([prompt]), {"max_new_tokens": count, "do_sample": False}
    return model.generate(given, attention_mask=torch.ones_like(given), **keys)[0, len(prompt) :].tolist()


def watch(engine: InferenceEngineV2) -> list[dict[int, int]]:
    """Tokens by uid of each forward from now on."""
    put, seen = engine.put, []

    def recorded(uids: Any, tokens: Any, do_checks: bool = True) -> Any:
        seen.append({uid: len(each) for uid, each in zip(uids, tokens, strict=True)})
        return put(uids, tokens, do_checks)

    engine.put = recorded  # type: ignore[method-assign]
    return seen


LENGTHS, COUNTS = (1, 17, 3, 30, 9, 2), (12, 3, 20, 8, 1, 15)


@pytest.mark.parametrize(("budget", "num_blocks"), [(2, 64), (5, 10), (16, 12), (64, 10), (64, 64)])
def test_greedy_tokens_are_those_of_transformers_whatever_the_schedule(budget: int, num_blocks: int) -> None:
    plain, given = make_model(), prompts(0, *LENGTHS)
    wanted = [greedy(plain, prompt, count) for prompt, count in zip(given, COUNTS, strict=True)]
    engine = make_engine(num_blocks)
    assert generate(engine, given, COUNTS, token_budget=budget) == wanted
    assert engine.tracked_uids == ()
    assert engine.free_blocks.tolist() == [num_blocks]


def test_long_prompts_are_cut_and_short_ones_fused_so_that_steps_are_full() -> None:
    engine = make_engine()
    scheduler, seen = Scheduler(engine, token_budget=8), watch(engine)
    for prompt in prompts(0, 2, 19, 3, 4):
        scheduler.submit(prompt, 6)
    list(scheduler.stream())
    assert seen[:4] == [{0: 2, 1: 6}, {0: 1, 1: 7}, {0: 1, 1: 6, 2: 1}, {0: 1, 1: 1, 2: 2, 3: 4}]
    assert [sum(step.values()) for step in seen] == [8, 8, 8, 8, 4, 4, 3, 3, 2]


def test_a_request_may_come_while_others_run() -> None:
    plain, (first, second) = make_model(), prompts(3, 9, 5)
    scheduler = Scheduler(make_engine())
    found: dict[int, list[int]] = {scheduler.submit(first, 6): []}
    for new in scheduler.stream():
        found.setdefault(new.uid, []).append(new.token)
        if new.uid == 0 and len(found[0]) == 3:
            scheduler.submit(second, 4)
    assert list(found.values()) == [greedy(plain, first, 6), greedy(plain, second, 4)]


def test_the_newest_request_gives_its_blocks_back_where_there_are_too_few() -> None:
    engine = make_engine(num_blocks=6)
    scheduler, seen = Scheduler(engine), watch(engine)
    given = prompts(4, 6, 5)
    for prompt in given:
        scheduler.submit(prompt, 16)
    found: dict[int, list[int]] = {0: [], 1: []}
    for new in scheduler.stream():
        found[new.uid].append(new.token)
    assert [found[0], found[1]] == [greedy(make_model(), prompt, 16) for prompt in given]
    assert {0: 6, 1: 5} in seen
    assert any(step.get(1, 0) > 5 for step in seen), "its prompt and what it had generated are computed again"
    assert all(step.get(0, 1) == 1 for step in seen[1:]), "the oldest goes on"


def test_a_stop_token_ends_a_request() -> None:
    plain, (prompt,) = make_model(), prompts(5, 7)
    tokens = greedy(plain, prompt, 12)
    stop = tokens[4]
    scheduler = Scheduler(make_engine())
    uid = scheduler.submit(prompt, 12, stop_tokens=[stop])
    end = tokens.index(stop) + 1
    wanted = [NewToken(uid, token, "stop" if token == stop else "") for token in tokens[:end]]
    assert list(scheduler.stream()) == wanted
    assert not scheduler.has_work


@pytest.mark.parametrize(
    "form",
    [
        lambda stop: torch.tensor([stop]),
        lambda stop: (torch.tensor(stop),),
        lambda stop: iter([stop]),
        lambda stop: stop,
        torch.tensor,
    ],
)
def test_stop_tokens_have_any_form_that_holds_integers(form: Any) -> None:
    plain, (prompt,) = make_model(), prompts(5, 7)
    tokens = greedy(plain, prompt, 12)
    stop = tokens[4]
    wanted = tokens[: tokens.index(stop) + 1]
    assert len(wanted) < 12
    scheduler = Scheduler(make_engine())
    scheduler.submit(torch.tensor(prompt), torch.tensor(12), stop_tokens=form(stop))
    assert [new.token for new in scheduler.stream()] == wanted
    assert generate(make_engine(), [prompt], 12, stop_tokens=form(stop)) == [wanted]


def test_cancel_frees_the_blocks() -> None:
    engine = make_engine(num_blocks=4)
    scheduler = Scheduler(engine)
    running, waiting = (scheduler.submit(prompt, 4) for prompt in prompts(6, 12, 9))
    scheduler.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.cancel(waiting)
    assert scheduler.cancel(running)
    assert not scheduler.cancel(running)
    assert not scheduler.has_work
    assert scheduler.step() == []
    assert engine.free_blocks.tolist() == [4]


def test_sampled_tokens_do_not_depend_on_the_other_requests() -> None:
    given, sampling = prompts(7, 9, 2, 14), Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=5)
    together = generate(make_engine(), given, 10, sampling=sampling, token_budget=7)
    assert len(set(map(tuple, together))) == 3
    for index, prompt in enumerate(given):
        own = Sampling(0.8, 20, 0.9, seed=5 + index)
        assert generate(make_engine(), [prompt], 10, sampling=own) == [together[index]]


@pytest.mark.parametrize("temperature", [1e-40, 1e-300, 5e-324, 1e-8])
def test_a_tiny_temperature_takes_the_greatest(temperature: float) -> None:
    given = prompts(0, 9, 2)
    wanted = [greedy(make_model(), prompt, 8) for prompt in given]
    for words in ({}, {"top_k": 5}, {"top_p": 0.5}):
        assert generate(make_engine(), given, 8, sampling=Sampling(temperature, **words)) == wanted


# ----- requests that fail --------------------------------------------------------------------------------------------

BROKEN = 7  # a token after which all numbers are NaN


def broken_engine(num_blocks: int = 12) -> InferenceEngineV2:
    """Its embedding of one token is NaN."""
    engine = make_engine(num_blocks)
    with torch.no_grad():
        engine.model.get_input_embeddings().weight[BROKEN] = float("nan")  # type: ignore[operator]
    return engine


def until_done(scheduler: Scheduler) -> tuple[dict[int, list[int]], list[RequestError]]:
    """By uid the tokens, and what was raised."""
    tokens: dict[int, list[int]] = {}
    errors: list[RequestError] = []
    while scheduler.has_work:
        try:
            for new in scheduler.step():
                tokens.setdefault(new.uid, []).append(new.token)
        except RequestError as error:
            errors.append(error)
    return tokens, errors


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=3)], ids=["greedy", "sampled"])
def test_a_request_that_fails_is_alone(sampling: Sampling) -> None:
    given = prompts(2, 5, 4, 6, 9)
    given[1][2] = given[2][0] = BROKEN
    assert all(BROKEN not in given[index] for index in (0, 3))
    wanted = {index: generate(make_engine(), [given[index]], 8, sampling=sampling)[0] for index in (0, 3)}
    assert all(BROKEN not in tokens[:-1] for tokens in wanted.values())
    engine = broken_engine()
    scheduler = Scheduler(engine, max_sequences=3)  # the last one gets the blocks of those that failed
    for prompt in given:
        scheduler.submit(prompt, 8, sampling=sampling)
    tokens, errors = until_done(scheduler)
    assert tokens == wanted
    assert sorted(error.uid for error in errors) == [1, 2], "each is raised once"
    for error in errors:
        assert str(error).startswith(f"request {error.uid}: the greatest logit of its next token is nan")
    assert scheduler.step() == []
    assert engine.tracked_uids == ()
    assert engine.free_blocks.tolist() == [12]


def test_a_request_whose_sampling_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("of this test")

    engine, given = make_engine(), prompts(2, 5, 4)
    scheduler, sampling = Scheduler(engine), Sampling(temperature=0.5)
    monkeypatch.setattr(Sampling, "probabilities", fail)
    uids = [scheduler.submit(given[0], 5), scheduler.submit(given[1], 5, sampling=sampling)]
    tokens, errors = until_done(scheduler)
    assert tokens == {uids[0]: greedy(make_model(), given[0], 5)}
    (error,) = errors
    assert str(error) == f"request {uids[1]}: of this test"
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert engine.free_blocks.tolist() == [64]


def test_a_request_that_failed_and_was_cancelled_raises_no_more() -> None:
    scheduler = Scheduler(broken_engine())
    for prompt in ([BROKEN], [5, 6]):
        scheduler.submit(prompt, 3)
    assert [new.uid for new in scheduler.step()] == [1]
    assert scheduler.cancel(0)
    assert not scheduler.cancel(0)
    assert [new.uid for new in scheduler.stream()] == [1, 1]


def test_generate_raises_what_failed_and_frees_all_blocks() -> None:
    engine = broken_engine()
    with pytest.raises(
        RequestError, match=r"generate: prompts\[1\]: the greatest logit of its next token is nan"
    ) as raised:
        generate(engine, [[5, 6], [3, BROKEN], [8] * 9], 8)
    assert raised.value.uid == 1
    assert engine.tracked_uids == ()
    assert engine.free_blocks.tolist() == [12]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({"temperature": 1.0}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"temperature": 1.0, "top_k": 2}, [0.0, 0.0, 3 / 7, 4 / 7]),
        ({"temperature": 1.0, "top_p": 0.5}, [0.0, 0.0, 3 / 7, 4 / 7]),
        ({"temperature": 1.0, "top_p": 0.3}, [0.0, 0.0, 0.0, 1.0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.7}, [0.0, 0.0, 3 / 7, 4 / 7]),
    ],
)
def test_probabilities_are_those_of_the_greatest(words: dict[str, Any], wanted: list[float]) -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    torch.testing.assert_close(Sampling(**words).probabilities(logits), torch.tensor(wanted))


@pytest.mark.parametrize(
    "words",
    [
        *({"temperature": value} for value in (-1.0, float("nan"), float("inf"))),
        *({"temperature": value} for value in ("0.5", None, True, 10**400, torch.tensor([0.5, 0.5]))),
        *({"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_p": float("nan")}),
        *({"top_k": 1.5}, {"top_k": "3"}, {"top_p": "0.5"}, {"top_p": None}),
        *({"seed": value} for value in (2**64, -(2**63) - 1, 1.5, "1", None)),
    ],
)
def test_sampling_that_means_nothing_is_refused(words: dict[str, Any]) -> None:
    ((name, value),) = words.items()
    found = re.escape(f"{name}={value!r}")
    with pytest.raises(ConfigError, match=rf"{found}.*temperature is a number of 0 or more, top_k an integer of 0"):
        Sampling(**words)


def test_sampling_takes_numbers_of_other_libraries() -> None:
    given = Sampling(np.float32(0.5), torch.tensor(3), torch.tensor(0.5), np.int64(2**63 - 1))  # type: ignore[arg-type]
    assert given == Sampling(0.5, 3, 0.5, 2**63 - 1)
    assert Sampling(seed=2**64 - 1) != Sampling(seed=-(2**63))


@pytest.mark.parametrize(
    ("prompt", "count", "text"),
    [
        ([], 3, "a prompt of 0 tokens"),
        ([3], 0, "max_new_tokens 0"),
        ([3, VOCAB], 3, f"holds {VOCAB}, but the model knows 0 to 60"),
        (
            [3] * 20,
            10,
            "more than the 17 that one sequence can have: max_context is 64, and the cache has 4 blocks of 4",
        ),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(prompt: list[int], count: int, text: str) -> None:
    scheduler = Scheduler(make_engine(num_blocks=4))
    with pytest.raises(ConfigError, match=text):
        scheduler.submit(prompt, count)
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("words", "text"),
    [
        *(({"stop_tokens": [value]}, "stop_tokens: asked for ") for value in (None, "x", 47.5, True)),
        ({"stop_tokens": None}, "stop_tokens: asked for None"),
        ({"stop_tokens": torch.tensor([1.5])}, "stop_tokens: asked for 1.5"),
        ({"stop_tokens": torch.tensor([True])}, "stop_tokens: asked for True"),
        *(({"max_new_tokens": value}, "max_new_tokens: asked for ") for value in (2.5, "3", None, True)),
        ({"max_new_tokens": torch.tensor(2.5)}, r"max_new_tokens: asked for tensor\(2.5"),
        ({"prompt": [5, 6.5]}, "prompt: asked for 6.5"),
        ({"prompt": "five"}, "prompt: asked for 'five'"),
        ({"prompt": 5}, "prompt: asked for 5"),
        ({"prompt": torch.tensor([[5, 6]])}, r"prompt: asked for \[5, 6\]"),
    ],
)
def test_what_is_no_integer_is_refused_with_its_value(words: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"prompt": [5, 6], "max_new_tokens": 3, **words}
    scheduler = Scheduler(make_engine())
    with pytest.raises(ConfigError, match=f"submit: {text}"):
        scheduler.submit(**given)
    assert not scheduler.has_work
    with pytest.raises(ConfigError, match=text):
        generate(make_engine(), [given.pop("prompt")], **given)


def test_numbers_of_new_tokens_are_one_or_one_for_each_prompt() -> None:
    plain, given = make_model(), prompts(3, 9, 5)
    wanted = [greedy(plain, prompt, 4) for prompt in given]
    for count in (4, torch.tensor(4), (4, 4), torch.tensor([4, 4]), iter([4, 4])):
        assert generate(make_engine(), given, count) == wanted
    with pytest.raises(ConfigError, match="max_new_tokens: asked for '44'"):
        generate(make_engine(), given, "44")  # type: ignore[arg-type]


def test_limits_above_the_engines_are_refused() -> None:
    engine = make_engine(max_ragged_batch_size=8, max_ragged_sequence_count=4)
    with pytest.raises(ConfigError, match="token_budget is 9, but the engine's limits allow 1 to 8"):
        Scheduler(engine, token_budget=9)
    with pytest.raises(ConfigError, match="max_sequences is 5, but the engine's limits allow 1 to 4"):
        Scheduler(engine, max_sequences=5)
    with pytest.raises(ConfigError, match="found 2 prompts and 1 number of"):
        generate(engine, [[3], [4]], [5])


def test_blocks_that_somebody_else_has_are_an_error_once_nothing_runs() -> None:
    engine = make_engine(num_blocks=4)
    engine.put([7], [torch.tensor([3] * 13)])
    scheduler = Scheduler(engine)
    assert scheduler.submit([3, 4], 2) == 8
    with pytest.raises(StateError, match="sequences that are not the scheduler's have the engine's blocks"):
        scheduler.step()
    engine.flush(7)
    assert len(list(scheduler.stream())) == 2


def test_a_step_that_fails_can_be_tried_again() -> None:
    (prompt,), engine = prompts(8, 6), make_engine()
    put, scheduler = engine.put, Scheduler(engine)
    scheduler.submit(prompt, 3)

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("of this test")

    engine.put = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        scheduler.step()
    engine.put = put  # type: ignore[method-assign]
    assert [new.token for new in scheduler.stream()] == greedy(make_model(), prompt, 3)
    scheduler.submit(prompt, 3)
    engine.put = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        scheduler.step()
    assert scheduler.cancel(1)
    assert not scheduler.has_work


def tokens_on_ranks(given: list[list[int]]) -> list[list[int]]:
    memory = {"mode": "allocate", "size": 12}
    limits = {"kv_block_size": 4, "memory_config": memory}
    engine = InferenceEngineV2(make_model(), {"tensor_parallel": {"tp_size": 2}, "state_manager": limits})
    return generate(engine, given, COUNTS, token_budget=9)


def test_ranks_that_share_a_model_generate_the_tokens_of_transformers() -> None:
    plain, given = make_model(), prompts(0, *LENGTHS)
    wanted = [greedy(copy.deepcopy(plain), prompt, count) for prompt, count in zip(given, COUNTS, strict=True)]
    assert run_ranks(2, tokens_on_ranks, given) == [wanted, wanted]
