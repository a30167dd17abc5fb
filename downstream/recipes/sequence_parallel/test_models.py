"""Models of transformers on divided sequences beside whole ones: kinds of heads, masks and attention, 2 and 3 ranks."""

from types import SimpleNamespace

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.sequence.batches import UlyssesSPDataLoaderAdapter
from deepspeed.sequence.hugging_face import UlyssesSPAttentionHF
from deepspeed.sequence.loss import mean_over_sequence
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import swept

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def create(kind, attention):
    """The same random weights in every call."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    torch.manual_seed(0)
    common = {"attn_implementation": attention}
    if kind == "llama":  # grouped KV heads
        return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **common))
    if kind == "mistral":  # a sliding window, shorter than a part of the sequence
        return MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=3, **common))
    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, **common))


def batches(padded):
    """Sequences of 13 tokens, which neither two nor three ranks divide evenly."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(3):
        tokens = torch.randint(1, 64, (2, 13), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        batch["labels"][:, : number * 3] = -100
        if padded:
            batch["attention_mask"] = torch.ones_like(tokens)
            batch["attention_mask"][0, 9:] = 0
            batch["labels"][0, 9:] = -100
        made.append(batch)
    return made


def whole(kind, attention, padded):
    """The losses in plain torch."""
    model = create(kind, attention).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches(padded):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_job(kind, attention, padded, stage):
    model = create(kind, attention)
    size, rank = dist.get_world_size(), dist.get_rank()
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, attention, size, 2)
    config = {
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, mpu=mpu, config=config)
    group = mpu.get_sequence_parallel_group()
    losses = []
    # rank 0 has all batches, so that they come in the order of the plain run
    for batch in UlyssesSPDataLoaderAdapter(batches(padded) if rank == 0 else [], rank, group, size, "cpu"):
        labels = batch["shift_labels"]
        loss = mean_over_sequence(engine(**batch, labels=labels).loss, (labels != -100).sum(), group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    UlyssesSPAttentionHF.unregister_from_transformers(attention)
    return losses


CASES = [
    (kind, attention, padded, world, 3 if world == 2 else 1)
    for kind in ("llama", "mistral", "gpt2")
    for attention in ("sdpa", "eager")
    for padded in (False, True)
    for world in (2, 3)
]
QUICK = {("llama", "sdpa", False, 3, 1), ("mistral", "sdpa", True, 2, 3), ("gpt2", "eager", True, 3, 1)}


@pytest.mark.parametrize(("kind", "attention", "padded", "world", "stage"), swept(CASES, lambda *case: case in QUICK))
def test_losses_equal_those_of_whole_sequences(kind, attention, padded, world, stage):
    expected = whole(kind, attention, padded)
    for losses in run_ranks(world, train_job, kind, attention, padded, stage):
        assert losses == pytest.approx(expected, abs=1e-5)


def eval_job():
    """In eval mode each rank has whole sequences of its own."""
    model = create("llama", "sdpa")
    (batch, *_) = batches(padded=True)
    expected = model.eval()(**batch).logits
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 2, disable_in_eval=True)
    found = model.eval()(**batch).logits
    UlyssesSPAttentionHF.unregister_from_transformers("sdpa")
    return torch.equal(found, expected)


def test_eval_mode_takes_whole_sequences():
    assert all(run_ranks(2, eval_job))


def refused_job():
    model = create("llama", "sdpa")
    messages = []

    def refused(kind, call):
        with pytest.raises(kind) as caught:
            call()
        messages.append(str(caught.value))

    def register(model=model, attention="sdpa", size=2, **options):
        return UlyssesSPAttentionHF.register_with_transformers(model, attention, size, 1, **options)

    refused(ConfigError, lambda: register(attention="flex_attention"))
    refused(ConfigError, lambda: register(attention="eager"))
    refused(ConfigError, lambda: register(size=8))
    refused(ConfigError, lambda: register(size=3))
    refused(ConfigError, lambda: register(seq_length=7))
    refused(ConfigError, lambda: register(seq_length_is_variable=False))
    refused(ConfigError, lambda: register(model=torch.nn.Linear(1, 1)))
    refused(ConfigError, lambda: register(model=SimpleNamespace(num_attention_heads=4)))
    register(seq_length=8, seq_length_is_variable=False)
    tokens, positions = torch.ones(1, 6, dtype=torch.int64), torch.arange(6)[None]
    refused(ValueError, lambda: model(tokens, position_ids=positions, use_cache=False))
    register()
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    refused(ValueError, lambda: model(tokens, position_ids=packed, use_cache=False))
    refused(ValueError, lambda: model(tokens, use_cache=False, renamed_bias=torch.zeros(4)))
    longer = torch.ones(1, 4 + dist.get_rank(), dtype=torch.int64)
    refused(ValueError, lambda: model(longer, use_cache=False))
    refused(ValueError, lambda: model(longer, attention_mask=torch.ones_like(longer), use_cache=False))
    UlyssesSPAttentionHF.unregister_from_transformers("sdpa")
    return messages


def test_wrong_uses_name_the_numbers_and_none_hangs():
    parts = [
        "core_attn_implementation is 'flex_attention'; there are sdpa, eager",
        "core_attn_implementation is 'eager', but the model uses 'sdpa'",
        "found 4 attention heads for 8 ranks",
        "found 3 for 2 ranks; give 1 or 2",
        "seq_length is 7, which 2 ranks cannot divide; pad to 8",
        "without a seq_length",
        "which does not say num_attention_heads",
        "SimpleNamespace does not say which attention the model uses",
        "found 6 tokens on this rank, but seq_length 8 over 2 ranks is 4",
        "several documents packed into a sequence",
        "adds a position bias or attention sinks (renamed_bias)",
        "brought different shapes",
        "attention_mask: the ranks of one sequence brought different shapes",
    ]
    for messages in run_ranks(2, refused_job, timeout_s=60):
        for part, message in zip(parts, messages, strict=True):
            assert part in message
