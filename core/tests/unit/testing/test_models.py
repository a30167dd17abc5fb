"""The small GPT: shapes, loss, causality, tying, sampling."""

import math

import pytest
import torch
from deepspeed.testing.models import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=50, sequence_length=16, num_layers=2, num_heads=2, width=32)


def build(**changes):
    from dataclasses import replace

    torch.manual_seed(0)
    return GPT(replace(CONFIG, **changes))


def test_logits_and_loss():
    model = build()
    tokens_BT = torch.randint(50, (3, 16))
    assert model(tokens_BT).shape == (3, 16, 50)
    loss = model(tokens_BT, torch.roll(tokens_BT, -1, 1))
    # An untrained model knows nothing: close to a uniform guess.
    assert loss.item() == pytest.approx(math.log(50), abs=0.1)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_token_sees_no_later_one():
    model = build()
    tokens_BT = torch.randint(50, (1, 16))
    changed_BT = tokens_BT.clone()
    changed_BT[0, 10] = (changed_BT[0, 10] + 1) % 50
    before, after = model(tokens_BT), model(changed_BT)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_tied_embedding_counts_once():
    tied = build(tie_embeddings=True)
    assert tied.head.weight is tied.tokens.weight
    assert build().num_parameters() - tied.num_parameters() == 50 * 32
    assert tied.head.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_parameters_by_hand():
    D, V, T, L = 32, 50, 16, 2
    block = 4 * D + 3 * D * D + 3 * D + D * D + D + 8 * D * D + 5 * D
    assert build().num_parameters() == 2 * V * D + T * D + L * block + 2 * D


def test_residual_layers_start_smaller():
    model = build(width=256)
    assert model.blocks[0].mlp_out.weight.std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert model.blocks[0].mlp_in.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_learns_to_repeat_and_samples_it():
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens_BT = torch.arange(17).remainder(4).repeat(4, 1)
    for _ in range(60):
        optimizer.zero_grad()
        model(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
        optimizer.step()
    model.train()
    assert model.sample(torch.tensor([[0, 1]]), 14, temperature=0)[0].tolist() == [i % 4 for i in range(16)]
    assert model.training
    drawn = [
        model.sample(torch.tensor([[0]]), 8, temperature=5.0, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    ]
    assert torch.equal(*drawn)


def test_too_long_and_uneven_heads_are_refused():
    with pytest.raises(ValueError, match="17 tokens were given, the model has positions for 16"):
        build()(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ValueError, match="width 30"):
        build(width=30, num_heads=4)
