"""The hybrid engine beside a plain torch loop: ten rounds of generating 32 tokens and a step on them.

Every rank runs the plain loop over the samples of all ranks, too. fp32, 1e-5; tokens are identical.
"""

import copy
import gc
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.errors import CommError, ConfigError, StateError
from deepspeed.testing.distributed import run_ranks
from deepspeed.testing.tiers import covering, swept

ROUNDS, NEW, PROMPT, BATCH, VOCABULARY = 10, 32, 4, 2, 31
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def create(lora=True):
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    if lora:
        import peft

        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
        model = peft.get_peft_model(model, config)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.05)
    return model


def prompts(round_index, rank):
    generator = torch.Generator().manual_seed(100 * round_index + rank)
    return torch.randint(1, VOCABULARY, (BATCH, PROMPT), generator=generator)


GENERATE = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}


def plain(lora, world_size):
    """Losses and tokens of all ranks' samples in one process."""
    model = create(lora)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    losses, tokens = [], []
    for index in range(ROUNDS):
        model.eval()
        made = [model.generate(input_ids=prompts(index, rank), **GENERATE) for rank in range(world_size)]
        model.train()
        each = [model(input_ids=ids, labels=ids).loss for ids in made]
        torch.stack(each).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([float(loss) for loss in each])
        tokens.append(made)
    return losses, tokens


def config_of(stage, **hybrid):
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "hybrid_engine": {"enabled": True, **hybrid},
    }


def loop(stage, lora, pin):
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    wanted_losses, wanted_tokens = plain(lora, world_size)
    engine, *_ = deepspeed.initialize(model=create(lora), config=config_of(stage, pin_parameters=pin))
    assert type(engine) is deepspeed.DeepSpeedHybridEngine
    for index in range(ROUNDS):
        engine.eval()
        tokens = engine.generate(input_ids=prompts(index, rank), **GENERATE)
        assert not engine.is_lora_fused
        assert torch.equal(tokens, wanted_tokens[index][rank]), index
        engine.train()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(wanted_losses[index][rank], rel=1e-5, abs=1e-5), index
    assert engine.generation_times.num_calls == 1
    assert engine.generation_times.generate_s > 0
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "lora", "pin"),
    swept(
        [(0, True, True), (2, True, True), (3, True, True), (3, True, False), (1, False, True)],
        lambda *case: case in [(0, True, True), (2, True, True), (3, True, False)],
    ),
)
def test_ten_rounds_equal_the_plain_loop(stage, lora, pin):
    run_ranks(2, loop, stage, lora, pin)


def held_bytes():
    """Of all tensors that Python knows, each storage once."""
    gc.collect()
    held = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            held[storage._cdata] = storage.nbytes()
    return sum(held.values())


def flat(stage):
    engine, *_ = deepspeed.initialize(model=create(), config=config_of(stage))
    held = []
    for index in range(6):
        engine.eval()
        tokens = engine.generate(input_ids=prompts(index, 0), **GENERATE)
        engine.train()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        held.append(held_bytes())
    engine.destroy()
    assert len(set(held[2:])) == 1, held


@pytest.mark.parametrize("stage", [0, 3])
def test_memory_is_flat_over_rounds(stage):
    run_ranks(2, flat, stage)


def refused_while_fused(folder):
    tmp_path = Path(folder)
    engine, *_ = deepspeed.initialize(model=create(), config=config_of(2))
    tokens = prompts(0, 0)
    engine.train()
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.fuse_lora_weight()
    calls = {
        "save_16bit_model": lambda: engine.save_16bit_model(str(tmp_path)),
        "save_fp16_model": lambda: engine.save_fp16_model(str(tmp_path)),
        "_consolidated_16bit_state_dict": engine._consolidated_16bit_state_dict,
        "module_state_dict": engine.module_state_dict,
        "load_module_state_dict": lambda: engine.load_module_state_dict({}),
        "save_checkpoint": lambda: engine.save_checkpoint(str(tmp_path)),
        "backward": lambda: engine.backward(loss),
        "plain backward": loss.backward,
        "step": engine.step,
    }
    for call in calls.values():
        with pytest.raises(StateError, match=r"LoRA is fused .* call train\(\) or unfuse_lora_weight\(\) first"):
            call()
    assert not list(tmp_path.iterdir())
    engine.train()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    assert engine.save_16bit_model(str(tmp_path))
    engine.destroy()


def test_what_reads_or_trains_fused_weights_is_refused(tmp_path):
    run_ranks(1, refused_while_fused, str(tmp_path))


def fused_within_generate(stage):
    engine, *_ = deepspeed.initialize(model=create(), config=config_of(stage))
    seen = []
    engine.module.base_model.model.register_forward_hook(lambda *_: seen.append(engine.is_lora_fused))
    before = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    engine.eval()
    engine.module.generate(input_ids=prompts(0, 0), **GENERATE)
    assert len(seen) == NEW
    assert all(seen)
    for name, param in engine.module.named_parameters():
        assert torch.equal(param, before[name]), name
    if stage < 3:
        engine.fuse_lora_weight()
        assert engine.is_lora_fused
        with pytest.raises(StateError, match="LoRA is fused"):
            engine.save_checkpoint("never")
        engine.train()
        assert not engine.is_lora_fused
        for name, param in engine.module.named_parameters():
            assert torch.equal(param, before[name]), name
    else:
        with pytest.raises(ConfigError, match="stage is 3"):
            engine.fuse_lora_weight()
    engine.destroy()
    assert "generate" not in vars(engine.module)


@pytest.mark.parametrize("stage", [0, 3])
def test_lora_is_fused_within_generate_and_put_back(stage):
    run_ranks(1 if stage == 0 else 2, fused_within_generate, stage)


def unequal_lengths(pin, lora, num_prompt, num_new):
    """Ranks that begin with prompts of other lengths, or end after different numbers of tokens, do not wait for each
    other. `num_prompt`, `num_new`: by rank."""
    rank = torch.distributed.get_rank()
    config = config_of(3, pin_parameters=pin)
    config["zero_optimization"]["stage3_max_reuse_distance"] = 0  # each layer is gathered for each token
    engine, *_ = deepspeed.initialize(model=create(lora), config=config)
    engine.eval()
    ids = prompts(0, rank)[:, : num_prompt[rank]]
    lengths = {"max_new_tokens": num_new[rank], "min_new_tokens": num_new[rank], "do_sample": False}
    for generate in (engine.generate, engine.module.generate):
        tokens = generate(input_ids=ids, **lengths)
        assert tokens.shape[1] == num_prompt[rank] + num_new[rank]
        assert torch.equal(tokens, create(lora).eval().generate(input_ids=ids, **lengths))
    engine.destroy()


# pinned or not, with LoRA or not, tokens of prompts and new ones by rank
UNEQUAL = list(product((True, False), (False, True), [((4, 4), (4, 12)), ((2, 4), (6, 4))]))


@pytest.mark.parametrize(("pin", "lora", "lengths"), swept(UNEQUAL, lambda *case: case in covering(UNEQUAL)))
def test_ranks_may_generate_different_numbers_of_tokens(pin, lora, lengths):
    run_ranks(2, unequal_lengths, pin, lora, *lengths, timeout_s=60)


def failure_of_one_rank(stage, pin, error):
    """In `generate`; peers raise instead of waiting, and the next call works on all ranks."""
    rank = torch.distributed.get_rank()
    config = config_of(stage, pin_parameters=pin)
    if not pin:  # peers may wait where ranks ask each other whether all have their tokens
        config["zero_optimization"]["stage3_max_reuse_distance"] = 0  # each layer is gathered for each token
    engine, *_ = deepspeed.initialize(model=create(), config=config)
    engine.eval()
    wanted = engine.generate(input_ids=prompts(0, 0), **GENERATE)
    calls = []

    def fail(*_):
        calls.append(0)
        if len(calls) == 3:
            raise error("one rank alone")

    failing = engine.module.base_model.model.lm_head.register_forward_pre_hook(fail) if rank == 1 else None
    with pytest.raises(error if rank == 1 else CommError) as caught:
        engine.generate(input_ids=prompts(0, 0), **GENERATE)
    assert not engine.is_lora_fused
    assert rank == 0 or "one rank alone" in str(caught.value)
    if failing is not None:
        failing.remove()
    assert torch.equal(engine.generate(input_ids=prompts(0, 0), **GENERATE), wanted)
    engine.destroy()


@pytest.mark.parametrize(("pin", "error"), [(True, ValueError), (False, ValueError), (True, torch.OutOfMemoryError)])
def test_a_rank_that_fails_in_generate_does_not_let_peers_wait(pin, error):
    run_ranks(2, failure_of_one_rank, 3, pin, error, timeout_s=40)


def rounds_of_which_one_fails(stage):
    """The second fails in `generate` of one rank, is caught, and the program goes on."""
    rank = torch.distributed.get_rank()
    engine, *_ = deepspeed.initialize(model=create(), config=config_of(stage))
    failures = []
    for round_index in range(4):
        handle = None
        if rank == 1 and round_index == 1:

            def fail(*_):
                raise ValueError("one rank alone")

            handle = engine.module.base_model.model.lm_head.register_forward_pre_hook(fail)
        try:
            engine.eval()
            tokens = engine.generate(input_ids=prompts(round_index, rank), **GENERATE)
            engine.train()
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        except (ValueError, CommError):
            failures.append(round_index)
        if handle is not None:
            handle.remove()
    weights = [fragment.detach().clone() for fragment in engine.module.parameters()]
    engine.destroy()
    return failures, weights


@pytest.mark.parametrize("stage", [0, 2])
def test_a_round_that_fails_in_generate_of_one_rank_fails_on_all(stage):
    """Else the peer would add its gradients to those of the failed rank's next round, to the end of the run."""
    (failures, weights), (others, copies) = run_ranks(2, rounds_of_which_one_fails, stage, timeout_s=40)
    assert failures == others == [1]
    assert all(torch.equal(own, other) for own, other in zip(weights, copies, strict=True))


class ChatLinear(torch.nn.Linear):
    """A LoRA layer in the form of DeepSpeed-Chat."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight
        self.weight.requires_grad_(False)
        self.lora_right_weight = torch.nn.Parameter(torch.randn(4, linear.in_features) / 10)
        self.lora_left_weight = torch.nn.Parameter(torch.randn(linear.out_features, 4) / 10)
        self.fuse_lora = False

    def fuse_lora_weight(self):
        self.weight.data += self.lora_left_weight @ self.lora_right_weight
        self.fuse_lora = True

    def unfuse_lora_weight(self):
        self.weight.data -= self.lora_left_weight @ self.lora_right_weight
        self.fuse_lora = False

    def forward(self, x):
        if self.fuse_lora:
            return super().forward(x)
        return super().forward(x) + x @ self.lora_right_weight.t() @ self.lora_left_weight.t()


def test_layers_of_deepspeed_chat_in_bf16_keep_their_base_weights(single_rank):
    model = create(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = ChatLinear(layer.self_attn.q_proj)
    wanted = copy.deepcopy(model).bfloat16().eval()
    engine, *_ = deepspeed.initialize(model=model, config={**config_of(0), "bf16": {"enabled": True}})
    layer = engine.module.model.layers[0].self_attn.q_proj
    before = layer.weight.clone()
    engine.eval()
    for _ in range(3):
        engine.generate(input_ids=prompts(0, 0), max_new_tokens=4, do_sample=False)
    assert torch.equal(layer.weight, before)
    assert torch.equal(layer.weight, wanted.model.layers[0].self_attn.q_proj.weight)
    engine.destroy()


def test_wrong_configurations_are_refused(single_rank):
    with pytest.raises(ConfigError, match="Linear, which has no generate"):
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config_of(0))
    with pytest.raises(ConfigError, match="inference_tp_size: found 2 with 1 tensor-parallel"):
        deepspeed.initialize(model=create(False), config=config_of(0, inference_tp_size=2))


def tensor_parallel_sampling():
    model = create(False)
    wanted = copy.deepcopy(model).eval()
    config = {**config_of(1, inference_tp_size=2), "tensor_parallel": {"autotp_size": 2}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    ids = prompts(0, 0)
    tokens = engine.generate(input_ids=ids, **GENERATE)
    assert torch.equal(tokens, wanted.generate(input_ids=ids, **GENERATE))
    torch.manual_seed(1 + torch.distributed.get_rank())  # states that differ
    sampled = engine.generate(input_ids=ids, max_new_tokens=NEW, do_sample=True)
    both = [torch.empty_like(sampled) for _ in range(2)]
    torch.distributed.all_gather(both, sampled)
    assert torch.equal(*both)
    torch.manual_seed(3)  # equal ones: as the whole model
    sampled = engine.generate(input_ids=ids, max_new_tokens=NEW, do_sample=True)
    torch.manual_seed(3)
    assert torch.equal(sampled, wanted.generate(input_ids=ids, max_new_tokens=NEW, do_sample=True))
    engine.destroy()


def test_tensor_parallel_ranks_sample_the_same_tokens():
    run_ranks(2, tensor_parallel_sampling)
