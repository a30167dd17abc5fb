"""A model whose experts are divided over half the ranks, on four ranks, against one process with plain tensors.

Ranks 0 and 2 hold expert 0, ranks 1 and 3 expert 1. Each rank sends half of its tokens to either, and gets the results
back. The reference has both experts and sees the samples of all ranks.
"""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.errors import ConfigError
from deepspeed.ops.muon import Muon
from deepspeed.parallel import groups
from deepspeed.parallel.model_part import expert_sizes
from deepspeed.testing.distributed import run_ranks
from deepspeed.zero.fragments import safe_get_full_fp32_param, safe_get_full_grad
from torch import nn

WORLD, EP, WIDTH, TOKENS, NUM_STEPS = 4, 2, 5, 6, 4
STAGES = (0, 1, 2, 3)
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
CLIP = 0.2  # every step is clipped (asserted)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens):
        received = torch.empty_like(tokens)
        torch.distributed.all_to_all_single(
            received, tokens.contiguous(), group=groups._get_expert_parallel_group("ep_size_2")
        )
        return received

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad)


class Mixture(nn.Module):
    """A residual layer of experts between dense ones. `runs`: by expert, whether it runs or passes its tokens on."""

    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(experts)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x, runs):
        x = torch.tanh(self.first(x))
        return F.softplus(self.last(x + self.mix(x, runs))).mean()

    def mix(self, x, runs):  # the reference: all experts are here
        return torch.cat(
            [expert(part) if run else part for expert, part, run in zip(self.experts, x.chunk(EP), runs, strict=True)]
        )


class Divided(Mixture):
    def mix(self, x, runs):
        (expert,) = self.experts
        tokens = _AllToAll.apply(x)
        return _AllToAll.apply(expert(tokens) if runs[dist.get_rank() % EP] else tokens)


def create_expert(rank):
    torch.manual_seed(10 + rank)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def create_divided(rank):
    """Different first weights on every rank: those of the first rank of each expert count."""
    model = Divided([create_expert(rank)])
    for param in model.experts.parameters():
        param.allreduce = False
        param.group_name = "ep_size_2"
    return model


def samples(step, rank):
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def runs_of(step):
    return (True, step != 1)


def reference():
    """Per step norm and gradients, and the last weights, by name."""
    model = Mixture([create_expert(rank) for rank in range(EP)])
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    norms, gradients = [], []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        (sum(model(samples(step, rank), runs_of(step)) for rank in range(WORLD)) / WORLD).backward()
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return norms, gradients, {name: param.detach() for name, param in model.named_parameters()}


def create_engine(stage, make=lambda params: torch.optim.AdamW(params, **ADAMW), **keys):
    groups._create_expert_and_data_parallel(EP)
    model = create_divided(dist.get_rank())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 40, "stage3_param_persistence_threshold": 6},
        **keys,
    }
    return deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=config)[0]


def train_job(stage, keys):
    engine = create_engine(stage, **keys)
    norms, gradients = [], []
    for step in range(NUM_STEPS):
        engine.backward(engine(samples(step, dist.get_rank()), runs_of(step)))
        gradients.append({name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()})
        gradients[-1] = {name: None if grad is None else grad.clone() for name, grad in gradients[-1].items()}
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    weights = {name: safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()}
    engine.destroy()
    plain = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    assert all(torch.equal(weights[name], plain[name]) for name in weights)
    return norms, gradients, weights


MUON = {"lr": 1e-2, "weight_decay": 0.1, "ns_method": "standard"}


def train_by_muon(model, optimizer):
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        (sum(model(samples(step, rank), runs_of(step)) for rank in range(WORLD)) / WORLD).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def muon_job(stages):
    model = Mixture([create_expert(rank) for rank in range(EP)])
    expected = train_by_muon(model, Muon(model.parameters(), **MUON))
    for stage in stages:
        engine = create_engine(stage, make=lambda params: Muon(params, **MUON))
        for step in range(NUM_STEPS):
            engine.backward(engine(samples(step, dist.get_rank()), runs_of(step)))
            engine.step()
        for name, param in engine.module.named_parameters():
            found = safe_get_full_fp32_param(param)
            wanted = expected[named_in_reference(name, dist.get_rank())]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        engine.destroy()


def test_muon_orthogonalizes_the_matrices_of_experts_among_their_holders():
    run_ranks(WORLD, muon_job, (0, 2, 3))


def named_in_reference(name, rank):
    return name.replace("experts.0.", f"experts.{rank % EP}.")


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("predivide", [1.0, 2.0])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_norm_and_weights_are_those_of_the_mean_loss(stage, predivide):
    norms, gradients, weights = reference()
    assert min(norms) > CLIP
    for rank, found in enumerate(run_ranks(WORLD, train_job, stage, {"gradient_predivide_factor": predivide})):
        assert found[0] == pytest.approx(norms, rel=1e-5)
        for step, by_name in enumerate(found[1]):
            for name, grad in by_name.items():
                expected = gradients[step][named_in_reference(name, rank)]
                assert (grad is None) == (expected is None), (step, name)
                if grad is not None:
                    assert_close(grad, expected)
        for name, weight in found[2].items():
            assert_close(weight, weights[named_in_reference(name, rank)])


def init_job():
    """Every rank has its own weights to begin with: of each parameter those of the first rank that has it count."""
    groups._create_expert_and_data_parallel(EP)
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 4, "zero_optimization": {"stage": 3}}):
        model = Marked(dist.get_rank())
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        if dist.get_rank() < EP:  # 1 is the first of the ranks with the second expert
            model.expert.fill_(10.0 + dist.get_rank())
        if dist.get_rank() == 0:
            model.weight.fill_(3.0)
    found = [safe_get_full_fp32_param(param).tolist() for param in (model.weight, model.expert)]
    ranks = [row.ranks for row in deepspeed.zero.show_layout(engine)]
    engine.destroy()
    return found, ranks


ROWS = 4
#: rows that a rank of either expert looks up, by step: each expert leaves rows alone that the other one uses
LOOKED_UP = [([0, 1], [2]), ([3], [0]), ([0], [1])]
SPARSE_ADAM = {"lr": 1e-2}


def sparse_job():
    """An expert's embedding, trained by SparseAdam; ranks r and r + 2 look up the same rows, with other weights."""
    groups._create_expert_and_data_parallel(EP)
    rank = dist.get_rank()
    torch.manual_seed(rank % EP)
    expert = nn.Embedding(ROWS, WIDTH, sparse=True)
    expert.weight.allreduce, expert.weight.group_name = False, "ep_size_2"
    plain = nn.Embedding(ROWS, WIDTH, sparse=True, _weight=expert.weight.detach().clone())
    optimizer = torch.optim.SparseAdam(plain.parameters(), **SPARSE_ADAM)
    adam = {"type": "SparseAdam", "params": SPARSE_ADAM}
    config = {"train_batch_size": WORLD, "optimizer": adam, "gradient_clipping": 0}
    engine = deepspeed.initialize(model=expert, config={**config, "sparse_gradients": True})[0]
    for by_expert in LOOKED_UP:
        rows = torch.tensor(by_expert[rank % EP])
        engine.backward(engine(rows).square().sum() * (rank + 1))
        engine.step()
        factor = sum(each + 1 for each in range(rank % EP, WORLD, EP)) / WORLD
        (plain(rows).square().sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(engine.module.weight.detach(), plain.weight.detach())
    engine.destroy()


def test_sparse_gradients_of_experts_keep_their_own_rows():
    run_ranks(WORLD, sparse_job)


class Marked(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), float(rank)))
        self.expert = nn.Parameter(torch.full((3,), float(rank)))
        self.expert.allreduce, self.expert.group_name = False, "ep_size_2"


def test_zero_init_and_gathered_parameters_keep_experts_apart():
    first, second = ([[3.0] * 3, [10.0] * 3], [4, 2]), ([[3.0] * 3, [11.0] * 3], [4, 2])
    assert run_ranks(WORLD, init_job) == [first, second, first, second]


# ---- what the user does with shown gradients, and what is refused ---------------------------------------------------


def halved_job():
    """The ranks of the second expert halve its gradient; the others do not know."""
    engine = create_engine(0, gradient_clipping=0.0)
    engine.backward(engine(samples(0, dist.get_rank()), runs_of(0)))
    expert = sum(float(param.grad.square().sum()) for param in engine.module.experts.parameters())
    if dist.get_rank() % EP == 1:
        for param in engine.module.experts.parameters():
            param.grad.mul_(0.5)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return norm, expert


def test_the_norm_follows_gradients_that_some_ranks_changed():
    squares = {}
    model = Mixture([create_expert(rank) for rank in range(EP)])
    (sum(model(samples(0, rank), runs_of(0)) for rank in range(WORLD)) / WORLD).backward()
    for name, param in model.named_parameters():
        part = name[: len("experts.0")] if name.startswith("experts") else "dense"
        squares[part] = squares.get(part, 0.0) + float(param.grad.square().sum())
    norm = (squares["dense"] + squares["experts.0"] + squares["experts.1"] / 4) ** 0.5
    found = run_ranks(WORLD, halved_job)
    assert [each[0] for each in found] == pytest.approx([norm] * WORLD, rel=1e-6)
    assert [each[1] for each in found] == pytest.approx([squares[f"experts.{rank % EP}"] for rank in range(WORLD)])


def refused_job(folder):
    groups._create_expert_and_data_parallel(EP)
    engine = deepspeed.initialize(model=Marked(dist.get_rank()), config={"train_batch_size": 4})[0]
    with pytest.raises(ConfigError, match="do not say which part a rank has"):
        engine.save_16bit_model(folder)
    for save in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(ConfigError, match=r"group_name is ep_size_2.* do not say which experts"):
            save(folder)
    engine.destroy()
    model = Marked(0)
    if dist.get_rank() == 1:
        model.expert.allreduce = True
    with pytest.raises(
        ConfigError, match="the parameters of experts, .* must be the same on all ranks, and rank 1 dif"
    ):
        deepspeed.initialize(model=model, config={"train_batch_size": 4})


def test_saves_and_different_marks_are_refused(tmp_path):
    run_ranks(WORLD, refused_job, tmp_path)


@pytest.mark.parametrize("name", [None, "experts", "ep_size_0", "ep_size_x"])
def test_a_mark_without_a_group_is_refused(name):
    model = Marked(0)
    model.expert.group_name = name
    with pytest.raises(ConfigError, match=rf"parameter expert: .* group_name is {name!r}; give the number of ranks"):
        expert_sizes(model)


def same_everywhere_job():
    model = Marked(dist.get_rank())
    model.expert.group_name = "ep_size_1"
    engine = deepspeed.initialize(model=model, config={"train_batch_size": 4, "zero_optimization": {"stage": 1}})[0]
    assert not engine.sharding.units.ranks.divides_experts
    found = model.expert.tolist()
    engine.destroy()
    return found


def test_experts_of_which_every_rank_has_all_are_like_other_parameters():
    assert run_ranks(WORLD, same_everywhere_job) == [[0.0] * 3] * WORLD
