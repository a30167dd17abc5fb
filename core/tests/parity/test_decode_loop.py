"""Our loop of generation: the tokens, random numbers and ends of transformers' loop, and what is left to that one."""

import copy
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.inference.generate import StaticGeneration, cache_of
from deepspeed.inference.injection import inject
from deepspeed.inference.injection.decoder import DecodeStep
from deepspeed.testing.tiers import swept
from torch import Tensor

_SHARED = runpy.run_path(str(Path(__file__).with_name("test_injection.py")))  # its families, models and changes
FAMILIES, VOCAB, _EAGER_ONLY = (_SHARED[name] for name in ("FAMILIES", "VOCAB", "_EAGER_ONLY"))
make_model, padded_batch = _SHARED["make_model"], _SHARED["padded_batch"]
add_adapter, add_hook, replace_mlp = (_SHARED[name] for name in ("add_adapter", "add_hook", "replace_mlp"))

SERVED = [name for name in FAMILIES if name not in ("bloom", "falcon with alibi")]
_IN_EVERY_RUN = ("gpt2", "gpt-j", "opt, norm after", "llama", "mistral", "gemma", "mixtral", "falcon")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each token that our loop computed, the number of sequences."""
    taken: list[int] = []
    compute = DecodeStep.__call__

    def counted(self: DecodeStep, tokens: Tensor) -> Tensor:
        taken.append(len(tokens))
        return compute(self, tokens)

    monkeypatch.setattr(DecodeStep, "__call__", counted)
    return taken


def pair(name: str, **words: Any) -> tuple[Any, Any]:
    """The plain model and the injected one, which never end by themselves."""
    attention = {"attn_implementation": "eager"} if name in _EAGER_ONLY else {}
    plain = make_model(FAMILIES[name], **attention, **words)
    plain.generation_config.eos_token_id = None
    injected = copy.deepcopy(plain)
    inject(injected, max_out_tokens=48)
    return plain, injected


def tokens_of(model: Any, batch: dict[str, Any], **words: Any) -> Tensor:
    torch.manual_seed(3)
    found: Tensor = model.generate(**batch, **words)
    return found


@pytest.mark.parametrize("name", swept(SERVED, lambda name: name in _IN_EVERY_RUN))
def test_every_family_of_the_table_gives_the_tokens_of_transformers_loop(name: str, steps: list[int]) -> None:
    plain, injected = pair(name)
    for batch in (padded_batch(), {"input_ids": padded_batch()["input_ids"][:1]}):
        for words in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}):
            steps.clear()
            wanted = tokens_of(plain, batch, max_new_tokens=12, **words)
            assert torch.equal(tokens_of(injected, batch, max_new_tokens=12, **words), wanted)
            assert steps == [len(wanted)] * 11


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-j", "gpt-neo"])
def test_without_a_kernel_of_whole_layers_their_parts_are_called(
    name: str, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_OPS_DISABLE", "inference_core_ops")
    test_every_family_of_the_table_gives_the_tokens_of_transformers_loop(name, steps)


def test_layers_are_one_call_each_where_the_kernel_serves() -> None:
    _, injected = pair("llama")
    with torch.profiler.profile(acc_events=True) as profile:
        injected.generate(**padded_batch(), max_new_tokens=5, do_sample=False)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["ds_cpu::decoder_layer"] == 2 * 4
    many = {"input_ids": padded_batch()["input_ids"][:1].repeat(17, 1)}  # more than the kernel takes
    with torch.profiler.profile(acc_events=True) as profile:
        injected.generate(**many, max_new_tokens=3, do_sample=False)
    assert "ds_cpu::decoder_layer" not in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("name", ["bloom", "falcon with alibi"])
def test_families_beside_the_table_run_in_transformers_loop(name: str, steps: list[int]) -> None:
    plain, injected = pair(name)
    wanted = tokens_of(plain, padded_batch(), max_new_tokens=6)
    assert torch.equal(tokens_of(injected, padded_batch(), max_new_tokens=6), wanted)
    assert steps == []


def test_rotary_angles_that_depend_on_the_length_are_the_models_own(steps: list[int]) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    plain, injected = pair("llama", rope_parameters=rope)
    wanted = tokens_of(plain, padded_batch(), max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens_of(injected, padded_batch(), max_new_tokens=6, do_sample=False), wanted)
    assert steps == []


class _Every(list[Tensor]):
    """A streamer that keeps what it is given."""

    def put(self, value: Tensor) -> None:
        self.append(value.clone())

    def end(self) -> None:
        self.append(torch.tensor([-1]))


class _Third:
    """Stops a sequence behind its third token of the generation whose number is even."""

    def __call__(self, input_ids: Tensor, scores: Any, **words: Any) -> Tensor:
        return (input_ids[:, 9:] % 2 == 0).sum(1) >= 3


@pytest.mark.parametrize(
    "words",
    [
        {"eos_token_id": [7, 11, 13, 17, 19, 23], "max_new_tokens": 20},
        {"eos_token_id": 7, "max_new_tokens": 12, "min_new_tokens": 10},
        {"max_length": 15, "do_sample": True, "top_k": 9, "min_p": 0.01},
        {"max_new_tokens": 9, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 9, "do_sample": True, "num_return_sequences": 2, "typical_p": 0.8},
        {"max_new_tokens": 9, "bad_words_ids": [[3], [4, 5]], "suppress_tokens": [9]},
        {"max_new_tokens": 20, "stopping_criteria": [_Third()]},
        {"max_new_tokens": 20, "logits_processor": [lambda ids, scores: scores + (ids[:, -1:] % 3)]},
    ],
    ids="-".join,
)
def test_processors_criteria_and_ends_are_transformers_own(words: dict[str, Any], steps: list[int]) -> None:
    plain, injected = pair("qwen2")
    wanted = tokens_of(plain, padded_batch(), **words)
    found = tokens_of(injected, padded_batch(), **words)
    assert torch.equal(found, wanted)
    assert len(steps) == wanted.shape[1] - 9 - 1


def test_a_criterion_of_the_callers_may_go_beyond_the_configured_length(steps: list[int]) -> None:
    from transformers import MaxLengthCriteria, StoppingCriteriaList

    plain, injected = pair("llama")
    words = {"max_new_tokens": 3, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(30)])}
    wanted = tokens_of(plain, padded_batch(), **words)
    assert wanted.shape[1] == 30
    assert torch.equal(tokens_of(injected, padded_batch(), **words), wanted)
    assert len(steps) == 20


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("kernel", ["whole layers", "parts"])
def test_a_length_of_the_models_configuration_that_the_cache_does_not_hold(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "parts":
        monkeypatch.setenv("DS_OPS_DISABLE", "inference_core_ops")
    _, injected = pair(name)
    injected.generation_config.max_new_tokens = 60
    with pytest.raises(ConfigError, match="needs 49 tokens.* max_out_tokens = 48"):
        injected.generate(**padded_batch(), do_sample=False)


def test_positions_of_the_callers_may_be_beyond_the_cache(steps: list[int]) -> None:
    plain, injected = pair("llama")
    tokens = padded_batch()["input_ids"]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens) + 100
    words = {"position_ids": positions, "max_new_tokens": 6, "do_sample": False}
    wanted = tokens_of(plain, {"input_ids": tokens}, **words)
    assert torch.equal(tokens_of(injected, {"input_ids": tokens}, **words), wanted)
    assert steps == [len(tokens)] * 5


def test_a_streamer_is_given_the_same(steps: list[int]) -> None:
    plain, injected = pair("gpt2")
    batch = {"input_ids": padded_batch()["input_ids"][:1]}
    wanted, found = _Every(), _Every()
    tokens_of(plain, batch, max_new_tokens=5, streamer=wanted)
    tokens_of(injected, batch, max_new_tokens=5, streamer=found)
    assert len(wanted) == 7
    assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))
    assert len(steps) == 4


def test_times_of_its_tokens_are_measured(steps: list[int]) -> None:
    plain = make_model(FAMILIES["llama"])
    plain.generation_config.eos_token_id = None
    wanted = tokens_of(plain, padded_batch(), max_new_tokens=5)
    engine = deepspeed.init_inference(plain, dtype="fp32", replace_with_kernel_inject=True)
    engine.profile_model_time()
    assert torch.equal(tokens_of(engine, padded_batch(), max_new_tokens=5), wanted)
    assert len(steps) == 4
    times = engine.model_times()
    assert len(times) == 5  # the prompt's with them
    assert min(times) > 0


def test_random_numbers_go_on_where_transformers_would() -> None:
    states = []
    for model in pair("llama"):
        tokens_of(model, padded_batch(), max_new_tokens=5, do_sample=True)
        states.append(torch.rand(4))
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "words",
    [
        {"num_beams": 2},
        {"return_dict_in_generate": True, "output_scores": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids="-".join,
)
def test_what_the_loop_does_not_serve_is_transformers_own(words: dict[str, Any], steps: list[int]) -> None:
    plain, injected = pair("llama")
    batch = {"input_ids": padded_batch()["input_ids"][:1]}
    wanted, found = (model.generate(**batch, max_new_tokens=6, do_sample=False, **words) for model in (plain, injected))
    if "output_scores" in words:
        assert all(torch.allclose(*each, atol=1e-4) for each in zip(found.scores, wanted.scores, strict=True))
        wanted, found = wanted.sequences, found.sequences
    assert torch.equal(found, wanted)
    assert steps == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("cache_implementation", "static"), ("cache_implementation", "dynamic"), ("prompt_lookup_num_tokens", 2)],
)
def test_what_the_models_own_configuration_asks_for_is_transformers_own(
    name: str, value: Any, steps: list[int]
) -> None:
    from transformers import GenerationConfig

    plain, injected = pair("llama")
    batch = {"input_ids": padded_batch()["input_ids"][:1]}
    for model in (plain, injected):
        setattr(model.generation_config, name, value)
    for words in ({}, {"generation_config": GenerationConfig(pad_token_id=0, max_new_tokens=6)}):
        keys = {"do_sample": False, "max_new_tokens": 6, **words}
        wanted, found = (model.generate(**batch, **keys) for model in (plain, injected))
        assert torch.equal(found, wanted)
    assert steps == []
    again = injected.generate(**batch, max_new_tokens=6, do_sample=False, **{name: None})
    assert torch.equal(again, wanted)
    assert steps, "the argument counts"


def test_a_cache_that_older_files_name_is_none(steps: list[int]) -> None:
    plain, injected = pair("llama")
    for model in (plain, injected):
        model.generation_config.cache_implementation = "hybrid"
    wanted, found = (model.generate(**padded_batch(), max_new_tokens=6, do_sample=False) for model in (plain, injected))
    assert torch.equal(found, wanted)
    assert steps


@pytest.mark.parametrize("by", ["argument", "configuration"])
@pytest.mark.parametrize("words", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "low"}], ids="-".join)
def test_loops_that_transformers_loads_from_the_hub_are_left_to_it(
    words: dict[str, Any], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GenerationMixin

    _, injected = pair("llama")
    keys: dict[str, Any] = {**padded_batch(), "max_new_tokens": 3, "do_sample": False}
    if by == "argument":
        keys |= words
    else:
        for name, value in words.items():
            setattr(injected.generation_config, name, value)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        injected.generate(**keys)
    asked: list[str] = []

    def load(_: Any, repository: str, **__: Any) -> Callable[..., Any]:
        asked.append(repository)
        return lambda model, **given: given

    monkeypatch.setattr(GenerationMixin, "load_custom_generate", load)
    given = injected.generate(**keys, trust_remote_code=True)
    assert asked
    assert cache_of(given) is None


def test_beams_of_a_configuration_run_in_transformers_loop(steps: list[int]) -> None:
    from transformers import GenerationConfig

    plain, injected = pair("llama")
    config = GenerationConfig(num_beams=3, max_new_tokens=6, pad_token_id=0)
    wanted, found = (model.generate(**padded_batch(), generation_config=config) for model in (plain, injected))
    assert torch.equal(found, wanted)
    for model in (plain, injected):
        model.generation_config.num_beams = 3
    wanted, found = (model.generate(**padded_batch(), max_new_tokens=6) for model in (plain, injected))
    assert torch.equal(found, wanted)
    assert steps == []


def test_embeddings_in_the_place_of_tokens(steps: list[int]) -> None:
    found = []
    for model in pair("llama"):
        embedded = model.get_input_embeddings()(padded_batch()["input_ids"])
        found.append(model.generate(inputs_embeds=embedded.detach(), max_new_tokens=6, do_sample=False))
    assert torch.equal(*found)
    assert steps == []


def hook_of_the_model(model: Any) -> Any:
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs), with_kwargs=True)
    return model


def hook_of_a_layer(model: Any) -> Any:
    model.model.layers[1].register_forward_hook(lambda _, __, output: output * 1.5)
    return model


class _Doubled(torch.nn.Module):
    """In the place of a layer."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states * 2


def replace_layer(model: Any) -> Any:
    model.model.layers[1] = _Doubled()
    return model


def replace_last_norm(model: Any) -> Any:
    model.model.norm = torch.nn.Identity()
    return model


def shorten(model: Any) -> Any:
    model.model.layers = model.model.layers[:1]
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "change",
    [hook_of_the_model, hook_of_a_layer, replace_layer, replace_last_norm, shorten, add_adapter, add_hook, replace_mlp],
)
def test_a_model_that_was_changed_since_computes_its_tokens_itself(
    change: Callable[[Any], Any], steps: list[int]
) -> None:
    plain, injected = pair("llama")
    words = {**padded_batch(), "max_new_tokens": 6, "do_sample": False}
    injected.generate(**words)
    assert steps
    steps.clear()
    tokens = [change(model).eval().generate(**words) for model in (plain, injected)]
    assert torch.equal(*tokens)
    assert steps == []


def test_hooks_of_the_embedding_and_of_the_output_layer_are_called(steps: list[int]) -> None:
    calls: list[str] = []
    plain, injected = pair("llama")
    for model in (plain, injected):
        model.lm_head.register_forward_hook(lambda _, __, output: output.flip(-1))
        model.model.embed_tokens.register_forward_hook(lambda _, args, output: calls.append("embedding"))
    wanted, found = (model.generate(**padded_batch(), max_new_tokens=6, do_sample=False) for model in (plain, injected))
    assert torch.equal(found, wanted)
    assert len(calls) == 12
    assert len(steps) == 5


def test_weights_that_change_between_generations_count(steps: list[int]) -> None:
    plain, injected = pair("llama")
    words = {**padded_batch(), "max_new_tokens": 6, "do_sample": False}
    injected.generate(**words)
    for model in (plain, injected):
        with torch.no_grad():
            model.model.norm.weight.mul_(-1)
            for parameter in model.model.layers[0].parameters():
                parameter.data = parameter.data.flip(0).clone()
    assert torch.equal(injected.generate(**words), plain.generate(**words))
    assert len(steps) == 10


def test_tokens_that_are_hidden_within_a_prompt(steps: list[int]) -> None:
    batch = padded_batch()
    batch["attention_mask"][0, 4] = 0
    plain, injected = pair("qwen2")
    wanted, found = (model.generate(**batch, max_new_tokens=6, do_sample=False) for model in (plain, injected))
    assert torch.equal(found, wanted)
    assert len(steps) == 5
    assert int(wanted.max()) < VOCAB


def test_before_transformers_5_its_own_loop_runs() -> None:
    """It had no prefill that our loop could call."""

    class Earlier(torch.nn.Module):
        generation_config = None

        def generate(self, inputs: Any, **words: Any) -> set[str]:
            return set(words)

    decoder: Any = SimpleNamespace(serves=lambda: True)
    model, newer = Earlier(), Earlier()
    newer._prefill = None
    prompt = torch.zeros(1, 2, dtype=torch.long)
    for each in (model, newer):
        StaticGeneration(each, 8, decoder)
    assert model.generate(prompt, max_new_tokens=2) == {"max_new_tokens", "past_key_values"}
    assert newer.generate(prompt, max_new_tokens=2) == {"max_new_tokens", "past_key_values", "custom_generate"}
