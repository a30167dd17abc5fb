"""Layers that compute a random part of the tokens: what they compute, its gradient, its operations, and its loss."""

import copy

import deepspeed
import pytest
import torch
from deepspeed.data.random_ltd import (
    RandomLayerTokenDrop,
    RandomLTDScheduler,
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)
from deepspeed.errors import ConfigError
from deepspeed.ops.random_ltd import GatherTokens, ScatterTokens, bert_sample_tokens, gpt_sample_tokens
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

LENGTH, VOCAB, HIDDEN, LAYERS = 32, 16, 32, 4


class Block(nn.Module):
    """A layer of a decoder, by plain products."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / HIDDEN**0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        if attention_mask is not None:
            scores = scores + attention_mask[:, 0]
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN)
        self.places = nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens):
        x = self.words(tokens[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def section(num_steps=8, least=8, **keys):
    return {
        "enabled": True,
        "total_layer_num": LAYERS,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": least,
            "max_value": LENGTH,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": num_steps, "seq_per_step": 8},
        },
        **keys,
    }


# ---- the operators ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [gpt_sample_tokens, bert_sample_tokens])
def test_tokens_are_chosen_at_random_and_rise(sample):
    torch.manual_seed(0)
    indices, mask = sample(3, 8, 5, layers=40)
    assert (indices.shape, indices.dtype, mask) == ((40, 5, 3), torch.int32, None)
    assert (indices.diff(dim=-1) > 0).all()
    counts = indices.flatten().long().bincount(minlength=8)
    assert counts.min() > 50  # 75 are expected of each
    assert counts.max() < 100
    with pytest.raises(ConfigError, match="asked to keep 9 of 8 tokens"):
        sample(9, 8, 1)


def test_masks_are_cut_to_the_tokens():
    mask = torch.arange(2 * 8 * 8.0).view(2, 1, 8, 8)
    indices, cut = bert_sample_tokens(3, 8, 2, layers=2, attn_mask=mask)
    for layer in range(2):
        for sample in range(2):
            own = indices[layer, sample].long()
            assert torch.equal(cut[layer, sample, 0], mask[sample, 0][own][:, own])
    row = mask[:, :, :1]
    indices, cut = bert_sample_tokens(3, 8, 2, attn_mask=row)
    assert torch.equal(cut[0, 1, 0, 0], row[1, 0, 0][indices[0, 1].long()])
    causal = torch.ones(8, 8).tril()[None, None]
    _, cut = gpt_sample_tokens(3, 8, 2, attn_mask=causal)
    assert torch.equal(cut[0, 0], torch.ones(3, 3).tril())


def test_a_decoders_mask_with_padding_is_cut_to_the_tokens():
    """One with a sample's own padding is not that of the first tokens."""
    torch.manual_seed(0)
    row = torch.arange(2 * 8.0).view(2, 1, 1, 8)
    whole = row + torch.full((8, 8), -100.0).triu(1)  # [2, 1, 8, 8]
    for mask in (row, whole, whole[:1], row.flatten(1)):
        batch = mask.shape[0]
        indices, cut = gpt_sample_tokens(3, 8, batch, attn_mask=mask)
        for sample, own in enumerate(indices[0].long()):
            kept = mask[sample][..., own]
            assert torch.equal(cut[sample], kept[:, own] if kept.dim() == 3 and kept.shape[1] > 1 else kept)
    shared = torch.ones(8, 8).tril()
    for mask in (shared, shared[None], shared[None, None]):
        assert torch.equal(gpt_sample_tokens(3, 8, 2, layers=4, attn_mask=mask)[1], mask[..., :3, :3])
    with pytest.raises(ConfigError, match="asked for the tokens of 2 layers with a mask of each sample's own"):
        gpt_sample_tokens(3, 8, 2, layers=2, attn_mask=whole)
    for mask in (torch.ones(2, 8, 8), torch.ones(3, 1, 8, 8), torch.ones(2, 1, 8, 9), torch.ones(2, 7), torch.ones(8)):
        with pytest.raises(ConfigError, match=r"found an attention mask of shape .* for 2 samples of 8 tokens"):
            gpt_sample_tokens(3, 8, 2, attn_mask=mask)


@pytest.mark.parametrize("batch_first", [True, False])
def test_gather_and_scatter_have_torchs_values_and_gradients(batch_first):
    torch.manual_seed(0)
    states = torch.randn(2, 6, 3, dtype=torch.double) if batch_first else torch.randn(6, 2, 3, dtype=torch.double)
    states.requires_grad_()
    indices = torch.tensor([[0, 2, 5], [1, 2, 3]], dtype=torch.int32)

    def drop(states):
        states, part = GatherTokens.apply(states, indices, batch_first)
        return ScatterTokens.apply(states, part.sin(), indices, batch_first)

    def plain(states):
        whole = states if batch_first else states.transpose(0, 1)
        rows = [
            torch.stack([each.sin() if n in own else each for n, each in enumerate(sample)])
            for sample, own in zip(whole, indices.tolist(), strict=True)
        ]
        out = torch.stack(rows)
        return out if batch_first else out.transpose(0, 1)

    assert torch.equal(drop(states), plain(states))
    assert torch.autograd.gradcheck(drop, states)


# ---- the schedule -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"total_layer_num": None}, r"random_ltd\.total_layer_num: found nothing"),
        ({"random_ltd_layer_id": [1]}, r"random_ltd_layer_id: found \[1\]; give 2 numbers .* of 0 to 3"),
        ({"random_ltd_layer_id": [1, 4]}, r"random_ltd_layer_id: found \[1, 4\]"),
        ({"random_ltd_schedule": {}}, "schedule_type: found None; there is 'fixed_linear'"),
        ({"random_ltd_schedule": {"schedule_type": "fixed_linear"}}, "min_value: found None; give a whole number"),
        ({"least": 64}, "min_value: found 64, above max_value 32"),
        ({"least": 4}, "min_value: found 4, below seq_per_step 8, a multiple of which is kept"),
    ],
)
def test_what_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        RandomLTDScheduler(section(**keys))


# ---- the layers ---------------------------------------------------------------------------------------------------


def layer(kept, **keys):
    torch.manual_seed(1)
    wrapped = RandomLayerTokenDrop(Block())
    schedule = RandomLTDScheduler(section(**keys))
    schedule.set_current_seq(kept)
    wrapped.init_config(section(**keys), schedule, 0)
    return wrapped


def test_a_layer_that_keeps_all_is_the_layer():
    wrapped, states = layer(LENGTH), torch.randn(2, LENGTH, HIDDEN)
    assert torch.equal(wrapped(states), wrapped.random_ltd_layer(states))
    wrapped = layer(8).eval()
    assert torch.equal(wrapped(states), wrapped.random_ltd_layer(states))
    assert wrapped.reserved_length == LENGTH


def test_tokens_go_past_a_layer_that_drops_them():
    wrapped, states = layer(8), torch.randn(2, LENGTH, HIDDEN, requires_grad=True)
    torch.manual_seed(5)
    out = wrapped(states)
    torch.manual_seed(5)
    indices = gpt_sample_tokens(8, LENGTH, 2)[0][0].long()
    expected = states.clone()
    for sample in range(2):
        expected[sample, indices[sample]] = wrapped.random_ltd_layer(states[sample : sample + 1, indices[sample]])[0]
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), [states, *wrapped.parameters()])
    plain = torch.autograd.grad(expected.square().sum(), [states, *wrapped.parameters()])
    torch.testing.assert_close(ours, plain)


def test_what_is_by_token_is_cut_with_the_states():
    class Layer(nn.Module):
        def forward(self, x, attention_mask=None, position_ids=None, position_embeddings=None):
            self.given = attention_mask, position_ids, position_embeddings
            return (x, "kept")

    wrapped = layer(8, model_type="encoder", hidden_state_order="seq_batch_dim")
    wrapped.random_ltd_layer = Layer()
    ids = torch.arange(LENGTH)[None]
    states = torch.arange(LENGTH * 2.0).view(LENGTH, 2, 1).expand(-1, -1, HIDDEN)
    cos = torch.arange(LENGTH)[None, :, None].expand(1, -1, 4)
    whole, kept = wrapped(
        states, attention_mask=torch.zeros(2, 1, 1, LENGTH), position_ids=ids, position_embeddings=(cos, cos)
    )
    assert torch.equal(whole, states)
    assert kept == "kept"
    mask, places, (cosines, _) = wrapped.random_ltd_layer.given
    assert (mask.shape, places.shape, cosines.shape) == ((2, 1, 1, 8), (2, 8), (2, 8, 4))
    assert torch.equal(cosines[..., 0], places)


class Given(nn.Module):
    """Keeps what it is given."""

    attention_type = "full"

    def forward(self, x, attention_mask=None, position_ids=None, position_embeddings=None):
        self.given = attention_mask, position_ids, position_embeddings
        return x


def test_arguments_may_come_by_position():
    wrapped, states = layer(8), torch.zeros(2, LENGTH, HIDDEN)
    wrapped.random_ltd_layer = Given()
    mask = torch.arange(2.0 * LENGTH).view(2, 1, 1, LENGTH)
    wrapped(states, mask, torch.arange(LENGTH)[None])
    cut, places, _ = wrapped.random_ltd_layer.given
    assert torch.equal(cut[:, 0, 0], places + torch.tensor([[0.0], [LENGTH]]))
    with pytest.raises(TypeError, match="attention_mask"):
        wrapped(states, mask, attention_mask=mask)
    with pytest.raises(TypeError, match="5 arguments"):
        wrapped(states, mask, None, None, None)
    assert wrapped.attention_type == "full"
    with pytest.raises(AttributeError, match="'Given' object has no attribute 'window'"):
        wrapped.window  # noqa: B018
    assert not hasattr(wrapped, "_hidden")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_ids", torch.zeros(LENGTH)),
        ("position_ids", torch.zeros(3, 2, LENGTH)),
        ("position_embeddings", (torch.zeros(LENGTH, 4), torch.zeros(LENGTH, 4))),
        ("position_ids", torch.zeros(3, LENGTH)),
    ],
)
def test_what_has_no_place_for_tokens_is_refused(name, value):
    wrapped = layer(8)
    wrapped.random_ltd_layer = Given()
    with pytest.raises(ConfigError, match=rf"{name}: found shape .* for states of 2 x 32 tokens"):
        wrapped(torch.zeros(2, LENGTH, HIDDEN), **{name: value})


def test_a_recomputed_layer_drops_the_same_tokens():
    wrapped, states = layer(8), torch.randn(2, LENGTH, HIDDEN, requires_grad=True)
    torch.manual_seed(5)
    plain = torch.autograd.grad(wrapped(states).square().sum(), states)
    torch.manual_seed(5)
    out = torch.utils.checkpoint.checkpoint(wrapped, states, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), states), plain)


# ---- an engine ----------------------------------------------------------------------------------------------------


def create(stage=0, seed=0, **keys):
    torch.manual_seed(seed)
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": stage},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section(**keys)}},
    }
    engine = deepspeed.initialize(model=Decoder(), config=config)[0]
    return convert_to_random_ltd(engine, Block)


def batch(step):
    """Sentences that count by 1 or 2."""
    generator = torch.Generator().manual_seed(step)
    first, by = torch.randint(VOCAB, (8, 1), generator=generator), torch.randint(1, 3, (8, 1), generator=generator)
    return (first + by * torch.arange(LENGTH + 1)) % VOCAB


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def flops(engine, step):
    with FlopCounterMode(display=False) as counter:
        train(engine, step, step + 1)
    return counter.get_total_flops()


def test_operations_fall_as_the_schedule_says(single_rank):
    engine = create(num_steps=8)
    assert engine.random_ltd_enabled()
    plain = deepspeed.initialize(model=Decoder(), config={"train_batch_size": 8, "optimizer": {"type": "Adam"}})[0]
    whole = flops(plain, 0)

    def of_layer(length):  # 3 times a forward: 12 products of H x H for each token, and two of length x length
        return 3 * 2 * 8 * (12 * length * HIDDEN**2 + 2 * length**2 * HIDDEN)

    kept = []
    for step in range(9):
        found = flops(engine, step)
        kept.append(engine.random_ltd_scheduler.get_current_seq())
        assert found == whole - 2 * (of_layer(LENGTH) - of_layer(kept[-1])), step
    assert kept == [8, 8, 8, 16, 16, 16, 24, 24, 32]


def test_the_loss_is_within_2_percent(single_rank):
    """A decoder of four layers, of which two drop three quarters of the tokens at first, beside one that drops none."""
    steps, after = 320, 20
    engine, plain = create(num_steps=200), create(enabled=False)
    losses = [sum(train(each, 0, steps)[-after:]) / after for each in (plain, engine)]
    assert losses[0] < 1.0
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_checkpoint_goes_on_with_the_schedule(single_rank, tmp_path, stage):
    engine = create(stage)
    train(engine, 0, 4)
    engine.save_checkpoint(str(tmp_path))
    state = engine.random_ltd_scheduler.state_dict()
    assert state["consumed_layer_tokens"] == 8 * (2 * (8 + 8 + 8 + 16) + 2 * 4 * LENGTH)
    engine.destroy()
    again = create(stage, seed=1)
    again.load_checkpoint(str(tmp_path))
    assert again.random_ltd_scheduler.state_dict() == state
    train(again, 4, 5)
    assert again.random_ltd_scheduler.get_current_seq() == 16
    again.destroy()


def test_weights_have_their_old_names_again(single_rank):
    engine, plain = create(), Decoder()
    assert "layers.1.random_ltd_layer.out.weight" in engine.module.state_dict()
    plain.load_state_dict(save_without_random_ltd(engine.module))
    engine.eval()
    assert torch.equal(engine(batch(0)), plain.eval()(batch(0)))
    nested = {"model": {"layers.1.random_ltd_layer.out.weight": 1}, "step": 2}
    assert remove_random_ltd_state_dict(nested) == {"model": {"layers.1.out.weight": 1}, "step": 2}


def test_a_model_that_the_section_does_not_fit(single_rank):
    with pytest.raises(ConfigError, match="total_layer_num: found 5, but convert_to_random_ltd has wrapped 4 layers"):
        create(total_layer_num=5)
    with pytest.raises(ConfigError, match="found no layer of type LSTM in the model"):
        convert_to_random_ltd(Decoder(), nn.LSTM)


def test_a_pipeline_is_refused(single_rank):
    model = PipelineModule([Block() for _ in range(LAYERS)], num_stages=1, loss_fn=nn.functional.mse_loss)
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam"},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section()}},
    }
    with pytest.raises(ConfigError, match=r"random_ltd\.enabled: found true with a PipelineModule"):
        deepspeed.initialize(model=model, config=config)


def test_an_engine_says_that_no_layer_drops(single_rank, lines):
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam"},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section()}},
    }
    engine = deepspeed.initialize(model=Decoder(), config=config)[0]
    train(engine, 0, 1)
    assert "random_ltd.enabled: found true, but no layer drops tokens; call convert_to_random_ltd" in str(lines)


def test_a_module_without_an_engine_computes_all():
    torch.manual_seed(0)
    model = Decoder()
    plain = copy.deepcopy(model)
    assert torch.equal(convert_to_random_ltd(model, Block)(batch(0)), plain(batch(0)))
    assert isinstance(model.layers[0], RandomLayerTokenDrop)
