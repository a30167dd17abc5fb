"""Muon against the published iteration in numpy, and its AdamW half against torch."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.errors import ConfigError
from deepspeed.ops.muon import Muon, mark_muon_parameters, muon_update
from deepspeed.ops.muon.muon import orthogonalize


def _numpy_newton_schulz(g, steps):
    x = g / (np.linalg.norm(g) + 1e-7)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if transposed else x


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6), (1, 5)])
def test_orthogonalize_is_the_published_iteration(method, shape):
    matrix = np.random.default_rng(0).standard_normal(shape)
    result = orthogonalize(torch.tensor(matrix, dtype=torch.float32), 5, method).numpy()
    np.testing.assert_allclose(result, _numpy_newton_schulz(matrix, 5), atol=2e-5)
    singular = np.linalg.svd(result, compute_uv=False)
    assert singular.min() > 0.6
    assert singular.max() < 1.3


def test_orthogonalize_edges():
    assert orthogonalize(torch.zeros(0, 3)).shape == (0, 3)
    assert torch.equal(orthogonalize(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert orthogonalize(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="ns_method: found 'magic'.*gram, standard"):
        orthogonalize(torch.ones(2, 2), method="magic")


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_steps(nesterov):
    lr, wd, beta = 0.1, 0.3, 0.9
    start = np.random.default_rng(1).standard_normal((8, 3))
    grads = np.random.default_rng(2).standard_normal((4, 8, 3))
    weights, m = start.copy(), np.zeros((8, 3))
    for g in grads:
        m = beta * m + (1 - beta) * g
        u = (1 - beta) * g + beta * m if nesterov else m
        weights = weights * (1 - lr * wd) - lr * np.sqrt(8 / 3) * _numpy_newton_schulz(u, 5)
    param = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer = Muon([param], lr=lr, momentum=beta, weight_decay=wd, nesterov=nesterov)
    for g in grads:
        param.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.step()
    np.testing.assert_allclose(param.detach().numpy(), weights, atol=5e-5)
    assert set(optimizer.state[param]) == {"momentum_buffer"}


def test_parameters_are_divided_and_the_rest_takes_adamw():
    matrix, bias = torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))
    head = torch.nn.Parameter(torch.ones(3, 3))
    head.use_muon = False
    twins = [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))]
    optimizer = Muon([matrix, head, bias], lr=0.2, muon_lr=0.5, adam_lr=0.01, weight_decay=0.1)
    assert [(g["use_muon"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        (True, 0.5, 1),
        (False, 0.01, 2),
    ]
    theirs = torch.optim.AdamW(twins, lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1, fused=True)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for param in (matrix, head, bias):
            param.grad = torch.randn(param.shape, generator=generator)
        twins[0].grad, twins[1].grad = head.grad.clone(), bias.grad.clone()
        optimizer.step()
        theirs.step()
    assert torch.equal(head, twins[0])
    assert torch.equal(bias, twins[1])


def test_groups_say_use_muon():
    matrix, bias = torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))
    groups = [
        {"params": [matrix], "use_muon": True, "lr": 0.3, "momentum": 0.5},
        {"params": [bias], "use_muon": False, "lr": 0.1, "betas": (0.5, 0.6)},
    ]
    optimizer = Muon(groups, weight_decay=0.2)
    assert optimizer.param_groups[0]["ns_steps"] == 5
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    assert "betas" not in optimizer.param_groups[0]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    with pytest.raises(ConfigError, match="use_muon: found None"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def test_state_round_trip():
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        return model, Muon(model.parameters(), lr=0.05)

    def train(model, optimizer, seed):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    train(model, optimizer, 0)
    other, fresh = make()
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin = copy.deepcopy(fresh)
    assert [group["use_muon"] for group in twin.param_groups] == [True, False]
    train(model, optimizer, 1)
    train(other, fresh, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_flat_shard_is_refused_and_an_empty_one_left_alone():
    with pytest.raises(ConfigError, match=r"whole matrices, but found a parameter of shape \(6,\)"):
        muon_update(torch.ones(6), torch.zeros(6))
    empty = torch.nn.Parameter(torch.zeros(0))
    empty.grad = torch.zeros(0)
    Muon([{"params": [empty], "use_muon": True}]).step()


def test_convolutions_are_flattened():
    grad = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    update = muon_update(grad, torch.zeros_like(grad))
    assert update.shape == grad.shape
    flat = muon_update(grad.reshape(4, 18), torch.zeros(4, 18))
    assert torch.equal(update.reshape(4, 18), flat)


def test_marking_a_model():
    model = torch.nn.ModuleDict(
        {
            "wte": torch.nn.Embedding(5, 4),
            "table": torch.nn.Embedding(5, 4),
            "hidden": torch.nn.Linear(4, 4),
            "mine": torch.nn.Linear(4, 4, bias=False),
            "lm_head": torch.nn.Linear(4, 5, bias=False),
        }
    )
    model["mine"].weight.use_muon = False
    mark_muon_parameters(model)
    marked = {name for name, param in model.named_parameters() if param.use_muon}
    assert marked == {"hidden.weight"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 1.0}, "^momentum: found 1.0"),
        ({"ns_steps": 0}, "^ns_steps: found 0"),
        ({"ns_method": "x"}, "^ns_method: found 'x'"),
        ({"adam_lr": -1.0}, "^adam_lr: found -1.0"),
    ],
)
def test_wrong_values_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], **arguments)


def test_each_head_is_a_matrix_of_its_own():
    grad = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    grad[:4] *= 100  # would take part in the directions of other heads
    found = muon_update(grad, torch.zeros_like(grad), num_heads=3)
    alone = [muon_update(head.clone(), torch.zeros(4, 5)) for head in grad.chunk(3)]
    torch.testing.assert_close(found, torch.cat(alone))
    tall = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    found = muon_update(tall, torch.zeros_like(tall), num_heads=3)
    torch.testing.assert_close(found, torch.cat([muon_update(head, torch.zeros(4, 2)) for head in tall.chunk(3)]))


@pytest.mark.parametrize("shape", [(3, 4, 6), (3, 6, 4)])
def test_each_matrix_of_a_stack_is_one_of_its_own(shape):
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = muon_update(grad, torch.zeros_like(grad), is_expert_group=True)
    alone = [muon_update(each.clone(), torch.zeros(shape[1:])) for each in grad]
    torch.testing.assert_close(found, torch.stack(alone))
    model = torch.nn.ParameterDict({"experts": torch.nn.Parameter(grad), "bias": torch.nn.Parameter(torch.ones(3, 6))})
    model.convolution = torch.nn.Conv1d(4, 3, 6)
    mark_muon_parameters(model)
    assert {name for name, param in model.named_parameters() if hasattr(param, "muon_is_stack")} == {"experts"}
    assert Muon.cost(model["experts"], grad.shape) == 3 * 4 * 6 * 4
    assert Muon.cost(model.convolution.weight, torch.Size((3, 4, 6))) == 3 * 4 * 6 * 3


class Attention(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        for name, (num_out, num_in) in rows.items():
            self.add_module(name, torch.nn.Linear(num_in, num_out))


def model_of(config, **rows):
    model = torch.nn.ModuleDict({"layer": Attention(rows), "mlp": torch.nn.Linear(8, 8)})
    model.config = SimpleNamespace(**config)
    return model


@pytest.mark.parametrize(
    ("config", "rows", "wanted"),
    [
        (
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3},
            {"q_proj": (12, 8), "k_proj": (6, 8), "v_proj": (6, 8), "o_proj": (8, 12)},
            {"q_proj": 4, "k_proj": 2, "v_proj": 2},
        ),
        (
            {"num_attention_heads": 2, "hidden_size": 8},
            {"query": (8, 8), "key": (8, 8), "value": (8, 8), "dense": (8, 8)},
            {"query": 2, "key": 2, "value": 2},
        ),
        (  # latent attention; of the first projections, rows are no heads
            {
                **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 2},
                **{"qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 3},
            },
            {"q_a_proj": (8, 8), "q_b_proj": (20, 8), "kv_a_proj_with_mqa": (8, 8), "kv_b_proj": (24, 8)},
            {"q_b_proj": 4, "kv_b_proj": 4},
        ),
        (  # queries with a gate, whose rows are not those that the config says
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3},
            {"q_proj": (24, 8), "k_proj": (6, 8), "qkv_proj": (24, 8)},
            {"k_proj": 2},
        ),
    ],
)
def test_heads_are_found_by_the_names_of_layers_and_the_config(config, rows, wanted):
    model = model_of(config, **rows)
    mark_muon_parameters(model, per_head=True)
    found = {
        name.split(".")[1]: param.muon_num_heads
        for name, param in model.named_parameters()
        if hasattr(param, "muon_num_heads")
    }
    assert found == wanted


def test_the_nearest_config_says_the_heads():
    model = torch.nn.ModuleDict(
        {
            "vision": model_of({"num_attention_heads": 2, "hidden_size": 8}, q_proj=(8, 8)),
            "text": model_of({"num_attention_heads": 4, "hidden_size": 8}, q_proj=(8, 8)),
        }
    )
    model.config = SimpleNamespace(text_config=model["text"].config)
    mark_muon_parameters(model, per_head=True)
    assert model["vision"]["layer"].q_proj.weight.muon_num_heads == 2
    assert model["text"]["layer"].q_proj.weight.muon_num_heads == 4


def test_what_has_no_heads_is_refused():
    with pytest.raises(ConfigError, match="per_head_muon: found true, and no attention projection in Linear .*q_proj"):
        mark_muon_parameters(torch.nn.Linear(4, 4), per_head=True)
    model = model_of({"num_attention_heads": 4, "hidden_size": 8}, fused=(24, 8))
    model["layer"].fused.weight.muon_num_heads = 12  # a user's, who knows that each head has two rows
    mark_muon_parameters(model, per_head=True)
    model["layer"].fused.weight.muon_num_heads = 7
    for per_head in (True, False):
        with pytest.raises(ConfigError, match=r"found muon_num_heads 7 on layer.fused.weight of shape \(24, 8\)"):
            mark_muon_parameters(model, per_head=per_head)


@pytest.mark.parametrize("heads", [7, 0, -2, 2.0, True])
def test_heads_that_do_not_divide_the_rows_are_named(heads, make_engine):
    message = rf"Muon: found muon_num_heads {heads} on .* of shape \(24, 8\), whose rows it does not divide"
    weight = torch.nn.Parameter(torch.ones(24, 8))
    weight.grad, weight.muon_num_heads = torch.ones(24, 8), heads
    with pytest.raises(ConfigError, match=message):  # an optimizer without an engine
        Muon([{"params": [weight], "use_muon": True}]).step()
    layer = torch.nn.Linear(8, 24)
    layer.weight.muon_num_heads = heads
    with pytest.raises(ConfigError, match=message):
        make_engine(layer, optimizer={"type": "Muon", "params": {"lr": 0.1}})


def test_a_stack_of_matrices_has_no_heads():
    experts = torch.nn.Module()
    experts.weight = torch.nn.Parameter(torch.ones(4, 6, 8))
    experts.weight.muon_num_heads = 2
    with pytest.raises(ConfigError, match=r"muon_num_heads 2 on weight of shape \(4, 6, 8\), which is a stack"):
        mark_muon_parameters(experts)
