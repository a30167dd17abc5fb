"""Models of transformers divided over tensor-parallel ranks, beside the whole model in plain torch on one rank.

Every rank trains the whole model, too, and compares its own parts. fp32, 20 steps, 1e-5.

In bf16 sums over ranks round elsewhere than a product of the whole weight, so no bit is equal. What both round is
measured against fp32: the divided model is as near to it as the whole one in plain torch, or twice as far at most.
"""

import functools

import deepspeed
import pytest
import torch
from deepspeed.activation import checkpointing
from deepspeed.errors import ConfigError
from deepspeed.parallel.model_part import part_held
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import covering, swept
from deepspeed.utils import safe_get_full_fp32_param

NUM_STEPS, BATCH, TIME, VOCABULARY = 20, 2, 8, 33
#: a large eps: the gradient of a key's bias is zero but for rounding, which Adam would scale up
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
}
NEOX = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "head_dim")}
#: name: (config class, model class, keys of the config)
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "llama, biases": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama, grouped": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**LLAMA, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "llama, one key": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 1, "attention_bias": True}),
    "llama, two keys": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    "llama, tied": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 4}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**LLAMA, "num_key_value_heads": 1, "pad_token_id": 0}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 40},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", NEOX),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**NEOX, "ffn_dim": 50, "word_embed_proj_dim": 32, "pad_token_id": 1},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**NEOX, "multi_query": True, "bias": True}),
    "falcon, alibi": ("FalconConfig", "FalconForCausalLM", {**NEOX, "alibi": True, "multi_query": False}),
    "falcon, new": (
        "FalconConfig",
        "FalconForCausalLM",
        {**NEOX, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", {**LLAMA, "qk_layernorm": True}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**LLAMA, "pad_token_id": 0, "num_key_value_heads": 2}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            **{
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 50,
                "num_layers": 2,
                "num_heads": 4,
                "feed_forward_proj": "gated-gelu",
            },
            **{"decoder_start_token_id": 0, "pad_token_id": 0},
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {**NEOX, "tie_word_embeddings": True}),
}
DROPOUT = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "dropout_rate", "attention_dropout", "hidden_dropout"),
    *("activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"),
)


def create(name, rate=0.0):
    import transformers

    config_class, model_class, keys = FAMILIES[name]
    config = getattr(transformers, config_class)(
        **{"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, **keys}
    )
    for key in DROPOUT:
        if hasattr(config, key):
            setattr(config, key, rate)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():  # norms and biases are ones and zeros, which hide mistakes
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.02)
    return model.train()


def tokens(step, micro=0, dp_rank=0):
    """Counting from anywhere, which can be learned."""
    seed = 1000 * step + 10 * micro + dp_rank
    starts = torch.randint(0, VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    return (starts + torch.arange(TIME)) % VOCABULARY


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


@functools.cache
def reference(name, *, dp=1, micro=1, clip=0.0, rate=0.0):
    """Losses, norms and weights of the whole model after 20 steps of plain torch."""
    model = create(name, rate)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        batch = [loss_of(model, tokens(step, m, r)) for m in range(micro) for r in range(dp)]
        loss = sum(batch) / len(batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {path: param.detach() for path, param in model.named_parameters()}


def config_of(tp, stage=0, micro=1, clip=0.0, **tensor_parallel):
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000},
        "tensor_parallel": {"autotp_size": tp, **tensor_parallel},
        "steps_per_print": float("inf"),
    }


def train(engine, micro=1):
    """This rank's losses and the norms of 20 steps."""
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for m in range(micro):
            loss = loss_of(engine, tokens(step, m, engine.mesh.rank("dp")))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def compare(engine, weights):
    """The largest difference between a parameter of this rank and its part of the whole; how many are divided."""
    worst, divided = 0.0, 0
    for path, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            part = part_held(param)
            divided += part is not None
            whole = weights[path] if part is None else part.take(weights[path])
            worst = max(worst, (param.detach() - whole).abs().max().item())
    return worst, divided


def family_job(name, tp, checkpoints=False, **section):
    losses, norms, weights = reference(name)
    model = create(name)
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = deepspeed.initialize(model=model, config=config_of(tp, **section))[0]
    found = train(engine)
    worst, divided = compare(engine, weights)
    engine.destroy()
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[1] == pytest.approx(norms, rel=1e-4)
    assert losses[-1] < losses[0] - 0.3  # it learned
    return worst, divided


IN_EVERY_RUN = {
    ("llama", 2),
    ("gpt2", 3),
    ("bloom", 2),
    ("falcon", 3),
    ("t5", 2),
    ("bert", 3),
    ("qwen3", 3),
    ("mixtral", 2),
}


@pytest.mark.parametrize(
    ("name", "tp"),
    swept([(name, tp) for name in FAMILIES for tp in (2, 3)], lambda *case: case in IN_EVERY_RUN),
)
def test_a_divided_model_learns_what_the_whole_one_learns(name, tp):
    for worst, divided in run_ranks(tp, family_job, name, tp):
        assert worst < 1e-5
        assert divided >= 9


def sequence_job(name, tp, checkpoints):
    return family_job(name, tp, checkpoints, sequence_parallel=True)


@pytest.mark.parametrize(
    ("name", "tp", "checkpoints"),
    swept(
        [(name, 2, False) for name in ("llama, biases", "llama, one key", "mistral", "qwen3", "gemma", "phi", "phi3")]
        + [("llama, biases", 4, True), ("qwen3", 2, True)],
        lambda *case: case in [("llama, biases", 4, True), ("qwen3", 2, True)],
    ),
)
def test_a_sequence_that_is_divided_between_blocks(name, tp, checkpoints):
    for worst, divided in run_ranks(tp, sequence_job, name, tp, checkpoints):
        assert worst < 1e-5
        assert divided >= 9


STEPS_BETWEEN = 3


def forwards(kind, model):
    """The losses of one step, whose backwards are called one after the other: in the order of their forwards."""
    ids = [tokens(0, micro) for micro in range(2)]
    first = loss_of(model, ids[0])
    if kind == "without gradients":
        with torch.no_grad():
            loss_of(model, ids[1])
        return [first]
    if kind == "evaluation mode":
        model.eval()
        second = loss_of(model, ids[1])
        model.train()
        return [first, second]
    if kind == "two forwards":
        return [first, loss_of(model, ids[1])]
    return [first]


def recompute(model, how):
    """Activation checkpointing of each layer."""
    if how is None:
        return
    reentrant = how == "reentrant"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if how in ("partitioned", "contiguous"):
        buffers = {"contiguous_checkpointing": True, "num_checkpoints": 40} if how == "contiguous" else {}
        checkpointing.configure(None, partition_activations=True, **buffers)
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = checkpointing.checkpoint


def between_job(kind, stage, how, sequence_parallel, other_engine):
    plain = create("llama, biases")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(STEPS_BETWEEN):
        for loss in forwards(kind, plain):
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = create("llama, biases")
    recompute(model, how)
    config = {**config_of(2, stage, 2, sequence_parallel=sequence_parallel), "gradient_clipping": 0.0}
    del config["optimizer"]
    engine = deepspeed.initialize(model=model, config=config, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))[
        0
    ]
    if other_engine:  # with another mesh, from now on that of `deepspeed.utils.groups`
        another = {**config, "tensor_parallel": {"autotp_size": 1}}
        other = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=another)[0]
        assert other.mesh.size("tp") == 1
    for _ in range(STEPS_BETWEEN):
        losses = forwards(kind, engine)
        for micro in range(2):
            if micro < len(losses):
                engine.backward(losses[micro])
            engine.step()
    assert engine.global_steps == STEPS_BETWEEN
    worst, _ = compare(engine, dict(plain.named_parameters()))
    norms = [param.detach().clone() for path, param in model.named_parameters() if "norm" in path and param.numel()]
    engine.destroy()
    return worst, norms


BETWEEN = [
    *[
        (kind, stage, how, True, False)
        for kind in ("without gradients", "evaluation mode", "two forwards")
        for stage in (0, 1, 2, 3)
        for how in (None, "reentrant", "not reentrant", "partitioned")
    ],
    *[
        ("without gradients", stage, how, sequence_parallel, True)
        for stage in (0, 3)
        for how in ("partitioned", "contiguous")
        for sequence_parallel in (False, True)
    ],
]
BETWEEN_IN_EVERY_RUN = {
    ("without gradients", 1, "not reentrant", True, False),
    ("evaluation mode", 0, None, True, False),
    ("two forwards", 2, "partitioned", True, False),
    ("evaluation mode", 3, "reentrant", True, False),
    ("without gradients", 0, "partitioned", False, True),
    ("without gradients", 0, "contiguous", True, True),
}


@pytest.mark.parametrize(
    ("kind", "stage", "how", "sequence_parallel", "other_engine"),
    swept(BETWEEN, lambda *case: case in BETWEEN_IN_EVERY_RUN),
)
def test_a_forward_between_another_and_its_backward(kind, stage, how, sequence_parallel, other_engine):
    """Whether the sequence is divided, and on which ranks, is the state of each forward, not of the last one."""
    (worst, norms), (other, theirs) = run_ranks(2, between_job, kind, stage, how, sequence_parallel, other_engine)
    assert max(worst, other) < 1e-6
    assert all(map(torch.equal, norms, theirs))  # the copies of one weight do not drift apart


def mixed_job():
    engine = deepspeed.initialize(model=create("llama"), config=config_of(2, sequence_parallel=True))[0]
    losses = forwards("evaluation mode", engine)
    with pytest.raises(ConfigError, match="one backward goes through a forward in training mode"):
        engine.backward(sum(losses))
    engine.destroy()


def test_one_backward_through_a_divided_and_a_whole_sequence_is_refused():
    run_ranks(2, mixed_job)


def vocabulary_job(keeps_logits_divided):
    """Tokens and labels outside of the vocabulary, as torch takes them."""
    config = config_of(2, vocab_parallel_lm_head=keeps_logits_divided)
    engine = deepspeed.initialize(model=create("llama, tied"), config=config)[0]
    ids = tokens(0)
    for wrong in (VOCABULARY, -1, 10**6):
        outside = ids.clone()
        outside[1, 3] = wrong
        with pytest.raises(IndexError, match=f"found token {wrong}, and the vocabulary has the tokens 0 to 32"):
            engine(input_ids=outside)
        with pytest.raises(IndexError, match=f"{wrong}"):
            engine(input_ids=ids, labels=outside)
    outside[1, 3] = -100
    found = engine(input_ids=ids, labels=outside).loss.item()
    assert found == pytest.approx(create("llama, tied")(input_ids=ids, labels=outside).loss.item(), rel=1e-5)
    engine.destroy()


@pytest.mark.parametrize("keeps_logits_divided", [False, True])
def test_tokens_and_labels_outside_of_the_vocabulary(keeps_logits_divided):
    run_ranks(2, vocabulary_job, keeps_logits_divided)


def fail(*_):
    raise MemoryError("no memory for this batch")


def interrupt(*_):
    raise KeyboardInterrupt


def random_numbers_job(how, sequence_parallel):
    """Masks between blocks, the gradients of a norm, and what is drawn after the forward and after failed ones."""
    model = create("phi", rate=0.5)
    recompute(model, how)
    tensor_parallel = {"autotp_size": 2, "sequence_parallel": sequence_parallel}
    engine = deepspeed.initialize(model=model, config={**config_of(2), "tensor_parallel": tensor_parallel})[0]
    torch.manual_seed(7)
    masks, after = [], []
    dropout = model.model.layers[0].resid_dropout
    dropout.register_forward_hook(lambda _, __, out: masks.append((out == 0).detach()))
    loss = loss_of(engine, tokens(0))
    after.append(torch.rand(()).item())
    masks_of_forward = list(masks)
    engine.backward(loss)
    after.append(torch.rand(()).item())
    grads = [param.grad.clone() for path, param in model.named_parameters() if "layernorm" in path]
    for path in ("model.layers.1.self_attn.dense", "model.layers.0.mlp.fc2", "model.layers.1.resid_dropout", "lm_head"):
        hook = model.get_submodule(path).register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            loss_of(engine, tokens(1))
        hook.remove()
        after.append(torch.rand(()).item())
    hook = model.model.layers[1].self_attn.dense.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(engine, tokens(1))
    hook.remove()
    after.append(torch.rand(()).item())
    hook = model.model.layers[1].self_attn.dense.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):  # not through the model itself
        model.model(tokens(1))
    hook.remove()
    after.append(torch.rand(()).item())
    engine.destroy()
    return masks_of_forward, grads, after, loss.item()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("how", swept([None, "not reentrant", "reentrant"], lambda how: how != "reentrant"))
def test_random_numbers_agree_where_activations_do(how, sequence_parallel):
    (masks, grads, after, loss), (other_masks, other_grads, other_after, _) = run_ranks(
        2, random_numbers_job, how, sequence_parallel
    )
    assert after == other_after
    assert len(set(after)) == len(after)  # no state is used twice
    assert [torch.equal(a, b) for a, b in zip(masks, other_masks, strict=True)] == [not sequence_parallel] * len(masks)
    assert all(map(torch.equal, grads, other_grads))
    if how is not None:  # a block that is computed again draws the same numbers
        once = run_ranks(2, random_numbers_job, None, sequence_parallel)[0]
        assert loss == once[3]
        assert all(map(torch.equal, masks, once[0]))
        torch.testing.assert_close(grads, once[1])


def odd_sequence_job():
    engine = deepspeed.initialize(model=create("llama"), config=config_of(3, sequence_parallel=True))[0]
    with pytest.raises(ConfigError, match="found a sequence of 8 tokens for 3 ranks; pad it to a multiple of that"):
        loss_of(engine, tokens(0))
    engine.eval()
    with torch.no_grad():  # there it stays whole
        loss = loss_of(engine, tokens(0)).item()
    assert loss == pytest.approx(loss_of(create("llama"), tokens(0)).item(), rel=1e-5)
    engine.destroy()


def test_a_sequence_that_does_not_divide_is_refused():
    run_ranks(3, odd_sequence_job)


def product_job(name, stage, micro, clip, checkpoints, vocab):
    """tp 2 x dp 2."""
    losses, norms, weights = reference(name, dp=2, micro=micro, clip=clip)
    model = create(name)
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = config_of(2, stage, micro, clip, vocab_parallel_lm_head=vocab)
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert engine.mesh.size("dp") == engine.mesh.size("tp") == 2
    found, found_norms = train(engine, micro)
    whole = {path: param for path, param in engine.module.named_parameters() if part_held(param) is None}
    with deepspeed.zero.GatheredParameters(list(whole.values())):
        values = {path: param.detach().clone() for path, param in whole.items()}
    worst, _ = compare(engine, weights)
    ranks = engine.mesh.ranks("tp")
    engine.destroy()
    assert found_norms == pytest.approx(norms, rel=1e-4)
    return worst, found, values, ranks, losses


PRODUCTS = [
    (name, stage, micro, clip, checkpoints, vocab)
    for name in ("llama, tied", "llama, one key", "gpt2")
    for stage in (0, 1, 2, 3)
    for micro in (1, 2)
    for clip in (0.0, 0.5)
    for checkpoints in (False, True)
    for vocab in (False, True)
]
PRODUCTS_IN_EVERY_RUN = {
    ("llama, tied", 3, 2, 0.5, False, True),
    ("gpt2", 2, 1, 0.5, True, False),
}


@pytest.mark.parametrize(
    ("name", "stage", "micro", "clip", "checkpoints", "vocab"),
    swept(
        [case for case in PRODUCTS if case in covering(PRODUCTS) or case in PRODUCTS_IN_EVERY_RUN],
        lambda *case: case in PRODUCTS_IN_EVERY_RUN,
    ),
)
def test_tp_2_x_dp_2(name, stage, micro, clip, checkpoints, vocab):
    results = run_ranks(4, product_job, name, stage, micro, clip, checkpoints, vocab)
    losses = results[0][4]
    for rank, (worst, found, values, ranks, _) in enumerate(results):
        assert worst < 1e-5
        first = results[ranks[0]]
        assert found == first[1]  # the ranks of one model agree in every bit,
        for path, value in values.items():  # and so do the parameters that all of them have
            assert torch.equal(value, first[2][path]), (rank, path)
    means = [(a + b) / 2 for a, b in zip(results[0][1], results[2][1], strict=True)]
    means = [sum(means[step : step + micro]) / micro for step in range(0, len(means), micro)]
    assert means == pytest.approx(losses, rel=1e-5)


def whole_parameters_job(kind):
    config = config_of(2)
    config["optimizer"] = {"type": kind, "params": {"lr": 1e-3}}
    with pytest.raises(ConfigError, match=f"found .*{kind}.* for a model of which tensor-parallel ranks have parts"):
        deepspeed.initialize(model=create("llama"), config=config)


@pytest.mark.parametrize("kind", ["Lamb", "Muon"])
def test_an_optimizer_that_needs_whole_parameters_is_refused(kind):
    run_ranks(2, whole_parameters_job, kind)


# ----- bf16 ----------------------------------------------------------------------------------------------------------

BF16_CLIP = 0.5
#: the layers whose products tensor-parallel ranks add up
ADDED_UP = {"llama, tied": ("o_proj", "down_proj"), "gpt2": ("c_proj",), "t5": (".o", ".wo")}


def add_up_parts(model, name, num_parts):
    """Products of the layers that ranks add up are rounded once per part, as on that many ranks."""
    for path, layer in model.named_modules():
        if path.endswith(ADDED_UP[name]):
            layer.forward = functools.partial(sum_of_parts, layer, type(layer) is torch.nn.Linear, num_parts)
    return model


def sum_of_parts(layer, is_transposed, num_parts, x):
    weight = layer.weight.t() if is_transposed else layer.weight
    parts = zip(x.tensor_split(num_parts, -1), weight.tensor_split(num_parts, 0), strict=True)
    total = sum(part @ rows for part, rows in parts)
    return total if layer.bias is None else total + layer.bias


@functools.cache
def reference_bf16(name, num_parts):
    """Losses and fp32 master weights of the whole model, with products in that many parts."""
    model = add_up_parts(create(name).bfloat16(), name, num_parts)
    params = list(model.parameters())
    torch.manual_seed(0)
    masters = [param.detach().float() for param in create(name).parameters()]
    masters = [torch.nn.Parameter(each) for each in masters]
    optimizer = torch.optim.AdamW(masters, **ADAMW)
    losses = []
    for step in range(NUM_STEPS):
        loss = loss_of(model, tokens(step))
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, BF16_CLIP)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)
        losses.append(loss.item())
    return losses, dict(zip((path for path, _ in model.named_parameters()), (m.detach() for m in masters), strict=True))


def distance(some, others):
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def mean_distance(weights, others):
    total = sum((weights[path] - others[path]).abs().sum().item() for path in weights)
    return total / sum(weight.numel() for weight in weights.values())


def bf16_job(name, tp, stage):
    exact_losses, _, exact = reference(name, clip=BF16_CLIP)
    # one run's largest error varies by a factor of three with the order of its sums: that of several is the measure
    plain = [reference_bf16(name, num_parts) for num_parts in (1, 2, 3, 4)]
    config = {**config_of(tp, stage, clip=BF16_CLIP), "bf16": {"enabled": True}}
    engine = deepspeed.initialize(model=create(name), config=config)[0]
    assert {param.dtype for param in engine.module.parameters()} == {torch.bfloat16}
    found_losses, _ = train(engine)
    found = {path: safe_get_full_fp32_param(param) for path, param in engine.module.named_parameters()}
    divided = sum(part_held(param) is not None for param in engine.module.parameters())
    engine.destroy()
    assert divided >= 9
    assert distance(found_losses, exact_losses) <= 1.5 * max(distance(losses, exact_losses) for losses, _ in plain)
    assert mean_distance(found, exact) <= 1.5 * max(mean_distance(masters, exact) for _, masters in plain)
    assert exact_losses[-1] < exact_losses[0] - 0.3  # it learned
    return found_losses


BF16_CASES = [(name, tp, stage) for name in ("llama, tied", "gpt2", "t5") for tp in (2, 3) for stage in (1, 2, 3)]
BF16_IN_EVERY_RUN = {("llama, tied", 2, 3), ("gpt2", 3, 1), ("t5", 2, 2)}


@pytest.mark.parametrize(("name", "tp", "stage"), swept(BF16_CASES, lambda *case: case in BF16_IN_EVERY_RUN))
def test_a_divided_model_in_bf16_is_as_near_to_fp32_as_the_whole_one(name, tp, stage):
    found = run_ranks(tp, bf16_job, name, tp, stage)
    assert all(each == found[0] for each in found)  # the ranks of one model agree in every bit


# ---- what has a value per head -----------------------------------------------------------------------------------


def eager(name):
    model = create(name)
    model.set_attn_implementation("eager")
    return model


def asked_for(output):
    """The values per layer that a caller asked for."""
    names = [name for name in output if "attentions" in name or name.endswith("hidden_states")]
    return {name: output[name] for name in names if isinstance(output[name], tuple)}


def per_layer_job(name, tp, kind):
    """Attentions and hidden states of a divided model, and the gradients of a loss of them, beside the whole one."""
    whole, model = eager(name), eager(name)
    ids = tokens(0)
    more = {"labels": ids} if name == "t5" else {}
    wanted = {"output_attentions": True, "output_hidden_states": True}

    def loss_of_all(output):
        return sum(value.square().mean() for values in asked_for(output).values() for value in values)

    expected = whole(input_ids=ids, **more, **wanted)
    loss_of_all(expected).backward()
    grads = {path: param.grad for path, param in whole.named_parameters()}
    if kind == "inference":
        engine = deepspeed.init_inference(model, tensor_parallel={"tp_size": tp}, dtype=torch.float32)
        with torch.no_grad():
            whole.eval()
            expected = whole(input_ids=ids, **more, **wanted)
    else:
        engine = deepspeed.initialize(model=model, config=config_of(tp, sequence_parallel=kind == "sequence"))[0]
    found = engine(input_ids=ids, **more, **wanted)
    theirs = asked_for(expected)
    assert len(theirs) >= 2
    torch.testing.assert_close(asked_for(found), theirs, rtol=1e-4, atol=1e-5)
    as_tuples = engine(input_ids=ids, **more, **wanted, return_dict=False)
    torch.testing.assert_close(as_tuples, expected.to_tuple(), rtol=1e-4, atol=1e-5)
    if kind == "inference":
        return
    engine.backward(loss_of_all(found))
    for path, param in engine.module.named_parameters():
        if grads[path] is not None:
            torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(param), grads[path], rtol=1e-4, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize(
    ("name", "tp", "kind"),
    swept(
        [(name, 2, "training") for name in FAMILIES]
        + [(name, 3, "training") for name in ("llama, grouped", "t5", "bloom", "gpt2")]
        + [(name, 2, "inference") for name in ("llama", "t5", "bloom")]
        + [("llama", 2, "sequence")],
        lambda *case: (
            case in [("t5", 2, "training"), ("bloom", 2, "inference"), ("llama", 2, "sequence")]
            or case == ("gpt2", 3, "training")
        ),
    ),
)
def test_values_per_layer_are_those_of_the_whole_model(name, tp, kind):
    run_ranks(tp, per_layer_job, name, tp, kind)


def mask_job(name, kind):
    """A mask of its own for each head, which a caller gives for all heads."""
    whole, model = eager(name).eval(), eager(name).eval()
    ids = tokens(0)
    heads = 4
    mask = torch.randn(BATCH, heads, TIME, TIME, generator=torch.Generator().manual_seed(1))
    if kind == "training":
        engine = deepspeed.initialize(model=model, config=config_of(2))[0]
    else:
        fused = kind == "fused blocks"
        engine = deepspeed.init_inference(model, mp_size=2, dtype=torch.float32, replace_with_kernel_inject=fused)
    with torch.no_grad():
        expected = whole(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(engine(input_ids=ids, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-5)
    if kind == "training":
        engine.destroy()


@pytest.mark.parametrize(
    ("name", "kind"),
    swept(
        [(name, kind) for name in ("llama", "bert", "gpt2") for kind in ("training", "inference", "fused blocks")],
        lambda *case: case in [("llama", "training"), ("gpt2", "fused blocks")],
    ),
)
def test_a_mask_for_each_head_is_cut_to_the_heads_of_a_rank(name, kind):
    run_ranks(2, mask_job, name, kind)
