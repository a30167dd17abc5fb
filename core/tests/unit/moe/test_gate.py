"""Random choices of the gate, its losses in closed form, capacity, and padding."""

import math

import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.log import logger
from deepspeed.moe.gate import TopKGate, capacity_of

WIDTH, EXPERTS = 6, 4


def gate(**arguments):
    torch.manual_seed(0)
    return TopKGate(WIDTH, EXPERTS, **{"min_capacity": 1, **arguments})


def tokens(num_tokens=64):
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        (3, (10, 4, 1, 1.0, 1)),  # 2.5
        (5, (10, 4, 2, 1.0, 1)),
        (8, (10, 4, 2, 1.0, 8)),
        (11, (10, 1, 1, 1.1, 1)),  # 11.000000000000002 in fp64
        (4, (0, 4, 1, 1.0, 4)),
    ],
)
def test_capacity(expected, arguments):
    assert capacity_of(*arguments) == expected


def test_the_balance_loss_of_even_probabilities_is_one_and_of_one_expert_the_number_of_experts():
    even, one = torch.zeros(8, EXPERTS), torch.zeros(8, EXPERTS)
    one[:, 2] = 50.0
    assert gate().route(even).loss.item() == pytest.approx(1.0)
    assert gate().route(one).loss.item() == pytest.approx(EXPERTS)


@pytest.mark.parametrize(("k", "expected"), [(1, [0]), (2, [0, 1])])
def test_among_equal_logits_the_first_experts_are_chosen(k, expected):
    """As DeepSpeed's argmax does: for padding whose hidden state is 0, or a gate that starts at 0."""
    chosen = gate(k=k, top2_2nd_expert_sampling=False).route(torch.zeros(8, EXPERTS)).experts
    assert chosen.tolist() == [expected] * 8


def test_the_z_loss_is_the_mean_square_of_logsumexp():
    logits = torch.randn(16, EXPERTS)
    plain, with_z = gate().route(logits).loss, gate(z_loss_coefficient=0.25).route(logits).loss
    expected = sum(math.log(sum(math.exp(value) for value in row)) ** 2 for row in logits.tolist()) / 16
    assert (with_z - plain).item() == pytest.approx(0.25 * expected, rel=1e-4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_padding_goes_nowhere_and_is_not_counted(k):
    used = torch.arange(64) % 3 > 0
    routing = gate(k=k, drop_tokens=False)(tokens(), used.view(8, 8).float())
    assert torch.equal(routing.kept, used[:, None].expand(-1, k))
    assert routing.counts.sum() == k * used.sum()
    assert (routing.weights[~used] == 0).all()
    torch.testing.assert_close(routing.weights[used].sum(1) <= 1 + 1e-6, torch.ones(int(used.sum())).bool())


def test_experts_take_as_many_as_their_capacity():
    routing = gate(capacity_factor=0.5, use_rts=False)(tokens())
    kept = torch.bincount(routing.experts[routing.kept], minlength=EXPERTS)
    assert routing.capacity == 8
    assert torch.equal(kept, routing.counts.clamp(max=8))
    first = [(routing.experts == expert).nonzero()[:8, 0].tolist() for expert in range(EXPERTS)]
    assert sorted(sum(first, [])) == routing.kept[:, 0].nonzero()[:, 0].tolist()


def test_in_evaluation_the_other_factor_counts_and_nothing_is_drawn():
    model = gate(k=2, capacity_factor=0.5, eval_capacity_factor=2.0, noisy_gate_policy="Jitter").eval()
    routing, again = model(tokens()), model(tokens())
    assert routing.capacity == 64
    assert torch.equal(routing.experts, again.experts)
    assert torch.equal(routing.weights, again.weights)


def test_which_of_too_many_tokens_stay_is_drawn_evenly():
    model, num_draws = gate(capacity_factor=0.25), 600
    logits = torch.zeros(16, EXPERTS)
    logits[:, 1] = 5.0  # all 16 tokens, for a capacity of 1
    frequency = sum(model.route(logits).kept[:, 0].float() for _ in range(num_draws)) / num_draws
    assert frequency.sum().item() == pytest.approx(1.0)
    assert (frequency - 1 / 16).abs().max() < 5 * math.sqrt(15 / 256 / num_draws)  # five standard deviations


@pytest.mark.parametrize(
    ("arguments", "column"),
    [({"k": 1, "noisy_gate_policy": "RSample"}, 0), ({"k": 2, "top2_2nd_expert_sampling": True}, 1)],
)
def test_sampled_experts_have_the_probabilities_of_the_gate(arguments, column):
    """The Gumbel maximum: argmax of logits + noise is a sample of the softmax; of k = 2, without the first expert."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5]]).expand(20000, -1)
    found = gate(drop_tokens=False, **arguments).route(logits).experts
    frequency = torch.bincount(found[:, column], minlength=EXPERTS) / len(found)
    expected = logits[0].clone()
    if column == 1:
        assert (found[:, 0] == 1).all()
        expected[1] = -math.inf
    torch.testing.assert_close(frequency, expected.softmax(0), atol=0.02, rtol=0)


def test_jitter_changes_weights_by_a_few_percent_in_training_only():
    quiet, noisy = gate(drop_tokens=False), gate(drop_tokens=False, noisy_gate_policy="Jitter")
    expected, found = quiet(tokens()).weights, noisy(tokens()).weights
    assert 0 < (expected - found).abs().max() < 0.05


def test_the_gate_computes_in_fp32():
    model = gate(use_rts=False).bfloat16()
    x = tokens().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        routing = model(x)
    expected = (x.float() @ model.wg.weight.float().T).softmax(-1).amax(1)
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.weights[routing.kept], expected[routing.kept[:, 0]])


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"found k 5 with num_experts 4; give a k from 1 to 4", {"k": 5}),
        (r"found k 0 ", {"k": 0}),
        (r"found noisy_gate_policy 'Gauss'; give one of None, 'Jitter', 'RSample'", {"noisy_gate_policy": "Gauss"}),
        (r"found capacity_factor 0 and .* drop_tokens=False", {"capacity_factor": 0}),
        (r"found capacity_factor inf and .* drop_tokens=False", {"capacity_factor": float("inf")}),
        (r"found min_capacity '4'; give a whole number", {"min_capacity": "4"}),
        (r"found min_capacity -1; give a whole number", {"min_capacity": -1}),
        (r"found z_loss_coefficient nan; give a number", {"z_loss_coefficient": float("nan")}),
        (r"found z_loss_coefficient -1.0; give a number", {"z_loss_coefficient": -1.0}),
        (r"found capacity_factor '2' and .* give positive numbers", {"capacity_factor": "2"}),
        (r"found k '1' ", {"k": "1"}),
    ],
)
def test_arguments_that_do_not_fit(message, arguments):
    with pytest.raises(ConfigError, match=message):
        gate(**arguments)


def test_noise_that_has_no_effect_is_said(monkeypatch, caplog):
    monkeypatch.setattr(logger, "propagate", True)
    gate(k=3, noisy_gate_policy="RSample")
    assert "adds noise where a token gets one expert, and found k=3" in caplog.text
