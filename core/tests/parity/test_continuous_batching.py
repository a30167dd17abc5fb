"""`InferenceEngineV2`: the logits and greedy tokens of transformers, whatever is computed together, in what parts."""

import copy
import random
import re
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
import transformers
from deepspeed.errors import CheckpointError, ConfigError, StateError
from deepspeed.inference import InferenceEngineV2, build_engine_from_ds_checkpoint, build_hf_engine
from deepspeed.inference.v2 import SchedulingError, SchedulingResult
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept
from torch import Tensor

VOCAB = 61
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_FALCON = {"hidden_size": 32, "vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4}
_NEO = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {**_GROUPED, "head_dim": 8}),
    "gemma 2": (
        "Gemma2",
        {**_GROUPED, "head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma 3": (
        "Gemma3Text",
        {**_GROUPED, "head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 4}),
    "gpt2": ("GPT2", _GPT2),
    "gpt-neo, local": ("GPTNeo", {**_NEO, "window_size": 5, "attention_types": [[["global", "local"], 1]]}),
    "gpt-j": ("GPTJ", {**_GPT2, "rotary_dim": 4}),
    "gpt-neox": ("GPTNeoX", _SIZES),
    "opt, norm after": (
        "OPT",
        {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "pad_token_id": 0},
    ),
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("Llama", _GROUPED),
    "mistral, sliding": ("Mistral", {**_GROUPED, "sliding_window": 5}),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen2, sliding": ("Qwen2", {**_GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 8}),
    "phi": ("Phi", _SIZES),
    "falcon": ("Falcon", _FALCON),
    "falcon, grouped": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
}


_EAGER_ONLY = ("gpt-neo, local", "gpt-j", "bloom", "gemma 2")


def make_model(name: str = "llama", **words: Any) -> Any:
    family, sizes = FAMILIES[name]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **ids, **words})
    family = family.removesuffix("Text")
    model_class = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that are not 0 and 1, logits that are far apart
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def settings(num_blocks: int = 64, **limits: Any) -> dict[str, Any]:
    memory = {"mode": "allocate", "size": num_blocks}
    return {"state_manager": {"kv_block_size": 4, "memory_config": memory, **limits}}


def prompts(*lengths: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=made) for length in lengths]


def all_logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens.unsqueeze(0)).logits[0]


def greedy(model: Any, prompt: Tensor, count: int) -> list[int]:
    keys = {"max_new_tokens": count, "do_sample": False}
    found = model.generate(prompt.unsqueeze(0), attention_mask=torch.ones(1, len(prompt)), **keys)
    return found[0, len(prompt) :].tolist()


def assert_state(engine: InferenceEngineV2, tokens: dict[int, int], free: int) -> None:
    """By uid how many tokens are in the cache, and the free blocks."""
    assert {uid: engine.num_tokens(uid) for uid in engine.tracked_uids} == tokens
    assert engine.free_blocks.tolist() == [free]


@pytest.mark.parametrize(
    ("name", "attention"),
    swept(
        [(name, kind) for name in FAMILIES for kind in ("eager", "sdpa") if kind == "eager" or name not in _EAGER_ONLY],
        lambda name, kind: kind == "sdpa" or name in _EAGER_ONLY,
    ),
)
def test_logits_of_mixed_parts_are_those_of_the_plain_model(name: str, attention: str) -> None:
    plain = make_model(name, attn_implementation=attention)
    tokens = prompts(1, 13, 7, 7)
    wanted = [all_logits(plain, each) for each in tokens]
    engine = InferenceEngineV2(copy.deepcopy(plain), settings())
    seen = [0] * len(tokens)
    for parts in ({0: 1, 1: 5, 2: 6, 3: 5}, {2: 1, 1: 7, 3: 1}, {3: 1, 1: 1}):
        given = [tokens[uid][seen[uid] : seen[uid] + count] for uid, count in parts.items()]
        logits = engine.put(list(parts), given)
        for row, (uid, count) in zip(logits, parts.items(), strict=True):
            seen[uid] += count
            assert (row - wanted[uid][seen[uid] - 1]).abs().max() < 1e-4
    assert seen == [1, 13, 7, 7]


@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_are_those_of_transformers_whatever_the_schedule(seed: int) -> None:
    plain, draw = make_model(), random.Random(seed)
    tokens = prompts(*(draw.randint(1, 20) for _ in range(6)))
    wanted = [greedy(plain, each, 10) for each in tokens]
    engine = InferenceEngineV2(copy.deepcopy(plain), settings())
    pending, found = dict(enumerate(tokens)), {uid: [] for uid in range(len(tokens))}
    while pending:
        chosen = draw.sample(sorted(pending), draw.randint(1, len(pending)))
        counts = [draw.randint(1, len(pending[uid])) for uid in chosen]
        logits = engine.put(chosen, [pending[uid][:count] for uid, count in zip(chosen, counts, strict=True)])
        for uid, count, row in zip(chosen, counts, logits, strict=True):
            pending[uid] = pending[uid][count:]
            if not len(pending[uid]):
                found[uid].append(int(row.argmax()))
                pending[uid] = torch.tensor(found[uid][-1:])
            if len(found[uid]) == 10:
                engine.flush(uid)
                del pending[uid]
    assert [found[uid] for uid in range(len(tokens))] == wanted
    assert_state(engine, {}, 64)


def test_blocks_of_a_flushed_sequence_are_used_again() -> None:
    plain, (first, second) = make_model(), prompts(16, 15)
    engine = InferenceEngineV2(copy.deepcopy(plain), settings(num_blocks=4))
    engine.put([1], [first])
    assert_state(engine, {1: 16}, 0)
    engine.flush(1)
    logits = engine.put([2], [second])
    assert (logits[0] - all_logits(plain, second)[-1]).abs().max() < 1e-4
    assert_state(engine, {2: 15}, 0)
    assert engine.get_remaining_block_capacity(2) == 1
    assert engine.get_remaining_block_capacity(1) == 0


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.03), (4, 0.4)])
def test_weights_in_few_bits_give_the_logits_of_the_engine_that_is_not_batched(bits: int, bound: float) -> None:
    plain, tokens = make_model(), prompts(9, 3)
    quant = {"weight": {"num_bits": bits}}
    alone = deepspeed.init_inference(copy.deepcopy(plain), dtype=torch.int8, quant=quant)
    config = {**settings(), "quantization": {"quantization_mode": f"int{bits}"}}
    logits = InferenceEngineV2(copy.deepcopy(plain), config).put([0, 1], tokens)
    for row, each in zip(logits, tokens, strict=True):
        wanted = alone(each.unsqueeze(0)).logits[0, -1]
        assert (row - wanted).norm() / wanted.norm() < 1e-2  # activations are rounded by the kernel of few rows
        exact = all_logits(plain, each)[-1]
        assert 0 < (row - exact).norm() / exact.norm() < bound


def test_bf16_is_as_near_to_fp32_as_transformers() -> None:
    plain, tokens = make_model(), prompts(9, 3)
    half = copy.deepcopy(plain).bfloat16()
    logits = InferenceEngineV2(copy.deepcopy(half), settings()).put([0, 1], tokens)
    assert logits.dtype == torch.bfloat16
    for row, each in zip(logits, tokens, strict=True):
        exact = all_logits(plain, each)[-1]
        theirs = (all_logits(half, each)[-1].float() - exact).norm()
        assert (row.float() - exact).norm() < 1.5 * theirs


def logits_on_ranks(folder: str, num_blocks: int) -> tuple[Tensor, list[int], str]:
    tokens = prompts(9, 3)
    config = {**settings(num_blocks), "tensor_parallel": {"tp_size": 2}}
    engine = build_hf_engine(folder, config) if folder else InferenceEngineV2(make_model(), config)
    engine.put([0, 1], [tokens[0][:4], tokens[1][:2]])
    logits = engine.put([1, 0], [tokens[1][2:], tokens[0][4:]])
    try:
        engine.put([2], [tokens[0]])
    except SchedulingError as error:
        return logits, engine.free_blocks.tolist(), str(error)
    return logits, engine.free_blocks.tolist(), ""


@pytest.mark.parametrize("from_files", [False, True], ids=["given", "from files"])
def test_a_model_divided_over_two_ranks_gives_equal_logits(tmp_path: Path, from_files: bool) -> None:
    plain, tokens = make_model(), prompts(9, 3)
    if from_files:
        plain.save_pretrained(tmp_path)
    for logits, free, error in run_ranks(2, logits_on_ranks, str(tmp_path) if from_files else "", 5):
        assert free == [1]
        assert "3 more blocks" in error
        for row, uid in zip(logits, (1, 0), strict=True):
            assert (row - all_logits(plain, tokens[uid])[-1]).abs().max() < 1e-4


# ----- limits and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uids", "lengths", "limits", "result", "text"),
    [
        ([1, 5], [1, 5], {}, "KVCacheLimitExceeded", "the batch needs 2 more blocks of 4 tokens, but 1 of 4 are free"),
        ([1], [60], {"memory_config": {"mode": "allocate", "size": 99}}, "SequenceTokenLimitExceeded", "at most 64"),
        ([1], [6], {"max_context": 12}, "SequenceTokenLimitExceeded", "uid 1 has 7 tokens, and 6 would be new"),
        ([1], [9], {"max_ragged_batch_size": 8}, "BatchTokenLimitExceeded", "found 9 new tokens"),
        ([1, 2], [1, 1], {"max_ragged_sequence_count": 1}, "BatchSequenceLimitExceeded", "found 2 sequences"),
        ([1, 3], [1, 1], {"max_tracked_sequences": 2}, "EngineSequenceLimitExceeded", "flush sequences"),
    ],
)
def test_what_is_over_a_limit_names_it_and_changes_nothing(
    uids: list[int], lengths: list[int], limits: dict[str, Any], result: str, text: str
) -> None:
    plain, (first, second) = make_model(), prompts(7, 1)
    config = settings(num_blocks=4)
    config["state_manager"].update(limits)
    engine = InferenceEngineV2(copy.deepcopy(plain), config)
    engine.put([1], [first])
    engine.put([2], [second])
    before = engine.free_blocks.item()
    assert engine.can_schedule(uids, lengths) is SchedulingResult[result]
    with pytest.raises(SchedulingError, match=text) as raised:
        engine.put(uids, [torch.ones(length, dtype=torch.int64) for length in lengths])
    assert raised.value.result is SchedulingResult[result]
    assert_state(engine, {1: 7, 2: 1}, int(before))
    assert engine.can_schedule([1], [1]) is SchedulingResult.Success
    logits = engine.put([1], [torch.tensor([5])])
    wanted = all_logits(plain, torch.cat((first, torch.tensor([5]))))[-1]
    assert (logits[0] - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("uids", "tokens", "text"),
    [
        ([1, 1], [[3], [4]], "found uid 1 twice"),
        ([1], [[3], [4]], "found 1 uid and 2 lists"),
        ([], [], "one uid at least"),
        ([1], [[]], "give a tensor of one or more integers"),
        ([1], [[0.5]], "give a tensor of one or more integers"),
        ([1], ["w1 w2"], "of uid 1 are a str that makes no tensor"),
        ([1], [[[1, 2], [3]]], "of uid 1 are a list that makes no tensor"),
        ([1], [[3, VOCAB]], f"hold {VOCAB}, but the model knows 0 to {VOCAB - 1}"),
        ([1], [[-1]], "hold -1"),
    ],
)
def test_wrong_tokens_are_refused_and_change_nothing(uids: list[int], tokens: list[Any], text: str) -> None:
    engine = InferenceEngineV2(make_model(), settings(num_blocks=4))
    engine.put([7], prompts(3))
    with pytest.raises(ConfigError, match=text):
        engine.put(uids, tokens)
    assert_state(engine, {7: 3}, 3)


def test_flush_of_what_is_not_tracked_is_an_error() -> None:
    engine = InferenceEngineV2(make_model(), settings())
    engine.put([1, 2], prompts(3, 4))
    engine.flush(1)
    for uid in (1, 9):
        with pytest.raises(ConfigError, match=f"uid {uid} is not tracked: .*; tracked are 2"):
            engine.flush(uid)
    assert_state(engine, {2: 4}, 63)


@pytest.mark.parametrize("uid", [1.7, 1.0, "1", None, True, torch.tensor(1.5), torch.tensor(True), [1]], ids=repr)
def test_a_uid_that_is_no_integer_is_refused_with_its_value(uid: Any) -> None:
    engine = InferenceEngineV2(make_model(), settings())
    engine.put([1], prompts(3))
    calls: list[Any] = [
        lambda: engine.put([uid], prompts(1)),
        lambda: engine.can_schedule([uid], [1]),
        lambda: engine.query(uid, 1, 1),
        lambda: engine.flush(uid),
        lambda: engine.num_tokens(uid),
        lambda: engine.get_remaining_block_capacity(uid),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=rf"uid: asked for {re.escape(repr(uid))}, allowed is an integer"):
            call()
    assert_state(engine, {1: 3}, 63)


@pytest.mark.parametrize("uid", [torch.tensor(1), np.int64(1), np.int32(1)], ids=repr)
def test_a_uid_is_an_integer_of_any_library(uid: Any) -> None:
    engine = InferenceEngineV2(make_model(), settings(max_tracked_sequences=1))
    engine.put([uid], prompts(3))
    assert engine.tracked_uids == (1,)
    engine.put([1], prompts(2))
    assert engine.num_tokens(uid) == 5
    assert engine.query(uid, 3, 0) == (3, 0)
    assert engine.get_remaining_block_capacity(uid) == 3
    assert engine.can_schedule([uid], [torch.tensor(1)]) is SchedulingResult.Success
    engine.flush(uid)
    assert_state(engine, {}, 64)


def test_a_length_that_is_no_integer_is_refused() -> None:
    engine = InferenceEngineV2(make_model(), settings())
    for length in (1.5, "1", True, -1):
        with pytest.raises(ConfigError, match=f"can_schedule: the new tokens of uid 1: asked for {length!r}"):
            engine.can_schedule([1], [length])  # type: ignore[list-item]


def test_a_forward_that_fails_leaves_the_sequences_as_they_were() -> None:
    plain, (first, second) = make_model(), prompts(7, 9)
    engine = InferenceEngineV2(copy.deepcopy(plain), settings(num_blocks=8))
    engine.put([1], [first])
    layer: Any = engine.model
    hook = layer.model.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(StateError, match="does not compute by its fused block any more"):
        engine.put([2, 1], [second, torch.tensor([5])])
    assert_state(engine, {1: 7}, 6)
    hook.remove()
    logits = engine.put([2, 1], [second, torch.tensor([5])])
    wanted = all_logits(plain, torch.cat((first, torch.tensor([5]))))[-1]
    assert (logits[1] - wanted).abs().max() < 1e-4


def test_a_model_in_training_mode_is_an_error_that_says_so() -> None:
    engine = InferenceEngineV2(make_model(), settings())
    engine.model.train()
    with pytest.raises(StateError, match=r"put into training mode, .*; call model\.eval\(\)"):
        engine.put([1], prompts(3))
    engine.model.eval()
    engine.put([1], prompts(3))
    assert_state(engine, {1: 3}, 63)


def test_query_says_what_fits() -> None:
    engine = InferenceEngineV2(make_model(), settings(num_blocks=8, max_context=20, max_tracked_sequences=1))
    assert engine.query(1, 9, 8) == (9, 3)
    assert engine.query(1, 99, 8) == (20, 5)
    assert engine.query(1, 9, 2) == (8, 2)
    engine.put([1], prompts(6))
    assert engine.query(1, 2, 0) == (2, 0)
    assert engine.query(1, 9, 1) == (6, 1)
    assert engine.query(1, 99, 8) == (14, 3)
    assert engine.query(2, 1, 8) == (0, 0)


def test_reserve_takes_no_more_than_all_sequences_need() -> None:
    limits = {"kv_block_size": 4, "max_tracked_sequences": 3, "max_context": 10}
    engine = InferenceEngineV2(make_model(), {"state_manager": limits})
    assert engine.num_blocks == 3 * 3
    too_much = {"state_manager": {"memory_config": {"mode": "reserve", "size": 2**60}}}
    with pytest.raises(ConfigError, match="bytes are free on a rank, and size reserves"):
        InferenceEngineV2(make_model(), too_much)


# ----- models and files ----------------------------------------------------------------------------------------------


def test_an_engine_of_init_inference_is_taken_as_it_is() -> None:
    plain, (tokens,) = make_model(), prompts(5)
    ours = deepspeed.init_inference(copy.deepcopy(plain), dtype=torch.float, replace_with_kernel_inject=True)
    engine = InferenceEngineV2(ours, settings())
    assert engine.model is ours.module
    assert (engine.put([0], [tokens])[0] - all_logits(plain, tokens)[-1]).abs().max() < 1e-4
    assert ours.generate(tokens.unsqueeze(0), max_new_tokens=5, do_sample=False)[0, 5:].tolist() == greedy(
        plain, tokens, 5
    )
    with pytest.raises(ConfigError, match="quantization_mode 'int8' in the config; give it to init_inference"):
        InferenceEngineV2(ours, {"quantization": {"quantization_mode": "int8"}})


def test_a_second_engine_over_a_model_says_what_there_is() -> None:
    said = "there is an engine over this LlamaForCausalLM already, .* or build the model again"
    engine = InferenceEngineV2(make_model(), settings())
    with pytest.raises(StateError, match=said):
        InferenceEngineV2(engine.model, settings())
    ours = deepspeed.init_inference(make_model(), dtype=torch.float, replace_with_kernel_inject=True)
    with pytest.raises(StateError, match=said):
        deepspeed.init_inference(ours.module, dtype=torch.half, replace_with_kernel_inject=True)
    assert ours.module.dtype == torch.float, "the engine that there is stays as it was"


def bert() -> Any:
    sizes = {**_SIZES, "is_decoder": False}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.nn.Linear(2, 2), "Linear is no causal language model"),
        (lambda: "llama", "found str; give a causal language model"),
        (bert, "BertForMaskedLM is an encoder"),
        (
            lambda: deepspeed.init_inference(make_model(), dtype=torch.float),
            "0 of 2 layers of LlamaForCausalLM compute by fused blocks",
        ),
        (
            lambda: make_model("falcon", alibi=True, multi_query=False, parallel_attn=False),
            "FalconForCausalLM has ALiBi in its masks",
        ),
        (
            lambda: make_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
            "rotary embeddings of type 'dynamic'",
        ),
    ],
)
def test_a_model_that_cannot_be_batched_says_why(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        InferenceEngineV2(make(), settings())


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "longrope"}},  # as transformers before 5.0 has it
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},  # as its files had it before
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
    ],
)
def test_rotary_types_are_read_wherever_a_version_of_transformers_has_them(keys: dict[str, Any]) -> None:
    model = make_model()
    model.config = SimpleNamespace(**keys)
    with pytest.raises(ConfigError, match="rotary embeddings of type '(longrope|dynamic)'"):
        InferenceEngineV2(model, settings())


class LlamaOfAnotherVersion(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """The cache by the other name that versions of transformers have for it, in the model and in its layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.renames = 0
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self._rename, with_kwargs=True)

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, cache: Any = None
    ) -> Any:
        own = "cache" if "cache" in signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
        return super().forward(input_ids, attention_mask, position_ids, **{own: cache})

    def _rename(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        names = {"past_key_values": "cache", "cache": "past_key_values"}
        self.renames += 1
        return args, {names.get(name, name): value for name, value in kwargs.items()}


def test_a_cache_is_found_whatever_a_version_of_transformers_calls_it() -> None:
    plain = make_model()
    model = LlamaOfAnotherVersion(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    (prompt,) = prompts(7)
    engine = InferenceEngineV2(model, settings())
    tokens = [int(engine.put([0], [prompt]).argmax())]
    for _ in range(5):
        tokens.append(int(engine.put([0], [torch.tensor(tokens[-1:])]).argmax()))
    assert tokens == greedy(plain, prompt, 6)
    assert model.renames == 2 * 6


def test_a_model_that_names_its_cache_otherwise_is_refused() -> None:
    class Renamed(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, memory: Any = None, **_: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(ConfigError, match="the forward of Renamed takes a cache neither as"):
        InferenceEngineV2(Renamed(make_model().config).eval(), settings())


def test_a_key_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_ragged_batch_size"):
        InferenceEngineV2(make_model(), {"state_manager": {"max_raged_batch_size": 3}})
    with pytest.raises(ConfigError, match="offload"):
        InferenceEngineV2(make_model(), {"state_manager": {"offload": True}})


@pytest.mark.parametrize("mode", ["int8", "int4", "fp8", "fp6", "wf6af16"])
def test_a_folder_of_transformers_is_built_with_weights_in_few_bits(tmp_path: Path, mode: str) -> None:
    plain, (tokens,) = make_model("gpt2"), prompts(6)
    plain.save_pretrained(tmp_path)
    config = {**settings(), "quantization": {"quantization_mode": mode}}
    found = build_hf_engine(str(tmp_path), config).put([3], [tokens])
    assert torch.equal(found, InferenceEngineV2(copy.deepcopy(plain), config).put([3], [tokens]))


def test_a_folder_without_weights_is_an_error_that_names_it(tmp_path: Path) -> None:
    make_model().config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        build_hf_engine(str(tmp_path), settings())


def test_a_folder_of_transformers_is_built_and_serialized(tmp_path: Path) -> None:
    plain, (tokens,) = make_model(), prompts(6)
    plain.save_pretrained(tmp_path / "plain")
    wanted = all_logits(plain, tokens)[-1]
    engine = build_hf_engine(str(tmp_path / "plain"), settings())
    assert (engine.put([3], [tokens])[0] - wanted).abs().max() < 1e-4
    engine.serialize(tmp_path / "written")
    again = build_engine_from_ds_checkpoint(str(tmp_path / "written"), settings())
    assert (again.put([3], [tokens])[0] - wanted).abs().max() < 1e-4
    with pytest.raises(ConfigError, match=r"found no config\.json"):
        build_engine_from_ds_checkpoint(str(tmp_path), settings())
